//! A session that is open: one application, one address space, its areas.

use std::collections::BTreeMap;

use firn_types::{GuestPhys, PAGE_SIZE, Page};

use super::area::Area;
use super::{Below, Pending};
use crate::key::{Proof, SealKey, Speaker};
use crate::message::{self, Answer, AreaId, Refusal, Request, Run};
use crate::noting::{NoteOrder, Order, WORD};
use crate::window::Place;

/// Areas that a session has at most.
const AREAS_MAX: u16 = 256;
/// Where the part of an address space ends that belongs to programs, on x86-64 with four levels of tables. Linux gives a
/// program more only if it asks for it.
const PROGRAMS_END: u64 = 1 << 47;

/// See the module documentation.
pub(super) struct Session {
    pub(super) name: String,
    slot: u32,
    seal: SealKey,
    /// The last request that was answered: each is, once.
    last: u64,
    space: GuestPhys,
    proof_at: u64,
    proof: Proof,
    pages_max: u32,
    areas: BTreeMap<AreaId, Area>,
    next: u16,
    /// Since when all writes are known.
    era: Option<u64>,
    /// The `Collect` that was answered last.
    told: u64,
    /// That answer was `Anything`.
    told_anything: bool,
    /// At the last sweep its process was not to be found.
    is_suspect: bool,
    /// Its stores are noted from below.
    is_noting: bool,
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { name, space, areas, .. } = self;
        f.debug_struct("Session")
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

    /// Whether its process is gone: was not to be found twice. The guest's kernel may have the proof out of memory for a while.
    pub(super) fn is_gone(&mut self, below: &mut dyn Below) -> bool {
        let is_missing = self.check_space(below).is_err();
        std::mem::replace(&mut self.is_suspect, is_missing) && is_missing
    }

    /// The next request of this session, if it is one. The window has the low half of its number.
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

    /// The answer, and which pages were found to be written on the way.
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

    /// A root that is not the process's any more may be another's.
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
        // What was written there before is no news, but for those who follow it already.
        let found = below.written(&distinct(area.places()));
        let (era, found) = found.ok_or(Refusal::Unavailable)?;
        // Others that are followed since an earlier era have missed something.
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

    /// What was written, unless that is not known or does not fit an answer.
    fn tell(&mut self) -> Answer {
        let mut runs: Vec<Run> = Vec::new();
        self.areas.iter_mut().for_each(|(id, area)| area.tell(*id, &mut runs));
        let written = Answer::Written(runs);
        let fits = message::bytes(&written).len() + crate::key::SEAL_BYTES <= Place::ANSWER_BYTES;
        if self.told_anything || !fits { Answer::Anything } else { written }
    }

    /// These pages, in ascending order, were written.
    pub(super) fn note(&mut self, written: &[Page]) {
        self.areas.values_mut().for_each(|area| area.note(written));
    }
}

/// In ascending order, each once.
fn distinct(pages: impl Iterator<Item = Page>) -> Vec<Page> {
    let mut pages: Vec<Page> = pages.collect();
    pages.sort_unstable();
    pages.dedup();
    pages
}
