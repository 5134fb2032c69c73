//! Options of the verbs that start a VM: whether its applications may make guest calls, and whether
//! their stores are recorded.

use std::path::{Path, PathBuf};

use clap::Args as ClapArgs;
use firn_supervisor::{Failure, FailureKind, absolute_path};

use crate::output::check_input;

/// The file name of the plugin that records stores.
const PLUGIN: &str = "libfirn_stores.so";

/// The applications that may make guest calls.
#[derive(Debug, ClapArgs)]
pub struct CallsArgs {
    /// Answer guest calls of the applications that this file lists with their keys (TOML:
    /// [applications.NAME], key = "64 hexadecimal digits", pages = N). The VM gets a device for
    /// that (ivshmem). The option excludes --working-set, because Firn can trace the guest's memory
    /// for only one of the two.
    #[arg(long, value_name = "POLICY", conflicts_with = "working_set")]
    calls: Option<PathBuf>,
    /// Record each store of these applications to their tracked memory, from outside the guest. A
    /// commit then needs no call, and returns which words were written, not only which pages. A
    /// plugin in QEMU records them (by default the libfirn_stores.so that was installed with this
    /// program). QEMU must emulate the guest (TCG). The guest gets slower, because the plugin
    /// checks each store.
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
    /// The absolute path of the policy file.
    pub fn policy_path(&self) -> Result<Option<PathBuf>, Failure> {
        self.calls.as_deref().map_or(Ok(()), check_input)?;
        self.calls.as_deref().map(absolute_path).transpose()
    }

    /// The absolute path of the plugin.
    pub fn plugin_path(&self) -> Result<Option<PathBuf>, Failure> {
        self.stores.as_deref().map(find_plugin).transpose()
    }
}

fn find_plugin(named: &Path) -> Result<PathBuf, Failure> {
    let candidates = match named.as_os_str() == PLUGIN {
        true => installed_plugins(&program_path()?).to_vec(),
        false => vec![absolute_path(named)?],
    };
    find_file(&candidates)
}

fn program_path() -> Result<PathBuf, Failure> {
    std::env::current_exe().map_err(|error| Failure::from_error(FailureKind::Host, &error))
}

/// The first of the candidates that is a file.
fn find_file(candidates: &[PathBuf]) -> Result<PathBuf, Failure> {
    if let Some(found) = candidates.iter().find(|path| path.is_file()) {
        return Ok(found.clone());
    }
    let paths: Vec<String> = candidates.iter().map(|path| path.display().to_string()).collect();
    let text = format!("there is no plugin {}", paths.join(" or "));
    Err(Failure::new(FailureKind::Usage, text).with_hint("give its path: --stores=PLUGIN"))
}

/// The paths at which the plugin may be if the user names none: beside this program, where both are
/// built, and where `make install` puts it.
fn installed_plugins(program: &Path) -> [PathBuf; 2] {
    let prefix = program.ancestors().nth(2).unwrap_or(Path::new("/"));
    [program.with_file_name(PLUGIN), prefix.join("lib/firn").join(PLUGIN)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plugin_that_is_missing_is_named_with_both_of_its_paths() {
        let candidates = installed_plugins(Path::new("/nowhere/bin/firn"));
        let failure = find_file(&candidates).unwrap_err();
        let expected = "there is no plugin /nowhere/bin/libfirn_stores.so or \
                        /nowhere/lib/firn/libfirn_stores.so";
        assert_eq!(failure.chain, [expected]);
    }

    #[test]
    fn the_plugin_of_the_prefix_is_found() {
        let prefix = tempfile::tempdir().unwrap();
        let candidates = installed_plugins(&prefix.path().join("bin/firn"));
        std::fs::create_dir_all(candidates[1].parent().unwrap()).unwrap();
        std::fs::write(&candidates[1], "").unwrap();
        assert_eq!(find_file(&candidates).unwrap(), candidates[1]);
    }
}
