//! Disk probe: measures the effect of a throttle.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use firn_guest::stamp::mix;
use rustix::fs::{Advice, fadvise};
use serde::{Deserialize, Serialize};

use super::cold::make_cold;
use super::group::DiskThrottle;
use super::profile::{DiskProfile, ThrottleError, io_error_at};

/// Bytes per random read.
const READ_BYTES: usize = 4096;
/// Size of the file that is read from.
const FILE_BYTES: u64 = 64 << 20;
/// Maximum time to read.
const READ_TIME_MAX: Duration = Duration::from_millis(1500);
/// How much faster than its limit a throttled disk may be, as a factor. Slower is accepted, because
/// it is the machine's fault; faster is not.
const TOLERANCE: f64 = 1.25;

/// The result of random 4 KiB reads.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ProbeResult {
    /// Reads per second.
    pub iops: f64,
    /// Mean time of a read, in milliseconds.
    pub read_ms: f64,
}

/// Measures a throttle with random reads of a cold file in `dir`.
///
/// `lab` is the `firn-lab` program: its `probe-disk` verb is started under the throttle and calls
/// [`probe_disk`].
///
/// # Errors
/// If the disk is faster than its profile: the throttle has no effect here, and a figure measured
/// with it would mislead.
pub fn measure_throttle(
    throttle: &DiskThrottle,
    dir: &Path,
    lab: &Path,
) -> Result<ProbeResult, ThrottleError> {
    let file = dir.join("disk-probe");
    fill_file(&file)?;
    make_cold([file.as_path()])?;
    let mut command = throttle.command(lab);
    command.arg("probe-disk").arg(&file);
    let achieved = run_probe(command);
    let _ = fs::remove_file(&file);
    check_limits(throttle.profile(), achieved?)
}

fn check_limits(profile: DiskProfile, found: ProbeResult) -> Result<ProbeResult, ThrottleError> {
    let expected = profile.disk_limits().map_or(u64::MAX, |limits| limits.iops);
    match found.iops > expected as f64 * TOLERANCE {
        true => Err(ThrottleError::Ineffective { profile, expected, achieved: found.iops }),
        false => Ok(found),
    }
}

fn run_probe(mut command: Command) -> Result<ProbeResult, ThrottleError> {
    let failed = |why: String| ThrottleError::Probe(why);
    let output = command.output().map_err(|error| failed(error.to_string()))?;
    serde_json::from_slice(&output.stdout)
        .map_err(|error| failed(format!("{error}; {}", String::from_utf8_lossy(&output.stderr))))
}

fn fill_file(path: &Path) -> Result<(), ThrottleError> {
    let mut file = File::create(path).map_err(io_error_at(path))?;
    let chunk: Vec<u8> = (0..1_u64 << 17).flat_map(|word| mix(word).to_le_bytes()).collect();
    for _ in 0..FILE_BYTES / chunk.len() as u64 {
        file.write_all(&chunk).map_err(io_error_at(path))?;
    }
    file.sync_all().map_err(io_error_at(path))
}

/// Reads 4 KiB at a time from random offsets of a file, each offset once, for at most a second and
/// a half.
pub fn probe_disk(path: &Path) -> Result<ProbeResult, ThrottleError> {
    let file = File::open(path).map_err(io_error_at(path))?;
    fadvise(&file, 0, None, Advice::Random).map_err(|errno| io_error_at(path)(errno.into()))?;
    let read_count = file.metadata().map_err(io_error_at(path))?.len() / READ_BYTES as u64;
    let mut buffer = [0; READ_BYTES];
    let (start, mut reads) = (Instant::now(), 0_u64);
    while reads < read_count && start.elapsed() < READ_TIME_MAX {
        let offset = scattered_index(reads, read_count) * READ_BYTES as u64;
        file.read_exact_at(&mut buffer, offset).map_err(io_error_at(path))?;
        reads += 1;
    }
    let seconds = start.elapsed().as_secs_f64();
    Ok(ProbeResult { iops: reads as f64 / seconds, read_ms: seconds * 1e3 / reads.max(1) as f64 })
}

/// A permutation of `0..read_count` that jumps: the step has no divisor in common with any power of
/// two.
fn scattered_index(index: u64, read_count: u64) -> u64 {
    (index * 7919 + 13) % read_count.max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_place_is_read_once() {
        let read_count = FILE_BYTES / READ_BYTES as u64;
        let mut seen: Vec<u64> =
            (0..read_count).map(|index| scattered_index(index, read_count)).collect();
        seen.sort_unstable();
        assert!(seen.iter().copied().eq(0..read_count));
    }

    #[test]
    fn a_disk_faster_than_its_profile_is_refused() {
        let found = |iops| check_limits(DiskProfile::Hdd15k, ProbeResult { iops, read_ms: 1.0 });
        assert!(matches!(found(300.0), Err(ThrottleError::Ineffective { expected: 180, .. })));
        assert!(found(190.0).is_ok() && found(20.0).is_ok());
        assert!(check_limits(DiskProfile::None, ProbeResult { iops: 1e6, read_ms: 0.0 }).is_ok());
    }

    #[test]
    fn an_unthrottled_probe_reads_something() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        fs::write(&file, vec![1; 1 << 20]).unwrap();
        assert!(probe_disk(&file).unwrap().iops > 0.0);
    }
}
