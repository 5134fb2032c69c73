//! The remembered translation: it costs nothing while nothing moves, and misses nothing, whatever
//! the guest's kernel does at any moment.

use std::collections::BTreeSet;

use firn_calls::PartNumber;

use super::busy_guest::{AREAS, BusyGuest, PART_BYTES};
use super::*;

/// The count of sequences that each test runs.
const SEEDS: u64 = 500;

/// A server for an application with areas of any size.
fn large_server() -> SessionServer {
    let text = format!("[applications.ledger]\nkey = \"{}\"\npages = 1000000", "07".repeat(32));
    SessionServer::new(CallPolicy::parse(&text).unwrap())
}

#[test]
fn a_commit_translates_only_what_may_have_moved() {
    const PARTS: u64 = 64;
    const START: u64 = 0x4000_0000;
    let (mut server, mut guest) = (large_server(), Guest::new());
    guest.map(OWN, START, 10, (PARTS * PartNumber::PAGES) as u32);
    let mut caller = open(&mut server, &mut guest, 0, OWN).unwrap();
    let pages = (PARTS * PartNumber::PAGES) as u32;
    follow(&mut server, &mut guest, 0, &mut caller, START, pages).unwrap();
    let mut commit = |guest: &mut Guest| {
        guest.translated = 0;
        let written = runs(&collect(&mut server, guest, 0, &mut caller).unwrap());
        (written, guest.translated)
    };
    assert_eq!(commit(&mut guest), (vec![], PARTS as usize), "tables may have changed since");
    assert_eq!(commit(&mut guest), (vec![], 0));
    guest.write(OWN, START + 5 * PART_BYTES);
    assert_eq!(commit(&mut guest), (vec![(0, 5 * 512, 1)], 0));
    // The processor sets the page's dirty bit.
    guest.write(OWN, START + 6 * PART_BYTES);
    guest.touch_table(OWN, START + 6 * PART_BYTES);
    assert_eq!(commit(&mut guest), (vec![(0, 6 * 512, 1)], 1));
    guest.place(OWN, START + 7 * PAGE, Ok(Page(900_000)));
    assert_eq!(commit(&mut guest), (vec![(0, 7, 1)], 1));
    guest.replace_table(OWN, PartNumber(START / PART_BYTES + 3));
    // The new table was written before the host first asked for its writes.
    assert_eq!(commit(&mut guest), (vec![], 2));
    assert_eq!(commit(&mut guest), (vec![], 0));
    guest.write(OWN, START + 7 * PAGE);
    assert_eq!(commit(&mut guest), (vec![(0, 7, 1)], 0));
}

#[test]
fn areas_that_share_parts_and_pages_receive_each_their_own() {
    const START: u64 = 0x4000_0000;
    let (mut server, mut guest) = (large_server(), Guest::new());
    guest.map(OWN, START, 10, 1024);
    let mut caller = open(&mut server, &mut guest, 0, OWN).unwrap();
    for (first, pages) in [(0, 4), (2, 512), (2, 1), (600, 3)] {
        follow(&mut server, &mut guest, 0, &mut caller, START + first * PAGE, pages).unwrap();
    }
    collect(&mut server, &mut guest, 0, &mut caller).unwrap();
    let mut commit =
        |guest: &mut Guest| runs(&collect(&mut server, guest, 0, &mut caller).unwrap());
    guest.write(OWN, START + 2 * PAGE);
    guest.write(OWN, START + 601 * PAGE);
    assert_eq!(commit(&mut guest), [(0, 2, 1), (1, 0, 1), (2, 0, 1), (3, 1, 1)]);
    guest.place(OWN, START + 3 * PAGE, Ok(Page(5000)));
    guest.place(OWN, START + 513 * PAGE, Ok(Page(5001)));
    assert_eq!(commit(&mut guest), [(0, 3, 1), (1, 1, 1), (1, 511, 1)]);
    let forget = caller.seal_request(&CallRequest::Forget(FollowedAreaId(1)));
    caller.accept_done(&ask(&mut server, &mut guest, 0, &caller, &forget)).unwrap();
    collect(&mut server, &mut guest, 0, &mut caller).unwrap();
    for page in [2, 3, 100, 513] {
        guest.write(OWN, START + page * PAGE);
    }
    let written = runs(&collect(&mut server, &mut guest, 0, &mut caller).unwrap());
    assert_eq!(written, [(0, 2, 2), (2, 0, 1)]);
}

/// Two sessions of an application in a busy guest, with the same areas.
struct BusySessions {
    server: SessionServer,
    guest: BusyGuest,
    callers: [Caller; 2],
}

impl BusySessions {
    fn open(seed: u64, steps: u64) -> Self {
        let (mut server, mut guest) = (large_server(), BusyGuest::new(seed));
        let callers = [0, 1].map(|slot| open(&mut server, &mut guest.guest, slot, OWN).unwrap());
        guest.steps = steps;
        let mut this = Self { server, guest, callers };
        for slot in 0..2 {
            AREAS.into_iter().for_each(|(first, pages)| this.follow(slot, first, pages));
        }
        this
    }

    fn follow(&mut self, slot: usize, first: u64, pages: u32) {
        loop {
            (first..first + u64::from(pages)).for_each(|page| self.guest.swap_in(page * PAGE));
            let follow = CallRequest::Follow { start: first * PAGE, pages };
            let request = self.callers[slot].seal_request(&follow);
            // While a page is not mapped the host refuses.
            let answer = self.answer(slot, &request);
            if self.callers[slot].accept_following(&answer).is_ok() {
                break;
            }
        }
    }

    fn answer(&mut self, slot: usize, request: &[u8]) -> Vec<u8> {
        let asked = self.callers[slot].request_number();
        self.server.answer_request(slot as u32, asked, Some(request), &mut self.guest).bytes
    }

    /// The addresses of the pages that the host reports.
    fn collect(&mut self, slot: usize) -> BTreeSet<u64> {
        let request = self.callers[slot].collect_request();
        let answer = self.answer(slot, &request);
        let written = self.callers[slot].accept_written(&answer).unwrap();
        if written == WrittenPages::Anything {
            assert!(self.guest.saves > 0, "no reason not to know");
            return self.guest.pages.iter().copied().collect();
        }
        let pages = runs(&written).into_iter().flat_map(|(area, first, pages)| {
            let start = AREAS[usize::from(area)].0 + u64::from(first);
            (start..start + u64::from(pages)).map(|page| page * PAGE)
        });
        pages.collect()
    }
}

/// What the application saw at the last reply is what it sees now, but for the reported pages.
#[test]
fn nothing_is_missed_while_the_kernel_moves_pages() {
    for seed in 0..SEEDS {
        let mut sessions = BusySessions::open(seed, seed % 3);
        sessions.guest.with_saves = seed % 2 == 0;
        let mut seen = [0, 1].map(|_| sessions.guest.all_contents());
        for commit in 0..60 {
            for _ in 0..sessions.guest.dice.below(4) {
                sessions.guest.write_page();
                sessions.guest.disturb_some();
            }
            let slot = sessions.guest.dice.below(2) as usize;
            let told = sessions.collect(slot);
            let now = sessions.guest.all_contents();
            for ((address, before), now) in sessions.guest.pages.iter().zip(&seen[slot]).zip(&now) {
                assert!(
                    before == now || told.contains(address),
                    "seed {seed}, commit {commit}, session {slot}: {address:#x} was not reported"
                );
            }
            seen[slot] = now;
        }
    }
}

/// The host reports what looks at the whole translation would find, or would have found at the look
/// before, and nothing else.
#[test]
fn nothing_is_reported_without_reason() {
    for seed in 0..SEEDS {
        let mut session = BusySessions::open(seed, 0);
        session.collect(0);
        let mut reports = 0;
        for commit in 0..40 {
            session.guest.moved.rotate_left(1);
            session.guest.written.rotate_left(1);
            session.guest.moved[1].clear();
            session.guest.written[1].clear();
            for _ in 0..session.guest.dice.below(3) {
                session.guest.disturb();
                session.guest.write_page();
            }
            let told = session.collect(0);
            let guest = &session.guest;
            for address in &told {
                let is_absent = guest.guest.physical(OWN, *address).is_none();
                let has_reason =
                    guest.moved.iter().chain(&guest.written).any(|pages| pages.contains(address));
                assert!(
                    is_absent || has_reason,
                    "seed {seed}, commit {commit}: {address:#x} was reported"
                );
            }
            reports += told.len();
        }
        assert!(reports > 0, "seed {seed}");
    }
}
