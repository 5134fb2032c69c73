//! Options of the verbs that start a VM: whether its applications may make guest calls, and whether
//! their stores are noted.

use std::path::{Path, PathBuf};

use clap::Args as ClapArgs;
use firn_supervisor::{Failure, FailureKind, absolute_path};

use crate::output::check_input;

/// The file name of the plugin that notes stores.
const PLUGIN: &str = "libfirn_stores.so";

/// The applications that may make guest calls.
#[derive(Debug, ClapArgs)]
pub struct CallsArgs {
    /// Answer guest calls of the applications that this file lists with their keys (TOML:
    /// [applications.NAME], key = "64 hexadecimal digits", pages = N). The VM gets a device for
    /// that (ivshmem). Not together with --working-set: Firn can trace the guest's memory for only
    /// one of them.
    #[arg(long, value_name = "POLICY", conflicts_with = "working_set")]
    calls: Option<PathBuf>,
    /// Note each store of these applications to their tracked memory, from outside the guest. Their
    /// commits then need no call, and learn of written words instead of pages. QEMU gets a plugin
    /// for that (libfirn_stores.so, as it was installed with this program, unless another is named)
    /// and must emulate the guest (TCG), which makes it slower: the plugin checks each of its
    /// stores.
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
        true => installed_plugins()?,
        false => vec![absolute_path(named)?],
    };
    if let Some(found) = candidates.iter().find(|path| path.is_file()) {
        return Ok(found.clone());
    }
    let paths: Vec<String> = candidates.iter().map(|path| path.display().to_string()).collect();
    let text = format!("there is no plugin {}", paths.join(" or "));
    Err(Failure::new(FailureKind::Usage, text).with_hint("give its path: --stores=PLUGIN"))
}

/// The paths at which the plugin may be if the user names none: beside this program, where both are
/// built, and where `make install` puts it.
fn installed_plugins() -> Result<Vec<PathBuf>, Failure> {
    let program =
        std::env::current_exe().map_err(|error| Failure::from_error(FailureKind::Host, &error))?;
    let prefix = program.ancestors().nth(2).unwrap_or(Path::new("/"));
    Ok(vec![program.with_file_name(PLUGIN), prefix.join("lib/firn").join(PLUGIN)])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plugin_that_is_missing_is_named_with_both_of_its_paths() {
        let failure = find_plugin(Path::new(PLUGIN)).unwrap_err();
        let program = std::env::current_exe().unwrap();
        let beside = program.parent().unwrap();
        let installed = beside.parent().unwrap().join("lib/firn/libfirn_stores.so");
        let expected = format!(
            "there is no plugin {} or {}",
            beside.join("libfirn_stores.so").display(),
            installed.display()
        );
        assert_eq!(failure.chain, [expected]);
    }
}
