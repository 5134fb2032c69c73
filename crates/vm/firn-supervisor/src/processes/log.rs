//! The supervisor's log: a file in the VM's runtime directory, accessible to its owner only.
//!
//! It never contains anything of the guest: no memory, no console, no command line.

use std::io;
use std::sync::Mutex;

use tracing_subscriber::EnvFilter;

use crate::processes::runtime::VmDir;
use crate::processes::spawn;

/// The environment variable for the log level, as `tracing-subscriber` reads it: `debug`,
/// `firn=trace`, ...
const VARIABLE: &str = "FIRN_LOG";

/// Writes this process's log, and its panics, to the VM's log file.
pub(crate) fn open_log(vm: &VmDir) -> io::Result<()> {
    let file = spawn::open_append(&vm.log_file())?;
    rustix::stdio::dup2_stderr(&file)?;
    let filter = EnvFilter::try_from_env(VARIABLE).unwrap_or_else(|_| EnvFilter::new("info"));
    // A second call in one process keeps the first log.
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(false)
        .with_target(false)
        .with_writer(Mutex::new(file))
        .try_init();
    Ok(())
}
