//! The control protocol between a `firn` command and a supervisor: JSON, one message per line.
//!
//! ```text
//!   firn checkpoint                                       supervisor
//!        {"v":1,"request":"checkpoint","image":"/x/web.firn",...}  ->
//!        <-  {"v":1,"reply":"progress","stage":"saving","done":12582912,"total":1073741824}
//!        <-  {"v":1,"reply":"progress",...}
//!        <-  {"v":1,"reply":"done","facts":{...}}     or     {"v":1,"reply":"failed","kind":"busy","chain":[...]}
//! ```
//!
//! A supervisor answers each request with any number of `progress` messages and then one `done` or
//! `failed`. It answers a line that is no request of this version with `failed`, and the connection
//! stays usable. A connection may carry several requests, one after another. A supervisor that
//! starts sends the same replies over a pipe, with a [`SupervisorPlan`] in place of the request.

use std::collections::BTreeMap;
use std::io::{self, BufRead, Read, Write};
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};

use firn_checkpoint::{SaveStrategy, WorkingSetEstimator};
use firn_cluster::member::ClusterMembership;
use firn_cluster::switch::MacAddress;
use firn_cluster::{Epoch, Generation, RequestNumber};
use firn_epochs::endpoint::BackupEndpoint;
use firn_image::{Codec, ImageKey, ImageSeal};
use firn_restore::{FillChoices, ReadFailurePolicy, RestoreMode};
use firn_types::BlockSize;
use firn_vmm::StorageCommand;
use firn_vmm::command_line::CommandOverrides;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::records::failure::{Failure, FailureKind};
use crate::records::family::FamilyRecord;
use crate::records::monitor_address::MonitorAddress;
use crate::records::restored_domain::LibvirtTarget;
use crate::records::store_target::StoreTarget;

/// The version of the messages. It goes up when an old reader would misunderstand a new message.
pub const VERSION: u32 = 1;

/// The longest message, in bytes: a [`SupervisorPlan`] holds a command line, at most 2 MiB in
/// Linux, escaped.
pub const LINE_BYTES_MAX: usize = 16 << 20;

/// The longest request, in bytes. Requests hold little more than a path.
pub const REQUEST_BYTES_MAX: usize = 64 << 10;

/// A request of a command to a running supervisor.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "kebab-case", deny_unknown_fields)]
pub enum SupervisorRequest {
    /// Report the VM's status.
    Status,
    /// Save the VM, which continues to run.
    Checkpoint(SaveRequest),
    /// Save the VM and end it.
    Suspend(SaveRequest),
    /// As `Checkpoint`, to a sealed image. It has a name of its own because a supervisor of a version
    /// without sealed images does not know the choice `seal`: it would ignore it, and write memory in
    /// clear. So it refuses the request, and nothing is written.
    SealedCheckpoint(SaveRequest),
    /// As `Suspend`, to a sealed image.
    SealedSuspend(SaveRequest),
    /// As `Checkpoint`, to object storage, sealed or not. A supervisor of a version that can't upload
    /// refuses it: it would leave the image in the file, and report success.
    StoredCheckpoint(SaveRequest),
    /// As `Suspend`, to object storage.
    StoredSuspend(SaveRequest),
    /// End the VM.
    Stop(StopRequest),
    /// Report the command line that starts the VM on its current disks; null if the VM is busy.
    CommandLine,
    /// Report which operations on the VM work, and why the others do not.
    CheckOperations,
    /// Merge the layers of the VM's disks that no image needs.
    MergeDisks,
    /// Merge all layers of the VM's disks into the files that its command line names.
    CommitDisks,
    /// Detach from the VM, which continues to run without Firn.
    Detach,
    /// Report progress until no operation runs.
    Watch,
    /// Send the VM's epochs to a backup until it is released.
    Protect(ProtectRequest),
    /// End the protection.
    Release,
    /// Release the buffered output, within the lease: no other host can run the VM.
    GoOn,
    /// Run a standby's VM from its newest committed epoch.
    Failover(FailoverRequest),
    /// A request of the coordinator of a cluster's global checkpoints, to a member VM.
    Member(MemberRequest),
    /// Like `Release`, as part of the release of a whole cluster.
    ReleaseMember,
    /// Make the final cut of a planned move: the VM stays paused until `ResumeAfterCut`.
    FinalCut {
        /// After this time it resumes by itself, in milliseconds.
        hold_ms: u64,
    },
    /// The move is called off: the VM resumes.
    ResumeAfterCut,
    /// Use these keys of sealed images: the supervisor waits for them to continue a restore.
    AddKeys {
        /// The keys.
        keys: Vec<ImageKey>,
    },
    /// End the VM, because it runs on another host.
    Fence {
        /// The reason.
        why: String,
    },
}

impl SupervisorRequest {
    /// The request for a checkpoint, sealed or not, to a file or to a store.
    pub fn for_checkpoint(save: SaveRequest) -> Self {
        match (&save.store, &save.choices.seal) {
            (Some(_), _) => Self::StoredCheckpoint(save),
            (None, Some(_)) => Self::SealedCheckpoint(save),
            (None, None) => Self::Checkpoint(save),
        }
    }

    /// The request for a suspend, sealed or not, to a file or to a store.
    pub fn for_suspend(save: SaveRequest) -> Self {
        match (&save.store, &save.choices.seal) {
            (Some(_), _) => Self::StoredSuspend(save),
            (None, Some(_)) => Self::SealedSuspend(save),
            (None, None) => Self::Suspend(save),
        }
    }
}

/// How to run a standby's VM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FailoverRequest {
    /// The VM's output leaves only while the lease of this generation is held.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lease: Option<u32>,
    /// The epoch to continue from, if the VM belongs to a cluster.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub member: Option<FailoverMember>,
    /// Run the VM even if its primary was stopped or shut down, and so was not lost.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub accept_stopped: bool,
}

/// A request to a member of a cluster.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "ask", rename_all = "kebab-case", deny_unknown_fields)]
pub enum MemberRequest {
    /// Report the state of the VM's network card: a [`MemberCard`].
    Card,
    /// Become a member, in a generation that begins.
    Join(ClusterMembership),
    /// Report the member's mark for a global checkpoint: an answer of `firn-cluster`, `cut`.
    Mark {
        /// The generation.
        generation: Generation,
        /// The number of the coordinator's request.
        number: RequestNumber,
    },
    /// A global checkpoint that includes this epoch of the member is on record.
    Globally {
        /// The generation.
        generation: Generation,
        /// The epoch.
        epoch: Epoch,
    },
    /// Cease to be a member.
    Leave,
}

/// The network card of a VM that is or could be a member of a cluster.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemberCard {
    /// Its MAC address.
    pub mac: MacAddress,
    /// All released output has arrived.
    pub is_settled: bool,
}

/// The point from which a member of a cluster is to continue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FailoverMember {
    /// Its epoch in the newest global checkpoint.
    pub epoch: Epoch,
    /// The generation that begins.
    pub generation: Generation,
}

/// How to protect a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProtectRequest {
    /// The address at which the backup listens.
    pub to: BackupEndpoint,
    /// Milliseconds from one cut to the next.
    pub interval_ms: u64,
    /// Pages written in one epoch are writable from the start of the next.
    pub predicts: bool,
    /// When the backup is lost, the buffered output is released, and the VM continues alone.
    #[serde(default)]
    pub alone: bool,
    /// The VM's output leaves only while the lease of this generation is held, until a release.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lease: Option<u32>,
}

/// How to save.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SaveRequest {
    /// The file to write; absolute.
    pub image: PathBuf,
    /// The user's choices.
    #[serde(default)]
    pub choices: SaveChoices,
    /// The keys of the images that the new one builds on, if they are sealed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub keys: Vec<ImageKey>,
    /// The object that the file becomes; then the file is removed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub store: Option<Box<StoreTarget>>,
    /// Abort when the client disconnects.
    #[serde(default)]
    pub cancel_with_client: bool,
}

/// A user's choices for a save; `None` is the default.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SaveChoices {
    /// How memory blocks are compressed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub codec: Option<Codec>,
    /// Pages in a memory block: 1, 2, 4, 8 or 16.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub block_size: Option<BlockSize>,
    /// Bytes in a locality block: a power of two from 16 KiB to 1 MiB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub locality_block_bytes: Option<u32>,
    /// Threads that compress.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compressors: Option<usize>,
    /// The background sweep yields to the guest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub throttle: Option<bool>,
    /// The maximum of bytes that background work writes in a second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bandwidth: Option<NonZeroU64>,
    /// The time in which memory is to be copied, in milliseconds: the sweep does not yield to the
    /// guest when it is behind.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub finish_within_ms: Option<u64>,
    /// How the state of memory at the cut is preserved while it is copied.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub strategy: Option<SaveStrategy>,
    /// The number of address spaces, most recently used first, whose written pages are copied
    /// first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first_spaces: Option<usize>,
    /// The image that the new one builds on; absolute.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<PathBuf>,
    /// How the disks are saved. By default the supervisor clones them where the file system can;
    /// otherwise it makes overlays for a VM that Firn started, and copies for another one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disks: Option<SaveDisks>,
    /// The directory for the files of the disks, absolute. By default they are made beside the
    /// disks, and copies beside the image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk_dir: Option<PathBuf>,
    /// The command by which the storage of the disks makes snapshots of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk_snapshot: Option<StorageCommand>,
    /// The key with which the image is sealed, and its wrapped forms.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seal: Option<ImageSeal>,
    /// Seal the image although snapshots of its disks are not encrypted.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub disks_in_clear: bool,
    /// How the working set is estimated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub working_set: Option<WorkingSetEstimator>,
    /// Make an image that cannot be restored, and mark it, instead of refusing.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub accept_unrestorable: bool,
    /// Freeze the guest's file systems for the cut, for at most this time, in milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub freeze_ms: Option<u64>,
    /// For tests: also copy RAM to this file during the pause.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reference: Option<PathBuf>,
}

/// How a save treats the disks that the guest writes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SaveDisks {
    /// Jobs of the hypervisor copy them; the VM keeps its files.
    Copy,
    /// Their files are cloned, which the file system must support; the VM keeps its files.
    Clone,
    /// From the cut on, the VM writes to overlays on them.
    Overlay,
    /// They are only named: a restore checks whether they have changed.
    Reference,
}

/// How a restore treats the disks that an image has saved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RestoreDisks {
    /// The VM writes to files of its own.
    #[default]
    Own,
    /// The VM writes to the image's files: the image can be restored only once.
    InPlace,
}

/// How to end a VM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StopRequest {
    /// Press the guest's power button and wait this long, in seconds, instead of ending QEMU at
    /// once.
    #[serde(default)]
    pub powerdown_s: Option<u64>,
    /// End the VM even while a checkpoint is being written.
    #[serde(default)]
    pub force: bool,
    /// Remove the files that its drives have written to since the last checkpoint.
    #[serde(default)]
    pub discard: bool,
}

/// The VM that a new supervisor is to manage.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "plan", rename_all = "kebab-case")]
#[expect(clippy::large_enum_variant, reason = "a process has one plan, for a moment")]
pub enum SupervisorPlan {
    /// Start a hypervisor.
    Run {
        /// The user's command line, program first.
        args: Vec<String>,
        /// Scan for pages that the guest uses, at this number of bytes of RAM per second.
        #[serde(default)]
        access_bits: Option<u64>,
        /// Answer calls of the applications that this file names; absolute.
        #[serde(default)]
        calls: Option<PathBuf>,
        /// Record stores of the guest's applications, with this QEMU plugin; absolute.
        #[serde(default)]
        stores: Option<PathBuf>,
        /// Use disks whose files hold old states of them.
        #[serde(default)]
        old_disk: bool,
        /// Add a generation ID where the machine supports one.
        #[serde(default)]
        generation_id: bool,
    },
    /// Manage a hypervisor that runs already.
    Attach {
        /// Its process.
        pid: i32,
        /// Its monitor; absolute.
        qmp: MonitorAddress,
        /// As with `Run`.
        #[serde(default)]
        access_bits: Option<u64>,
        /// As with `Run`.
        #[serde(default)]
        old_disk: bool,
    },
    /// Start a hypervisor and give it the state of an image.
    Restore {
        /// The image; absolute.
        image: PathBuf,
        /// Its keys, and those of the images that it builds on, if they are sealed.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        keys: Vec<ImageKey>,
        /// How memory is restored.
        mode: RestoreMode,
        /// What happens to the VM when its memory can't be read.
        #[serde(default)]
        on_error: ReadFailurePolicy,
        /// When and how fast memory is filled in the background.
        #[serde(flatten)]
        fill: FillChoices,
        /// Continue when QEMU's version or a disk differs.
        force: bool,
        /// The user trusts the image, whatever its origin is.
        #[serde(default)]
        trust: bool,
        /// Count which prefetched pages the guest uses, at a cost to the guest.
        #[serde(default)]
        account_use: bool,
        /// The files that its drives write to.
        #[serde(default)]
        disks: RestoreDisks,
        /// The directory for these files, absolute; by default that of the image's disk files.
        #[serde(default)]
        disk_dir: Option<PathBuf>,
        /// Use the blocks that earlier restores of the image had to read on demand, and record
        /// those of this one.
        learn: bool,
        /// Start the vCPUs of a VM that was paused when it was saved.
        #[serde(default)]
        run: bool,
        /// Changes to the command line that the image holds.
        #[serde(default)]
        overrides: CommandOverrides,
        /// The libvirt that starts the hypervisor, as a domain.
        #[serde(default)]
        libvirt: Option<LibvirtTarget>,
        /// The family of clones that the VM joins.
        #[serde(default)]
        family: Option<Box<FamilyRecord>>,
        /// As with `Run`.
        #[serde(default)]
        access_bits: Option<u64>,
        /// As with `Run`.
        #[serde(default)]
        calls: Option<PathBuf>,
        /// As with `Run`.
        #[serde(default)]
        stores: Option<PathBuf>,
    },
    /// Receive a VM's epochs, and keep a hypervisor ready for it.
    Standby {
        /// The address that the primary connects to.
        listen: BackupEndpoint,
        /// The network cards, by their ids, that have another uplink on this host.
        #[serde(default)]
        uplinks: BTreeMap<String, String>,
        /// The files of the disks on this host, by the disks' ids; absolute.
        #[serde(default)]
        disks: BTreeMap<String, PathBuf>,
    },
}

impl SupervisorPlan {
    /// The rate of the access scan, in bytes of RAM per second, if there is to be one.
    pub fn access_bits(&self) -> Option<u64> {
        match self {
            Self::Run { access_bits, .. }
            | Self::Attach { access_bits, .. }
            | Self::Restore { access_bits, .. } => *access_bits,
            Self::Standby { .. } => None,
        }
    }

    /// The file that names the applications that may make guest calls, if any may.
    pub fn calls_file(&self) -> Option<&Path> {
        match self {
            Self::Run { calls, .. } | Self::Restore { calls, .. } => calls.as_deref(),
            Self::Attach { .. } | Self::Standby { .. } => None,
        }
    }

    /// The plugin that records stores, if one is to.
    pub fn stores_plugin(&self) -> Option<&Path> {
        match self {
            Self::Run { stores, .. } | Self::Restore { stores, .. } => stores.as_deref(),
            Self::Attach { .. } | Self::Standby { .. } => None,
        }
    }
}

/// A supervisor's reply to a request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "reply", rename_all = "kebab-case")]
pub enum SupervisorReply {
    /// The request is in progress.
    Progress(OperationProgress),
    /// The request has succeeded.
    Done {
        /// Facts about the result.
        facts: serde_json::Value,
    },
    /// The request has failed.
    Failed(Failure),
}

/// The progress of an operation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OperationProgress {
    /// The operation, such as `saving`.
    pub stage: String,
    /// The bytes of guest memory that are done.
    pub done: u64,
    /// The bytes in all.
    pub total: u64,
    /// Of a restore: memory that can't be read or installed at present.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waiting: Option<RestoreOutage>,
    /// Of a restore: its cost to the guest so far.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restore: Option<RestoreProgress>,
}

impl OperationProgress {
    /// Progress of an operation other than a restore.
    pub fn new(stage: &str, done: u64, total: u64) -> Self {
        Self { stage: stage.to_owned(), done, total, waiting: None, restore: None }
    }
}

/// Memory that can't be read or installed at present: Firn retries until it succeeds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RestoreOutage {
    /// The error, from the attempted operation down to the cause.
    pub error: String,
    /// The image that the memory comes from.
    pub path: PathBuf,
    /// When the outage began, in seconds since 1970.
    pub since: u64,
    /// The guest-physical address of the page fault, in hexadecimal; none if only the background
    /// fill is blocked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// Whether a vCPU is blocked.
    pub guest_waits: bool,
}

/// The cost of a restore to its guest so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RestoreProgress {
    /// Virtual CPUs.
    pub vcpus: u32,
    /// The time that vCPUs were blocked on pages, summed over all of them, in microseconds.
    pub waited_us: u64,
    /// Page faults.
    pub faults: u64,
    /// Reads from storage for requested pages.
    pub demand_reads: u64,
    /// Pages that were installed before the guest touched them, except those of the background
    /// fill.
    pub prefetched_pages: u64,
}

impl SupervisorReply {
    /// Whether no further reply to the same request follows.
    pub fn is_last(&self) -> bool {
        !matches!(self, Self::Progress(_))
    }
}

/// Why a line is not a message.
#[derive(Debug, Error)]
pub enum MessageError {
    /// The connection failed or ended in the middle of a line.
    #[error("the connection failed")]
    Io(#[from] io::Error),
    /// The line does not end within the limit.
    #[error("a message has at most {0} bytes")]
    TooLong(usize),
    /// It is not JSON, or not a message.
    #[error("not a message")]
    Malformed(#[source] serde_json::Error),
    /// It is a message of another version.
    #[error("message of version {0}; this Firn speaks version {VERSION}")]
    Version(u32),
}

#[derive(Serialize, Deserialize)]
struct MessageEnvelope<T> {
    v: u32,
    #[serde(flatten)]
    body: T,
}

/// Encodes a message as a line, with its newline.
pub fn encode_message<T: Serialize>(body: &T) -> Vec<u8> {
    // Messages are made of strings, numbers and JSON values: nothing in them can fail to serialize.
    let mut line = serde_json::to_vec(&MessageEnvelope { v: VERSION, body }).unwrap_or_default();
    line.push(b'\n');
    line
}

/// Decodes the message in a line.
pub fn decode_message<T: DeserializeOwned>(line: &[u8]) -> Result<T, MessageError> {
    #[derive(Deserialize)]
    struct VersionedMessage {
        v: u32,
    }
    let VersionedMessage { v } = serde_json::from_slice(line).map_err(MessageError::Malformed)?;
    if v != VERSION {
        return Err(MessageError::Version(v));
    }
    let MessageEnvelope { body, .. } =
        serde_json::from_slice(line).map_err(MessageError::Malformed)?;
    Ok(body)
}

/// Writes one message.
pub fn write_message<T: Serialize>(to: &mut impl Write, body: &T) -> io::Result<()> {
    to.write_all(&encode_message(body))?;
    to.flush()
}

/// Reads one line of at most `bytes_max` bytes; `None` at the end of the connection.
pub fn read_line(
    from: &mut impl BufRead,
    bytes_max: usize,
) -> Result<Option<Vec<u8>>, MessageError> {
    let mut line = Vec::new();
    from.take(bytes_max as u64 + 1).read_until(b'\n', &mut line)?;
    match line.last() {
        None => Ok(None),
        Some(b'\n') => Ok(Some(line)),
        Some(_) if line.len() > bytes_max => Err(MessageError::TooLong(bytes_max)),
        Some(_) => Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
    }
}

impl From<MessageError> for Failure {
    fn from(error: MessageError) -> Self {
        Failure::from_error(FailureKind::Other, &error)
            .with_hint("the supervisor and the command may be of different versions of Firn")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::records::store_target::StoreCredentials;
    use firn_cluster::VmId;
    use proptest::prelude::*;

    fn checkpoint() -> SupervisorRequest {
        SupervisorRequest::Checkpoint(SaveRequest {
            image: "/x/web.firn".into(),
            choices: SaveChoices { codec: Some(Codec::Lz4), ..SaveChoices::default() },
            keys: vec![ImageKey::from_bytes([7; 32])],
            store: None,
            cancel_with_client: false,
        })
    }

    #[test]
    fn requests_survive_the_wire() {
        let stop =
            SupervisorRequest::Stop(StopRequest { powerdown_s: Some(3), ..StopRequest::default() });
        let fence = SupervisorRequest::Fence { why: "it runs on b".to_owned() };
        let (cluster, own, generation, layout) = (1, VmId(0), Generation(2), 3);
        let members = vec![(own, MacAddress([2, 0, 0, 0, 0, 1]))];
        let join =
            MemberRequest::Join(ClusterMembership { cluster, own, members, generation, layout });
        let mark = MemberRequest::Mark { generation, number: RequestNumber::default() };
        let member = Some(FailoverMember { epoch: Epoch(7), generation });
        let run = SupervisorRequest::Failover(FailoverRequest {
            lease: Some(3),
            member,
            accept_stopped: false,
        });
        let members = [join, mark, MemberRequest::Card].map(SupervisorRequest::Member);
        let moves =
            [SupervisorRequest::FinalCut { hold_ms: 3000 }, SupervisorRequest::ResumeAfterCut];
        let others =
            [SupervisorRequest::Status, checkpoint(), stop, SupervisorRequest::Watch, fence, run];
        for request in others.into_iter().chain(members).chain(moves) {
            let line = encode_message(&request);
            assert_eq!(line.iter().filter(|&&byte| byte == b'\n').count(), 1);
            assert_eq!(decode_message::<SupervisorRequest>(&line).unwrap(), request);
        }
    }

    /// A supervisor without sealed images or uploads ignores an unknown choice, and refuses an unknown
    /// request.
    #[test]
    fn a_supervisor_of_before_refuses_to_save_a_sealed_or_stored_image() {
        #[derive(Debug, Deserialize)]
        #[serde(tag = "request", rename_all = "kebab-case", deny_unknown_fields)]
        #[expect(dead_code, reason = "it is decoded only")]
        enum OldRequest {
            Checkpoint(OldSave),
            Suspend(OldSave),
        }
        #[derive(Debug, Deserialize)]
        #[expect(dead_code, reason = "it is decoded only")]
        struct OldSave {
            image: PathBuf,
        }
        let SupervisorRequest::Checkpoint(save) = checkpoint() else { unreachable!() };
        let seal = ImageSeal { key: ImageKey::from_bytes([8; 32]), wraps: Vec::new() };
        let mut sealed = save.clone();
        sealed.choices.seal = Some(seal);
        let location = "s3://vms/web.firn".to_owned();
        let target = StoreTarget { location, credentials: StoreCredentials::from_env() };
        let stored = SaveRequest { store: Some(Box::new(target)), ..save.clone() };
        let both = SaveRequest { choices: sealed.choices.clone(), ..stored.clone() };
        for make in [SupervisorRequest::for_checkpoint, SupervisorRequest::for_suspend] {
            let clear = encode_message(&make(save.clone()));
            assert!(decode_message::<OldRequest>(&clear).is_ok());
            for save in [&sealed, &stored, &both] {
                let request = make(save.clone());
                let line = encode_message(&request);
                let error = decode_message::<OldRequest>(&line).unwrap_err();
                assert!(matches!(error, MessageError::Malformed(_)), "{error:?}");
                assert_eq!(decode_message::<SupervisorRequest>(&line).unwrap(), request);
            }
        }
    }

    #[test]
    fn replies_survive_the_wire() {
        let progress = OperationProgress::new("saving", 1, 2);
        let failed = Failure::new(FailureKind::Busy, "a\nb").with_hint("c");
        let done = SupervisorReply::Done { facts: serde_json::json!([1]) };
        for reply in [SupervisorReply::Progress(progress), done, SupervisorReply::Failed(failed)] {
            assert_eq!(decode_message::<SupervisorReply>(&encode_message(&reply)).unwrap(), reply);
        }
    }

    #[test]
    fn the_protocol_is_as_documented() {
        let line = String::from_utf8(encode_message(&SupervisorRequest::Status)).unwrap();
        assert_eq!(line, "{\"v\":1,\"request\":\"status\"}\n");
        let line = String::from_utf8(encode_message(&SupervisorRequest::Failover(
            FailoverRequest::default(),
        )));
        assert_eq!(line.unwrap(), "{\"v\":1,\"request\":\"failover\"}\n");
    }

    #[test]
    fn another_version_is_distinguished_from_garbage() {
        let line = br#"{"v":2,"request":"levitate"}"#;
        assert!(matches!(decode_message::<SupervisorRequest>(line), Err(MessageError::Version(2))));
        let line = br#"{"v":1,"request":"levitate"}"#;
        assert!(matches!(
            decode_message::<SupervisorRequest>(line),
            Err(MessageError::Malformed(_))
        ));
    }

    #[test]
    fn lines_end_where_they_should() {
        let mut from = io::Cursor::new(b"ab\ncd".to_vec());
        assert_eq!(read_line(&mut from, 10).unwrap().unwrap(), b"ab\n");
        assert!(matches!(read_line(&mut from, 10), Err(MessageError::Io(_))));
        assert!(read_line(&mut from, 10).unwrap().is_none());
        let mut endless = io::repeat(b'x');
        let mut endless = io::BufReader::new(&mut endless);
        assert!(matches!(read_line(&mut endless, 100), Err(MessageError::TooLong(100))));
    }

    proptest! {
        #[test]
        fn no_line_makes_decoding_panic(line in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = decode_message::<SupervisorRequest>(&line);
        }

        #[test]
        fn no_json_object_makes_decoding_panic(key in "[a-z]{1,9}", value in any::<i64>()) {
            let line = serde_json::json!({ "v": 1, "request": key, key.as_str(): value }).to_string();
            let _ = decode_message::<SupervisorRequest>(line.as_bytes());
        }
    }
}
