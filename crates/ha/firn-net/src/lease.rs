//! Output lease: the time until which frames may leave. The process that requests the VM's lease
//! writes it to the lease file, 32 bytes; the network card reads the file for each frame.
//!
//! ```text
//!   agent: lease is granted -- write --> | magic | generation | until | check |  8 bytes each,
//!                                                        ^                       little endian
//!   card: before each frame -- read ---------------------' of my generation, and not over?
//! ```
//!
//! `until` is a time of `CLOCK_BOOTTIME`, which continues while processes are stopped and hosts are
//! asleep. So a process that wakes up finds that the lease is over. No process, neither the agent
//! nor the supervisor, has to be alive to end it.
//!
//! The card reads it by pread(2), which costs some hundred nanoseconds beside the write of the
//! frame. A mapping would be quicker, but the reader would be killed if the file were truncated. A
//! lease that is read while it is written has a wrong `check`, and does not count.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

const MAGIC: u64 = u64::from_le_bytes(*b"FIRNlea1");
const LEASE_BYTES: usize = 32;
/// How many times the file is read if it is being written at that moment.
const READS_MAX: u32 = 3;

/// Writes to the lease file until when frames of a generation may leave.
///
/// # Errors
/// If the file can't be written; it then has its old contents.
pub fn write_lease(path: &Path, generation: u32, until: Duration) -> io::Result<()> {
    let mut options = OpenOptions::new();
    let file = options.write(true).create(true).truncate(false).mode(0o600).open(path)?;
    file.write_all_at(&encode_lease(generation, until), 0)
}

fn encode_lease(generation: u32, until: Duration) -> [u8; LEASE_BYTES] {
    let until = u64::try_from(until.as_nanos()).unwrap_or(u64::MAX);
    let words = [MAGIC, generation.into(), until, compute_checksum(generation.into(), until)];
    let mut bytes = [0; LEASE_BYTES];
    bytes.chunks_exact_mut(8).zip(words).for_each(|(at, word)| {
        at.copy_from_slice(&word.to_le_bytes());
    });
    bytes
}

/// The generation and the end of the lease. `None` if the bytes are no lease, or were read while
/// they were written.
fn decode_lease(bytes: &[u8; LEASE_BYTES]) -> Option<(u64, Duration)> {
    let mut words = bytes.chunks_exact(8).map(|word| {
        let mut number = [0; 8];
        number.copy_from_slice(word);
        u64::from_le_bytes(number)
    });
    let (magic, generation, until) = (words.next()?, words.next()?, words.next()?);
    let is_whole = magic == MAGIC && words.next()? == compute_checksum(generation, until);
    is_whole.then_some((generation, Duration::from_nanos(until)))
}

fn compute_checksum(generation: u64, until: u64) -> u64 {
    !(MAGIC ^ generation.rotate_left(32) ^ until)
}

/// The lease that a VM's frames need.
#[derive(Debug)]
pub struct OutputLease {
    path: PathBuf,
    generation: u64,
    /// Opened once it exists.
    file: Mutex<Option<File>>,
}

impl OutputLease {
    /// The lease for frames of this generation, from the lease file at `path`, which need not exist
    /// yet.
    pub fn new(path: &Path, generation: u32) -> Self {
        Self { path: path.to_owned(), generation: generation.into(), file: Mutex::default() }
    }

    /// Whether a frame may leave. The caller checks this for every frame, right before it sends it.
    pub fn is_held(&self) -> bool {
        self.is_held_at(boottime_now())
    }

    fn is_held_at(&self, now: Duration) -> bool {
        self.read_lease_file()
            .is_some_and(|(generation, until)| generation == self.generation && now < until)
    }

    fn read_lease_file(&self) -> Option<(u64, Duration)> {
        let mut opened = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        if opened.is_none() {
            *opened = File::open(&self.path).ok();
        }
        let file = opened.as_ref()?;
        let mut bytes = [0; LEASE_BYTES];
        (0..READS_MAX).find_map(|_| {
            file.read_exact_at(&mut bytes, 0).ok()?;
            decode_lease(&bytes)
        })
    }
}

/// The current time of the clock that leases use.
fn boottime_now() -> Duration {
    let now = clock_gettime(ClockId::Boottime);
    Duration::new(now.tv_sec.unsigned_abs(), now.tv_nsec.unsigned_abs() as u32)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const S: Duration = Duration::from_secs(1);

    #[test]
    fn a_lease_is_valid_until_its_end_and_for_its_own_generation() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lease");
        let lease = OutputLease::new(&path, 2);
        assert!(!lease.is_held_at(S), "there is no file");
        write_lease(&path, 2, 5 * S).unwrap();
        assert!(lease.is_held_at(4 * S));
        assert!(!lease.is_held_at(5 * S) && !lease.is_held_at(6 * S));
        write_lease(&path, 2, 8 * S).unwrap();
        assert!(lease.is_held_at(6 * S));
        for other in [1, 3] {
            write_lease(&path, other, 8 * S).unwrap();
            assert!(!lease.is_held_at(6 * S), "of generation {other}");
        }
        write_lease(&path, 2, Duration::ZERO).unwrap();
        assert!(!lease.is_held_at(Duration::ZERO), "it was given up");
    }

    #[test]
    fn invalid_bytes_are_no_lease() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lease");
        for bytes in
            [&b""[..], &[0; LEASE_BYTES], &[0xff; LEASE_BYTES], &encode_lease(2, 9 * S)[..31]]
        {
            std::fs::write(&path, bytes).unwrap();
            assert!(!OutputLease::new(&path, 2).is_held_at(S), "{bytes:?}");
        }
    }

    proptest! {
        /// A lease that is partly overwritten by a newer one is read as one of the two, or as none.
        #[test]
        fn a_half_written_lease_is_none(
            old in (0..4_u32, 0..u64::MAX), new in (0..4_u32, 0..u64::MAX), words in 0..5_usize,
        ) {
            let of = |(generation, until)| encode_lease(generation, Duration::from_nanos(until));
            let mut bytes = of(old);
            bytes[..8 * words.min(4)].copy_from_slice(&of(new)[..8 * words.min(4)]);
            let is = |it: (u32, u64)| Some((u64::from(it.0), Duration::from_nanos(it.1)));
            let read = decode_lease(&bytes);
            prop_assert!(read.is_none() || read == is(old) || read == is(new), "{read:?}");
        }
    }
}
