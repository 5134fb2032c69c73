//! `firn __man`: the manual pages, which `make install` installs.
//!
//! They are made from the definition of the command line, as the help is:
//!
//! ```text
//!   firn.1  firn-run.1  firn-attach.1 ...     one for each public verb
//!   firn-image.1  firn-image-inspect.1 ...    and for each verb below it
//!   firn-agent-status.1                       but not firn-agent.1: the program firn-agent writes that
//! ```

use std::io;
use std::path::{Path, PathBuf};

use clap::{Args as ClapArgs, Command, CommandFactory};
use clap_mangen::Man;
use firn_supervisor::{Failure, FailureContext as _};

/// The hidden verb.
pub const VERB: &str = "__man";

/// The page of the program firn-agent, whose name `firn agent` would have too.
const AGENT_PAGE: &str = "firn-agent.1";

/// Write the manual pages.
#[derive(Debug, ClapArgs)]
pub struct ManArgs {
    /// The directory, which exists.
    directory: PathBuf,
}

impl ManArgs {
    /// Runs the verb.
    pub fn run(&self) -> Result<(), Failure> {
        write_all_pages(&self.directory)
            .while_doing(format!("writing manual pages to {}", self.directory.display()))
    }
}

fn write_all_pages(directory: &Path) -> io::Result<()> {
    let mut firn = crate::FirnCli::command();
    firn.build();
    write_pages(&firn, directory)
}

/// Writes the page of a verb, and those of the public verbs below it.
fn write_pages(verb: &Command, directory: &Path) -> io::Result<()> {
    for below in verb.get_subcommands().filter(|below| !below.is_hide_set()) {
        write_pages(below, directory)?;
    }
    let page = Man::new(verb.clone());
    if page.get_filename() != AGENT_PAGE {
        page.generate_to(directory)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written_pages() -> Vec<String> {
        let directory = tempfile::tempdir().unwrap();
        write_all_pages(directory.path()).unwrap();
        let entries = std::fs::read_dir(directory.path()).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    #[test]
    fn every_public_verb_has_a_page_but_firn_agent_is_the_programs() {
        let pages = written_pages();
        for verb in crate::FirnCli::command().get_subcommands() {
            let page = format!("firn-{}.1", verb.get_name());
            let is_expected = !verb.is_hide_set() && page != AGENT_PAGE;
            assert_eq!(pages.contains(&page), is_expected, "{page} in {pages:?}");
        }
        for page in ["firn.1", "firn-image-inspect.1", "firn-agent-status.1"] {
            assert!(pages.iter().any(|it| it == page), "{page} in {pages:?}");
        }
        assert!(!pages.iter().any(|page| page.contains("help")), "{pages:?}");
    }
}
