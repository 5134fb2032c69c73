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
//!   14    0           how the protection ended: `PrimaryEnd` as JSON                last
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

use firn_cluster::epoch::Progress;
use firn_cluster::member::{Membership, OfEpoch};
use firn_cluster::{Epoch, Seq};
use firn_disks::Change;
use firn_image::AuxBlock;
use firn_types::{PAGE_SIZE, Page, RegionMap};
use serde::{Deserialize, Serialize};
use thiserror::Error;
use twox_hash::XxHash3_64;

use crate::delta::Patches;
use crate::primary_end::PrimaryEnd;

/// The version of the protocol, on which both sides must agree.
pub const VERSION: u32 = 6;
/// The maximum number of pages in one message.
pub const PAGES_MAX: usize = 256;

const HEAD_BYTES: usize = 24;
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
const PRIMARY_END: u32 = 14;
const END_NOTED: u32 = 15;
const DECLINE: u32 = 16;

/// Why a stream can't continue.
#[derive(Debug, Error)]
pub enum WireError {
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
    Changes(#[from] firn_disks::wire::WireError),
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
pub struct Hello {
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
    pub member: Option<Membership>,
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
pub struct Pages {
    /// The page numbers.
    pub numbers: Vec<Page>,
    /// The contents, one page after another.
    pub bytes: Vec<u8>,
}

impl Pages {
    /// Each page with its contents.
    pub fn iter(&self) -> impl Iterator<Item = (Page, &[u8])> {
        self.numbers.iter().copied().zip(self.bytes.chunks_exact(PAGE_SIZE))
    }
}

/// A received message.
#[derive(Clone, Debug, PartialEq)]
pub enum Message {
    /// The hello of a primary.
    Hello(Box<Hello>),
    /// Pages of an epoch.
    Pages(Epoch, Pages),
    /// Parts of pages of an epoch; the rest of these pages is as in the epoch before.
    Patches(Epoch, Patches),
    /// The device state at the end of an epoch.
    Devices(Epoch, Vec<u8>),
    /// An auxiliary block at the end of an epoch.
    Aux(Epoch, AuxBlock),
    /// Changes of the disk of this number, in order.
    Changes(Epoch, u32, Vec<Change>),
    /// The state of the card of a member of a cluster that belongs to an epoch.
    Card(Epoch, OfEpoch),
    /// A global checkpoint includes this epoch: no failover goes back behind it.
    Globally(Epoch),
    /// A member's frames to the outside were sent, up to this one.
    Gone(Seq),
    /// The end of an epoch, which has been received completely and verified.
    End {
        /// The epoch.
        epoch: Epoch,
        /// No epoch follows.
        last: bool,
    },
    /// The progress of the backup.
    Progress(Progress),
    /// The backup refuses further epochs.
    Refusal(String),
    /// The primary continues alone; or the backup confirms that, and never runs the VM.
    Release,
    /// How the protection ended at the primary.
    PrimaryEnd(PrimaryEnd),
    /// The backup has recorded how it ended.
    EndNoted,
    /// Why the backup never runs the VM.
    Decline(String),
}

/// The sending end of a stream.
pub struct Writer<W> {
    to: W,
    sum: XxHash3_64,
    sent: u64,
}

impl<W: Write> Writer<W> {
    /// Writes to a stream on which nothing was sent yet.
    pub fn new(to: W) -> Self {
        Self { to, sum: XxHash3_64::new(), sent: 0 }
    }

    /// The number of bytes sent so far.
    pub fn sent(&self) -> u64 {
        self.sent
    }

    /// Sends the hello.
    pub fn hello(&mut self, hello: &Hello) -> Result<(), WireError> {
        let json = serde_json::to_vec(hello).map_err(|error| WireError::Hello(Some(error)))?;
        let check = XxHash3_64::oneshot(&json).to_le_bytes();
        self.message(HELLO, Epoch(0), &[&check, &json])
    }

    /// Sends pages of an epoch, in as many messages as necessary.
    pub fn pages<'a>(
        &mut self,
        epoch: Epoch,
        pages: impl Iterator<Item = (Page, &'a [u8])>,
    ) -> Result<(), WireError> {
        let mut pages = pages.peekable();
        while pages.peek().is_some() {
            let some: Vec<_> = pages.by_ref().take(PAGES_MAX).collect();
            let numbers: Vec<u8> = some.iter().flat_map(|(page, _)| page.0.to_le_bytes()).collect();
            let contents = some.iter().map(|&(_, bytes)| bytes);
            let parts: Vec<&[u8]> = std::iter::once(&numbers[..]).chain(contents).collect();
            self.message(PAGES, epoch, &parts)?;
        }
        Ok(())
    }

    /// Sends parts of pages of an epoch, about [`PATCHES_BYTES`] at most.
    pub fn patches(&mut self, epoch: Epoch, patches: &Patches) -> Result<(), WireError> {
        self.message(PATCHES, epoch, &[patches.bytes()])
    }

    /// Sends changes of a disk, in as many messages as necessary.
    pub fn changes(
        &mut self,
        epoch: Epoch,
        disk: u32,
        changes: &[Change],
    ) -> Result<(), WireError> {
        firn_disks::wire::encode(disk, changes)
            .try_for_each(|body| self.message(DISK, epoch, &[&body]))
    }

    /// Sends the state of a member's card that belongs to an epoch.
    pub fn card(&mut self, epoch: Epoch, of: &OfEpoch) -> Result<(), WireError> {
        let body = postcard::to_stdvec(of).map_err(io::Error::other)?;
        self.message(CARD, epoch, &[&body])
    }

    /// Reports that a global checkpoint includes an epoch.
    pub fn globally(&mut self, epoch: Epoch) -> Result<(), WireError> {
        self.message(GLOBAL, epoch, &[])?;
        Ok(self.to.flush()?)
    }

    /// Reports that frames to the outside were sent, up to this one.
    pub fn gone(&mut self, seq: Seq) -> Result<(), WireError> {
        self.message(GONE, Epoch(seq.0), &[])?;
        Ok(self.to.flush()?)
    }

    /// Sends device state and auxiliary blocks, and ends an epoch.
    pub fn end(
        &mut self,
        epoch: Epoch,
        devices: &[u8],
        aux: &[AuxBlock],
        last: bool,
    ) -> Result<(), WireError> {
        self.message(DEVICES, epoch, &[devices])?;
        for block in aux {
            let bytes = block.id.len();
            let id =
                u16::try_from(bytes).map_err(|_| WireError::TooLarge { what: "a name", bytes })?;
            self.message(AUX, epoch, &[&id.to_le_bytes(), block.id.as_bytes(), &block.bytes])?;
        }
        let last = u64::from(last).to_le_bytes();
        self.sum.write(&last);
        let sum = std::mem::take(&mut self.sum).finish().to_le_bytes();
        self.message(END, epoch, &[&last, &sum])?;
        Ok(self.to.flush()?)
    }

    /// Reports the progress of the backup.
    pub fn progress(&mut self, progress: Progress) -> Result<(), WireError> {
        self.message(PROGRESS, progress.complete, &[&progress.committed.0.to_le_bytes()])?;
        Ok(self.to.flush()?)
    }

    /// Reports why the backup refuses further epochs.
    pub fn refusal(&mut self, why: &str) -> Result<(), WireError> {
        self.message(REFUSAL, Epoch(0), &[why.as_bytes()])?;
        Ok(self.to.flush()?)
    }

    /// Reports that the primary continues alone, or that the backup confirms it.
    pub fn release(&mut self) -> Result<(), WireError> {
        self.message(RELEASE, Epoch(0), &[])?;
        Ok(self.to.flush()?)
    }

    /// Reports how the protection ended at the primary.
    pub fn primary_end(&mut self, end: &PrimaryEnd) -> Result<(), WireError> {
        let json = serde_json::to_vec(end).map_err(io::Error::other)?;
        self.message(PRIMARY_END, Epoch(0), &[&json])?;
        Ok(self.to.flush()?)
    }

    /// Reports that the backup has recorded how it ended.
    pub fn end_noted(&mut self) -> Result<(), WireError> {
        self.message(END_NOTED, Epoch(0), &[])?;
        Ok(self.to.flush()?)
    }

    /// Reports why the backup never runs the VM.
    pub fn decline(&mut self, why: &str) -> Result<(), WireError> {
        self.message(DECLINE, Epoch(0), &[why.as_bytes()])?;
        Ok(self.to.flush()?)
    }

    fn message(&mut self, kind: u32, epoch: Epoch, parts: &[&[u8]]) -> Result<(), WireError> {
        let bytes = parts.iter().map(|part| part.len()).sum();
        let length = u32::try_from(bytes).ok().filter(|_| bytes <= longest(kind));
        let length = length.ok_or(WireError::TooLarge { what: "one message", bytes })?;
        let head = head(kind, length, epoch);
        let is_summed = is_summed(kind);
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
pub struct Reader<R> {
    from: R,
    sum: XxHash3_64,
}

impl<R: Read> Reader<R> {
    /// Reads from a stream of which nothing was read yet.
    pub fn new(from: R) -> Self {
        Self { from, sum: XxHash3_64::new() }
    }

    /// Reads the next message. After an error the stream can't be decoded any further.
    pub fn receive(&mut self) -> Result<Message, WireError> {
        let mut head = [0; HEAD_BYTES];
        self.from.read_exact(&mut head)?;
        let (kind, length, epoch) = checked(&head)?;
        if length > longest(kind) {
            return Err(WireError::Body { kind, bytes: length });
        }
        let mut body = Vec::new();
        self.from.by_ref().take(length as u64).read_to_end(&mut body)?;
        if body.len() < length {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
        }
        if is_summed(kind) {
            self.sum.write(&head);
            self.sum.write(&body);
        }
        self.message(kind, epoch, body)
    }

    fn message(&mut self, kind: u32, epoch: Epoch, body: Vec<u8>) -> Result<Message, WireError> {
        let bytes = body.len();
        let message = match kind {
            HELLO => return hello(&body).map(Message::Hello),
            PAGES => pages(body).map(|pages| Message::Pages(epoch, pages)),
            PATCHES => Patches::parse(body).map(|patches| Message::Patches(epoch, patches)),
            DEVICES => Some(Message::Devices(epoch, body)),
            AUX => aux(&body).map(|block| Message::Aux(epoch, block)),
            END => return self.end(epoch, &body),
            DISK => {
                let (disk, changes) = firn_disks::wire::decode(&body)?;
                return Ok(Message::Changes(epoch, disk, changes));
            }
            CARD => postcard::from_bytes(&body).ok().map(|of| Message::Card(epoch, of)),
            GLOBAL => Some(Message::Globally(epoch)),
            GONE => Some(Message::Gone(Seq(epoch.0))),
            PROGRESS => number(&body, 0).map(|committed| {
                Message::Progress(Progress { complete: epoch, committed: Epoch(committed) })
            }),
            REFUSAL => Some(Message::Refusal(String::from_utf8_lossy(&body).into_owned())),
            RELEASE => Some(Message::Release),
            PRIMARY_END => serde_json::from_slice(&body).ok().map(Message::PrimaryEnd),
            END_NOTED => Some(Message::EndNoted),
            DECLINE => Some(Message::Decline(String::from_utf8_lossy(&body).into_owned())),
            _ => None,
        };
        message.ok_or(WireError::Body { kind, bytes })
    }

    fn end(&mut self, epoch: Epoch, body: &[u8]) -> Result<Message, WireError> {
        let (Some(last @ 0..=1), Some(expected), 16) =
            (number(body, 0), number(body, 8), body.len())
        else {
            return Err(WireError::Body { kind: END, bytes: body.len() });
        };
        self.sum.write(&last.to_le_bytes());
        let found = std::mem::take(&mut self.sum).finish();
        match found == expected {
            true => Ok(Message::End { epoch, last: last == 1 }),
            false => Err(WireError::Checksum { epoch, expected, found }),
        }
    }
}

fn is_summed(kind: u32) -> bool {
    matches!(kind, PAGES | PATCHES | DEVICES | AUX | DISK | CARD)
}

fn longest(kind: u32) -> usize {
    match kind {
        HELLO => HELLO_BYTES_MAX,
        PAGES => PAGES_MAX * NUMBERED_BYTES,
        PATCHES => PATCHES_BYTES + PAGE_SIZE,
        DEVICES | AUX => STATE_BYTES_MAX,
        END => 16,
        DISK => firn_disks::wire::BYTES_MAX,
        CARD => CARD_BYTES_MAX,
        PROGRESS => 8,
        REFUSAL | PRIMARY_END | DECLINE => REFUSAL_BYTES_MAX,
        _ => 0,
    }
}

fn head(kind: u32, length: u32, epoch: Epoch) -> [u8; HEAD_BYTES] {
    let mut head = [0; HEAD_BYTES];
    head[..4].copy_from_slice(&kind.to_le_bytes());
    head[4..8].copy_from_slice(&length.to_le_bytes());
    head[8..16].copy_from_slice(&epoch.0.to_le_bytes());
    let check = XxHash3_64::oneshot(&head[..16]);
    head[16..].copy_from_slice(&check.to_le_bytes());
    head
}

fn checked(head: &[u8; HEAD_BYTES]) -> Result<(u32, usize, Epoch), WireError> {
    let (words, epoch) = (number(head, 0), number(head, 8));
    let (words, epoch) = (words.unwrap_or_default(), Epoch(epoch.unwrap_or_default()));
    let (expected, found) =
        (number(head, 16).unwrap_or_default(), XxHash3_64::oneshot(&head[..16]));
    match found == expected {
        true => Ok((words as u32, (words >> 32) as usize, epoch)),
        false => Err(WireError::Head { expected, found }),
    }
}

/// Eight bytes as a number.
fn number(bytes: &[u8], at: usize) -> Option<u64> {
    let bytes = bytes.get(at..at + 8)?.try_into().ok()?;
    Some(u64::from_le_bytes(bytes))
}

fn hello(body: &[u8]) -> Result<Box<Hello>, WireError> {
    let check = number(body, 0).ok_or(WireError::Hello(None))?;
    let json = &body[8..];
    if XxHash3_64::oneshot(json) != check {
        return Err(WireError::Hello(None));
    }
    let hello: Hello =
        serde_json::from_slice(json).map_err(|error| WireError::Hello(Some(error)))?;
    let is_sound = hello.version == VERSION && hello.regions.check().is_ok();
    is_sound.then(|| Box::new(hello)).ok_or(WireError::Hello(None))
}

fn pages(mut body: Vec<u8>) -> Option<Pages> {
    let count = body.len() / NUMBERED_BYTES;
    if count * NUMBERED_BYTES != body.len() {
        return None;
    }
    let bytes = body.split_off(count * 4);
    let number = |bytes: &[u8]| Some(Page(u32::from_le_bytes(bytes.try_into().ok()?)));
    let numbers = body.chunks_exact(4).map(number).collect::<Option<_>>()?;
    Some(Pages { numbers, bytes })
}

fn aux(body: &[u8]) -> Option<AuxBlock> {
    let (length, rest) = body.split_first_chunk::<2>()?;
    let (id, bytes) = rest.split_at_checked(usize::from(u16::from_le_bytes(*length)))?;
    Some(AuxBlock { id: String::from_utf8(id.to_vec()).ok()?, bytes: bytes.to_vec() })
}

#[cfg(test)]
mod tests {
    use firn_cluster::output::{Sent, To};
    use firn_cluster::switch::Mac;
    use firn_cluster::{Generation, Vm};
    use proptest::prelude::*;

    use super::*;

    fn block() -> AuxBlock {
        AuxBlock { id: "vga.vram".into(), bytes: vec![7; 9] }
    }

    /// One epoch with three pages, and two bytes of a fourth.
    fn stream() -> Vec<u8> {
        let mut writer = Writer::new(Vec::new());
        let contents = [1, 2, 3].map(|fill| vec![fill; PAGE_SIZE]);
        let pages = contents.iter().zip([5, 9, 700]).map(|(bytes, page)| (Page(page), &bytes[..]));
        writer.pages(Epoch(4), pages).unwrap();
        writer.patches(Epoch(4), &patches()).unwrap();
        writer.end(Epoch(4), b"devices", &[block()], false).unwrap();
        writer.to
    }

    fn patches() -> Patches {
        let mut patches = Patches::default();
        patches.add(Page(6), &[8..9, 9..10], &[3; PAGE_SIZE]);
        patches
    }

    fn read(stream: &[u8]) -> (Vec<Message>, WireError) {
        let (mut reader, mut messages) = (Reader::new(stream), Vec::new());
        loop {
            match reader.receive() {
                Ok(message) => messages.push(message),
                Err(error) => return (messages, error),
            }
        }
    }

    fn has_end(messages: &[Message]) -> bool {
        messages.iter().any(|message| matches!(message, Message::End { .. }))
    }

    #[test]
    fn an_epoch_survives_the_wire() {
        let (messages, _) = read(&stream());
        let [Message::Pages(_, pages), patched, devices, aux, end] = &messages[..] else {
            panic!()
        };
        assert_eq!(*patched, Message::Patches(Epoch(4), patches()));
        assert_eq!(pages.numbers, [5, 9, 700].map(Page));
        assert!(pages.iter().zip(1..).all(|((_, bytes), fill)| bytes == [fill; PAGE_SIZE]));
        assert_eq!(*devices, Message::Devices(Epoch(4), b"devices".to_vec()));
        assert_eq!(*aux, Message::Aux(Epoch(4), block()));
        assert_eq!(*end, Message::End { epoch: Epoch(4), last: false });
    }

    #[test]
    fn many_pages_are_cut_to_messages() {
        let mut writer = Writer::new(Vec::new());
        let page = [0; PAGE_SIZE];
        writer.pages(Epoch(1), (0..600).map(|number| (Page(number), &page[..]))).unwrap();
        let (messages, _) = read(&writer.to);
        let count = |message: &Message| match message {
            Message::Pages(_, pages) => pages.numbers.len(),
            _ => 0,
        };
        assert_eq!(messages.iter().map(count).collect::<Vec<_>>(), [256, 256, 88]);
    }

    #[test]
    fn the_others_survive_the_wire_too() {
        let regions = RegionMap::lay_out([("ram", 1 << 20)]).unwrap();
        let disks = vec![DiskHello { id: "d".into(), size: 9, head: vec![1] }];
        let meta = serde_json::json!({ "name": "web" });
        let members = [(Vm(0), Mac([2, 0, 0, 0, 0, 1]))].into();
        let (cluster, own, generation, layout) = (7, Vm(0), Generation(2), 1);
        let member = Some(Membership { cluster, own, members, generation, layout });
        let leased = true;
        let hello = Hello { version: VERSION, regions, disks, leased, member, meta };
        let progress = Progress { complete: Epoch(3), committed: Epoch(2) };
        let mut writer = Writer::new(Vec::new());
        writer.hello(&hello).unwrap();
        writer.progress(progress).unwrap();
        let frame = Sent { to: To::Vm(Vm(1)), seq: Seq(3), frame: vec![1, 2, 3].into() };
        let received = vec![(Vm(1), Seq(9))];
        let of = OfEpoch { sent: vec![frame], received, ..OfEpoch::default() };
        writer.card(Epoch(4), &of).unwrap();
        writer.globally(Epoch(2)).unwrap();
        writer.gone(Seq(1 << 40)).unwrap();
        writer.refusal("full").unwrap();
        let end = PrimaryEnd::Lost("killed".into());
        writer.primary_end(&end).unwrap();
        writer.end_noted().unwrap();
        writer.decline("stopped").unwrap();
        let expected = [
            Message::Hello(Box::new(hello)),
            Message::Progress(progress),
            Message::Card(Epoch(4), of),
            Message::Globally(Epoch(2)),
            Message::Gone(Seq(1 << 40)),
            Message::Refusal("full".into()),
            Message::PrimaryEnd(end),
            Message::EndNoted,
            Message::Decline("stopped".into()),
        ];
        assert_eq!(read(&writer.to).0, expected);
    }

    #[test]
    fn a_length_alone_takes_no_memory() {
        let head = head(DEVICES, STATE_BYTES_MAX as u32, Epoch(1));
        assert!(matches!(read(&head).1, WireError::Io(_)));
        let head = super::head(PAGES, u32::MAX, Epoch(1));
        assert!(matches!(read(&head).1, WireError::Body { kind: PAGES, .. }));
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
