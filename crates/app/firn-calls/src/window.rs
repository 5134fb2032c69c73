//! The call window: memory that the application and the host share.
//!
//! ```text
//!   byte 0        header      "FIRNCALL", version, count of slots, and the host's number of this service
//!   16 KiB        slot 0      one application
//!   32 KiB        slot 1
//!   ...
//!
//!   slot:  0      owner       0, or the number that an application chose when it claimed the slot
//!          4      asked       number of the request   written last by the application
//!          8      length of the request
//!         12      answered    number of the request that the reply belongs to   written last by the host
//!         16      length of the reply
//!         24      end word    8 bytes, a store to which ends an epoch   by the application, where stores are recorded
//!         32      reported    the epoch that the report describes       written last by the plugin
//!         36      length of the report
//!         64      request     up to 1 KiB
//!       1088      answer      reply or report, up to the end of the slot
//! ```
//!
//! Words are little-endian, as on every machine that Firn runs on. The host never reads here what
//! it wrote itself, copies a request once before it parses it, and checks the copy: programs of the
//! guest can write everywhere, at any time.

use std::sync::atomic::{AtomicU32, Ordering};

use thiserror::Error;

/// The size of the header, and of each slot, in bytes.
pub const SLOT_BYTES: usize = 16 << 10;
const SLOT_WORDS: usize = SLOT_BYTES / 4;
const MAGIC: [u32; 2] = [u32::from_le_bytes(*b"FIRN"), u32::from_le_bytes(*b"CALL")];
const VERSION: u32 = 1;

const OWNER: usize = 0;
const ASKED: usize = 1;
const ASKED_LEN: usize = 2;
const ANSWERED: usize = 3;
const ANSWERED_LEN: usize = 4;
const END: [usize; 2] = [6, 7];
const REPORTED_EPOCH: usize = 8;
const REPORT_LEN: usize = 9;
const REQUEST: SlotField = SlotField { word: 16, bytes: 1 << 10 };
const ANSWER: SlotField = SlotField { word: 16 + 256, bytes: SLOT_BYTES - 64 - (1 << 10) };

/// A field of a slot that holds a message: the request, or the answer.
#[derive(Clone, Copy, Debug)]
pub struct SlotField {
    word: usize,
    bytes: usize,
}

impl SlotField {
    /// The maximum size of a reply in bytes.
    pub const ANSWER_BYTES: usize = ANSWER.bytes;
    /// The maximum size of a request in bytes.
    pub const REQUEST_BYTES: usize = REQUEST.bytes;
}

/// Why the memory is no usable window.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum WindowError {
    /// It is smaller than a header and a slot.
    #[error("the window has {0} bytes: at least {min} are needed", min = 2 * SLOT_BYTES)]
    Small(usize),
    /// No host serves it.
    #[error("the host does not serve calls by this device (yet)")]
    NotServed,
    /// The host uses another version.
    #[error("the host speaks version {0} of calls, this library version {VERSION}")]
    Version(u32),
    /// All slots are claimed.
    #[error("all {0} slots are taken")]
    Full(usize),
}

/// The window, for either side.
#[derive(Clone, Copy, Debug)]
pub struct CallWindow<'w>(&'w [AtomicU32]);

impl<'w> CallWindow<'w> {
    /// A window over memory that both sides share.
    ///
    /// # Errors
    /// If it is too small.
    pub fn new(words: &'w [AtomicU32]) -> Result<Self, WindowError> {
        let is_enough = words.len() >= 2 * SLOT_WORDS;
        is_enough.then_some(Self(words)).ok_or(WindowError::Small(words.len() * 4))
    }

    /// The count of slots: of applications that can call at a time.
    pub fn slot_count(self) -> usize {
        self.0.len() / SLOT_WORDS - 1
    }

    /// The slot of this number, if it exists.
    pub fn slot(self, number: usize) -> Option<WindowSlot<'w>> {
        let at = number.checked_add(1)?.checked_mul(SLOT_WORDS)?;
        self.0.get(at..at.checked_add(SLOT_WORDS)?).map(WindowSlot)
    }

    /// Host: announces that calls are served, by a service of this number. The host repeats this,
    /// as programs of the guest can overwrite it.
    pub fn announce_service(self, service: u32) {
        self.0[2].store(VERSION, Ordering::Relaxed);
        self.0[3].store(self.slot_count() as u32, Ordering::Relaxed);
        self.0[4].store(service, Ordering::Relaxed);
        self.0[1].store(MAGIC[1], Ordering::Relaxed);
        self.0[0].store(MAGIC[0], Ordering::Release);
    }

    /// Host: withdraws the announcement.
    pub fn end_service(self) {
        self.0[0].store(0, Ordering::Release);
    }

    /// Host: clears what an earlier service left behind. An application that waits for a reply
    /// finds that it has lost its slot.
    pub fn clear(self) {
        self.end_service();
        for slot in (0..self.slot_count()).filter_map(|number| self.slot(number)) {
            slot.clear();
        }
    }

    /// Application: the number of the service that serves this window.
    ///
    /// # Errors
    /// If no service is announced.
    pub fn service_number(self) -> Result<u32, WindowError> {
        let is_served = self.0[0].load(Ordering::Acquire) == MAGIC[0]
            && self.0[1].load(Ordering::Relaxed) == MAGIC[1];
        let version = self.0[2].load(Ordering::Relaxed);
        match (is_served, version) {
            (false, _) => Err(WindowError::NotServed),
            (true, VERSION) => Ok(self.0[4].load(Ordering::Relaxed)),
            (true, other) => Err(WindowError::Version(other)),
        }
    }

    /// Application: claims a free slot for an owner number that is not 0. Returns the slot's
    /// number.
    ///
    /// # Errors
    /// If all slots are claimed.
    pub fn claim_slot(self, owner: u32) -> Result<usize, WindowError> {
        let is_mine = |number: &usize| self.slot(*number).is_some_and(|slot| slot.try_claim(owner));
        (0..self.slot_count()).find(is_mine).ok_or(WindowError::Full(self.slot_count()))
    }
}

/// The part of the window for one application.
#[derive(Clone, Copy, Debug)]
pub struct WindowSlot<'w>(&'w [AtomicU32]);

impl WindowSlot<'_> {
    fn try_claim(self, owner: u32) -> bool {
        let word = &self.0[OWNER];
        word.compare_exchange(0, owner, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// The owner number; 0 if the slot is free.
    pub fn owner(self) -> u32 {
        self.0[OWNER].load(Ordering::Acquire)
    }

    /// Application: releases the slot, if it still belongs to this owner.
    pub fn release_from(self, owner: u32) {
        let _ = self.0[OWNER].compare_exchange(owner, 0, Ordering::AcqRel, Ordering::Relaxed);
    }

    /// Host: resets the slot to its unused state.
    pub fn clear(self) {
        for word in [
            ASKED,
            ASKED_LEN,
            ANSWERED,
            ANSWERED_LEN,
            END[0],
            END[1],
            REPORTED_EPOCH,
            REPORT_LEN,
            OWNER,
        ] {
            self.0[word].store(0, Ordering::Release);
        }
    }

    /// Application: writes a request. The reply to the previous request must have arrived.
    pub fn write_request(self, sequence: u32, request: &[u8]) {
        self.write_range(REQUEST, request);
        self.0[ASKED_LEN].store(request.len() as u32, Ordering::Relaxed);
        self.0[ASKED].store(sequence, Ordering::Release);
    }

    /// Host: the number of the last request.
    pub fn request_number(self) -> u32 {
        self.0[ASKED].load(Ordering::Acquire)
    }

    /// Host: reads the last request. `None` if its length exceeds the space.
    pub fn read_request(self) -> Option<Vec<u8>> {
        self.read_range(REQUEST, self.0[ASKED_LEN].load(Ordering::Relaxed))
    }

    /// Host: writes the reply to a request. A reply has at most [`SlotField::ANSWER_BYTES`].
    pub fn write_reply(self, sequence: u32, answer: &[u8]) {
        self.write_range(ANSWER, answer);
        self.0[ANSWERED_LEN].store(answer.len() as u32, Ordering::Relaxed);
        self.0[ANSWERED].store(sequence, Ordering::Release);
    }

    /// Application: whether that request was answered.
    pub fn is_answered(self, sequence: u32) -> bool {
        self.0[ANSWERED].load(Ordering::Acquire) == sequence
    }

    /// Application: reads the last reply. `None` if its length exceeds the space.
    pub fn read_reply(self) -> Option<Vec<u8>> {
        self.read_range(ANSWER, self.0[ANSWERED_LEN].load(Ordering::Relaxed))
    }

    /// Application: the address of the end word in its memory.
    pub fn end_address(self) -> u64 {
        self.0[END[0]].as_ptr() as u64
    }

    /// Application: ends an epoch. If stores are recorded, the epoch's report is in the slot when
    /// this returns.
    pub fn end_epoch(self, token: u64) {
        self.0[END[0]].store(token as u32, Ordering::Release);
        self.0[END[1]].store((token >> 32) as u32, Ordering::Release);
    }

    /// Plugin: reads the end word.
    pub fn read_end_word(self) -> u64 {
        let [low, high] = END.map(|word| u64::from(self.0[word].load(Ordering::Acquire)));
        high << 32 | low
    }

    /// Plugin: writes the report of an epoch's stores, of at most [`SlotField::ANSWER_BYTES`].
    pub fn write_report(self, epoch: u32, report: &[u8]) {
        self.write_range(ANSWER, report);
        self.0[REPORT_LEN].store(report.len() as u32, Ordering::Relaxed);
        self.0[REPORTED_EPOCH].store(epoch, Ordering::Release);
    }

    /// Application: reads the report of this epoch, if there is one. Any program may have written
    /// it.
    pub fn read_report(self, epoch: u32) -> Option<Vec<u8>> {
        let is_reported = self.0[REPORTED_EPOCH].load(Ordering::Acquire) == epoch;
        is_reported.then(|| self.read_range(ANSWER, self.0[REPORT_LEN].load(Ordering::Relaxed)))?
    }

    fn write_range(self, field: SlotField, bytes: &[u8]) {
        debug_assert!(bytes.len() <= field.bytes);
        for (word, chunk) in self.0[field.word..].iter().zip(bytes.chunks(4)) {
            let mut whole = [0; 4];
            whole[..chunk.len()].copy_from_slice(chunk);
            word.store(u32::from_le_bytes(whole), Ordering::Relaxed);
        }
    }

    fn read_range(self, field: SlotField, len: u32) -> Option<Vec<u8>> {
        let len = usize::try_from(len).ok().filter(|&len| len <= field.bytes)?;
        let words = &self.0[field.word..field.word + len.div_ceil(4)];
        let mut bytes: Vec<u8> =
            words.iter().flat_map(|word| word.load(Ordering::Relaxed).to_le_bytes()).collect();
        bytes.truncate(len);
        Some(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory(bytes: usize) -> Vec<AtomicU32> {
        (0..bytes / 4).map(|_| AtomicU32::new(0)).collect()
    }

    #[test]
    fn a_request_and_its_answer_get_across() {
        let memory = memory(3 * SLOT_BYTES);
        let window = CallWindow::new(&memory).unwrap();
        assert_eq!(
            (window.slot_count(), window.service_number()),
            (2, Err(WindowError::NotServed))
        );
        window.announce_service(7);
        assert_eq!(window.service_number(), Ok(7));
        let slot = window.slot(window.claim_slot(5).unwrap()).unwrap();
        slot.write_request(1, b"hello");
        assert_eq!((slot.request_number(), slot.read_request().unwrap()), (1, b"hello".to_vec()));
        assert!(!slot.is_answered(1));
        slot.write_reply(1, &[9; SlotField::ANSWER_BYTES]);
        assert!(slot.is_answered(1));
        assert_eq!(slot.read_reply().unwrap(), [9; SlotField::ANSWER_BYTES]);
        assert_eq!(slot.read_request().unwrap(), b"hello", "an answer does not touch the request");
    }

    #[test]
    fn an_epoch_is_reported_where_answers_are() {
        let memory = memory(2 * SLOT_BYTES);
        let slot = CallWindow::new(&memory).unwrap().slot(0).unwrap();
        slot.end_epoch(0x1234_5678_9abc_def0);
        assert_eq!(slot.read_end_word(), 0x1234_5678_9abc_def0);
        assert_eq!(slot.end_address() % 8, 0);
        assert_eq!(slot.end_address(), &raw const memory[SLOT_WORDS + 6] as u64);
        slot.write_report(7, b"words");
        assert_eq!((slot.read_report(7), slot.read_report(8)), (Some(b"words".to_vec()), None));
        memory[SLOT_WORDS + REPORT_LEN].store(u32::MAX, Ordering::Relaxed);
        assert_eq!(slot.read_report(7), None);
    }

    #[test]
    fn slots_are_taken_once() {
        let memory = memory(3 * SLOT_BYTES);
        let window = CallWindow::new(&memory).unwrap();
        assert_eq!((window.claim_slot(1), window.claim_slot(2)), (Ok(0), Ok(1)));
        assert_eq!(window.claim_slot(3), Err(WindowError::Full(2)));
        window.slot(0).unwrap().release_from(2);
        assert_eq!(window.claim_slot(3), Err(WindowError::Full(2)), "it is another's");
        window.slot(0).unwrap().release_from(1);
        assert_eq!(window.claim_slot(3), Ok(0));
        window.clear();
        assert_eq!(window.slot(1).unwrap().owner(), 0);
        assert!(window.slot(2).is_none() && window.slot(usize::MAX).is_none());
    }

    #[test]
    fn lengths_are_not_believed() {
        let memory = memory(2 * SLOT_BYTES);
        let slot = CallWindow::new(&memory).unwrap().slot(0).unwrap();
        memory[SLOT_WORDS + ASKED_LEN].store(REQUEST.bytes as u32 + 1, Ordering::Relaxed);
        assert_eq!(slot.read_request(), None);
        memory[SLOT_WORDS + ANSWERED_LEN].store(u32::MAX, Ordering::Relaxed);
        assert_eq!(slot.read_reply(), None);
        assert_eq!(
            CallWindow::new(&memory[1..]).unwrap_err(),
            WindowError::Small(2 * SLOT_BYTES - 4)
        );
    }
}
