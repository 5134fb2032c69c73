//! The errors of templates.

use std::io;

use thiserror::Error;

/// Why a template can't be made or filled.
#[derive(Debug, Error)]
pub enum TemplateError {
    /// The kernel refused a step.
    #[error("{what} a template of guest memory failed")]
    Failed {
        /// The step.
        what: &'static str,
        /// The error of the kernel.
        source: io::Error,
    },
}

impl TemplateError {
    pub(super) fn new(what: &'static str, source: impl Into<io::Error>) -> Self {
        Self::Failed { what, source: source.into() }
    }
}
