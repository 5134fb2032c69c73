//! Options of the verbs that start a VM: whether its applications may call.

use std::path::PathBuf;

use clap::Args as ClapArgs;
use firn_supervisor::{Failure, absolute};

/// Which applications may call.
#[derive(Debug, ClapArgs)]
pub struct CallsArgs {
    /// Answer calls of the guest's applications: of those that this file lists with their keys (TOML:
    /// [applications.NAME], key = "64 hexadecimal digits", pages = N). The VM gets a device for it (ivshmem). Not together with
    /// --working-set: the guest's memory is followed by one or the other.
    #[arg(long, value_name = "POLICY", conflicts_with = "working_set")]
    calls: Option<PathBuf>,
}

impl CallsArgs {
    /// The file, absolute.
    pub fn policy(&self) -> Result<Option<PathBuf>, Failure> {
        self.calls.as_deref().map(absolute).transpose()
    }
}
