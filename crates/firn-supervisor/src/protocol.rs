//! What a `firn` command and a supervisor say to each other: JSON, one message per line.
//!
//! ```text
//!   firn checkpoint                                       supervisor
//!        {"v":1,"request":"checkpoint","image":"/x/web.firn",...}  ->
//!        <-  {"v":1,"reply":"progress","stage":"saving","done":12582912,"total":1073741824}
//!        <-  {"v":1,"reply":"progress",...}
//!        <-  {"v":1,"reply":"done","facts":{...}}     or     {"v":1,"reply":"failed","kind":"busy","chain":[...]}
//! ```
//!
//! Every request is answered by any number of `progress` and then one `done` or `failed`. A line that is no request of
//! this version is answered by `failed`, and the connection stays usable. A connection may carry several requests, one
//! after another. Starting a supervisor speaks the same replies over a pipe, with a [`Plan`] in place of the request.

use std::collections::BTreeMap;
use std::io::{self, BufRead, Read, Write};
use std::path::{Path, PathBuf};

use firn_checkpoint::{Estimator, Strategy};
use firn_cluster::member::Membership;
use firn_cluster::switch::Mac;
use firn_cluster::{Epoch, Generation, RequestNumber};
use firn_epochs::endpoint::Endpoint;
use firn_image::Codec;
use firn_restore::{Mode, OnError};
use firn_types::BlockSize;
use firn_vmm::command_line::Overrides;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::failure::{Failure, FailureKind};

/// The version of the messages. It goes up when an old reader would misunderstand a new message.
pub const VERSION: u32 = 1;

/// The longest message, in bytes: a [`Plan`] holds a command line, at most 2 MiB in Linux, escaped.
pub const LINE_BYTES_MAX: usize = 16 << 20;

/// The longest request, in bytes. Requests hold little more than a path.
pub const REQUEST_BYTES_MAX: usize = 64 << 10;

/// What a command asks of a running supervisor.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Request {
    /// What is going on.
    Status,
    /// Save the VM; it goes on.
    Checkpoint(SaveRequest),
    /// Save the VM and end it.
    Suspend(SaveRequest),
    /// End the VM.
    Stop(StopRequest),
    /// The command line that starts the VM on the disks it has now; nothing if the VM is busy.
    CommandLine,
    /// Merge the layers of its disks that no image needs.
    MergeDisks,
    /// Merge all layers of its disks into the files that its command line names.
    CommitDisks,
    /// Let go of the VM; it goes on without Firn.
    Detach,
    /// Report progress until nothing is going on.
    Watch,
    /// Send the VM's epochs to a backup until it is released.
    Protect(ProtectRequest),
    /// Send no more.
    Release,
    /// Nobody else can run the VM: what is held leaves, as the lease lets it.
    GoOn,
    /// Run a standby's VM from its newest committed epoch.
    Failover(FailoverRequest),
    /// Of who makes the global checkpoints of a cluster, to a VM that belongs to it.
    Member(MemberRequest),
    /// As `Release`, of a whole cluster.
    ReleaseMember,
    /// The VM runs elsewhere: end it.
    Fence {
        /// Who says so.
        why: String,
    },
}

/// How to run a standby's VM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FailoverRequest {
    /// What it sends leaves only while the lease of this timeline is held.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lease: Option<u32>,
    /// From where it goes on, if it belongs to a cluster.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub member: Option<FailoverMember>,
    /// Also if its primary was stopped, or shut down: it was not lost.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub accept_stopped: bool,
}

/// What is asked of a member of a cluster.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "ask", rename_all = "kebab-case", deny_unknown_fields)]
pub enum MemberRequest {
    /// How its network card is: a [`MemberCard`].
    Card,
    /// It is a member from now on, in a timeline that begins.
    Join(Membership),
    /// Its mark, for a global checkpoint: an answer of `firn-cluster`, `cut`.
    Mark {
        /// The timeline.
        generation: Generation,
        /// The request.
        number: RequestNumber,
    },
    /// A global checkpoint that has it at this epoch is on record.
    Globally {
        /// The timeline.
        generation: Generation,
        /// The epoch.
        epoch: Epoch,
    },
    /// It is no member any more.
    Leave,
}

/// The network card of a VM that is or could be a member of a cluster.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemberCard {
    /// Its address.
    pub mac: Mac,
    /// What was let out has arrived.
    pub is_settled: bool,
}

/// From where a member of a cluster is to go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FailoverMember {
    /// Its epoch in the newest global checkpoint.
    pub epoch: Epoch,
    /// The timeline that begins.
    pub generation: Generation,
}

/// How to protect a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProtectRequest {
    /// Where the backup listens.
    pub to: Endpoint,
    /// Milliseconds from one cut to the next.
    pub interval_ms: u64,
    /// What was written in one epoch starts the next writable.
    pub predicts: bool,
    /// When the backup is lost, what was held leaves, and the VM goes on alone.
    #[serde(default)]
    pub alone: bool,
    /// What the VM sends leaves only while the lease of this timeline is held, until it is released.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lease: Option<u32>,
}

/// How to save.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SaveRequest {
    /// The file to write; absolute.
    pub image: PathBuf,
    /// What the user chose.
    #[serde(default)]
    pub choices: SaveChoices,
    /// Abort when the client goes away.
    #[serde(default)]
    pub cancel_with_client: bool,
}

/// What a user may choose about a save; `None` is the default.
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
    /// How memory is kept as it was at the cut while it is copied.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub strategy: Option<Strategy>,
    /// Of how many address spaces, those used last, what was written is copied first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first_spaces: Option<usize>,
    /// The image that the new one is to build on; absolute.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<PathBuf>,
    /// What becomes of its disks; by default clones are made where the file system has them, and else overlays for a VM that
    /// Firn started, and copies for another.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disks: Option<SaveDisks>,
    /// Where files for its disks are made, absolute; by default beside them, and copies beside the image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk_dir: Option<PathBuf>,
    /// How its working set is found.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub working_set: Option<Estimator>,
    /// Make an image that cannot be restored, and mark it so, instead of refusing.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub accept_unrestorable: bool,
    /// For tests: also copy RAM to this file while the guest stands still.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reference: Option<PathBuf>,
}

/// What a save does about the disks that the guest writes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SaveDisks {
    /// They are copied by jobs of the hypervisor; the VM keeps its files.
    Copy,
    /// Their files are cloned, which the file system must be able to do; the VM keeps its files.
    Clone,
    /// The VM writes to overlays on them from the cut on.
    Overlay,
    /// They are only named: a restore finds out whether they have changed.
    Reference,
}

/// What a restore does about the disks that an image has kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RestoreDisks {
    /// The VM writes to files of its own.
    #[default]
    Own,
    /// The VM writes to the image's: it can be restored once only.
    InPlace,
}

/// How to end a VM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StopRequest {
    /// Press the guest's power button and wait this long, in seconds, rather than pull the plug.
    #[serde(default)]
    pub powerdown_s: Option<u64>,
    /// End it even while a checkpoint is being written.
    #[serde(default)]
    pub force: bool,
    /// Remove what its drives were written to since the last checkpoint.
    #[serde(default)]
    pub discard: bool,
}

/// What a new supervisor is to look after.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "plan", rename_all = "kebab-case")]
pub enum Plan {
    /// Start a hypervisor.
    Run {
        /// The user's command line, program first.
        args: Vec<String>,
        /// Scan what the guest uses, at so many bytes of RAM a second.
        #[serde(default)]
        access_bits: Option<u64>,
        /// Answer calls of its applications: of those that this file names; absolute.
        #[serde(default)]
        calls: Option<PathBuf>,
        /// Note stores of its applications, by this plugin of QEMU; absolute.
        #[serde(default)]
        stores: Option<PathBuf>,
        /// Use disks whose files are old states of them.
        #[serde(default)]
        old_disk: bool,
    },
    /// Look after one that runs.
    Attach {
        /// Its process.
        pid: i32,
        /// Its monitor socket; absolute.
        qmp: PathBuf,
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
        /// How memory comes back.
        mode: Mode,
        /// What becomes of the VM where its memory can't be read.
        #[serde(default)]
        on_error: OnError,
        /// Go on where QEMU's version or a disk differs.
        force: bool,
        /// Count which prefetched pages the guest uses, at its expense.
        #[serde(default)]
        account_use: bool,
        /// What its drives are written to.
        #[serde(default)]
        disks: RestoreDisks,
        /// Where files for them are made, absolute; by default beside those of the image.
        #[serde(default)]
        disk_dir: Option<PathBuf>,
        /// Go by what earlier restores of the image had to ask for, and keep what this one does.
        learn: bool,
        /// Start the vCPUs of a VM that was paused when it was saved.
        #[serde(default)]
        run: bool,
        /// What is to be otherwise than the image says.
        #[serde(default)]
        overrides: Overrides,
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
    /// Receive a VM's epochs, and have a hypervisor ready for it.
    Standby {
        /// Where its primary connects to.
        listen: Endpoint,
        /// Network cards, by their ids, that have another uplink here.
        #[serde(default)]
        uplinks: BTreeMap<String, String>,
        /// Where the files of disks are here, by their ids; absolute.
        #[serde(default)]
        disks: BTreeMap<String, PathBuf>,
    },
}

impl Plan {
    /// At how many bytes a second RAM is to be scanned for what the guest uses, if it is.
    pub fn access_bits(&self) -> Option<u64> {
        match self {
            Self::Run { access_bits, .. }
            | Self::Attach { access_bits, .. }
            | Self::Restore { access_bits, .. } => *access_bits,
            Self::Standby { .. } => None,
        }
    }

    /// The file that names the applications that may call, if any may.
    pub fn calls(&self) -> Option<&Path> {
        match self {
            Self::Run { calls, .. } | Self::Restore { calls, .. } => calls.as_deref(),
            Self::Attach { .. } | Self::Standby { .. } => None,
        }
    }

    /// The plugin that notes stores, if one is to.
    pub fn stores(&self) -> Option<&Path> {
        match self {
            Self::Run { stores, .. } | Self::Restore { stores, .. } => stores.as_deref(),
            Self::Attach { .. } | Self::Standby { .. } => None,
        }
    }
}

/// What a supervisor answers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "reply", rename_all = "kebab-case")]
pub enum Reply {
    /// It is being done.
    Progress(Progress),
    /// It is done.
    Done {
        /// What there is to say about it.
        facts: serde_json::Value,
    },
    /// It is not done, and won't be.
    Failed(Failure),
}

/// How far something has come.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    /// What is being done, such as `saving`.
    pub stage: String,
    /// How much of it is done, in bytes of guest memory.
    pub done: u64,
    /// How much there is.
    pub total: u64,
    /// Of a restore: what can't be read or installed at present.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waiting: Option<Waiting>,
    /// Of a restore: what the guest had of it so far.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restore: Option<RestoreNow>,
}

impl Progress {
    /// Of something that is no restore.
    pub fn new(stage: &str, done: u64, total: u64) -> Self {
        Self { stage: stage.to_owned(), done, total, waiting: None, restore: None }
    }
}

/// Memory that can't be read or installed at present: Firn tries again until it succeeds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Waiting {
    /// Why, from what was tried down to the cause.
    pub error: String,
    /// The image that it comes from.
    pub path: PathBuf,
    /// When that began, in seconds since 1970.
    pub since: u64,
    /// The guest-physical address that the guest waits for, in hexadecimal; none if only the background fill waits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// Whether the guest waits.
    pub guest_waits: bool,
}

/// What a guest has had of its restore so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RestoreNow {
    /// Virtual CPUs.
    pub vcpus: u32,
    /// How long they waited for pages, all together, in microseconds.
    pub waited_us: u64,
    /// Page faults.
    pub faults: u64,
    /// Reads from storage that the guest waited for.
    pub demand_reads: u64,
    /// Pages that were there before it asked, but for those of the background fill.
    pub prefetched_pages: u64,
}

impl Reply {
    /// Whether no further reply to the same request follows.
    pub fn is_last(&self) -> bool {
        !matches!(self, Self::Progress(_))
    }
}

/// Why a line is no message.
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
struct Envelope<T> {
    v: u32,
    #[serde(flatten)]
    body: T,
}

/// The line for a message, with its newline.
pub fn encode<T: Serialize>(body: &T) -> Vec<u8> {
    // Messages are made of strings, numbers and JSON values: nothing in them can fail to serialize.
    let mut line = serde_json::to_vec(&Envelope { v: VERSION, body }).unwrap_or_default();
    line.push(b'\n');
    line
}

/// The message in a line.
pub fn decode<T: DeserializeOwned>(line: &[u8]) -> Result<T, MessageError> {
    #[derive(Deserialize)]
    struct Versioned {
        v: u32,
    }
    let Versioned { v } = serde_json::from_slice(line).map_err(MessageError::Malformed)?;
    if v != VERSION {
        return Err(MessageError::Version(v));
    }
    let Envelope { body, .. } = serde_json::from_slice(line).map_err(MessageError::Malformed)?;
    Ok(body)
}

/// Writes one message.
pub fn write<T: Serialize>(to: &mut impl Write, body: &T) -> io::Result<()> {
    to.write_all(&encode(body))?;
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
            .hint("the supervisor and the command may be of different versions of Firn")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use firn_cluster::Vm;
    use proptest::prelude::*;

    fn checkpoint() -> Request {
        Request::Checkpoint(SaveRequest {
            image: "/x/web.firn".into(),
            choices: SaveChoices { codec: Some(Codec::Lz4), ..SaveChoices::default() },
            cancel_with_client: false,
        })
    }

    #[test]
    fn requests_survive_the_wire() {
        let stop = Request::Stop(StopRequest { powerdown_s: Some(3), ..StopRequest::default() });
        let fence = Request::Fence { why: "it runs on b".to_owned() };
        let (cluster, own, generation, layout) = (1, Vm(0), Generation(2), 3);
        let members = vec![(own, Mac([2, 0, 0, 0, 0, 1]))];
        let join = MemberRequest::Join(Membership { cluster, own, members, generation, layout });
        let mark = MemberRequest::Mark { generation, number: RequestNumber::default() };
        let member = Some(FailoverMember { epoch: Epoch(7), generation });
        let run =
            Request::Failover(FailoverRequest { lease: Some(3), member, accept_stopped: false });
        let members = [join, mark, MemberRequest::Card].map(Request::Member);
        let others = [Request::Status, checkpoint(), stop, Request::Watch, fence, run];
        for request in others.into_iter().chain(members) {
            let line = encode(&request);
            assert_eq!(line.iter().filter(|&&byte| byte == b'\n').count(), 1);
            assert_eq!(decode::<Request>(&line).unwrap(), request);
        }
    }

    #[test]
    fn replies_survive_the_wire() {
        let progress = Progress::new("saving", 1, 2);
        let failed = Failure::new(FailureKind::Busy, "a\nb").hint("c");
        let done = Reply::Done { facts: serde_json::json!([1]) };
        for reply in [Reply::Progress(progress), done, Reply::Failed(failed)] {
            assert_eq!(decode::<Reply>(&encode(&reply)).unwrap(), reply);
        }
    }

    #[test]
    fn what_is_on_the_wire_is_what_the_documentation_shows() {
        let line = String::from_utf8(encode(&Request::Status)).unwrap();
        assert_eq!(line, "{\"v\":1,\"request\":\"status\"}\n");
        let line = String::from_utf8(encode(&Request::Failover(FailoverRequest::default())));
        assert_eq!(line.unwrap(), "{\"v\":1,\"request\":\"failover\"}\n");
    }

    #[test]
    fn another_version_is_told_apart_from_nonsense() {
        let line = br#"{"v":2,"request":"levitate"}"#;
        assert!(matches!(decode::<Request>(line), Err(MessageError::Version(2))));
        let line = br#"{"v":1,"request":"levitate"}"#;
        assert!(matches!(decode::<Request>(line), Err(MessageError::Malformed(_))));
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
            let _ = decode::<Request>(&line);
        }

        #[test]
        fn no_json_object_makes_decoding_panic(key in "[a-z]{1,9}", value in any::<i64>()) {
            let line = serde_json::json!({ "v": 1, "request": key, key.as_str(): value }).to_string();
            let _ = decode::<Request>(line.as_bytes());
        }
    }
}
