//! Epoch sender: compares an epoch with the one before after its pause, and sends it, in a thread
//! of its own.

use std::io::{BufReader, BufWriter, Write};

use crossbeam_channel::{Receiver, Sender};
use firn_cluster::epoch::EpochProgress;
use firn_cluster::predict::{CutPlan, PageSet};
use firn_cluster::{Epoch, FrameNumber};

use crate::copy::{EpochCopy, PageComparison};
use crate::delta::PagePatches;
use crate::endpoint::EpochStream;
use crate::primary::ProtectionError;
use crate::protection_end::ProtectionEnd;
use crate::wire::{EpochMessage, EpochReader, EpochStreamError, EpochWriter, PageBatch};

/// A job of the sender.
#[derive(Debug)]
pub(crate) enum SendJob {
    /// A part of an epoch that is too large for the buffer, from within its pause.
    Part(Epoch, PageBatch),
    /// An epoch, or the rest of one.
    Epoch(Box<EpochCopy>),
    /// A global checkpoint includes this epoch.
    Globally(Epoch),
    /// A member's frames to the outside were sent, up to this one.
    Gone(FrameNumber),
    /// The primary continues alone.
    Release,
    /// The protection ended at the primary, in this way.
    ProtectionEnd(ProtectionEnd),
}

/// An event of the connection, for the thread that controls the VM.
#[derive(Debug)]
pub(crate) enum ConnectionEvent {
    /// An epoch was compared with the one before.
    Compared { epoch: Epoch, plan: CutPlan, same: PageSet },
    /// An epoch was sent.
    Sent { epoch: Epoch, pages: u64, bytes: u64 },
    /// A buffer that is not needed any more.
    Spare(Vec<u8>),
    /// The progress of the backup.
    Progress(EpochProgress),
    /// The backup confirms that it never runs the VM.
    Released,
    /// The backup has recorded how the protection ended.
    EndRecorded,
    /// The connection can't be used any more.
    Lost(ProtectionError),
}

/// The sending half of a connection.
pub(crate) struct EpochSender<W> {
    writer: EpochWriter<W>,
    events: Sender<ConnectionEvent>,
    before: EpochCopy,
}

impl<W: Write> EpochSender<W> {
    pub(crate) fn new(writer: EpochWriter<W>, events: Sender<ConnectionEvent>) -> Self {
        Self { writer, events, before: EpochCopy::default() }
    }

    /// Runs jobs until there are no more, or sending fails.
    pub(crate) fn run(mut self, jobs: &Receiver<SendJob>) {
        for job in jobs {
            if let Err(error) = self.send_job(job) {
                self.emit_event(ConnectionEvent::Lost(error.into()));
                return;
            }
        }
    }

    pub(crate) fn send_job(&mut self, job: SendJob) -> Result<(), EpochStreamError> {
        match job {
            SendJob::Part(epoch, pages) => self.writer.write_pages(epoch, pages.iter()),
            SendJob::Epoch(copy) => self.send_epoch(*copy),
            SendJob::Globally(epoch) => self.writer.write_global_epoch(epoch),
            SendJob::Gone(seq) => self.writer.write_released(seq),
            SendJob::Release => self.writer.write_release(),
            SendJob::ProtectionEnd(end) => self.writer.write_protection_end(&end),
        }
    }

    fn send_epoch(&mut self, copy: EpochCopy) -> Result<(), EpochStreamError> {
        let epoch = copy.epoch;
        let PageComparison { mut same, whole, patched } = copy.compare_with(&self.before);
        let pages = copy.plan.page_count() - same.len();
        // The other pages are known to have been written, even if their contents are the same.
        same.subtract(&copy.plan.written);
        self.emit_event(ConnectionEvent::Compared { epoch, plan: copy.plan.clone(), same });
        let before = self.writer.sent_bytes();
        self.writer.write_pages(epoch, copy.iter().filter(|(page, _)| whole.contains(*page)))?;
        let give = |patches: &PagePatches| self.writer.write_patches(epoch, patches);
        copy.for_each_patch_batch(&self.before, &patched, give)?;
        for (disk, changes) in (0..).zip(&copy.disks) {
            self.writer.write_changes(epoch, disk, changes)?;
        }
        if let Some(card) = &copy.card {
            self.writer.write_card(epoch, card)?;
        }
        self.writer.write_end(epoch, &copy.devices, &copy.aux, copy.last)?;
        let bytes = self.writer.sent_bytes() - before;
        self.emit_event(ConnectionEvent::Sent { epoch, pages: pages as u64, bytes });
        let copy = EpochCopy { disks: Vec::new(), card: None, ..copy };
        let spare = std::mem::replace(&mut self.before, copy).bytes;
        self.emit_event(ConnectionEvent::Spare(spare));
        Ok(())
    }

    /// Emits an event. If its receiver has ended, no more jobs follow either.
    fn emit_event(&self, event: ConnectionEvent) {
        let _ = self.events.send(event);
    }
}

/// Reads the backup's messages until the connection ends.
pub(crate) fn read_messages(stream: EpochStream, events: &Sender<ConnectionEvent>) {
    let mut reader = EpochReader::new(BufReader::new(stream));
    loop {
        let event = match reader.read_message() {
            Ok(EpochMessage::Progress(progress)) => ConnectionEvent::Progress(progress),
            Ok(EpochMessage::Release) => ConnectionEvent::Released,
            Ok(EpochMessage::EndRecorded) => ConnectionEvent::EndRecorded,
            Ok(EpochMessage::Decline(why)) => ConnectionEvent::Lost(ProtectionError::Declined(why)),
            Ok(EpochMessage::Refusal(why)) => ConnectionEvent::Lost(ProtectionError::Refused(why)),
            Ok(_) => ConnectionEvent::Lost(ProtectionError::Confused),
            Err(error) => ConnectionEvent::Lost(error.into()),
        };
        let is_over = matches!(event, ConnectionEvent::Lost(_));
        if events.send(event).is_err() || is_over {
            return;
        }
    }
}

/// The buffered writer of a connection.
pub(crate) fn buffered_writer(stream: EpochStream) -> EpochWriter<BufWriter<EpochStream>> {
    EpochWriter::new(BufWriter::with_capacity(1 << 18, stream))
}
