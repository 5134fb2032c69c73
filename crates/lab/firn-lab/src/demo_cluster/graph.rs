//! Reply graph: replies over time in a terminal, one column for each tenth of a second, redrawn in
//! place. Without a terminal, one line for each second.
//!
//! ```text
//!   |▆█▇▇█▆█▆▇█                 ▃▇█▇        the last seconds; rows are filled from below
//!   |██████████                ▅████
//!   +------ replies per tenth of a second: 41, at most 48
//! ```

use std::io::{self, IsTerminal as _, Write as _};
use std::time::Duration;

use crate::prober::ReplyTimeline;

/// The time that a column covers.
const COLUMN_TIME: Duration = Duration::from_millis(100);
/// Number of columns and rows in a terminal.
const COLUMNS: usize = 76;
const ROWS: usize = 6;
/// Columns of a line, without a terminal.
const LINE_COLUMNS: usize = 10;

const EIGHTHS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// A graph that grows.
#[derive(Debug)]
pub(super) struct ReplyGraph {
    is_terminal: bool,
    /// Number of columns that were printed, without a terminal.
    printed: usize,
    /// Whether the terminal shows the graph now.
    is_shown: bool,
}

impl ReplyGraph {
    pub(super) fn new() -> Self {
        Self { is_terminal: io::stderr().is_terminal(), printed: 0, is_shown: false }
    }

    /// Shows all replies until now.
    pub(super) fn draw_graph(&mut self, timeline: &ReplyTimeline, now: Duration) {
        let columns = count_columns(timeline, now);
        let text = match self.is_terminal {
            true => self.redraw_rows(&columns),
            false => self.format_lines(&columns),
        };
        // The reader of standard error may have gone.
        let _ = io::stderr().write_all(text.as_bytes());
    }

    fn redraw_rows(&mut self, columns: &[usize]) -> String {
        let back = self.erase_sequence();
        self.is_shown = true;
        let from = columns.len().saturating_sub(COLUMNS);
        let most = columns.iter().copied().max().unwrap_or_default().max(1);
        let rows =
            (0..ROWS).rev().map(|row| format!("  |{}\n", draw_row(&columns[from..], most, row)));
        let last = columns.last().copied().unwrap_or_default();
        let rows: String = rows.collect();
        format!(
            "{back}{rows}  +{} replies per tenth of a second: {last}, at most {most}\n",
            "-".repeat(30)
        )
    }

    /// Returns the escape sequence that removes the graph, so that text can be printed in its
    /// place.
    fn erase_sequence(&mut self) -> String {
        match std::mem::take(&mut self.is_shown) {
            true => format!("\x1b[{}A\x1b[J", ROWS + 1),
            false => String::new(),
        }
    }

    /// Removes the graph, to make room for text.
    pub(super) fn hide_graph(&mut self) {
        let _ = io::stderr().write_all(self.erase_sequence().as_bytes());
    }

    fn format_lines(&mut self, columns: &[usize]) -> String {
        let mut text = String::new();
        let most = columns.iter().copied().max().unwrap_or_default().max(1);
        while columns.len() >= self.printed + LINE_COLUMNS {
            let line = &columns[self.printed..self.printed + LINE_COLUMNS];
            let (second, sum) = (self.printed / LINE_COLUMNS, line.iter().sum::<usize>());
            text += &format!("  {second:4} s |{}| {sum} replies\n", draw_line(line, most));
            self.printed += LINE_COLUMNS;
        }
        text
    }
}

/// Counts the replies in each complete tenth of a second.
fn count_columns(timeline: &ReplyTimeline, now: Duration) -> Vec<usize> {
    let many = (now.as_millis() / COLUMN_TIME.as_millis()) as u32;
    (0..many).map(|at| timeline.count_in(at * COLUMN_TIME..(at + 1) * COLUMN_TIME)).collect()
}

/// One row of several, counted from below.
fn draw_row(columns: &[usize], most: usize, row: usize) -> String {
    let eighths = |it: &usize| it * ROWS * 8 / most;
    columns.iter().map(|it| EIGHTHS[eighths(it).saturating_sub(row * 8).min(8)]).collect()
}

/// All columns in one row. A column with any reply is visible, so only a gap is blank.
fn draw_line(columns: &[usize], most: usize) -> String {
    columns.iter().map(|it| EIGHTHS[(it * 8).div_ceil(most).min(8)]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_tenths_of_a_second() {
        let at = [10, 20, 150, 310].map(Duration::from_millis);
        let timeline = ReplyTimeline::new(at.to_vec());
        assert_eq!(count_columns(&timeline, Duration::from_millis(399)), [2, 1, 0]);
    }

    #[test]
    fn a_line_is_printed_when_its_second_is_over() {
        let mut graph = ReplyGraph { is_terminal: false, printed: 0, is_shown: false };
        assert_eq!(graph.format_lines(&[4; 9]), "");
        assert_eq!(graph.format_lines(&[4; 12]), "     0 s |██████████| 40 replies\n");
        assert_eq!(graph.format_lines(&[4; 19]), "");
        let gap = [&[4; 10][..], &[0; 9], &[1]].concat();
        assert_eq!(graph.format_lines(&gap), "     1 s |         ▂| 1 replies\n");
    }

    #[test]
    fn rows_are_filled_from_below() {
        let columns = [0, 1, 6];
        assert_eq!(draw_row(&columns, 6, 0), " ██");
        assert_eq!(draw_row(&columns, 6, 5), "  █");
    }

    #[test]
    fn the_graph_is_erased_before_it_is_redrawn() {
        let mut graph = ReplyGraph { is_terminal: true, printed: 0, is_shown: false };
        assert!(!graph.redraw_rows(&[1]).contains('\x1b'));
        assert!(graph.redraw_rows(&[1, 2]).starts_with("\x1b[7A\x1b[J"));
        assert_eq!(graph.erase_sequence(), "\x1b[7A\x1b[J");
        assert_eq!(graph.erase_sequence(), "");
    }
}
