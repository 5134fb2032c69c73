//! The disks that the lab imitates, and why one can't be imitated here.

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// A disk to imitate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DiskProfile {
    /// The disk as it is.
    None,
    /// A network SSD.
    NetSsd,
    /// A 15,000 rpm disk.
    Hdd15k,
    /// A 7,200 rpm disk.
    Hdd7200,
}

/// The limits of a disk, for reads and for writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskLimits {
    /// Operations per second.
    pub iops: u64,
    /// Bytes per second.
    pub bytes_per_s: u64,
}

/// A name that is no disk profile's.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("no disk profile is called {0:?}; there are none, netssd, hdd15k and hdd7200")]
pub struct DiskProfileError(String);

impl DiskProfile {
    /// All profiles, fastest first.
    pub const ALL: [Self; 4] = [Self::None, Self::NetSsd, Self::Hdd15k, Self::Hdd7200];

    /// The profile's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::NetSsd => "netssd",
            Self::Hdd15k => "hdd15k",
            Self::Hdd7200 => "hdd7200",
        }
    }

    /// The profile's limits; `None` for no limit.
    pub fn disk_limits(self) -> Option<DiskLimits> {
        let limits = |iops, megabytes: u64| DiskLimits { iops, bytes_per_s: megabytes * 1_000_000 };
        match self {
            Self::None => None,
            Self::NetSsd => Some(limits(3000, 125)),
            Self::Hdd15k => Some(limits(180, 120)),
            Self::Hdd7200 => Some(limits(80, 100)),
        }
    }
}

impl fmt::Display for DiskProfile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for DiskProfile {
    type Err = DiskProfileError;

    fn from_str(name: &str) -> Result<Self, DiskProfileError> {
        let known = Self::ALL.into_iter().find(|profile| profile.name() == name);
        known.ok_or_else(|| DiskProfileError(name.to_owned()))
    }
}

/// Why a disk can't be imitated here.
#[derive(Debug, Error)]
pub enum ThrottleError {
    /// The file is on no block device: tmpfs, an overlay over one, a network file system.
    #[error(
        "{0} is on no block device, so there is nothing to throttle; use a directory on a real disk"
    )]
    NoDevice(PathBuf),
    /// Neither version of control groups can throttle block I/O here.
    #[error(
        "no control group hierarchy here throttles block I/O (cgroup v1 blkio or cgroup v2 io)"
    )]
    NoController,
    /// An operation on a file of the control group, or of the disk, failed.
    #[error("{path}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The error.
        source: io::Error,
    },
    /// The page cache keeps a file, so reading it would be no disk I/O.
    #[error("{pages} pages of {path} stay in the page cache; as root, all caches can be dropped")]
    Cached {
        /// The file.
        path: PathBuf,
        /// How many of its pages.
        pages: u64,
    },
    /// The kernel accepted the limits and does not enforce them.
    #[error(
        "{profile} should allow {expected} random reads per second; {achieved:.0} were measured"
    )]
    Ineffective {
        /// The profile.
        profile: DiskProfile,
        /// The rate that it allows.
        expected: u64,
        /// The measured rate.
        achieved: f64,
    },
    /// The measuring program printed no result.
    #[error("the disk probe failed: {0}")]
    Probe(String),
}

pub(crate) fn io_error_at(path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> ThrottleError {
    let path = path.into();
    move |source| ThrottleError::Io { path, source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_back() {
        for profile in DiskProfile::ALL {
            assert_eq!(profile.to_string().parse(), Ok(profile));
            let json = serde_json::to_string(&profile).unwrap();
            assert_eq!(json, format!("\"{profile}\""));
        }
        assert!("floppy".parse::<DiskProfile>().is_err());
    }

    #[test]
    fn profiles_get_slower() {
        let iops =
            |profile: DiskProfile| profile.disk_limits().map_or(u64::MAX, |limits| limits.iops);
        assert!(DiskProfile::ALL.map(iops).is_sorted_by(|faster, slower| faster > slower));
    }
}
