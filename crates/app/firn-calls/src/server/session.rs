//! An open call session: one application, one address space, its areas.

use std::collections::BTreeMap;

use firn_types::{GuestPhys, PAGE_SIZE, Page};

use super::PendingSession;
use super::access::GuestAccess;
use super::area::FollowedArea;
use super::followed_pages::{FollowedPages, ranges_of_pages};
use super::pending_report::PendingReport;
use crate::key::{MessageSender, Proof, SealKey};
use crate::message::{self, CallRefusal, CallReply, CallRequest, FollowedAreaId};
use crate::store_recording::{PluginOrder, RecordedApplication, WORD};
use crate::window::SlotField;

/// The maximum count of areas of a session.
const AREAS_MAX: u16 = 4096;
/// How often a `Collect` looks at a part whose table is being written.
const LOOKS_MAX: usize = 5;
/// The end of the part of an address space that belongs to programs, on x86-64 with four levels of
/// tables. Linux gives a program higher addresses only if the program requests them.
const PROGRAMS_END: u64 = 1 << 47;

/// An open session on the host's side.
pub(super) struct CallSession {
    pub(super) name: String,
    slot: u32,
    seal: SealKey,
    /// The number of the last answered request: each request is answered once.
    last: u64,
    space: GuestPhys,
    proof_at: u64,
    proof: Proof,
    pages_max: u32,
    areas: BTreeMap<FollowedAreaId, FollowedArea>,
    pages: FollowedPages,
    report: PendingReport,
    next: u16,
    /// The era since whose begin all writes are known.
    era: Option<u64>,
    /// The number of the `Collect` that was answered last.
    last_collect: u64,
    /// Whether that reply was `Anything`.
    replied_anything: bool,
    /// The last sweep did not find its process.
    is_suspect: bool,
    /// The plugin records its stores.
    is_recording: bool,
}

impl std::fmt::Debug for CallSession {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { name, space, areas, .. } = self;
        f.debug_struct("CallSession")
            .field("name", name)
            .field("space", space)
            .field("areas", areas)
            .finish_non_exhaustive()
    }
}

impl CallSession {
    pub(super) fn new(
        by: PendingSession,
        sequence: u64,
        space: GuestPhys,
        proof_at: u64,
        proof: Proof,
    ) -> Self {
        Self {
            name: by.name,
            slot: by.slot,
            seal: by.seal,
            last: sequence,
            space,
            proof_at,
            proof,
            pages_max: by.application.pages,
            areas: BTreeMap::new(),
            pages: FollowedPages::default(),
            report: PendingReport::default(),
            next: 0,
            era: None,
            last_collect: 0,
            replied_anything: false,
            is_suspect: false,
            is_recording: false,
        }
    }

    /// Whether its process is gone: two sweeps in a row did not find it. The guest's kernel may
    /// page out the proof for a while.
    pub(super) fn is_gone(&mut self, below: &mut dyn GuestAccess) -> bool {
        let is_missing = self.check_space(below).is_err();
        std::mem::replace(&mut self.is_suspect, is_missing) && is_missing
    }

    /// The next request of this session, if the bytes are one. The window has only the low half of
    /// its number.
    pub(super) fn open_request(&mut self, asked: u32, sealed: &[u8]) -> Option<(u64, CallRequest)> {
        let ahead = u64::from(asked.wrapping_sub(self.last as u32));
        let sequence = self.last.checked_add(ahead).filter(|_| ahead > 0)?;
        let request = message::decode_message(self.seal.open_message(
            MessageSender::Application,
            sequence,
            sealed,
        )?)?;
        self.last = sequence;
        Some((sequence, request))
    }

    pub(super) fn seal_reply(&self, sequence: u64, answer: &CallReply) -> Vec<u8> {
        self.seal.seal_message(MessageSender::Host, sequence, &message::encode_message(answer))
    }

    /// Handles a request. Returns the reply, and the pages that were found written meanwhile.
    pub(super) fn handle_request(
        &mut self,
        sequence: u64,
        request: &CallRequest,
        below: &mut dyn GuestAccess,
    ) -> (CallReply, Vec<Page>) {
        let mut written = Vec::new();
        let answer = self.try_handle(sequence, request, below, &mut written);
        (answer.unwrap_or_else(CallReply::Refused), written)
    }

    fn try_handle(
        &mut self,
        sequence: u64,
        request: &CallRequest,
        below: &mut dyn GuestAccess,
        written: &mut Vec<Page>,
    ) -> Result<CallReply, CallRefusal> {
        match *request {
            CallRequest::Hello { .. } | CallRequest::Prove { .. } => Err(CallRefusal::Early),
            CallRequest::Bye => Ok(CallReply::Done),
            CallRequest::Forget(id) => self.forget_area(id, below),
            CallRequest::Follow { start, pages } => self.follow_area(start, pages, below, written),
            CallRequest::Collect { known } => self.collect_writes(sequence, known, below, written),
            CallRequest::RecordStores { end } => self.begin_recording(sequence, end, below),
        }
    }

    /// Checks that the address space still has the proof. A page-table root that the process has
    /// lost may belong to another.
    fn check_space(&self, below: &mut dyn GuestAccess) -> Result<(), CallRefusal> {
        let is_there = below.has_proof(self.space, self.proof_at, &self.proof);
        is_there.then_some(()).ok_or(CallRefusal::Gone(self.proof_at))
    }

    fn follow_area(
        &mut self,
        start: u64,
        pages: u32,
        below: &mut dyn GuestAccess,
        written: &mut Vec<Page>,
    ) -> Result<CallReply, CallRefusal> {
        self.check_space(below)?;
        self.check_range(start, pages)?;
        self.end_recording(below);
        let area = FollowedArea { start, pages };
        let translate = |part| (part, below.translate_part(self.space, part));
        let translations: Vec<_> = area.parts().map(translate).collect();
        let physical = area.physical_pages(&translations)?;
        // Earlier writes there are no news for this session, but for sessions that already follow
        // these pages.
        let found = below.take_written(&ranges_of_pages(physical));
        let (era, found) = found.ok_or(CallRefusal::Unavailable)?;
        // Areas followed since an earlier era have missed writes.
        if self.era != Some(era) {
            self.areas.iter().for_each(|(id, area)| self.report.mark_area(*id, area.pages));
            self.pages.mark_tables_written();
        }
        self.era = Some(era);
        *written = found;
        self.mark_written(written);
        let id = FollowedAreaId(self.next);
        self.next += 1;
        self.areas.insert(id, area);
        self.pages.add_area(id, area, translations, &mut self.report);
        Ok(CallReply::Following(id))
    }

    fn forget_area(
        &mut self,
        id: FollowedAreaId,
        below: &mut dyn GuestAccess,
    ) -> Result<CallReply, CallRefusal> {
        self.end_recording(below);
        let area = self.areas.remove(&id).ok_or(CallRefusal::NoArea)?;
        self.pages.remove_area(id, area);
        self.report.forget_area(id);
        Ok(CallReply::Done)
    }

    fn check_range(&self, start: u64, pages: u32) -> Result<(), CallRefusal> {
        let bytes = u64::from(pages) * PAGE_SIZE as u64;
        let end = start.checked_add(bytes).ok_or(CallRefusal::Misplaced(start))?;
        if start % PAGE_SIZE as u64 != 0 || pages == 0 {
            return Err(CallRefusal::Misplaced(start));
        }
        if end > PROGRAMS_END {
            return Err(CallRefusal::Kernel(start));
        }
        let followed: u32 = self.areas.values().map(|area| area.pages).sum();
        if pages > self.pages_max.saturating_sub(followed) {
            return Err(CallRefusal::TooMuch(self.pages_max));
        }
        let has_room = self.areas.len() < usize::from(AREAS_MAX) && self.next < u16::MAX;
        has_room.then_some(()).ok_or(CallRefusal::TooMany(AREAS_MAX))
    }

    fn collect_writes(
        &mut self,
        sequence: u64,
        known: u64,
        below: &mut dyn GuestAccess,
        written: &mut Vec<Page>,
    ) -> Result<CallReply, CallRefusal> {
        self.check_space(below)?;
        if known == self.last_collect {
            self.report.acknowledge_reported();
            self.replied_anything = false;
        }
        self.last_collect = sequence;
        self.era = self.find_writes(below, written);
        Ok(self.report_writes())
    }

    /// Finds the pages that were written, and where the pages are now (see `followed_pages`).
    /// Returns the era since whose begin all writes are known.
    fn find_writes(&mut self, below: &mut dyn GuestAccess, written: &mut Vec<Page>) -> Option<u64> {
        let mut parts = self.pages.parts();
        let mut era = self.era;
        for look in 0..LOOKS_MAX {
            if parts.is_empty() && look > 0 {
                break;
            }
            self.pages.compare_mappings(&parts, self.space, below);
            let taken = below.take_written(&self.pages.ranges_of_parts(&parts));
            let now = taken.as_ref().map(|(now, _)| *now);
            if now.is_none() || now != era {
                self.replied_anything = true;
                self.pages.mark_tables_written();
            }
            era = now;
            let (_, found) = taken?;
            self.mark_written(&found);
            written.extend(found);
            parts = self.pages.translate_stale(self.space, below, &mut self.report);
        }
        self.pages.distrust_parts(&parts, &mut self.report);
        self.pages.mark_incomplete(&mut self.report);
        era
    }

    fn begin_recording(
        &mut self,
        sequence: u64,
        end: u64,
        below: &mut dyn GuestAccess,
    ) -> Result<CallReply, CallRefusal> {
        self.check_space(below)?;
        if end % WORD != 0 {
            return Err(CallRefusal::Misplaced(end));
        }
        if end >= PROGRAMS_END {
            return Err(CallRefusal::Kernel(end));
        }
        self.end_recording(below);
        let areas: Option<Vec<_>> =
            self.areas.iter().map(|(id, area)| area.recorded_area(*id)).collect();
        let key = self.seal.derive_report_key(sequence);
        let order = areas.map(|areas| {
            PluginOrder::RecordStores(RecordedApplication { slot: self.slot, key, end, areas })
        });
        self.is_recording = order.is_some_and(|order| below.order_plugin(&order));
        self.is_recording.then_some(CallReply::RecordingStores).ok_or(CallRefusal::NoStores)
    }

    pub(super) fn end_recording(&mut self, below: &mut dyn GuestAccess) {
        if std::mem::take(&mut self.is_recording) {
            below.order_plugin(&PluginOrder::End { slot: self.slot });
        }
    }

    /// The written pages, unless they are not known or do not fit into a reply.
    fn report_writes(&mut self) -> CallReply {
        let written = CallReply::Written(self.report.report_runs());
        let fits = message::encode_message(&written).len() + crate::key::SEAL_BYTES
            <= SlotField::ANSWER_BYTES;
        if self.replied_anything || !fits { CallReply::Anything } else { written }
    }

    /// Records that these physical pages were written.
    pub(super) fn mark_written(&mut self, written: &[Page]) {
        self.pages.mark_written(written, &mut self.report);
    }
}
