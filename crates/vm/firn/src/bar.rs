//! A progress bar on a terminal; without a terminal, nothing.

use std::io::IsTerminal;

use firn_supervisor::OperationProgress;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Of a stage without bytes.
const PLAIN_TEMPLATE: &str = "{msg}";
const TEMPLATE: &str = "{msg} {bar:30} {bytes} of {total_bytes} ({bytes_per_sec})";

/// A progress bar.
pub struct TerminalBar {
    bar: ProgressBar,
}

impl TerminalBar {
    /// A bar on standard error, if that is a terminal. It appears with the first progress.
    pub fn new() -> Self {
        Self { bar: ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden()) }
    }

    /// Shows the progress of the current stage.
    pub fn show_progress(&mut self, progress: &OperationProgress) {
        if self.bar.is_hidden() && std::io::stderr().is_terminal() {
            self.bar.set_draw_target(ProgressDrawTarget::stderr());
        }
        let template = if progress.total == 0 { PLAIN_TEMPLATE } else { TEMPLATE };
        if let Ok(style) = ProgressStyle::with_template(template) {
            self.bar.set_style(style);
        }
        self.bar.set_message(progress.stage.clone());
        self.bar.set_length(progress.total);
        self.bar.set_position(progress.done);
    }
}

impl Drop for TerminalBar {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
