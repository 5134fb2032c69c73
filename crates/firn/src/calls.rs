//! Options of the verbs that start a VM: whether its applications may call, and how closely they are followed.

use std::path::{Path, PathBuf};

use clap::Args as ClapArgs;
use firn_supervisor::{Failure, FailureKind, absolute};

use crate::output::check_input;

/// The plugin that notes stores, as it is called beside this program.
const PLUGIN: &str = "libfirn_stores.so";

/// Which applications may call.
#[derive(Debug, ClapArgs)]
pub struct CallsArgs {
    /// Answer calls of the guest's applications: of those that this file lists with their keys (TOML:
    /// [applications.NAME], key = "64 hexadecimal digits", pages = N). The VM gets a device for it (ivshmem). Not together with
    /// --working-set: the guest's memory is followed by one or the other.
    #[arg(long, value_name = "POLICY", conflicts_with = "working_set")]
    calls: Option<PathBuf>,
    /// Note each store of these applications to what they have followed, from below: their commits then need no call, and are
    /// told words. QEMU gets a plugin for it (libfirn_stores.so, beside this program if no other is named) and must emulate the
    /// guest (TCG), which gets slower: each of its stores is looked at.
    #[arg(
        long,
        value_name = "PLUGIN",
        requires = "calls",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = PLUGIN
    )]
    stores: Option<PathBuf>,
}

impl CallsArgs {
    /// The file, absolute.
    pub fn policy(&self) -> Result<Option<PathBuf>, Failure> {
        self.calls.as_deref().map_or(Ok(()), check_input)?;
        self.calls.as_deref().map(absolute).transpose()
    }

    /// The plugin, absolute.
    pub fn plugin(&self) -> Result<Option<PathBuf>, Failure> {
        self.stores.as_deref().map(plugin).transpose()
    }
}

fn plugin(named: &Path) -> Result<PathBuf, Failure> {
    let found = match named.as_os_str() == PLUGIN {
        true => std::env::current_exe().map(|program| program.with_file_name(PLUGIN)),
        false => Ok(absolute(named)?),
    };
    let found = found.map_err(|error| Failure::from_error(FailureKind::Host, &error))?;
    if found.is_file() {
        return Ok(found);
    }
    let text = format!("there is no plugin {}", found.display());
    Err(Failure::new(FailureKind::Usage, text).hint("say where it is: --stores=PLUGIN"))
}
