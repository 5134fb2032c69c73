//! An open call session: one application, one address space, its areas.

use std::collections::BTreeMap;

use firn_types::{GuestPhys, PAGE_SIZE, Page};

use super::area::Area;
use super::{Below, Pending};
use crate::key::{Proof, SealKey, Speaker};
use crate::message::{self, Answer, AreaId, Refusal, Request, Run};
use crate::noting::{NoteOrder, Order, WORD};
use crate::window::Place;

/// The maximum count of areas of a session.
const AREAS_MAX: u16 = 256;
/// The end of the part of an address space that belongs to programs, on x86-64 with four levels of
/// tables. Linux gives a program higher addresses only if the program requests them.
const PROGRAMS_END: u64 = 1 << 47;

/// An open session on the host's side.
pub(super) struct Session {
    pub(super) name: String,
    slot: u32,
    seal: SealKey,
    /// The number of the last answered request: each request is answered once.
    last: u64,
    space: GuestPhys,
    proof_at: u64,
    proof: Proof,
    pages_max: u32,
    areas: BTreeMap<AreaId, Area>,
    next: u16,
    /// The era since whose begin all writes are known.
    era: Option<u64>,
    /// The number of the `Collect` that was answered last.
    told: u64,
    /// Whether that reply was `Anything`.
    told_anything: bool,
    /// The last sweep did not find its process.
    is_suspect: bool,
    /// The plugin notes its stores.
    is_noting: bool,
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { name, space, areas, .. } = self;
        f.debug_struct("CallSession")
            .field("name", name)
            .field("space", space)
            .field("areas", areas)
            .finish_non_exhaustive()
    }
}

impl Session {
    pub(super) fn new(
        by: Pending,
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
            next: 0,
            era: None,
            told: 0,
            told_anything: false,
            is_suspect: false,
            is_noting: false,
        }
    }

    /// Whether its process is gone: two sweeps in a row did not find it. The guest's kernel may
    /// page out the proof for a while.
    pub(super) fn is_gone(&mut self, below: &mut dyn Below) -> bool {
        let is_missing = self.check_space(below).is_err();
        std::mem::replace(&mut self.is_suspect, is_missing) && is_missing
    }

    /// The next request of this session, if the bytes are one. The window has only the low half of
    /// its number.
    pub(super) fn unseal(&mut self, asked: u32, sealed: &[u8]) -> Option<(u64, Request)> {
        let ahead = u64::from(asked.wrapping_sub(self.last as u32));
        let sequence = self.last.checked_add(ahead).filter(|_| ahead > 0)?;
        let request = message::parse(self.seal.open(Speaker::Application, sequence, sealed)?)?;
        self.last = sequence;
        Some((sequence, request))
    }

    pub(super) fn seal(&self, sequence: u64, answer: &Answer) -> Vec<u8> {
        self.seal.seal(Speaker::Host, sequence, &message::bytes(answer))
    }

    /// Handles a request. Returns the reply, and the pages that were found written meanwhile.
    pub(super) fn answer(
        &mut self,
        sequence: u64,
        request: &Request,
        below: &mut dyn Below,
    ) -> (Answer, Vec<Page>) {
        let mut written = Vec::new();
        let answer = self.try_answer(sequence, request, below, &mut written);
        (answer.unwrap_or_else(Answer::Refused), written)
    }

    fn try_answer(
        &mut self,
        sequence: u64,
        request: &Request,
        below: &mut dyn Below,
        written: &mut Vec<Page>,
    ) -> Result<Answer, Refusal> {
        match *request {
            Request::Hello { .. } | Request::Prove { .. } => Err(Refusal::Early),
            Request::Bye => Ok(Answer::Done),
            Request::Forget(id) => {
                self.end_noting(below);
                self.areas.remove(&id).map(|_| Answer::Done).ok_or(Refusal::NoArea)
            }
            Request::Follow { start, pages } => self.follow(start, pages, below, written),
            Request::Collect { known } => self.collect(sequence, known, below, written),
            Request::Note { end } => self.begin_noting(sequence, end, below),
        }
    }

    /// Checks that the address space still has the proof. A page-table root that the process has
    /// lost may belong to another.
    fn check_space(&self, below: &mut dyn Below) -> Result<(), Refusal> {
        let is_there = below.has(self.space, self.proof_at, &self.proof);
        is_there.then_some(()).ok_or(Refusal::Gone(self.proof_at))
    }

    fn follow(
        &mut self,
        start: u64,
        pages: u32,
        below: &mut dyn Below,
        written: &mut Vec<Page>,
    ) -> Result<Answer, Refusal> {
        self.check_space(below)?;
        self.check_place(start, pages)?;
        self.end_noting(below);
        let places: Result<Vec<Page>, Refusal> =
            below.translate(self.space, start, pages).into_iter().collect();
        let area = Area::new(start, places?);
        // Earlier writes there are no news for this session, but for sessions that already follow
        // these pages.
        let found = below.written(&distinct(area.places()));
        let (era, found) = found.ok_or(Refusal::Unavailable)?;
        // Areas followed since an earlier era have missed writes.
        if self.era != Some(era) {
            self.areas.values_mut().for_each(Area::note_all);
        }
        self.era = Some(era);
        *written = found;
        self.note(written);
        let id = AreaId(self.next);
        self.next += 1;
        self.areas.insert(id, area);
        Ok(Answer::Following(id))
    }

    fn check_place(&self, start: u64, pages: u32) -> Result<(), Refusal> {
        let bytes = u64::from(pages) * PAGE_SIZE as u64;
        let end = start.checked_add(bytes).ok_or(Refusal::Misplaced(start))?;
        if start % PAGE_SIZE as u64 != 0 || pages == 0 {
            return Err(Refusal::Misplaced(start));
        }
        if end > PROGRAMS_END {
            return Err(Refusal::Kernel(start));
        }
        let followed: u32 = self.areas.values().map(Area::pages).sum();
        if pages > self.pages_max.saturating_sub(followed) {
            return Err(Refusal::TooMuch(self.pages_max));
        }
        let has_room = self.areas.len() < usize::from(AREAS_MAX) && self.next < u16::MAX;
        has_room.then_some(()).ok_or(Refusal::TooMany(AREAS_MAX))
    }

    fn collect(
        &mut self,
        sequence: u64,
        known: u64,
        below: &mut dyn Below,
        written: &mut Vec<Page>,
    ) -> Result<Answer, Refusal> {
        self.check_space(below)?;
        if known == self.told {
            self.areas.values_mut().for_each(Area::acknowledge);
            self.told_anything = false;
        }
        self.told = sequence;
        for area in self.areas.values_mut() {
            area.moved(&below.translate(self.space, area.start, area.pages()));
        }
        let pages = distinct(self.areas.values().flat_map(Area::places));
        let (era, found) =
            below.written(&pages).map_or((None, Vec::new()), |(era, found)| (Some(era), found));
        *written = found;
        self.note(written);
        self.told_anything |= era.is_none() || era != self.era;
        self.era = era;
        Ok(self.tell())
    }

    fn begin_noting(
        &mut self,
        sequence: u64,
        end: u64,
        below: &mut dyn Below,
    ) -> Result<Answer, Refusal> {
        self.check_space(below)?;
        if end % WORD != 0 {
            return Err(Refusal::Misplaced(end));
        }
        if end >= PROGRAMS_END {
            return Err(Refusal::Kernel(end));
        }
        self.end_noting(below);
        let areas: Option<Vec<_>> = self.areas.iter().map(|(id, area)| area.noted(*id)).collect();
        let key = self.seal.noting(sequence);
        let order = areas.map(|areas| Order::Note(NoteOrder { slot: self.slot, key, end, areas }));
        self.is_noting = order.is_some_and(|order| below.order(&order));
        self.is_noting.then_some(Answer::Noting).ok_or(Refusal::NoStores)
    }

    pub(super) fn end_noting(&mut self, below: &mut dyn Below) {
        if std::mem::take(&mut self.is_noting) {
            below.order(&Order::End { slot: self.slot });
        }
    }

    /// The written pages, unless they are not known or do not fit into a reply.
    fn tell(&mut self) -> Answer {
        let mut runs: Vec<Run> = Vec::new();
        self.areas.iter_mut().for_each(|(id, area)| area.tell(*id, &mut runs));
        let written = Answer::Written(runs);
        let fits = message::bytes(&written).len() + crate::key::SEAL_BYTES <= Place::ANSWER_BYTES;
        if self.told_anything || !fits { Answer::Anything } else { written }
    }

    /// Records that these physical pages, in ascending order, were written.
    pub(super) fn note(&mut self, written: &[Page]) {
        self.areas.values_mut().for_each(|area| area.note(written));
    }
}

/// Sorts pages, and removes duplicates.
fn distinct(pages: impl Iterator<Item = Page>) -> Vec<Page> {
    let mut pages: Vec<Page> = pages.collect();
    pages.sort_unstable();
    pages.dedup();
    pages
}
