//! Huge pages for a test, reserved for as long as it runs.
//!
//! The host has one number of huge pages, and tests run beside each other. So a test that reserves
//! some locks the file with that number until it gives them back:
//!
//! ```text
//!   test a   lock, 0 -> 96 ........ 96 -> 0, unlock
//!   test b        waits for the lock ............... 0 -> 8 .... 8 -> 0
//! ```

use std::fs::{File, read_to_string, write};
use std::io;

use rustix::fs::{FlockOperation, flock};

use crate::skip_test;

const NUMBER: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages";
const FREE: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages";

/// Huge pages of 2 MiB that no other test uses. When it is dropped, the host has as many as before.
#[derive(Debug)]
pub struct HugePages {
    before: u64,
    _lock: File,
}

impl HugePages {
    /// Reserves this many more; `None` if that is not possible: then the test is noted as skipped.
    ///
    /// A test that also waits for something that other tests hold reserves its pages first.
    pub fn reserve(count: u64) -> Option<Self> {
        match Self::try_reserve(count) {
            Ok(pages) if read_number(FREE).is_ok_and(|free| free >= count) => Some(pages),
            Ok(_) => {
                skip_test(format!("this host has no {count} huge pages of 2 MiB"));
                None
            }
            Err(error) => {
                skip_test(format!("no huge pages of 2 MiB ({NUMBER}: {error})"));
                None
            }
        }
    }

    fn try_reserve(count: u64) -> io::Result<Self> {
        let lock = File::open(NUMBER)?;
        flock(&lock, FlockOperation::LockExclusive)?;
        let before = read_number(NUMBER)?;
        let pages = Self { before, _lock: lock };
        pages.set_number(before + count)?;
        Ok(pages)
    }

    /// Gives some of them back: the host has this many more than before.
    pub fn keep_only(&self, count: u64) -> io::Result<()> {
        self.set_number(self.before + count)
    }

    /// The huge pages of the host that no process has.
    pub fn count_free() -> io::Result<u64> {
        read_number(FREE)
    }

    fn set_number(&self, number: u64) -> io::Result<()> {
        write(NUMBER, number.to_string())
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        if let Err(error) = self.set_number(self.before) {
            eprintln!("{NUMBER} can't be set to {} again: {error}", self.before);
        }
    }
}

fn read_number(file: &str) -> io::Result<u64> {
    let text = read_to_string(file)?;
    text.trim().parse().map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}
