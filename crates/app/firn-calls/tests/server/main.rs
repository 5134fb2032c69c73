//! Tests of the server against a model guest: it must report exactly what was written, whatever
//! other programs do.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on fails")]

use std::collections::BTreeSet;

use firn_calls::{
    ApplicationKey, CallError, CallLogEvent, CallPolicy, CallRefusal, CallReply, CallRequest,
    Caller, FollowedAreaId, ReportReader, ServedCall, SessionServer, StoreReport, WordRun,
    WrittenPages,
};
use firn_types::{GuestPhys, Page};
use proptest::prelude::*;

mod busy_guest;
#[path = "../guest/mod.rs"]
mod guest;
mod translation;

use guest::{Guest, PAGE};

const KEY: [u8; 32] = [7; 32];
/// The process that the tests' application is.
const OWN: GuestPhys = GuestPhys(0x1000);
const OTHER: GuestPhys = GuestPhys(0x2000);
const PROOF_AT: u64 = 0x10_0000;

fn server() -> SessionServer {
    let key = "07".repeat(32);
    let text = format!(
        "[applications.ledger]\nkey = \"{key}\"\npages = 64\n[applications.other]\nkey = \"{key}\""
    );
    SessionServer::new(CallPolicy::parse(&text).unwrap())
}

fn caller(slot: u32) -> Caller {
    Caller::new("ledger", ApplicationKey::new(KEY), slot, [slot as u8 + 100; 32])
}

/// Asks, with the answer as it is.
fn ask(
    server: &mut SessionServer,
    guest: &mut Guest,
    slot: u32,
    caller: &Caller,
    bytes: &[u8],
) -> Vec<u8> {
    server.answer_request(slot, caller.request_number(), Some(bytes), guest).bytes
}

/// Opens a session, with the proof in `space`.
fn open(
    server: &mut SessionServer,
    guest: &mut Guest,
    slot: u32,
    space: GuestPhys,
) -> Result<Caller, CallError> {
    let mut caller = caller(slot);
    let hello = caller.hello_request();
    let proof = caller.accept_challenge(&ask(server, guest, slot, &caller, &hello))?;
    let at = PROOF_AT + u64::from(slot) * PAGE;
    guest.proofs.insert((space, at), proof);
    let prove = caller.seal_request(&CallRequest::Prove { at });
    caller.accept_done(&ask(server, guest, slot, &caller, &prove))?;
    Ok(caller)
}

fn follow(
    server: &mut SessionServer,
    guest: &mut Guest,
    slot: u32,
    caller: &mut Caller,
    start: u64,
    pages: u32,
) -> Result<FollowedAreaId, CallError> {
    let request = caller.seal_request(&CallRequest::Follow { start, pages });
    caller.accept_following(&ask(server, guest, slot, caller, &request))
}

fn collect(
    server: &mut SessionServer,
    guest: &mut Guest,
    slot: u32,
    caller: &mut Caller,
) -> Result<WrittenPages, CallError> {
    let request = caller.collect_request();
    let answer = ask(server, guest, slot, caller, &request);
    caller.accept_written(&answer)
}

fn runs(changed: &WrittenPages) -> Vec<(u16, u32, u32)> {
    match changed {
        WrittenPages::Runs(runs) => {
            runs.iter().map(|run| (run.area.0, run.first, run.pages)).collect()
        }
        WrittenPages::Anything => panic!("anything"),
    }
}

#[test]
fn an_application_receives_the_pages_that_it_wrote() {
    let (mut server, mut guest) = (server(), Guest::new());
    guest.map(OWN, 0x40_0000, 10, 4);
    guest.map(OWN, 0x80_0000, 50, 2);
    let mut caller = open(&mut server, &mut guest, 0, OWN).unwrap();
    guest.write(OWN, 0x40_0000);
    follow(&mut server, &mut guest, 0, &mut caller, 0x40_0000, 4).unwrap();
    follow(&mut server, &mut guest, 0, &mut caller, 0x80_0000, 2).unwrap();
    assert_eq!(runs(&collect(&mut server, &mut guest, 0, &mut caller).unwrap()), []);
    guest.write(OWN, 0x40_1000);
    guest.write(OWN, 0x40_2000);
    guest.write(OWN, 0x80_1000);
    let changed = collect(&mut server, &mut guest, 0, &mut caller).unwrap();
    assert_eq!(runs(&changed), [(0, 1, 2), (1, 1, 1)]);
    assert_eq!(runs(&collect(&mut server, &mut guest, 0, &mut caller).unwrap()), []);
    let forget = caller.seal_request(&CallRequest::Forget(FollowedAreaId(0)));
    caller.accept_done(&ask(&mut server, &mut guest, 0, &caller, &forget)).unwrap();
    guest.write(OWN, 0x40_1000);
    assert_eq!(runs(&collect(&mut server, &mut guest, 0, &mut caller).unwrap()), []);
    let bye = caller.seal_request(&CallRequest::Bye);
    let ServedCall { bytes: answer, event, .. } =
        server.answer_request(0, caller.request_number(), Some(&bye), &mut guest);
    assert_eq!(caller.accept_done(&answer), Ok(()));
    assert_eq!(event, Some(CallLogEvent::Closed { name: "ledger".into() }));
    assert!(collect(&mut server, &mut guest, 0, &mut caller).is_err());
}

#[test]
fn a_caller_without_the_key_is_refused() {
    let (mut server, mut guest) = (server(), Guest::new());
    let mut unknown = Caller::new("nobody", ApplicationKey::new(KEY), 0, [1; 32]);
    let hello = unknown.hello_request();
    let answer = ask(&mut server, &mut guest, 0, &unknown, &hello);
    assert_eq!(unknown.accept_challenge(&answer), Err(CallRefusal::Unknown.into()));

    let mut wrong = Caller::new("ledger", ApplicationKey::new([8; 32]), 0, [1; 32]);
    let hello = wrong.hello_request();
    let proof = wrong.accept_challenge(&ask(&mut server, &mut guest, 0, &wrong, &hello)).unwrap();
    guest.proofs.insert((OWN, PROOF_AT), proof);
    let prove = wrong.seal_request(&CallRequest::Prove { at: PROOF_AT });
    let answer = ask(&mut server, &mut guest, 0, &wrong, &prove);
    assert_eq!(wrong.accept_done(&answer), Err(CallError::NotTheHosts));
    assert_eq!(guest.searches, 0, "who has no key costs the host nothing");
}

#[test]
fn the_proof_must_be_in_one_address_space() {
    let (mut server, mut guest) = (server(), Guest::new());
    let mut caller = caller(0);
    let hello = caller.hello_request();
    let proof = caller.accept_challenge(&ask(&mut server, &mut guest, 0, &caller, &hello)).unwrap();
    for space in [OWN, OTHER] {
        guest.proofs.insert((space, PROOF_AT), proof);
    }
    let prove = caller.seal_request(&CallRequest::Prove { at: PROOF_AT });
    let answer = ask(&mut server, &mut guest, 0, &caller, &prove);
    assert_eq!(caller.accept_done(&answer), Err(CallRefusal::NotProven(PROOF_AT).into()));
}

#[test]
fn an_area_is_the_applications_own() {
    let (mut server, mut guest) = (server(), Guest::new());
    guest.map(OWN, 0x40_0000, 10, 65);
    guest.map(OTHER, 0x90_0000, 90, 1);
    guest.place(OWN, 0x50_0000, Err(CallRefusal::ReadOnly(0x50_0000)));
    let mut caller = open(&mut server, &mut guest, 0, OWN).unwrap();
    let mut refused =
        |start, pages| match follow(&mut server, &mut guest, 0, &mut caller, start, pages) {
            Err(CallError::Refused(refusal)) => refusal,
            other => panic!("{other:?}"),
        };
    assert_eq!(refused(0x90_0000, 1), CallRefusal::Unmapped(0x90_0000), "another process has it");
    assert_eq!(refused(0x50_0000, 1), CallRefusal::ReadOnly(0x50_0000));
    assert_eq!(refused(0xffff_8880_0000_0000, 1), CallRefusal::Kernel(0xffff_8880_0000_0000));
    assert_eq!(refused((1 << 47) - PAGE, 2), CallRefusal::Kernel((1 << 47) - PAGE));
    assert_eq!(refused(u64::MAX - PAGE + 1, 2), CallRefusal::Misplaced(u64::MAX - PAGE + 1));
    assert_eq!(refused(0x40_0001, 1), CallRefusal::Misplaced(0x40_0001));
    assert_eq!(refused(0x40_0000, 0), CallRefusal::Misplaced(0x40_0000));
    assert_eq!(refused(0x40_0000, 65), CallRefusal::TooMuch(64));
    assert_eq!(refused(0x40_0000, u32::MAX), CallRefusal::TooMuch(64));
}

#[test]
fn a_process_that_is_gone_is_not_followed() {
    let (mut server, mut guest) = (server(), Guest::new());
    guest.map(OWN, 0x40_0000, 10, 1);
    let mut caller = open(&mut server, &mut guest, 0, OWN).unwrap();
    follow(&mut server, &mut guest, 0, &mut caller, 0x40_0000, 1).unwrap();
    guest.proofs.clear();
    let gone = collect(&mut server, &mut guest, 0, &mut caller);
    assert_eq!(gone, Err(CallRefusal::Gone(PROOF_AT).into()));
}

#[test]
fn old_requests_and_lost_answers_lose_nothing() {
    let (mut server, mut guest) = (server(), Guest::new());
    guest.map(OWN, 0x40_0000, 10, 4);
    let mut caller = open(&mut server, &mut guest, 0, OWN).unwrap();
    follow(&mut server, &mut guest, 0, &mut caller, 0x40_0000, 4).unwrap();
    guest.write(OWN, 0x40_1000);
    let first = caller.collect_request();
    let number = caller.request_number();
    let lost = ask(&mut server, &mut guest, 0, &caller, &first);
    // Another program repeats the request, and overwrites the reply.
    let again = server.answer_request(0, number, Some(&first), &mut guest).bytes;
    assert_ne!(again, lost);
    assert_eq!(caller.accept_written(&again), Err(CallError::NotTheHosts));
    guest.write(OWN, 0x40_3000);
    let changed = collect(&mut server, &mut guest, 0, &mut caller).unwrap();
    assert_eq!(runs(&changed), [(0, 1, 1), (0, 3, 1)], "the first is told again");
    // A request of long ago.
    let ServedCall { bytes: answer, event, .. } =
        server.answer_request(0, number, Some(&first), &mut guest);
    assert!(caller.accept_written(&answer).is_err());
    assert!(matches!(event, Some(CallLogEvent::Refused { refusal: CallRefusal::Garbled, .. })));
    assert_eq!(runs(&collect(&mut server, &mut guest, 0, &mut caller).unwrap()), []);
}

#[test]
fn a_hello_of_another_process_ends_no_session() {
    let (mut server, mut guest) = (server(), Guest::new());
    guest.map(OWN, 0x40_0000, 10, 4);
    let mut own = open(&mut server, &mut guest, 0, OWN).unwrap();
    follow(&mut server, &mut guest, 0, &mut own, 0x40_0000, 4).unwrap();
    let mut other = Caller::new("other", ApplicationKey::new([9; 32]), 0, [1; 32]);
    let hello = other.hello_request();
    ask(&mut server, &mut guest, 0, &other, &hello);
    let prove = other.seal_request(&CallRequest::Prove { at: PROOF_AT });
    ask(&mut server, &mut guest, 0, &other, &prove);
    guest.write(OWN, 0x40_1000);
    assert_eq!(runs(&collect(&mut server, &mut guest, 0, &mut own).unwrap()), [(0, 1, 1)]);
}

#[test]
fn two_applications_that_share_a_page_both_receive_it() {
    let (mut server, mut guest) = (server(), Guest::new());
    guest.map(OWN, 0x40_0000, 10, 2);
    guest.map(OTHER, 0x70_0000, 11, 1);
    let mut one = open(&mut server, &mut guest, 0, OWN).unwrap();
    let mut two = open(&mut server, &mut guest, 1, OTHER).unwrap();
    follow(&mut server, &mut guest, 0, &mut one, 0x40_0000, 2).unwrap();
    guest.write(OWN, 0x40_1000);
    follow(&mut server, &mut guest, 1, &mut two, 0x70_0000, 1).unwrap();
    assert_eq!(runs(&collect(&mut server, &mut guest, 0, &mut one).unwrap()), [(0, 1, 1)]);
    guest.write(OTHER, 0x70_0000);
    assert_eq!(runs(&collect(&mut server, &mut guest, 0, &mut one).unwrap()), [(0, 1, 1)]);
    assert_eq!(runs(&collect(&mut server, &mut guest, 1, &mut two).unwrap()), [(0, 0, 1)]);
}

/// The host also reports pages between the requested ones, and reports each write once.
#[test]
fn two_applications_with_interleaved_pages_both_receive_them() {
    let (mut server, mut guest) = (server(), Guest::new());
    for (n, at) in [(0, 10), (1, 12), (2, 14)] {
        guest.map(OWN, 0x40_0000 + n * PAGE, at, 1);
        guest.map(OTHER, 0x70_0000 + n * PAGE, at + 1, 1);
    }
    let mut one = open(&mut server, &mut guest, 0, OWN).unwrap();
    let mut two = open(&mut server, &mut guest, 1, OTHER).unwrap();
    follow(&mut server, &mut guest, 0, &mut one, 0x40_0000, 3).unwrap();
    follow(&mut server, &mut guest, 1, &mut two, 0x70_0000, 2).unwrap();
    guest.write(OWN, 0x40_2000);
    guest.write(OTHER, 0x70_0000);
    assert_eq!(runs(&collect(&mut server, &mut guest, 0, &mut one).unwrap()), [(0, 2, 1)]);
    assert_eq!(runs(&collect(&mut server, &mut guest, 1, &mut two).unwrap()), [(0, 0, 1)]);
    // To follow one more asks as well.
    guest.write(OWN, 0x40_2000);
    guest.write(OTHER, 0x70_1000);
    follow(&mut server, &mut guest, 1, &mut two, 0x70_2000, 1).unwrap();
    assert_eq!(runs(&collect(&mut server, &mut guest, 0, &mut one).unwrap()), [(0, 2, 1)]);
    assert_eq!(runs(&collect(&mut server, &mut guest, 1, &mut two).unwrap()), [(0, 1, 1)]);
}

#[test]
fn pages_that_the_host_did_not_track_count_as_written() {
    let (mut server, mut guest) = (server(), Guest::new());
    guest.map(OWN, 0x40_0000, 10, 2);
    let mut caller = open(&mut server, &mut guest, 0, OWN).unwrap();
    follow(&mut server, &mut guest, 0, &mut caller, 0x40_0000, 2).unwrap();
    for era in [None, Some(2)] {
        guest.era = era;
        assert_eq!(collect(&mut server, &mut guest, 0, &mut caller), Ok(WrittenPages::Anything));
    }
    assert_eq!(runs(&collect(&mut server, &mut guest, 0, &mut caller).unwrap()), []);
    guest.era = Some(3);
    let lost = caller.collect_request();
    ask(&mut server, &mut guest, 0, &caller, &lost);
    assert_eq!(
        collect(&mut server, &mut guest, 0, &mut caller),
        Ok(WrittenPages::Anything),
        "told again"
    );
    assert_eq!(runs(&collect(&mut server, &mut guest, 0, &mut caller).unwrap()), []);
}

#[test]
fn more_than_fits_is_anything() {
    let key = "07".repeat(32);
    let text = format!("[applications.ledger]\nkey = \"{key}\"\npages = 40000");
    let (mut server, mut guest) =
        (SessionServer::new(CallPolicy::parse(&text).unwrap()), Guest::new());
    guest.map(OWN, 0x40_0000, 10, 40_000);
    let mut caller = open(&mut server, &mut guest, 0, OWN).unwrap();
    follow(&mut server, &mut guest, 0, &mut caller, 0x40_0000, 40_000).unwrap();
    for n in (0..40_000).step_by(2) {
        guest.write(OWN, 0x40_0000 + n * PAGE);
    }
    assert_eq!(collect(&mut server, &mut guest, 0, &mut caller), Ok(WrittenPages::Anything));
    assert_eq!(runs(&collect(&mut server, &mut guest, 0, &mut caller).unwrap()), []);
}

#[test]
fn a_thousand_areas_are_followed_and_recorded() {
    const AREAS: u16 = 4096;
    let key = "07".repeat(32);
    let text = format!("[applications.ledger]\nkey = \"{key}\"\npages = 40000");
    let (mut server, mut guest) =
        (SessionServer::new(CallPolicy::parse(&text).unwrap()), Guest::new());
    guest.recorded = Some(Default::default());
    let start = |area: u16| 0x40_0000 + u64::from(area) * 3 * PAGE;
    guest.map(OWN, start(0), 10, 3 * u32::from(AREAS));
    let mut caller = open(&mut server, &mut guest, 0, OWN).unwrap();
    for area in 0..AREAS {
        let id = follow(&mut server, &mut guest, 0, &mut caller, start(area), 2).unwrap();
        assert_eq!(id, FollowedAreaId(area));
    }
    let more = follow(&mut server, &mut guest, 0, &mut caller, start(0), 1);
    assert_eq!(more, Err(CallRefusal::TooMany(AREAS).into()));
    collect(&mut server, &mut guest, 0, &mut caller).unwrap();
    for area in (0..AREAS).step_by(4) {
        guest.write(OWN, start(area) + PAGE);
    }
    let told = runs(&collect(&mut server, &mut guest, 0, &mut caller).unwrap());
    let expected: Vec<_> = (0..AREAS).step_by(4).map(|area| (area, 1, 1)).collect();
    assert_eq!(told, expected, "a reply has room for the pages of a thousand areas");
    for area in 0..AREAS {
        guest.write(OWN, start(area));
    }
    assert_eq!(collect(&mut server, &mut guest, 0, &mut caller), Ok(WrittenPages::Anything));
    let mut reader = request_recording(&mut server, &mut guest, 0, &mut caller, 0x18).unwrap();
    let stores = guest.recorded.as_mut().unwrap().get_mut(&0).unwrap();
    stores.record_store(start(AREAS - 1) + 8, 8);
    let word = WordRun { area: FollowedAreaId(AREAS - 1), first: 1, words: 1 };
    assert_eq!(end(&mut guest, 0, &mut reader), Some(StoreReport::Words(vec![word])));
}

#[derive(Clone, Debug)]
enum Event {
    Write { page: u64 },
    Move { page: u64 },
    Collect { lost: bool },
    Replay { back: usize },
    Garbage { bytes: Vec<u8>, asked: u32 },
    Hello,
    Blind,
    Save,
    Follow,
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        6 => (0..8u64).prop_map(|page| Event::Write { page }),
        1 => (0..8u64).prop_map(|page| Event::Move { page }),
        4 => any::<bool>().prop_map(|lost| Event::Collect { lost }),
        1 => (0..20usize).prop_map(|back| Event::Replay { back }),
        1 => (prop::collection::vec(any::<u8>(), 0..80), any::<u32>())
            .prop_map(|(bytes, asked)| Event::Garbage { bytes, asked }),
        1 => Just(Event::Hello),
        1 => Just(Event::Blind),
        1 => Just(Event::Save),
        1 => Just(Event::Follow),
    ]
}

proptest! {
    /// Whatever other programs write into the slot: the next reply that arrives reports each page
    /// that was written.
    #[test]
    fn nothing_that_was_written_is_missed(events in prop::collection::vec(event(), 1..80)) {
        let (mut server, mut guest) = (server(), Guest::new());
        guest.map(OWN, 0x40_0000, 10, 8);
        let mut caller = open(&mut server, &mut guest, 0, OWN).unwrap();
        follow(&mut server, &mut guest, 0, &mut caller, 0x40_0000, 8).unwrap();
        let (mut dirty, mut sent, mut places) = (BTreeSet::new(), Vec::new(), 100);
        let mut eras = 1;
        for event in events {
            match event {
                Event::Write { page } => {
                    guest.write(OWN, 0x40_0000 + page * PAGE);
                    dirty.insert(page as u32);
                }
                Event::Move { page } => {
                    places += 1;
                    guest.place(OWN, 0x40_0000 + page * PAGE, Ok(Page(places)));
                }
                Event::Collect { lost } => {
                    let request = caller.collect_request();
                    let asked = caller.request_number();
                    let answer = server.answer_request(0, asked, Some(&request), &mut guest).bytes;
                    sent.push((asked, request));
                    if lost {
                        continue;
                    }
                    let told: BTreeSet<u32> = match caller.accept_written(&answer).unwrap() {
                        WrittenPages::Anything => (0..8).collect(),
                        WrittenPages::Runs(runs) => {
                            let first = runs.iter().filter(|run| run.area == FollowedAreaId(0));
                            first.flat_map(|run| run.first..run.first + run.pages).collect()
                        }
                    };
                    prop_assert!(dirty.is_subset(&told), "{dirty:?} {told:?}");
                    dirty.clear();
                }
                Event::Replay { back } => {
                    if let Some((asked, request)) = sent.iter().rev().nth(back) {
                        let answer = server.answer_request(0, *asked, Some(request), &mut guest).bytes;
                        prop_assert!(caller.open_reply(&answer).is_err());
                    }
                }
                Event::Garbage { bytes, asked } => {
                    let answer = server.answer_request(0, asked, Some(&bytes), &mut guest).bytes;
                    prop_assert!(caller.open_reply(&answer).is_err());
                }
                Event::Hello => {
                    let hello = Caller::new("other", ApplicationKey::new([1; 32]), 0, [1; 32]).hello_request();
                    let answer = server.answer_request(0, 1, Some(&hello), &mut guest).bytes;
                    prop_assert!(caller.open_reply(&answer).is_err());
                }
                // A save takes the written pages, and ends, or begins: no session gets a report
                // meanwhile.
                Event::Blind => {
                    eras += 1;
                    guest.written.clear();
                    guest.era = Some(eras);
                }
                Event::Save => {
                    guest.written.clear();
                    guest.era = None;
                }
                Event::Follow => {
                    places += 1;
                    let start = 0x100_0000 + u64::from(places) * PAGE;
                    guest.map(OWN, start, places, 1);
                    // The host refuses it while a save runs, and when there are too many.
                    let _ = follow(&mut server, &mut guest, 0, &mut caller, start, 1);
                }
            }
        }
    }

    /// No bytes make the server do anything for who has no key.
    #[test]
    fn garbage_costs_nothing(
        requests in prop::collection::vec((0..3u32, any::<u32>(), prop::collection::vec(any::<u8>(), 0..100)), 1..50)
    ) {
        let (mut server, mut guest) = (server(), Guest::new());
        for (slot, asked, bytes) in requests {
            let answer = server.answer_request(slot, asked, Some(&bytes), &mut guest).bytes;
            prop_assert!(!answer.is_empty());
        }
        prop_assert_eq!(guest.searches, 0);
    }
}

#[test]
fn a_request_that_is_too_long_is_refused() {
    let answer = server().answer_request(0, 1, None, &mut Guest::new()).bytes;
    let mut caller = caller(0);
    assert_eq!(caller.accept_challenge(&answer), Err(CallRefusal::Early.into()));
    let _ = CallReply::Done;
}

/// The next application in a slot does not accept replies to the previous one as its own.
#[test]
fn two_that_follow_one_another_do_not_count_alike() {
    let first = Caller::new("ledger", ApplicationKey::new(KEY), 0, [1; 32]);
    let second = Caller::new("ledger", ApplicationKey::new(KEY), 0, [2; 32]);
    assert_ne!(first.request_number(), second.request_number());
}

fn request_recording(
    server: &mut SessionServer,
    guest: &mut Guest,
    slot: u32,
    caller: &mut Caller,
    end: u64,
) -> Result<ReportReader, CallError> {
    let request = caller.seal_request(&CallRequest::RecordStores { end });
    caller.accept_recording(&ask(server, guest, slot, caller, &request))
}

/// Ends an epoch as the application and the plugin do, if stores are recorded.
fn end(guest: &mut Guest, slot: u32, reader: &mut ReportReader) -> Option<StoreReport> {
    let (_, token) = reader.current_epoch();
    let ended = guest.recorded.as_mut().unwrap().get_mut(&slot)?.end_epoch(token)?;
    reader.open_report(&ended.report)
}

#[test]
fn stores_are_recorded_if_the_hypervisor_has_the_plugin() {
    const END: u64 = 0x70_0018;
    let (mut server, mut guest) = (server(), Guest::new());
    guest.map(OWN, 0x40_0000, 10, 2);
    let mut own = open(&mut server, &mut guest, 0, OWN).unwrap();
    let area = follow(&mut server, &mut guest, 0, &mut own, 0x40_0000, 2).unwrap();
    let none = request_recording(&mut server, &mut guest, 0, &mut own, END).unwrap_err();
    assert_eq!(none, CallError::Refused(CallRefusal::NoStores));

    guest.recorded = Some(Default::default());
    for (at, refusal) in
        [(END + 1, CallRefusal::Misplaced(END + 1)), (1 << 63, CallRefusal::Kernel(1 << 63))]
    {
        let refused = request_recording(&mut server, &mut guest, 0, &mut own, at).unwrap_err();
        assert_eq!(refused, CallError::Refused(refusal));
    }
    let mut reader = request_recording(&mut server, &mut guest, 0, &mut own, END).unwrap();
    guest.recorded.as_mut().unwrap().get_mut(&0).unwrap().record_store(0x40_1008, 8);
    let word = WordRun { area, first: 513, words: 1 };
    assert_eq!(end(&mut guest, 0, &mut reader), Some(StoreReport::Words(vec![word])));

    // Another request to record: it does not accept reports of the first.
    let mut second = request_recording(&mut server, &mut guest, 0, &mut own, END).unwrap();
    let (_, token) = reader.current_epoch();
    assert_eq!(guest.recorded.as_mut().unwrap().get_mut(&0).unwrap().end_epoch(token), None);
    assert_eq!(end(&mut guest, 0, &mut second), Some(StoreReport::Words(vec![])));

    // The followed areas change: an application with records of the earlier areas must request
    // recording again.
    follow(&mut server, &mut guest, 0, &mut own, 0x40_0000, 1).unwrap();
    assert_eq!(end(&mut guest, 0, &mut second), None);
    let mut third = request_recording(&mut server, &mut guest, 0, &mut own, END).unwrap();
    assert_eq!(end(&mut guest, 0, &mut third), Some(StoreReport::Words(vec![])));

    // A session of another process in the slot, or none any more.
    let mut other = open(&mut server, &mut guest, 0, OTHER).unwrap();
    assert_eq!(end(&mut guest, 0, &mut third), None);
    let mut reader = request_recording(&mut server, &mut guest, 0, &mut other, END).unwrap();
    assert_eq!(end(&mut guest, 0, &mut reader), Some(StoreReport::Words(vec![])));
    let bye = other.seal_request(&CallRequest::Bye);
    other.accept_done(&ask(&mut server, &mut guest, 0, &other, &bye)).unwrap();
    assert_eq!(end(&mut guest, 0, &mut reader), None);
}
