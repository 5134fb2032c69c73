//! Disk readiness: waits until the disk itself is faster than the one that it imitates.
//!
//! After a checkpoint was written, the host may still be busy with it, or the disk of a virtual
//! machine may have used up its burst allowance. The first restore would then be measured on a
//! slower disk than the later ones.

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

use super::cold::make_cold;
use super::profile::{DiskProfile, ThrottleError, io_error_at};

/// How many bytes are read to measure the disk's speed.
const SPEED_READ_BYTES: u64 = 32 << 20;
/// How many times as fast as the imitated disk the real one must be.
const SPEED_MARGIN: f64 = 1.25;
/// How long a disk may take to become fast enough, and how often its speed is measured.
const READY_TIMEOUT: Duration = Duration::from_secs(30);
const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// Evicts a file from the page cache when reading it is faster than this profile allows. Returns
/// whether that was reached in time.
///
/// # Errors
/// Those of [`make_cold`], and a file that can't be read.
pub fn make_cold_when_ready(file: &Path, profile: DiskProfile) -> Result<bool, ThrottleError> {
    let wanted =
        profile.disk_limits().map_or(0.0, |limits| limits.bytes_per_s as f64 * SPEED_MARGIN);
    let since = Instant::now();
    loop {
        make_cold([file])?;
        let is_ready = measure_bytes_per_s(file)? >= wanted;
        if is_ready || since.elapsed() >= READY_TIMEOUT {
            make_cold([file])?;
            return Ok(is_ready);
        }
        sleep(POLL_INTERVAL);
    }
}

fn measure_bytes_per_s(path: &Path) -> Result<f64, ThrottleError> {
    let (mut file, since) =
        (File::open(path).map_err(io_error_at(path))?.take(SPEED_READ_BYTES), Instant::now());
    let read = std::io::copy(&mut file, &mut std::io::sink()).map_err(io_error_at(path))?;
    Ok(read as f64 / since.elapsed().as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_without_limits_is_always_ready() {
        let file = tempfile::NamedTempFile::new_in("/var/tmp").unwrap();
        file.as_file().set_len(1 << 20).unwrap();
        assert!(make_cold_when_ready(file.path(), DiskProfile::None).unwrap());
        assert!(make_cold_when_ready(Path::new("/nowhere"), DiskProfile::None).is_err());
    }
}
