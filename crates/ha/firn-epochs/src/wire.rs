//! Replication stream: the messages from a primary to its backup, and the replies.
//!
//! Messages in both directions, all numbers little-endian:
//!
//! ```text
//!     0        4        8                 16                24
//!   +--------+--------+-----------------+-----------------+----------------+
//!   | kind   | length | epoch           | check           | body: length   |
//!   +--------+--------+-----------------+-----------------+----------------+
//!                                         XXH3-64 of bytes 0 to 15
//!
//!   kind  epoch       body
//!   1     0           XXH3-64 of the rest (8 bytes), hello as JSON                  once, first
//!   2     of these    per page: its number (4 bytes); then per page: 4096 bytes     repeated
//!   3     of this     device state
//!   4     of these    length of the name (2 bytes), name, bytes of an aux. block    repeated
//!   5     that ends   last (1: no epoch follows, else 0; 8 bytes), XXH3-64 (8 bytes)
//!   6     complete    committed (8 bytes)                                           backup's
//!   7     0           why the backup refuses further epochs, UTF-8                  backup's
//!   8     0           empty: the primary continues alone                            last
//!   8     0           empty: the backup confirms, and never runs the VM             backup's, last
//!   9     of these    changes of a disk (`firn_disks::wire`)                        repeated
//!   10    of this     the card of a member of a cluster, `NicEpoch` by postcard     member's
//!   11    in it       empty: a global checkpoint includes this epoch                member's (*)
//!   12    a frame     empty: frames to the outside were sent, up to this one        member's (*)
//!   13    of these    per run of bytes: page (4 bytes), offset (2), length (2),     repeated
//!                     bytes; the rest of the page is as in the epoch before
//!   14    0           how the protection ended: `ProtectionEnd` as JSON                last
//!   15    0           empty: the backup has recorded that end                       backup's, last
//!   16    0           why the backup never runs the VM, UTF-8                       backup's, last
//!
//!   (*) between epochs
//! ```
//!
//! The checksum of kind 5 is over the headers and bodies of all messages of kinds 2 to 4, 9, 10 and
//! 13 since the last one of kind 5. So each epoch has one. Until it has been compared, no part of
//! the epoch may be applied: [`EpochReader::read_message`] returns the end of an epoch only if the
//! checksum is right. Epoch 0 is the seed. Kind 12 has the sequence number of a frame instead of an
//! epoch.
//!
//! The check of a header protects the receiver from a damaged length. Lengths have bounds, and
//! memory for a body is allocated as its bytes arrive, so that no peer can cause an allocation by a
//! number alone.

use std::hash::Hasher as _;
use std::io::{self, Read, Write};

use firn_cluster::epoch::EpochProgress;
use firn_cluster::member::{ClusterMembership, NicEpoch};
use firn_cluster::{Epoch, FrameNumber};
use firn_disks::DiskChange;
use firn_image::AuxBlock;
use firn_types::{PAGE_SIZE, Page, RegionMap};
use serde::{Deserialize, Serialize};
use thiserror::Error;
use twox_hash::XxHash3_64;

use crate::delta::PagePatches;
use crate::protection_end::ProtectionEnd;

/// The version of the protocol, on which both sides must agree.
pub const VERSION: u32 = 6;
/// The maximum number of pages in one message.
pub const PAGES_MAX: usize = 256;

const HEADER_BYTES: usize = 24;
/// The bytes of a page with its number.
const NUMBERED_BYTES: usize = 4 + PAGE_SIZE;
/// The bytes of patches after which the next ones go into another message.
pub const PATCHES_BYTES: usize = 1 << 19;
/// The maximum length of the JSON: it contains a command line of up to 2 MiB, escaped.
const HELLO_BYTES_MAX: usize = 16 << 20;
/// The maximum size of the device state and of an auxiliary block.
const STATE_BYTES_MAX: usize = 256 << 20;
const REFUSAL_BYTES_MAX: usize = 64 << 10;
/// The maximum size of a card's state in an epoch: what its outbox holds, and the overhead of its
/// encoding.
const CARD_BYTES_MAX: usize = 64 << 20;

const HELLO: u32 = 1;
const PAGES: u32 = 2;
const DEVICES: u32 = 3;
const AUX: u32 = 4;
const END: u32 = 5;
const PROGRESS: u32 = 6;
const REFUSAL: u32 = 7;
const RELEASE: u32 = 8;
const DISK: u32 = 9;
const CARD: u32 = 10;
const GLOBAL: u32 = 11;
const GONE: u32 = 12;
const PATCHES: u32 = 13;
const PROTECTION_END: u32 = 14;
const END_RECORDED: u32 = 15;
const DECLINE: u32 = 16;

/// Why a stream can't continue.
#[derive(Debug, Error)]
pub enum EpochStreamError {
    /// The connection failed, or ended in the middle of a message.
    #[error("the connection failed")]
    Io(#[from] io::Error),
    /// The header of a message is damaged.
    #[error(
        "the header of a message is damaged: its checksum is {found:#018x}, not {expected:#018x}"
    )]
    Head {
        /// The checksum in the header.
        expected: u64,
        /// The checksum of its bytes.
        found: u64,
    },
    /// A body does not match its header.
    #[error("a message of kind {kind} with {bytes} bytes is invalid")]
    Body {
        /// The kind.
        kind: u32,
        /// The length of the body in bytes.
        bytes: usize,
    },
    /// The received bytes of an epoch differ from the sent ones.
    #[error("{epoch} is damaged: its checksum is {found:#018x}, not {expected:#018x}")]
    Checksum {
        /// The epoch.
        epoch: Epoch,
        /// The sender's checksum.
        expected: u64,
        /// The checksum of the received bytes.
        found: u64,
    },
    /// The hello is damaged, or of another version.
    #[error("the peer's hello is damaged, or not of protocol version {VERSION}")]
    Hello(#[source] Option<serde_json::Error>),
    /// The changes of a disk are damaged.
    #[error(transparent)]
    Changes(#[from] firn_disks::wire::DiskWireError),
    /// An item is too large to be sent.
    #[error("{bytes} bytes of {what} are more than can be sent")]
    TooLarge {
        /// What is too large.
        what: &'static str,
        /// Its size in bytes.
        bytes: usize,
    },
}

/// The first message of a primary.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PrimaryHello {
    /// The protocol version, [`VERSION`].
    pub version: u32,
    /// The VM's RAM regions.
    pub regions: RegionMap,
    /// The disks that are replicated with its epochs.
    pub disks: Vec<DiskHello>,
    /// Whether hosts decide by consensus where the VM runs, so that a failover follows their
    /// record.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub leased: bool,
    /// The cluster of the VM. The backup stores its epochs until a global checkpoint includes them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub member: Option<ClusterMembership>,
    /// Further data that the backup needs to start the VM.
    pub meta: serde_json::Value,
}

/// A disk that is replicated with a VM's epochs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskHello {
    /// Its id on the VM's command line.
    pub id: String,
    /// Its size in bytes, including the space into which its file may still grow.
    pub size: u64,
    /// The first bytes of its file. A hypervisor that is started before the rest has arrived reads
    /// them.
    pub head: Vec<u8>,
}

/// Pages and their contents.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PageBatch {
    /// The page numbers.
    pub numbers: Vec<Page>,
    /// The contents, one page after another.
    pub bytes: Vec<u8>,
}

impl PageBatch {
    /// Each page with its contents.
    pub fn iter(&self) -> impl Iterator<Item = (Page, &[u8])> {
        self.numbers.iter().copied().zip(self.bytes.chunks_exact(PAGE_SIZE))
    }
}

/// A received message.
#[derive(Clone, Debug, PartialEq)]
pub enum EpochMessage {
    /// The hello of a primary.
    Hello(Box<PrimaryHello>),
    /// Pages of an epoch.
    Pages(Epoch, PageBatch),
    /// Parts of pages of an epoch; the rest of these pages is as in the epoch before.
    Patches(Epoch, PagePatches),
    /// The device state at the end of an epoch.
    Devices(Epoch, Vec<u8>),
    /// An auxiliary block at the end of an epoch.
    Aux(Epoch, AuxBlock),
    /// Changes of the disk of this number, in order.
    Changes(Epoch, u32, Vec<DiskChange>),
    /// The state of the card of a member of a cluster that belongs to an epoch.
    Card(Epoch, NicEpoch),
    /// A global checkpoint includes this epoch: no failover goes back behind it.
    Globally(Epoch),
    /// A member's frames to the outside were sent, up to this one.
    Gone(FrameNumber),
    /// The end of an epoch, which has been received completely and verified.
    End {
        /// The epoch.
        epoch: Epoch,
        /// No epoch follows.
        last: bool,
    },
    /// The progress of the backup.
    Progress(EpochProgress),
    /// The backup refuses further epochs.
    Refusal(String),
    /// The primary continues alone; or the backup confirms that, and never runs the VM.
    Release,
    /// How the protection ended at the primary.
    ProtectionEnd(ProtectionEnd),
    /// The backup has recorded how it ended.
    EndRecorded,
    /// Why the backup never runs the VM.
    Decline(String),
}

/// The sending end of a stream.
pub struct EpochWriter<W> {
    to: W,
    sum: XxHash3_64,
    sent: u64,
}

impl<W: Write> EpochWriter<W> {
    /// Writes to a stream on which nothing was sent yet.
    pub fn new(to: W) -> Self {
        Self { to, sum: XxHash3_64::new(), sent: 0 }
    }

    /// The number of bytes sent so far.
    pub fn sent_bytes(&self) -> u64 {
        self.sent
    }

    /// Sends the hello.
    pub fn write_hello(&mut self, hello: &PrimaryHello) -> Result<(), EpochStreamError> {
        let json =
            serde_json::to_vec(hello).map_err(|error| EpochStreamError::Hello(Some(error)))?;
        let check = XxHash3_64::oneshot(&json).to_le_bytes();
        self.write_message(HELLO, Epoch(0), &[&check, &json])
    }

    /// Sends pages of an epoch, in as many messages as necessary.
    pub fn write_pages<'a>(
        &mut self,
        epoch: Epoch,
        pages: impl Iterator<Item = (Page, &'a [u8])>,
    ) -> Result<(), EpochStreamError> {
        let mut pages = pages.peekable();
        while pages.peek().is_some() {
            let some: Vec<_> = pages.by_ref().take(PAGES_MAX).collect();
            let numbers: Vec<u8> = some.iter().flat_map(|(page, _)| page.0.to_le_bytes()).collect();
            let contents = some.iter().map(|&(_, bytes)| bytes);
            let parts: Vec<&[u8]> = std::iter::once(&numbers[..]).chain(contents).collect();
            self.write_message(PAGES, epoch, &parts)?;
        }
        Ok(())
    }

    /// Sends parts of pages of an epoch, about [`PATCHES_BYTES`] at most.
    pub fn write_patches(
        &mut self,
        epoch: Epoch,
        patches: &PagePatches,
    ) -> Result<(), EpochStreamError> {
        self.write_message(PATCHES, epoch, &[patches.bytes()])
    }

    /// Sends changes of a disk, in as many messages as necessary.
    pub fn write_changes(
        &mut self,
        epoch: Epoch,
        disk: u32,
        changes: &[DiskChange],
    ) -> Result<(), EpochStreamError> {
        firn_disks::wire::encode_changes(disk, changes)
            .try_for_each(|body| self.write_message(DISK, epoch, &[&body]))
    }

    /// Sends the state of a member's card that belongs to an epoch.
    pub fn write_card(&mut self, epoch: Epoch, of: &NicEpoch) -> Result<(), EpochStreamError> {
        let body = postcard::to_stdvec(of).map_err(io::Error::other)?;
        self.write_message(CARD, epoch, &[&body])
    }

    /// Reports that a global checkpoint includes an epoch.
    pub fn write_global_epoch(&mut self, epoch: Epoch) -> Result<(), EpochStreamError> {
        self.write_message(GLOBAL, epoch, &[])?;
        Ok(self.to.flush()?)
    }

    /// Reports that frames to the outside were sent, up to this one.
    pub fn write_released(&mut self, seq: FrameNumber) -> Result<(), EpochStreamError> {
        self.write_message(GONE, Epoch(seq.0), &[])?;
        Ok(self.to.flush()?)
    }

    /// Sends device state and auxiliary blocks, and ends an epoch.
    pub fn write_end(
        &mut self,
        epoch: Epoch,
        devices: &[u8],
        aux: &[AuxBlock],
        last: bool,
    ) -> Result<(), EpochStreamError> {
        self.write_message(DEVICES, epoch, &[devices])?;
        for block in aux {
            let bytes = block.id.len();
            let id = u16::try_from(bytes)
                .map_err(|_| EpochStreamError::TooLarge { what: "a name", bytes })?;
            self.write_message(
                AUX,
                epoch,
                &[&id.to_le_bytes(), block.id.as_bytes(), &block.bytes],
            )?;
        }
        let last = u64::from(last).to_le_bytes();
        self.sum.write(&last);
        let sum = std::mem::take(&mut self.sum).finish().to_le_bytes();
        self.write_message(END, epoch, &[&last, &sum])?;
        Ok(self.to.flush()?)
    }

    /// Reports the progress of the backup.
    pub fn write_progress(&mut self, progress: EpochProgress) -> Result<(), EpochStreamError> {
        self.write_message(PROGRESS, progress.complete, &[&progress.committed.0.to_le_bytes()])?;
        Ok(self.to.flush()?)
    }

    /// Reports why the backup refuses further epochs.
    pub fn write_refusal(&mut self, why: &str) -> Result<(), EpochStreamError> {
        self.write_message(REFUSAL, Epoch(0), &[why.as_bytes()])?;
        Ok(self.to.flush()?)
    }

    /// Reports that the primary continues alone, or that the backup confirms it.
    pub fn write_release(&mut self) -> Result<(), EpochStreamError> {
        self.write_message(RELEASE, Epoch(0), &[])?;
        Ok(self.to.flush()?)
    }

    /// Reports how the protection ended at the primary.
    pub fn write_protection_end(&mut self, end: &ProtectionEnd) -> Result<(), EpochStreamError> {
        let json = serde_json::to_vec(end).map_err(io::Error::other)?;
        self.write_message(PROTECTION_END, Epoch(0), &[&json])?;
        Ok(self.to.flush()?)
    }

    /// Reports that the backup has recorded how it ended.
    pub fn write_end_recorded(&mut self) -> Result<(), EpochStreamError> {
        self.write_message(END_RECORDED, Epoch(0), &[])?;
        Ok(self.to.flush()?)
    }

    /// Reports why the backup never runs the VM.
    pub fn write_decline(&mut self, why: &str) -> Result<(), EpochStreamError> {
        self.write_message(DECLINE, Epoch(0), &[why.as_bytes()])?;
        Ok(self.to.flush()?)
    }

    fn write_message(
        &mut self,
        kind: u32,
        epoch: Epoch,
        parts: &[&[u8]],
    ) -> Result<(), EpochStreamError> {
        let bytes = parts.iter().map(|part| part.len()).sum();
        let length = u32::try_from(bytes).ok().filter(|_| bytes <= body_bytes_max(kind));
        let length = length.ok_or(EpochStreamError::TooLarge { what: "one message", bytes })?;
        let head = encode_header(kind, length, epoch);
        let is_summed = is_checksummed(kind);
        for part in std::iter::once(&head[..]).chain(parts.iter().copied()) {
            if is_summed {
                self.sum.write(part);
            }
            self.to.write_all(part)?;
            self.sent += part.len() as u64;
        }
        Ok(())
    }
}

/// The receiving end of a stream.
pub struct EpochReader<R> {
    from: R,
    sum: XxHash3_64,
}

impl<R: Read> EpochReader<R> {
    /// Reads from a stream of which nothing was read yet.
    pub fn new(from: R) -> Self {
        Self { from, sum: XxHash3_64::new() }
    }

    /// Reads the next message. After an error the stream can't be decoded any further.
    pub fn read_message(&mut self) -> Result<EpochMessage, EpochStreamError> {
        let mut head = [0; HEADER_BYTES];
        self.from.read_exact(&mut head)?;
        let (kind, length, epoch) = decode_header(&head)?;
        if length > body_bytes_max(kind) {
            return Err(EpochStreamError::Body { kind, bytes: length });
        }
        let mut body = Vec::new();
        self.from.by_ref().take(length as u64).read_to_end(&mut body)?;
        if body.len() < length {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
        }
        if is_checksummed(kind) {
            self.sum.write(&head);
            self.sum.write(&body);
        }
        self.decode_message(kind, epoch, body)
    }

    fn decode_message(
        &mut self,
        kind: u32,
        epoch: Epoch,
        body: Vec<u8>,
    ) -> Result<EpochMessage, EpochStreamError> {
        let bytes = body.len();
        let message = match kind {
            HELLO => return decode_hello(&body).map(EpochMessage::Hello),
            PAGES => decode_pages(body).map(|pages| EpochMessage::Pages(epoch, pages)),
            PATCHES => {
                PagePatches::parse(body).map(|patches| EpochMessage::Patches(epoch, patches))
            }
            DEVICES => Some(EpochMessage::Devices(epoch, body)),
            AUX => decode_aux(&body).map(|block| EpochMessage::Aux(epoch, block)),
            END => return self.decode_end(epoch, &body),
            DISK => {
                let (disk, changes) = firn_disks::wire::decode_changes(&body)?;
                return Ok(EpochMessage::Changes(epoch, disk, changes));
            }
            CARD => postcard::from_bytes(&body).ok().map(|of| EpochMessage::Card(epoch, of)),
            GLOBAL => Some(EpochMessage::Globally(epoch)),
            GONE => Some(EpochMessage::Gone(FrameNumber(epoch.0))),
            PROGRESS => read_u64(&body, 0).map(|committed| {
                EpochMessage::Progress(EpochProgress {
                    complete: epoch,
                    committed: Epoch(committed),
                })
            }),
            REFUSAL => Some(EpochMessage::Refusal(String::from_utf8_lossy(&body).into_owned())),
            RELEASE => Some(EpochMessage::Release),
            PROTECTION_END => serde_json::from_slice(&body).ok().map(EpochMessage::ProtectionEnd),
            END_RECORDED => Some(EpochMessage::EndRecorded),
            DECLINE => Some(EpochMessage::Decline(String::from_utf8_lossy(&body).into_owned())),
            _ => None,
        };
        message.ok_or(EpochStreamError::Body { kind, bytes })
    }

    fn decode_end(&mut self, epoch: Epoch, body: &[u8]) -> Result<EpochMessage, EpochStreamError> {
        let (Some(last @ 0..=1), Some(expected), 16) =
            (read_u64(body, 0), read_u64(body, 8), body.len())
        else {
            return Err(EpochStreamError::Body { kind: END, bytes: body.len() });
        };
        self.sum.write(&last.to_le_bytes());
        let found = std::mem::take(&mut self.sum).finish();
        match found == expected {
            true => Ok(EpochMessage::End { epoch, last: last == 1 }),
            false => Err(EpochStreamError::Checksum { epoch, expected, found }),
        }
    }
}

fn is_checksummed(kind: u32) -> bool {
    matches!(kind, PAGES | PATCHES | DEVICES | AUX | DISK | CARD)
}

fn body_bytes_max(kind: u32) -> usize {
    match kind {
        HELLO => HELLO_BYTES_MAX,
        PAGES => PAGES_MAX * NUMBERED_BYTES,
        PATCHES => PATCHES_BYTES + PAGE_SIZE,
        DEVICES | AUX => STATE_BYTES_MAX,
        END => 16,
        DISK => firn_disks::wire::BYTES_MAX,
        CARD => CARD_BYTES_MAX,
        PROGRESS => 8,
        REFUSAL | PROTECTION_END | DECLINE => REFUSAL_BYTES_MAX,
        _ => 0,
    }
}

fn encode_header(kind: u32, length: u32, epoch: Epoch) -> [u8; HEADER_BYTES] {
    let mut head = [0; HEADER_BYTES];
    head[..4].copy_from_slice(&kind.to_le_bytes());
    head[4..8].copy_from_slice(&length.to_le_bytes());
    head[8..16].copy_from_slice(&epoch.0.to_le_bytes());
    let check = XxHash3_64::oneshot(&head[..16]);
    head[16..].copy_from_slice(&check.to_le_bytes());
    head
}

fn decode_header(head: &[u8; HEADER_BYTES]) -> Result<(u32, usize, Epoch), EpochStreamError> {
    let (words, epoch) = (read_u64(head, 0), read_u64(head, 8));
    let (words, epoch) = (words.unwrap_or_default(), Epoch(epoch.unwrap_or_default()));
    let (expected, found) =
        (read_u64(head, 16).unwrap_or_default(), XxHash3_64::oneshot(&head[..16]));
    match found == expected {
        true => Ok((words as u32, (words >> 32) as usize, epoch)),
        false => Err(EpochStreamError::Head { expected, found }),
    }
}

/// Eight bytes as a number.
fn read_u64(bytes: &[u8], at: usize) -> Option<u64> {
    let bytes = bytes.get(at..at + 8)?.try_into().ok()?;
    Some(u64::from_le_bytes(bytes))
}

fn decode_hello(body: &[u8]) -> Result<Box<PrimaryHello>, EpochStreamError> {
    let check = read_u64(body, 0).ok_or(EpochStreamError::Hello(None))?;
    let json = &body[8..];
    if XxHash3_64::oneshot(json) != check {
        return Err(EpochStreamError::Hello(None));
    }
    let hello: PrimaryHello =
        serde_json::from_slice(json).map_err(|error| EpochStreamError::Hello(Some(error)))?;
    let is_sound = hello.version == VERSION && hello.regions.check_layout().is_ok();
    is_sound.then(|| Box::new(hello)).ok_or(EpochStreamError::Hello(None))
}

fn decode_pages(mut body: Vec<u8>) -> Option<PageBatch> {
    let count = body.len() / NUMBERED_BYTES;
    if count * NUMBERED_BYTES != body.len() {
        return None;
    }
    let bytes = body.split_off(count * 4);
    let number = |bytes: &[u8]| Some(Page(u32::from_le_bytes(bytes.try_into().ok()?)));
    let numbers = body.chunks_exact(4).map(number).collect::<Option<_>>()?;
    Some(PageBatch { numbers, bytes })
}

fn decode_aux(body: &[u8]) -> Option<AuxBlock> {
    let (length, rest) = body.split_first_chunk::<2>()?;
    let (id, bytes) = rest.split_at_checked(usize::from(u16::from_le_bytes(*length)))?;
    Some(AuxBlock { id: String::from_utf8(id.to_vec()).ok()?, bytes: bytes.to_vec() })
}

#[cfg(test)]
mod tests {
    use firn_cluster::output::{FrameDestination, SentFrame};
    use firn_cluster::switch::MacAddress;
    use firn_cluster::{Generation, VmId};
    use proptest::prelude::*;

    use super::*;

    fn block() -> AuxBlock {
        AuxBlock { id: "vga.vram".into(), bytes: vec![7; 9] }
    }

    /// One epoch with three pages, and two bytes of a fourth.
    fn stream() -> Vec<u8> {
        let mut writer = EpochWriter::new(Vec::new());
        let contents = [1, 2, 3].map(|fill| vec![fill; PAGE_SIZE]);
        let pages = contents.iter().zip([5, 9, 700]).map(|(bytes, page)| (Page(page), &bytes[..]));
        writer.write_pages(Epoch(4), pages).unwrap();
        writer.write_patches(Epoch(4), &patches()).unwrap();
        writer.write_end(Epoch(4), b"devices", &[block()], false).unwrap();
        writer.to
    }

    fn patches() -> PagePatches {
        let mut patches = PagePatches::default();
        patches.add_runs(Page(6), &[8..9, 9..10], &[3; PAGE_SIZE]);
        patches
    }

    fn read(stream: &[u8]) -> (Vec<EpochMessage>, EpochStreamError) {
        let (mut reader, mut messages) = (EpochReader::new(stream), Vec::new());
        loop {
            match reader.read_message() {
                Ok(message) => messages.push(message),
                Err(error) => return (messages, error),
            }
        }
    }

    fn has_end(messages: &[EpochMessage]) -> bool {
        messages.iter().any(|message| matches!(message, EpochMessage::End { .. }))
    }

    #[test]
    fn an_epoch_survives_the_wire() {
        let (messages, _) = read(&stream());
        let [EpochMessage::Pages(_, pages), patched, devices, aux, end] = &messages[..] else {
            panic!()
        };
        assert_eq!(*patched, EpochMessage::Patches(Epoch(4), patches()));
        assert_eq!(pages.numbers, [5, 9, 700].map(Page));
        assert!(pages.iter().zip(1..).all(|((_, bytes), fill)| bytes == [fill; PAGE_SIZE]));
        assert_eq!(*devices, EpochMessage::Devices(Epoch(4), b"devices".to_vec()));
        assert_eq!(*aux, EpochMessage::Aux(Epoch(4), block()));
        assert_eq!(*end, EpochMessage::End { epoch: Epoch(4), last: false });
    }

    #[test]
    fn many_pages_are_cut_to_messages() {
        let mut writer = EpochWriter::new(Vec::new());
        let page = [0; PAGE_SIZE];
        writer.write_pages(Epoch(1), (0..600).map(|number| (Page(number), &page[..]))).unwrap();
        let (messages, _) = read(&writer.to);
        let count = |message: &EpochMessage| match message {
            EpochMessage::Pages(_, pages) => pages.numbers.len(),
            _ => 0,
        };
        assert_eq!(messages.iter().map(count).collect::<Vec<_>>(), [256, 256, 88]);
    }

    #[test]
    fn the_others_survive_the_wire_too() {
        let regions = RegionMap::lay_out([("ram", 1 << 20)]).unwrap();
        let disks = vec![DiskHello { id: "d".into(), size: 9, head: vec![1] }];
        let meta = serde_json::json!({ "name": "web" });
        let members = [(VmId(0), MacAddress([2, 0, 0, 0, 0, 1]))].into();
        let (cluster, own, generation, layout) = (7, VmId(0), Generation(2), 1);
        let member = Some(ClusterMembership { cluster, own, members, generation, layout });
        let leased = true;
        let hello = PrimaryHello { version: VERSION, regions, disks, leased, member, meta };
        let progress = EpochProgress { complete: Epoch(3), committed: Epoch(2) };
        let mut writer = EpochWriter::new(Vec::new());
        writer.write_hello(&hello).unwrap();
        writer.write_progress(progress).unwrap();
        let frame = SentFrame {
            to: FrameDestination::Vm(VmId(1)),
            seq: FrameNumber(3),
            frame: vec![1, 2, 3].into(),
        };
        let received = vec![(VmId(1), FrameNumber(9))];
        let of = NicEpoch { sent: vec![frame], received, ..NicEpoch::default() };
        writer.write_card(Epoch(4), &of).unwrap();
        writer.write_global_epoch(Epoch(2)).unwrap();
        writer.write_released(FrameNumber(1 << 40)).unwrap();
        writer.write_refusal("full").unwrap();
        let end = ProtectionEnd::Lost("killed".into());
        writer.write_protection_end(&end).unwrap();
        writer.write_end_recorded().unwrap();
        writer.write_decline("stopped").unwrap();
        let expected = [
            EpochMessage::Hello(Box::new(hello)),
            EpochMessage::Progress(progress),
            EpochMessage::Card(Epoch(4), of),
            EpochMessage::Globally(Epoch(2)),
            EpochMessage::Gone(FrameNumber(1 << 40)),
            EpochMessage::Refusal("full".into()),
            EpochMessage::ProtectionEnd(end),
            EpochMessage::EndRecorded,
            EpochMessage::Decline("stopped".into()),
        ];
        assert_eq!(read(&writer.to).0, expected);
    }

    #[test]
    fn a_length_alone_takes_no_memory() {
        let head = encode_header(DEVICES, STATE_BYTES_MAX as u32, Epoch(1));
        assert!(matches!(read(&head).1, EpochStreamError::Io(_)));
        let head = super::encode_header(PAGES, u32::MAX, Epoch(1));
        assert!(matches!(read(&head).1, EpochStreamError::Body { kind: PAGES, .. }));
    }

    #[test]
    fn every_truncation_is_an_error_before_the_end() {
        let stream = stream();
        for length in 0..stream.len() {
            assert!(!has_end(&read(&stream[..length]).0), "{length} of {} bytes", stream.len());
        }
    }

    proptest! {
        #[test]
        fn every_flipped_bit_is_an_error_before_the_end(at: prop::sample::Index, bit in 0..8_u8) {
            let mut stream = stream();
            let at = at.index(stream.len());
            stream[at] ^= 1 << bit;
            prop_assert!(!has_end(&read(&stream).0), "bit {} of byte {}", bit, at);
        }

        #[test]
        fn no_bytes_make_reading_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            read(&bytes);
        }
    }
}
