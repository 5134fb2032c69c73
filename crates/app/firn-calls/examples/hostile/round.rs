//! One round: an application, its host, and a hostile program between them. What happens follows
//! from the dice alone.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU32, Ordering};

use firn_calls::{
    ApplicationKey, CallPolicy, CallRequest, CallWindow, Caller, ReportReader, SLOT_BYTES,
    SessionServer, StoreReport, WORD, WrittenPages,
};
use firn_types::GuestPhys;

#[expect(dead_code, reason = "the tests use the rest of it")]
#[path = "../../tests/guest/mod.rs"]
mod guest;

use guest::{Guest, PAGE};

const SLOTS: usize = 3;
const PAGES: u32 = 16;
const START: u64 = 0x40_0000;
const PROOF_AT: u64 = 0x10_0000;
const OWN: GuestPhys = GuestPhys(0x1000);
/// Where the application ends epochs.
const END: u64 = 0x70_0018;
const WORDS: u64 = PAGE / WORD;
/// Steps of a round at most.
pub const STEPS: usize = 400;

/// Where decisions come from.
pub enum Dice {
    /// SplitMix64 (Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA
    /// 2014).
    Seed(u64),
    /// These bytes, and zeros after them.
    Bytes(std::vec::IntoIter<u8>),
}

impl Dice {
    fn next(&mut self) -> u64 {
        match self {
            Self::Seed(state) => {
                *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
                let mut x = *state;
                x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
                x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
                x ^ (x >> 31)
            }
            // Two bytes are enough for most decisions, and leave more of them.
            Self::Bytes(bytes) => [bytes.next(), bytes.next()]
                .into_iter()
                .fold(0, |number, byte| number << 8 | u64::from(byte.unwrap_or(0))),
        }
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }

    fn is_spent(&self) -> bool {
        matches!(self, Self::Bytes(bytes) if bytes.len() == 0)
    }
}

/// The application, once it may call.
struct Application {
    caller: Caller,
    /// What it reads of its stores, while they are recorded.
    reader: Option<ReportReader>,
}

/// See the module documentation.
pub struct Round {
    dice: Dice,
    words: Vec<AtomicU32>,
    server: SessionServer,
    guest: Guest,
    asked: [u32; SLOTS],
    /// All requests and answers that anybody could have seen.
    seen: Vec<Vec<u8>>,
    honest_searches: usize,
    /// Answers that the application took for the host's.
    pub accepted: usize,
}

impl Round {
    /// A round without any message so far.
    pub fn new(dice: Dice) -> Self {
        let policy = format!("[applications.ledger]\nkey = \"{}\"", "07".repeat(32));
        let policy = CallPolicy::parse(&policy).unwrap_or_default();
        let mut guest = Guest::new();
        guest.map(OWN, START, 10, PAGES);
        guest.recorded = Some(Default::default());
        Self {
            dice,
            words: (0..(SLOTS + 1) * SLOT_BYTES / 4).map(|_| AtomicU32::new(0)).collect(),
            server: SessionServer::new(policy),
            guest,
            asked: [0; SLOTS],
            seen: Vec::new(),
            honest_searches: 0,
            accepted: 0,
        }
    }

    fn window(&self) -> CallWindow<'_> {
        CallWindow::new(&self.words).unwrap_or_else(|_| unreachable!("it is large enough"))
    }

    /// One turn of the host over all slots.
    fn host(&mut self) {
        self.window().announce_service(1);
        for number in 0..SLOTS {
            let window = CallWindow::new(&self.words).unwrap_or_else(|_| unreachable!());
            let Some(slot) = window.slot(number) else { continue };
            let asked = slot.request_number();
            if asked == self.asked[number] {
                continue;
            }
            self.asked[number] = asked;
            let request = slot.read_request();
            let answer = self
                .server
                .answer_request(number as u32, asked, request.as_deref(), &mut self.guest)
                .bytes;
            slot.write_reply(asked, &answer);
            self.seen.extend(request);
            self.seen.push(answer);
        }
        if self.dice.below(50) == 0 {
            self.server.sweep_sessions(&mut self.guest);
        }
    }

    /// Something hostile, or nothing.
    fn disturb(&mut self) {
        match self.dice.below(14) {
            0 => {
                let at = self.dice.below(self.words.len());
                self.words[at].store(self.dice.next() as u32, Ordering::Relaxed);
            }
            1 => {
                // Control words, where it hurts.
                let slot = 1 + self.dice.below(SLOTS);
                let at = slot * SLOT_BYTES / 4 + self.dice.below(10);
                let value = [0, 1, 2, 3, u32::MAX, self.dice.next() as u32][self.dice.below(6)];
                self.words[at].store(value, Ordering::Relaxed);
            }
            2 | 3 => self.play_again(),
            4 => {
                let own = [self.dice.next() as u8; 32];
                let mut other = Caller::new("ledger", ApplicationKey::new([8; 32]), 0, own);
                let hello = other.hello_request();
                self.post(&hello);
            }
            // A store at the address where the application ends epochs, or at one of its area.
            5 => self.plugin(),
            6 => {
                let at = START + self.dice.below((u64::from(PAGES) * PAGE) as usize) as u64;
                self.store(at);
            }
            _ => {}
        }
    }

    /// The plugin, when something is stored to an end word.
    fn plugin(&mut self) {
        let window = CallWindow::new(&self.words).unwrap_or_else(|_| unreachable!());
        for (number, stores) in self.guest.recorded.iter_mut().flatten() {
            let Some(slot) = window.slot(*number as usize) else { continue };
            let ended =
                stores.is_end_word(END).then(|| stores.end_epoch(slot.read_end_word())).flatten();
            if let Some(ended) = ended {
                slot.write_report(ended.epoch, &ended.report);
                self.seen.push(ended.report);
            }
        }
    }

    /// The plugin, when something is stored by anybody.
    fn store(&mut self, at: u64) {
        self.guest
            .recorded
            .iter_mut()
            .flatten()
            .for_each(|(_, stores)| stores.record_store(at, WORD));
    }

    /// An earlier message, unchanged or modified.
    fn play_again(&mut self) {
        if self.seen.is_empty() {
            return;
        }
        let recent = self.seen.len().min(20);
        let at = self.seen.len() - 1 - self.dice.below(recent);
        let mut bytes = self.seen[at].clone();
        for _ in 0..self.dice.below(3) {
            match self.dice.below(2) {
                0 if !bytes.is_empty() => {
                    let bit = self.dice.below(bytes.len() * 8);
                    bytes[bit / 8] ^= 1 << (bit % 8);
                }
                _ => bytes.truncate(self.dice.below(bytes.len() + 1)),
            }
        }
        self.post(&bytes);
    }

    fn post(&mut self, bytes: &[u8]) {
        let number = self.dice.below(SLOTS);
        let sequence = self.asked[number].wrapping_add(self.dice.below(4) as u32).wrapping_sub(1);
        let (is_answer, is_told) = (self.dice.below(3) == 0, self.dice.below(4) == 0);
        if let Some(slot) = self.window().slot(number) {
            let fits = bytes.len() <= 1 << 10;
            match is_answer {
                true if is_told => slot.write_report(sequence, bytes),
                true => slot.write_reply(sequence, bytes),
                false if fits => slot.write_request(sequence, bytes),
                false => {}
            }
        }
    }

    /// The application asks, and takes what it finds in the place of the answer.
    fn ask(&mut self, caller: &Caller, request: &[u8]) -> Option<Vec<u8>> {
        self.window().slot(0)?.write_request(caller.request_number(), request);
        self.seen.push(request.to_vec());
        self.disturb();
        self.host();
        self.disturb();
        let slot = self.window().slot(0)?;
        slot.is_answered(caller.request_number()).then(|| slot.read_reply())?
    }

    /// A session of the application, if the others let it come about.
    fn open(&mut self) -> Option<Caller> {
        let own = [self.dice.next() as u8; 32];
        let mut caller = Caller::new("ledger", ApplicationKey::new([7; 32]), 0, own);
        let hello = caller.hello_request();
        let proof = caller.accept_challenge(&self.ask(&caller, &hello)?).ok()?;
        self.guest.proofs.insert((OWN, PROOF_AT), proof);
        let prove = caller.seal_request(&CallRequest::Prove { at: PROOF_AT });
        self.honest_searches += 1;
        let answer = self.ask(&caller, &prove)?;
        caller.accept_done(&answer).ok()?;
        let follow = caller.seal_request(&CallRequest::Follow { start: START, pages: PAGES });
        let answer = self.ask(&caller, &follow)?;
        caller.accept_following(&answer).ok()?;
        Some(caller)
    }

    /// From now on its stores are recorded, unless the others prevent it.
    fn begin_recording(&mut self, own: &mut Application) {
        let request = own.caller.seal_request(&CallRequest::RecordStores { end: END });
        let answer = self.ask(&own.caller, &request);
        own.reader = answer.and_then(|answer| own.caller.accept_recording(&answer).ok());
    }

    /// What it has stored, as it was recorded.
    fn read_recorded(&mut self, own: &mut Application) -> Option<BTreeSet<u64>> {
        let mut reader = own.reader.take()?;
        let (epoch, token) = reader.current_epoch();
        self.window().slot(0)?.end_epoch(token);
        // Another processor may be quicker than the store is noticed.
        if self.dice.below(8) == 0 {
            self.disturb();
        }
        self.plugin();
        self.disturb();
        let reported = self.window().slot(0)?.read_report(epoch)?;
        let StoreReport::Words(runs) = reader.open_report(&reported)? else { return None };
        own.reader = Some(reader);
        let words = |first: u32, words: u32| u64::from(first)..u64::from(first + words);
        Some(runs.iter().flat_map(|run| words(run.first, run.words)).collect())
    }

    /// The words written since the last reply; whole pages where the host reports pages.
    fn collect(&mut self, own: &mut Application) -> Option<BTreeSet<u64>> {
        if let Some(words) = self.read_recorded(own) {
            return Some(words);
        }
        if self.dice.below(2) == 0 {
            self.begin_recording(own);
        }
        let reported = self.collect_pages(own);
        if reported.is_none() {
            // What was written before stores were recorded is not known yet.
            own.reader = None;
        }
        reported
    }

    fn collect_pages(&mut self, own: &mut Application) -> Option<BTreeSet<u64>> {
        let request = own.caller.collect_request();
        let answer = self.ask(&own.caller, &request)?;
        let words = |pages: std::ops::Range<u32>| {
            u64::from(pages.start) * WORDS..u64::from(pages.end) * WORDS
        };
        Some(match own.caller.accept_written(&answer).ok()? {
            WrittenPages::Anything => words(0..PAGES).collect(),
            WrittenPages::Runs(runs) => {
                runs.iter().flat_map(|run| words(run.first..run.first + run.pages)).collect()
            }
        })
    }

    /// The application writes a few words.
    fn write(&mut self, dirty: &mut BTreeSet<u64>) {
        for _ in 0..self.dice.below(4) {
            let page = self.dice.below(PAGES as usize) as u64;
            let word = page * WORDS + self.dice.below(4) as u64;
            self.guest.write(OWN, START + page * PAGE);
            self.store(START + word * WORD);
            dirty.insert(word);
        }
    }

    /// Fails with what went wrong.
    ///
    /// # Errors
    /// What was missed, or what the host did for a stranger.
    pub fn run(&mut self) -> Result<(), String> {
        let (mut application, mut dirty) = (None, BTreeSet::new());
        for _ in 0..STEPS {
            if self.dice.is_spent() {
                break;
            }
            let Some(mut own) = application.take() else {
                application = self.open().map(|caller| Application { caller, reader: None });
                // What was written before belongs to another session.
                dirty.clear();
                continue;
            };
            self.write(&mut dirty);
            if self.dice.below(40) == 0 {
                self.guest.era = self.guest.era.map(|era| era + 1);
            }
            if let Some(reported) = self.collect(&mut own) {
                self.accepted += 1;
                if !dirty.is_subset(&reported) {
                    return Err(format!("written {dirty:?}, reported {reported:?}"));
                }
                dirty.clear();
            }
            // Now and then it ends without a word.
            application = (self.dice.below(100) != 0).then_some(own);
        }
        match self.guest.searches <= self.honest_searches {
            true => Ok(()),
            false => Err("the host looked for an address space for who has no key".to_owned()),
        }
    }
}
