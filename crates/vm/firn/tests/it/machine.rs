//! What a test has of the machine while its VM is there.
//!
//! Tests run in several threads and processes. The locks are on files beside the test program, so that they are of one build, and
//! end with the process:
//!
//! ```text
//!   machine  shared by tests with a VM; exclusive for one that measures time
//!   gate     held while a test waits for `machine`: those that come later wait behind one that measures
//!   hosts    exclusive for a test of several hosts
//! ```

use std::fs::{File, OpenOptions};

use nix::fcntl::{Flock, FlockArg};

/// The locks that a test holds.
pub struct Machine {
    _locks: Vec<Flock<File>>,
}

impl Machine {
    /// Others may have VMs as well: as many as tests run at once.
    pub fn shared() -> Self {
        Self { _locks: vec![lock_machine(FlockArg::LockShared)] }
    }

    /// The same, but one test of several hosts at a time: each takes most of a processor, and their
    /// hosts are lost when they can't answer for seconds.
    pub fn hosts() -> Self {
        // A test that waits for its turn has nothing of the machine.
        let turn = lock("hosts", FlockArg::LockExclusive);
        Self { _locks: vec![lock_machine(FlockArg::LockShared), turn] }
    }

    /// It measures how long something takes, or how much a guest gets done in between.
    pub fn alone() -> Self {
        Self { _locks: vec![lock_machine(FlockArg::LockExclusive)] }
    }
}

fn lock_machine(how: FlockArg) -> Flock<File> {
    let _gate = lock("gate", FlockArg::LockExclusive);
    lock("machine", how)
}

fn lock(name: &str, how: FlockArg) -> Flock<File> {
    let program = std::env::current_exe().unwrap();
    let path = program.with_file_name(format!("firn-it-{name}.lock"));
    let file = OpenOptions::new().create(true).append(true).open(path).unwrap();
    Flock::lock(file, how).map_err(|(_, error)| error).unwrap()
}
