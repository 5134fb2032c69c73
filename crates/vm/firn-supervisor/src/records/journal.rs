//! The journal: the file in which a supervisor records each step before it does it, for the
//! successor that recovers the VM after the supervisor has died.
//!
//! The supervisor writes it before each step that must not be lost half done. It writes the whole
//! journal to a new file and renames that over the old one, so that a reader sees one state or the
//! other. It doesn't sync the file to disk: the journal must outlive the supervisor, not the host,
//! because the VM does not outlive the host either.
//!
//! ```text
//!                  QEMU answers                    save requested
//!     starting ------------------> running <-----------------------> saving
//!         |                         |   ^        finished, failed       |
//!         |                  detach |   | all pages present             |
//!         v                         v   |                               v
//!       ended <---------------- detached restoring ----------------> ended        (QEMU has ended, from anywhere)
//! ```
//!
//! `protecting` is entered from running and returns to it, like saving; `standby` becomes running
//! by a failover.
//!
//! The journal holds none of the guest's memory. It does hold QEMU's command line.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use firn_epochs::protection_end::ProtectionEnd;
use firn_restore::{FillChoices, ReadFailurePolicy, RestoreMode};
use firn_types::{HostVirt, RegionMap, ThreadId};
use firn_vmm::DriveCopy;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::processes::identity::ProcessIdentity;
use crate::records::checkpoint_tally::CheckpointTally;
use crate::records::device_records::{CardFilter, DriveSnapshot, NetworkCard, ServedDisk};
use crate::records::failure::Failure;
use crate::records::family::FamilyRecord;
use crate::records::image_ids::ImageIds;
use crate::records::meta::ImageMeta;
use crate::records::monitor_address::MonitorAddress;
use crate::records::name::VmName;
use crate::records::process_exit::ProcessExit;
use crate::records::restored_domain::RestoredDomain;

/// The version of the journal: a journal of another Firn is not interpreted.
pub const VERSION: u32 = 2;

/// The largest journal that is read, in bytes: a command line (at most 2 MiB in Linux) and some
/// hundred regions.
const BYTES_MAX: u64 = 8 << 20;

/// Why a journal can't be used.
#[derive(Debug, Error)]
pub enum JournalError {
    /// The file system refused.
    #[error("can't read or write {path}", path = .path.display())]
    Io {
        /// The journal.
        path: PathBuf,
        /// The error of the file system.
        source: io::Error,
    },
    /// It is not a journal.
    #[error("{path} is no journal", path = .path.display())]
    Malformed {
        /// The journal.
        path: PathBuf,
        /// Where and why parsing failed.
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

/// Everything that a successor needs to know.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Journal {
    /// `VERSION`.
    pub version: u32,
    /// The VM.
    pub name: VmName,
    /// Its hypervisor process, once that answers.
    #[serde(rename = "machine", default, skip_serializing_if = "Option::is_none")]
    pub hypervisor_record: Option<HypervisorRecord>,
    /// The operation that runs.
    pub phase: VmPhase,
    /// The last thing that happened that a user should know of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last: Option<JournalResult>,
    /// How often a successor has taken over.
    #[serde(default)]
    pub recoveries: u32,
    /// Files that the VM's drives write to and that no image refers to.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub overlays: Vec<PathBuf>,
    /// These files are to be removed when the VM ends.
    #[serde(default)]
    pub discard: bool,
    /// The last copies of its drives that an image has. The hypervisor tracks in dirty bitmaps what
    /// has been written since.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub copies: Vec<DriveCopy>,
    /// Its network cards buffer all output until a release, because a standby may run.
    #[serde(default)]
    pub shut: bool,
    /// Its output leaves only while the lease of this generation is held.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lease: Option<u32>,
    /// The filters that its network cards have, or are about to get.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub filters: Vec<CardFilter>,
    /// The mirrors of its disks that its hypervisor has, or is about to get, by their names.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mirrors: Vec<String>,
    /// How its protection ended, if it was protected: the reason why its standby is or is not
    /// needed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub protection_end: Option<ProtectionEnd>,
    /// The domain of libvirt that a restore creates, until the restore is complete as far as libvirt
    /// is concerned.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub domain: Option<RestoredDomain>,
    /// The family of clones that it belongs to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub family: Option<FamilyRecord>,
    /// The guest's file systems are frozen, or are about to be, and are to be thawed.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub frozen: bool,
    /// Its hypervisor did not answer the last query.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub hung: bool,
    /// Its checkpoints.
    #[serde(default, skip_serializing_if = "CheckpointTally::is_empty")]
    pub checkpoints: CheckpointTally,
}

/// A hypervisor process that runs a VM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct HypervisorRecord {
    /// The process.
    pub process: ProcessIdentity,
    /// Its monitor.
    pub qmp: MonitorAddress,
    /// Whether Firn started it (`run`, `restore`) or found it running (`attach`).
    pub launched: bool,
    /// Guest RAM: its regions and where the guest sees them.
    pub map: RegionMap,
    /// The address of each region in the hypervisor: region name and first address.
    pub locations: Vec<(String, HostVirt)>,
    /// The threads that run vCPUs; never used to inject system calls.
    pub vcpus: Vec<ThreadId>,
    /// The origin of this VM, as an image of it describes it.
    pub meta: ImageMeta,
    /// When Firn began to manage it, in seconds since 1970.
    pub since: u64,
    /// The rate of the access scan in bytes of RAM per second, if there is one: then a dead
    /// supervisor may have left the RAM registered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub access_bits: Option<u64>,
    /// The file that names the applications that may make guest calls, if any may.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub calls: Option<PathBuf>,
    /// Its network cards whose frames pass through the supervisor.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cards: Vec<NetworkCard>,
    /// Its disks that the supervisor serves.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub served: Vec<ServedDisk>,
    /// Whether dirty pages are tracked between checkpoints: then, too, a dead supervisor has left
    /// the RAM registered.
    #[serde(default)]
    pub followed: bool,
}

/// The operation that runs on a VM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "phase", rename_all = "kebab-case")]
pub enum VmPhase {
    /// A hypervisor is being started, or examined for the first time.
    Starting {
        /// The monitor socket of the hypervisor that is being started. If it was started and not
        /// yet journaled, a successor finds it by this socket in its command line. `None` for a VM
        /// that ran before Firn attached to it.
        launching: Option<PathBuf>,
    },
    /// The guest runs, and no operation does.
    Running,
    /// A checkpoint or suspend is being written.
    Saving {
        /// The image file that it becomes.
        image: PathBuf,
        /// The file that had this name before, if there was one. If another file has the name now,
        /// it is the new image, and complete.
        replaces: Option<FileIdentity>,
        /// Firn has paused the guest, or is about to.
        paused_by_us: bool,
        /// A suspend: the VM is to end once the image is complete.
        then_stop: bool,
        /// The image is on its way to object storage; the file is removed when it is there.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        upload: Option<ImageUpload>,
        /// What is done to the VM's drives.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        drives: Vec<DriveSnapshot>,
    },
    /// Layers of the VM's disks are being merged.
    Merging {
        /// The guest is paused by Firn, or is about to be.
        paused_by_us: bool,
    },
    /// The guest runs, or is about to, and misses pages that the image holds.
    Restoring {
        /// The image that the pages come from.
        image: PathBuf,
        /// The numbers of that image, in case its name comes to mean another one.
        #[serde(flatten)]
        ids: ImageIds,
        /// The restore mode.
        mode: RestoreMode,
        /// The device state is in place and the guest may run. Before that there is nothing worth
        /// recovering.
        started: bool,
        /// The guest was paused when it was saved, and is to stay paused.
        #[serde(default)]
        must_stay_paused: bool,
        /// What happens to the VM when its memory can't be read.
        #[serde(default)]
        on_error: ReadFailurePolicy,
        /// When and how fast memory is filled in the background.
        #[serde(flatten)]
        fill: FillChoices,
        /// The guest waits for storage, and Firn has paused it by a command, or is about to.
        #[serde(default)]
        paused_by_us: bool,
    },
    /// The VM's epochs are sent to a backup. A pause within the hypervisor ends by itself,
    /// whichever process dies.
    Protecting {
        /// The hypervisor can't pause while it saves devices: a command has stopped the VM, or is
        /// about to, and another command has to start it.
        #[serde(default)]
        paused_by_us: bool,
    },
    /// A hypervisor waits for the VM of a primary, whose epochs the supervisor receives. They are
    /// in the supervisor's memory and are lost with it.
    Standby {
        /// A failover has put the VM's whole state in place: the VM runs, or is about to. It needs
        /// nothing of this supervisor any more.
        #[serde(default)]
        started: bool,
    },
    /// The hypervisor has ended.
    Ended {
        /// How it ended.
        exit: ProcessExit,
        /// When it ended, in seconds since 1970.
        at: u64,
    },
    /// Firn has detached from the VM, which continues to run.
    Detached,
}

/// The upload of an image that is being saved.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageUpload {
    /// The location of the object.
    pub location: String,
    /// The object is there, and so the file of the image is not needed any more.
    pub is_complete: bool,
}

/// Something that happened, with its time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JournalResult {
    /// When it happened, in seconds since 1970.
    pub at: u64,
    /// Whether it is what the user wanted.
    pub good: bool,
    /// A description.
    pub text: String,
    /// The failure that ended the VM, if a client may still request it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<Failure>,
}

/// The identity of a file, independent of its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileIdentity {
    /// The device that holds it.
    pub dev: u64,
    /// Its inode there.
    pub ino: u64,
}

impl FileIdentity {
    /// The identity of the file that has this name now; `None` if there is none.
    pub fn from_path(path: &Path) -> Option<Self> {
        let metadata = fs::metadata(path).ok()?;
        Some(Self { dev: metadata.dev(), ino: metadata.ino() })
    }
}

impl VmPhase {
    /// Whether a restore that can't continue leaves the VM to a successor, instead of ending it.
    pub fn leaves_vm_to_successor(&self) -> bool {
        matches!(self, Self::Restoring { on_error: ReadFailurePolicy::Stop, .. })
    }

    /// Whether the VM has not run yet, and its supervisor may not answer until it does.
    pub fn is_starting(&self) -> bool {
        matches!(
            self,
            Self::Starting { .. } | Self::Restoring { started: false, .. } | Self::Standby { .. }
        )
    }

    /// Whether there is nothing left to manage.
    pub fn is_over(&self) -> bool {
        matches!(self, Self::Ended { .. } | Self::Detached)
    }

    /// The phase as one word, as `firn ls` shows it.
    pub fn state_word(&self) -> &'static str {
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
    /// The journal of a VM that is about to start.
    pub fn new(name: VmName, launching: Option<PathBuf>) -> Self {
        let phase = VmPhase::Starting { launching };
        Self {
            version: VERSION,
            name,
            hypervisor_record: None,
            phase,
            last: None,
            recoveries: 0,
            overlays: Vec::new(),
            discard: false,
            copies: Vec::new(),
            shut: false,
            lease: None,
            filters: Vec::new(),
            mirrors: Vec::new(),
            protection_end: None,
            domain: None,
            family: None,
            frozen: false,
            hung: false,
            checkpoints: CheckpointTally::default(),
        }
    }

    /// Whether the image that is being saved has its final name already, and so is complete; or is in
    /// object storage.
    pub fn is_image_complete(&self) -> bool {
        match &self.phase {
            VmPhase::Saving { upload: Some(upload), .. } if upload.is_complete => true,
            VmPhase::Saving { image, replaces, .. } => {
                let now = FileIdentity::from_path(image);
                now.is_some() && now != *replaces
            }
            _ => false,
        }
    }

    /// Records that something succeeded.
    pub fn record_success(&mut self, text: impl Into<String>) {
        self.last = Some(JournalResult {
            at: unix_seconds(),
            good: true,
            text: text.into(),
            failure: None,
        });
    }

    /// Records that something failed.
    pub fn record_failure(&mut self, text: impl Into<String>) {
        self.last = Some(JournalResult {
            at: unix_seconds(),
            good: false,
            text: text.into(),
            failure: None,
        });
    }

    /// Records why Firn ended the VM.
    pub fn record_end_reason(&mut self, failure: Failure) {
        let text = format!("the restore failed: {failure}");
        self.last =
            Some(JournalResult { at: unix_seconds(), good: false, text, failure: Some(failure) });
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
        Self::parse_journal(path, &text).map(Some)
    }

    fn parse_journal(path: &Path, text: &[u8]) -> Result<Self, JournalError> {
        #[derive(Deserialize)]
        struct VersionedJournal {
            version: u32,
        }
        let malformed = |source| JournalError::Malformed { path: path.to_owned(), source };
        let VersionedJournal { version } = serde_json::from_slice(text).map_err(malformed)?;
        if version != VERSION {
            return Err(JournalError::Version { path: path.to_owned(), found: version });
        }
        serde_json::from_slice(text).map_err(malformed)
    }

    /// Replaces the journal at `path` by this one, atomically.
    pub fn write_file(&self, path: &Path) -> Result<(), JournalError> {
        let new = path.with_extension("json.new");
        let malformed = |source| JournalError::Malformed { path: path.to_owned(), source };
        let text = serde_json::to_vec_pretty(self).map_err(malformed)?;
        write_private(&new, &text)
            .and_then(|()| fs::rename(&new, path))
            .map_err(|source| JournalError::Io { path: path.to_owned(), source })
    }
}

/// Writes a file with mode 0600.
pub(crate) fn write_private(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut options = OpenOptions::new();
    let mut file = options.write(true).create(true).truncate(true).mode(0o600).open(path)?;
    file.write_all(bytes)
}

/// A journal and its file. Several threads may change it: when a change returns, it is in the file.
#[derive(Debug)]
pub struct JournalFile {
    path: PathBuf,
    journal: Mutex<Journal>,
}

impl JournalFile {
    /// Creates the file at `path` and writes the journal to it.
    pub fn create(path: PathBuf, journal: Journal) -> Result<Self, JournalError> {
        journal.write_file(&path)?;
        Ok(Self { path, journal: Mutex::new(journal) })
    }

    /// Changes the journal, unless the file can't be written.
    pub fn update(&self, change: impl FnOnce(&mut Journal)) -> Result<(), JournalError> {
        let mut journal = self.journal.lock().unwrap_or_else(PoisonError::into_inner);
        let mut changed = journal.clone();
        change(&mut changed);
        changed.write_file(&self.path)?;
        *journal = changed;
        Ok(())
    }

    /// Whether the image that is being saved has its final name already, and so is complete.
    pub fn is_image_complete(&self) -> bool {
        self.current_journal().is_image_complete()
    }

    /// A copy of the current journal.
    pub fn current_journal(&self) -> Journal {
        self.journal.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// The current time, in seconds since 1970.
pub fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn journal(phase: VmPhase) -> Journal {
        Journal { phase, ..Journal::new(VmName::new("web").unwrap(), None) }
    }

    #[test]
    fn a_stored_journal_is_loaded() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal.json");
        assert_eq!(Journal::load(&path).unwrap(), None);
        let phases = [
            VmPhase::Starting { launching: Some("/run/firn/web/qmp.sock".into()) },
            VmPhase::Saving {
                image: "/a".into(),
                replaces: Some(FileIdentity { dev: 1, ino: 2 }),
                paused_by_us: true,
                then_stop: false,
                upload: Some(ImageUpload {
                    location: "s3://vms/web.firn".into(),
                    is_complete: true,
                }),
                drives: vec![DriveSnapshot { chain: vec!["/c".into()], made: None }],
            },
            VmPhase::Restoring {
                image: "/a".into(),
                ids: ImageIds { identity: "1f".into(), key_id: Some("2e".into()) },
                mode: RestoreMode::Lazy,
                started: true,
                must_stay_paused: false,
                on_error: ReadFailurePolicy::Kill,
                fill: FillChoices::default(),
                paused_by_us: true,
            },
            VmPhase::Ended { exit: ProcessExit::Signal(9), at: 12 },
        ];
        for phase in phases {
            let written = journal(phase);
            written.write_file(&path).unwrap();
            assert_eq!(Journal::load(&path).unwrap(), Some(written));
        }
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "no file is left behind");
    }

    /// A journal of a version without the later fields.
    #[test]
    fn a_protection_without_a_recorded_pause_has_paused_no_vm() {
        let phase: VmPhase = serde_json::from_str(r#"{"phase":"protecting"}"#).unwrap();
        assert_eq!(phase, VmPhase::Protecting { paused_by_us: false });
    }

    /// A journal of a version without sealed images.
    #[test]
    fn a_restore_without_a_recorded_key_is_from_an_image_that_is_not_sealed() {
        let text =
            r#"{"phase":"restoring","image":"/a","identity":"1f","mode":"lazy","started":true}"#;
        let VmPhase::Restoring { ids, .. } = serde_json::from_str(text).unwrap() else {
            unreachable!("another phase")
        };
        assert_eq!(ids, ImageIds { identity: "1f".into(), key_id: None });
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
    fn only_ended_and_detached_vms_need_no_supervisor() {
        assert!(journal(VmPhase::Detached).phase.is_over());
        assert!(!journal(VmPhase::Running).phase.is_over());
    }
}
