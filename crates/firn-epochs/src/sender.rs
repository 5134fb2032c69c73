//! Epoch sender: compares an epoch with the one before after its pause, and sends it, in a thread
//! of its own.

use std::io::{BufReader, BufWriter, Write};

use crossbeam_channel::{Receiver, Sender};
use firn_cluster::epoch::Progress;
use firn_cluster::predict::{CutPlan, PageSet};
use firn_cluster::{Epoch, Seq};

use crate::copy::{EpochCopy, News};
use crate::delta::Patches;
use crate::endpoint::Stream;
use crate::primary::PrimaryError;
use crate::primary_end::PrimaryEnd;
use crate::wire::{Message, Pages, Reader, WireError, Writer};

/// A job of the sender.
#[derive(Debug)]
pub(crate) enum Job {
    /// A part of an epoch that is too large for the buffer, from within its pause.
    Part(Epoch, Pages),
    /// An epoch, or the rest of one.
    Epoch(Box<EpochCopy>),
    /// A global checkpoint includes this epoch.
    Globally(Epoch),
    /// A member's frames to the outside were sent, up to this one.
    Gone(Seq),
    /// The primary continues alone.
    Release,
    /// The protection ended at the primary, in this way.
    PrimaryEnd(PrimaryEnd),
}

/// An event of the connection, for the thread that controls the VM.
#[derive(Debug)]
pub(crate) enum Event {
    /// An epoch was compared with the one before.
    Compared { epoch: Epoch, plan: CutPlan, same: PageSet },
    /// An epoch was sent.
    Sent { epoch: Epoch, pages: u64, bytes: u64 },
    /// A buffer that is not needed any more.
    Spare(Vec<u8>),
    /// The progress of the backup.
    Progress(Progress),
    /// The backup confirms that it never runs the VM.
    Released,
    /// The backup has recorded how the protection ended.
    EndNoted,
    /// The connection can't be used any more.
    Lost(PrimaryError),
}

/// The sending half of a connection.
pub(crate) struct Sending<W> {
    writer: Writer<W>,
    events: Sender<Event>,
    before: EpochCopy,
}

impl<W: Write> Sending<W> {
    pub(crate) fn new(writer: Writer<W>, events: Sender<Event>) -> Self {
        Self { writer, events, before: EpochCopy::default() }
    }

    /// Runs jobs until there are no more, or sending fails.
    pub(crate) fn run(mut self, jobs: &Receiver<Job>) {
        for job in jobs {
            if let Err(error) = self.send(job) {
                self.tell(Event::Lost(error.into()));
                return;
            }
        }
    }

    pub(crate) fn send(&mut self, job: Job) -> Result<(), WireError> {
        match job {
            Job::Part(epoch, pages) => self.writer.pages(epoch, pages.iter()),
            Job::Epoch(copy) => self.epoch(*copy),
            Job::Globally(epoch) => self.writer.globally(epoch),
            Job::Gone(seq) => self.writer.gone(seq),
            Job::Release => self.writer.release(),
            Job::PrimaryEnd(end) => self.writer.primary_end(&end),
        }
    }

    fn epoch(&mut self, copy: EpochCopy) -> Result<(), WireError> {
        let epoch = copy.epoch;
        let News { mut same, whole, patched } = copy.news_since(&self.before);
        let pages = copy.plan.pages() - same.len();
        // The other pages are known to have been written, even if their contents are the same.
        same.subtract(&copy.plan.written);
        self.tell(Event::Compared { epoch, plan: copy.plan.clone(), same });
        let before = self.writer.sent();
        self.writer.pages(epoch, copy.iter().filter(|(page, _)| whole.contains(*page)))?;
        let give = |patches: &Patches| self.writer.patches(epoch, patches);
        copy.patches(&self.before, &patched, give)?;
        for (disk, changes) in (0..).zip(&copy.disks) {
            self.writer.changes(epoch, disk, changes)?;
        }
        if let Some(card) = &copy.card {
            self.writer.card(epoch, card)?;
        }
        self.writer.end(epoch, &copy.devices, &copy.aux, copy.last)?;
        let bytes = self.writer.sent() - before;
        self.tell(Event::Sent { epoch, pages: pages as u64, bytes });
        let copy = EpochCopy { disks: Vec::new(), card: None, ..copy };
        let spare = std::mem::replace(&mut self.before, copy).bytes;
        self.tell(Event::Spare(spare));
        Ok(())
    }

    /// Emits an event. If its receiver has ended, no more jobs follow either.
    fn tell(&self, event: Event) {
        let _ = self.events.send(event);
    }
}

/// Reads the backup's messages until the connection ends.
pub(crate) fn hear(stream: Stream, events: &Sender<Event>) {
    let mut reader = Reader::new(BufReader::new(stream));
    loop {
        let event = match reader.receive() {
            Ok(Message::Progress(progress)) => Event::Progress(progress),
            Ok(Message::Release) => Event::Released,
            Ok(Message::EndNoted) => Event::EndNoted,
            Ok(Message::Decline(why)) => Event::Lost(PrimaryError::Declined(why)),
            Ok(Message::Refusal(why)) => Event::Lost(PrimaryError::Refused(why)),
            Ok(_) => Event::Lost(PrimaryError::Confused),
            Err(error) => Event::Lost(error.into()),
        };
        let is_over = matches!(event, Event::Lost(_));
        if events.send(event).is_err() || is_over {
            return;
        }
    }
}

/// The buffered writer of a connection.
pub(crate) fn writer(stream: Stream) -> Writer<BufWriter<Stream>> {
    Writer::new(BufWriter::with_capacity(1 << 18, stream))
}
