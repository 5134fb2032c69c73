//! The journal: what is going on with a VM, for whoever comes after the supervisor has died.
//!
//! It is written before each step whose half-way death matters, as a whole, to a new file that is then renamed over
//! the old one; a reader sees one state or the other. It isn't synced to disk: it must outlive the supervisor, not the
//! machine, for the VM does not outlive that either.
//!
//! ```text
//!                  QEMU answers                    image asked for
//!     starting ------------------> running <-----------------------> saving
//!         |                         |   ^        finished, failed       |
//!         |                  detach |   | all pages present             |
//!         v                         v   |                               v
//!       ended <---------------- detached restoring ----------------> ended        (QEMU is gone, from anywhere)
//! ```
//!
//! `protecting` is entered from running and left to it, as saving; `standby` becomes running by a failover.
//!
//! Nothing of the guest's memory is in it. It does hold QEMU's command line.

use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::sync::{Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use firn_epochs::primary_end::PrimaryEnd;
use firn_restore::{Mode, OnError};
use firn_types::{HostVirt, RegionMap, Tid};
use firn_vmm::DriveCopy;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::disks::Kept;
use crate::failure::Failure;
use crate::identity::ProcessIdentity;
use crate::meta::Meta;
use crate::name::VmName;
use crate::network::Card;
use crate::served::ServedDisk;

/// The journal's own version: another Firn's journal is not guessed at.
pub const VERSION: u32 = 2;

/// The largest journal that is read, in bytes: a command line (at most 2 MiB in Linux) and some hundred regions.
const BYTES_MAX: u64 = 8 << 20;

/// Why a journal can't be used.
#[derive(Debug, Error)]
pub enum JournalError {
    /// The file system refused.
    #[error("can't read or write {path}", path = .path.display())]
    Io {
        /// The journal.
        path: PathBuf,
        /// What the file system said.
        source: io::Error,
    },
    /// It is not a journal.
    #[error("{path} is no journal", path = .path.display())]
    Malformed {
        /// The journal.
        path: PathBuf,
        /// Where it stops making sense.
        source: serde_json::Error,
    },
    /// Another version of Firn wrote it.
    #[error("{path} is a journal of version {found}; this Firn reads version {VERSION}", path = .path.display())]
    Version {
        /// The journal.
        path: PathBuf,
        /// Its version.
        found: u32,
    },
}

/// Everything a successor needs to know.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Journal {
    /// `VERSION`.
    pub version: u32,
    /// The VM.
    pub name: VmName,
    /// Its hypervisor process, once that answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machine: Option<Machine>,
    /// What is going on.
    pub phase: Phase,
    /// What happened last that a user should hear of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last: Option<Note>,
    /// How often a successor has taken over.
    #[serde(default)]
    pub recoveries: u32,
    /// Files that the VM's drives are written to and no image refers to.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub overlays: Vec<PathBuf>,
    /// They are to go with the VM.
    #[serde(default)]
    pub discard: bool,
    /// The last copies of its drives that an image has: the hypervisor notes in dirty bitmaps what was written since.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub copies: Vec<DriveCopy>,
    /// Its network cards let nothing out until it is released: a standby may run.
    #[serde(default)]
    pub shut: bool,
    /// They let something out only while the lease of this timeline is held.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lease: Option<u32>,
    /// How its protection ended, if it was protected: the reason why its standby is or is not needed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub protection_end: Option<PrimaryEnd>,
    /// Its hypervisor did not answer when it was last asked.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub hung: bool,
}

/// A hypervisor process that runs a VM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Machine {
    /// The process.
    pub process: ProcessIdentity,
    /// Its monitor socket.
    pub qmp: PathBuf,
    /// Whether Firn started it (`run`, `restore`) or found it running (`attach`).
    pub launched: bool,
    /// Guest RAM: its regions and where the guest sees them.
    pub map: RegionMap,
    /// Where each region lies in the hypervisor: region name and first address.
    pub locations: Vec<(String, HostVirt)>,
    /// The threads that run vCPUs; never used to inject system calls.
    pub vcpus: Vec<Tid>,
    /// What an image of this VM has to say about where it comes from.
    pub meta: Meta,
    /// When Firn took charge of it, in seconds since 1970.
    pub since: u64,
    /// At how many bytes a second its RAM is scanned for what the guest uses, if it is: then a dead supervisor may have left
    /// it registered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub access_bits: Option<u64>,
    /// The file that names the applications that may call, if any may.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub calls: Option<PathBuf>,
    /// Its network cards whose frames pass through the supervisor.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cards: Vec<Card>,
    /// Its disks that the supervisor serves.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub served: Vec<ServedDisk>,
    /// Whether its writes are followed between checkpoints: then, too, a dead supervisor has left it registered.
    #[serde(default)]
    pub followed: bool,
}

/// What is going on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "phase", rename_all = "kebab-case")]
pub enum Phase {
    /// A hypervisor is being started, or looked at for the first time.
    Starting {
        /// The hypervisor to be: found by this socket in its command line if it was started and not yet journaled.
        /// `None` for a VM that ran before Firn came.
        launching: Option<PathBuf>,
    },
    /// Nothing but the guest.
    Running,
    /// A checkpoint or suspend is being written.
    Saving {
        /// The file it will be.
        image: PathBuf,
        /// The file that had its name before, if one had. Another one there now is the new image, and whole.
        replaces: Option<FileIdentity>,
        /// The guest stands still by Firn's doing, or is about to.
        paused_by_us: bool,
        /// A suspend: the VM is to end once the image is whole.
        then_stop: bool,
        /// What is being done about the VM's drives.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        drives: Vec<Kept>,
    },
    /// Layers of the VM's disks are being merged.
    Merging {
        /// The guest is paused by Firn, or is about to be.
        paused_by_us: bool,
    },
    /// The guest runs, or is about to, and misses pages that the image holds.
    Restoring {
        /// The file they come from.
        image: PathBuf,
        /// Which image that is, should its name come to mean another.
        identity: String,
        /// How they come.
        mode: Mode,
        /// The device state is in place and the guest may run. Before that there is nothing worth keeping.
        started: bool,
        /// The guest was paused when it was saved, and is to stay so.
        #[serde(default)]
        stays_paused: bool,
        /// What becomes of the VM where its memory can't be read.
        #[serde(default)]
        on_error: OnError,
        /// The guest waits for storage, and Firn has paused it by a command, or is about to.
        #[serde(default)]
        paused_by_us: bool,
    },
    /// The VM's epochs go to a backup; it may be held for a moment, which ends by itself whoever dies.
    Protecting {
        /// Its hypervisor can't be held: it has been stopped by a command, or is about to be, and has to be started by another.
        #[serde(default)]
        paused_by_us: bool,
    },
    /// A hypervisor waits for the VM of a primary, whose epochs come here. What came is in the supervisor and lost with it.
    Standby {
        /// A failover has put the VM's whole state in place: it runs, or is about to. It needs nothing of this supervisor any more.
        #[serde(default)]
        started: bool,
    },
    /// The hypervisor is gone.
    Ended {
        /// How it went.
        exit: Exit,
        /// When, in seconds since 1970.
        at: u64,
    },
    /// Firn has let go of the VM, which runs on.
    Detached,
}

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Exit {
    /// It exited with this code.
    Code(i32),
    /// This signal killed it.
    Signal(i32),
    /// Firn wasn't its parent and was not told.
    Unknown,
    /// `firn stop` or `firn suspend` ended it.
    Stopped,
}

/// Something that happened, with its time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Note {
    /// When, in seconds since 1970.
    pub at: u64,
    /// Whether it is what was asked for.
    pub good: bool,
    /// What.
    pub text: String,
    /// The failure behind it, if somebody may still ask for it: by that the VM was ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<Failure>,
}

/// Which file, whatever its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileIdentity {
    /// The device that holds it.
    pub dev: u64,
    /// Its inode there.
    pub ino: u64,
}

impl FileIdentity {
    /// The file that has a name now; `None` if none has.
    pub fn at(path: &Path) -> Option<Self> {
        let metadata = fs::metadata(path).ok()?;
        Some(Self { dev: metadata.dev(), ino: metadata.ino() })
    }
}

impl Phase {
    /// Whether a restore that can't go on leaves the VM to a successor, rather than end it.
    pub fn keeps_vm(&self) -> bool {
        matches!(self, Self::Restoring { on_error: OnError::Stop, .. })
    }

    /// Whether the VM has not run yet, and its supervisor may not answer until it does.
    pub fn is_starting(&self) -> bool {
        matches!(
            self,
            Self::Starting { .. } | Self::Restoring { started: false, .. } | Self::Standby { .. }
        )
    }

    /// Whether there is nothing left to look after.
    pub fn is_over(&self) -> bool {
        matches!(self, Self::Ended { .. } | Self::Detached)
    }

    /// One word for it, as `firn ls` shows it.
    pub fn word(&self) -> &'static str {
        match self {
            Self::Starting { .. } => "starting",
            Self::Running => "running",
            Self::Saving { then_stop: false, .. } => "saving",
            Self::Saving { then_stop: true, .. } => "suspending",
            Self::Merging { .. } => "merging",
            Self::Restoring { .. } => "restoring",
            Self::Protecting { .. } => "protected",
            Self::Standby { .. } => "standby",
            Self::Ended { .. } => "ended",
            Self::Detached => "detached",
        }
    }
}

impl Journal {
    /// The journal of a VM that is about to be.
    pub fn new(name: VmName, launching: Option<PathBuf>) -> Self {
        let phase = Phase::Starting { launching };
        Self {
            version: VERSION,
            name,
            machine: None,
            phase,
            last: None,
            recoveries: 0,
            overlays: Vec::new(),
            discard: false,
            copies: Vec::new(),
            shut: false,
            lease: None,
            protection_end: None,
            hung: false,
        }
    }

    /// Whether the image that is being saved has its name already, and so is whole.
    pub fn image_whole(&self) -> bool {
        match &self.phase {
            Phase::Saving { image, replaces, .. } => {
                let now = FileIdentity::at(image);
                now.is_some() && now != *replaces
            }
            _ => false,
        }
    }

    /// Notes that something went as it should.
    pub fn note_success(&mut self, text: impl Into<String>) {
        self.last = Some(Note { at: now(), good: true, text: text.into(), failure: None });
    }

    /// Notes that something went wrong.
    pub fn note_failure(&mut self, text: impl Into<String>) {
        self.last = Some(Note { at: now(), good: false, text: text.into(), failure: None });
    }

    /// Notes why the VM was ended.
    pub fn note_end(&mut self, failure: Failure) {
        let text = format!("the restore failed: {failure}");
        self.last = Some(Note { at: now(), good: false, text, failure: Some(failure) });
    }

    /// Reads a journal; `None` if there is none.
    pub fn load(path: &Path) -> Result<Option<Self>, JournalError> {
        let io = |source| JournalError::Io { path: path.to_owned(), source };
        let file = match File::open(path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(io(error)),
        };
        let mut text = Vec::new();
        file.take(BYTES_MAX).read_to_end(&mut text).map_err(io)?;
        Self::parse(path, &text).map(Some)
    }

    fn parse(path: &Path, text: &[u8]) -> Result<Self, JournalError> {
        #[derive(Deserialize)]
        struct Versioned {
            version: u32,
        }
        let malformed = |source| JournalError::Malformed { path: path.to_owned(), source };
        let Versioned { version } = serde_json::from_slice(text).map_err(malformed)?;
        if version != VERSION {
            return Err(JournalError::Version { path: path.to_owned(), found: version });
        }
        serde_json::from_slice(text).map_err(malformed)
    }

    /// Replaces the journal at `path` by this one, atomically.
    pub fn store(&self, path: &Path) -> Result<(), JournalError> {
        let new = path.with_extension("json.new");
        let malformed = |source| JournalError::Malformed { path: path.to_owned(), source };
        let text = serde_json::to_vec_pretty(self).map_err(malformed)?;
        write_private(&new, &text)
            .and_then(|()| fs::rename(&new, path))
            .map_err(|source| JournalError::Io { path: path.to_owned(), source })
    }
}

/// Writes a file for its owner alone.
pub(crate) fn write_private(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut options = OpenOptions::new();
    let mut file = options.write(true).create(true).truncate(true).mode(0o600).open(path)?;
    file.write_all(bytes)
}

/// A journal and the file it is kept in. Several threads may change it: each change is on file when it returns.
#[derive(Debug)]
pub struct JournalFile {
    path: PathBuf,
    journal: Mutex<Journal>,
}

impl JournalFile {
    /// Keeps a journal at `path`; writes it there.
    pub fn create(path: PathBuf, journal: Journal) -> Result<Self, JournalError> {
        journal.store(&path)?;
        Ok(Self { path, journal: Mutex::new(journal) })
    }

    /// Changes the journal, unless that can't be written down.
    pub fn update(&self, change: impl FnOnce(&mut Journal)) -> Result<(), JournalError> {
        let mut journal = self.journal.lock().unwrap_or_else(PoisonError::into_inner);
        let mut changed = journal.clone();
        change(&mut changed);
        changed.store(&self.path)?;
        *journal = changed;
        Ok(())
    }

    /// Whether the image that is being saved has its name already, and so is whole.
    pub fn image_whole(&self) -> bool {
        self.read().image_whole()
    }

    /// The journal as it is now.
    pub fn read(&self) -> Journal {
        self.journal.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl From<ExitStatus> for Exit {
    fn from(status: ExitStatus) -> Self {
        match (status.code(), status.signal()) {
            (Some(code), _) => Self::Code(code),
            (None, Some(signal)) => Self::Signal(signal),
            (None, None) => Self::Unknown,
        }
    }
}

impl fmt::Display for Exit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Code(0) => f.write_str("exited"),
            Self::Code(code) => write!(f, "exited with code {code}"),
            Self::Signal(signal) => write!(f, "killed by signal {signal}"),
            Self::Unknown => f.write_str("ended; how is not known"),
            Self::Stopped => f.write_str("stopped"),
        }
    }
}

/// Seconds since 1970.
pub fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn journal(phase: Phase) -> Journal {
        Journal { phase, ..Journal::new(VmName::new("web").unwrap(), None) }
    }

    #[test]
    fn what_is_stored_is_loaded() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal.json");
        assert_eq!(Journal::load(&path).unwrap(), None);
        let phases = [
            Phase::Starting { launching: Some("/run/firn/web/qmp.sock".into()) },
            Phase::Saving {
                image: "/a".into(),
                replaces: Some(FileIdentity { dev: 1, ino: 2 }),
                paused_by_us: true,
                then_stop: false,
                drives: vec![Kept { chain: vec!["/c".into()], made: None }],
            },
            Phase::Restoring {
                image: "/a".into(),
                identity: "1f".into(),
                mode: Mode::Lazy,
                started: true,
                stays_paused: false,
                on_error: OnError::Kill,
                paused_by_us: true,
            },
            Phase::Ended { exit: Exit::Signal(9), at: 12 },
        ];
        for phase in phases {
            let written = journal(phase);
            written.store(&path).unwrap();
            assert_eq!(Journal::load(&path).unwrap(), Some(written));
        }
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "no file is left behind");
    }

    /// As it was written before there was more to say.
    #[test]
    fn a_protection_of_which_nothing_is_said_has_stopped_nothing() {
        let phase: Phase = serde_json::from_str(r#"{"phase":"protecting"}"#).unwrap();
        assert_eq!(phase, Phase::Protecting { paused_by_us: false });
    }

    #[test]
    fn another_versions_journal_is_not_guessed_at() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal.json");
        fs::write(&path, r#"{"version":7,"phase":"dancing"}"#).unwrap();
        assert!(matches!(Journal::load(&path), Err(JournalError::Version { found: 7, .. })));
    }

    #[test]
    fn half_a_journal_is_an_error_that_names_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal.json");
        fs::write(&path, r#"{"version":2,"na"#).unwrap();
        let error = Journal::load(&path).unwrap_err();
        assert!(error.to_string().contains("journal.json"), "{error}");
    }

    #[test]
    fn only_ended_and_detached_need_nobody() {
        assert!(journal(Phase::Detached).phase.is_over());
        assert!(!journal(Phase::Running).phase.is_over());
    }
}
