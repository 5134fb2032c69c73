//! Sessions and their rules.

use std::os::unix::process::ExitStatusExt as _;
use std::process::Command;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::thread;

use firn_app::{
    Error, MemorySource, PageSpan, Precision, Session, SessionOptions, Tracker, TrackerKind,
    WrittenRuns,
};

fn open(kind: TrackerKind) -> Session {
    Session::open(SessionOptions::new("test").tracker(kind)).unwrap()
}

/// Changes as (start, end), of the only area.
fn changed(session: &Session) -> Vec<(usize, usize)> {
    session.changes().iter().map(|change| (change.bytes.start, change.bytes.end)).collect()
}

#[test]
fn words_that_differ_are_reported() {
    for kind in TrackerKind::ALL {
        let mut session = open(kind);
        let area = session.allocate("area", 20_000).unwrap();
        session.begin().unwrap().commit().unwrap();
        assert_eq!(changed(&session), [(0, 20_000)], "{kind}: the first commit tells everything");
        let mut transaction = session.begin().unwrap();
        transaction.bytes(&area)[19_999] = 1;
        transaction.bytes(&area)[5] = 1;
        transaction.bytes(&area)[8] = 1;
        assert_eq!(transaction.commit().unwrap(), 2);
        assert_eq!(changed(&session), [(0, 16), (19_992, 20_000)], "{kind}");
        session.begin().unwrap().commit().unwrap();
        assert!(session.changes().is_empty(), "{kind}");
    }
}

#[test]
fn pages_are_reported_where_nothing_is_compared() {
    for kind in [TrackerKind::Pages, TrackerKind::Assisted, TrackerKind::Scan] {
        let options =
            SessionOptions::new("test").tracker(kind).precision(Precision::Pages).undo(false);
        let mut session = Session::open(options).unwrap();
        let area = session.allocate("area", 20_000).unwrap();
        session.begin().unwrap().commit().unwrap();
        let mut transaction = session.begin().unwrap();
        transaction.bytes(&area)[4097] = 1;
        transaction.bytes(&area)[19_000] = 1;
        transaction.commit().unwrap();
        assert_eq!(changed(&session), [(4096, 8192), (16_384, 20_000)], "{kind}");
        let begun = session.begin().unwrap();
        assert!(matches!(begun.abort(), Err(Error::State { what: "abort", .. })));
    }
}

#[test]
fn a_transaction_that_is_dropped_is_undone() {
    for kind in TrackerKind::ALL {
        let mut session = open(kind);
        let area = session.allocate("area", 10_000).unwrap();
        let mut transaction = session.begin().unwrap();
        transaction.bytes(&area).fill(7);
        transaction.commit().unwrap();
        session.begin().unwrap().bytes(&area)[..9000].fill(8);
        assert!(session.bytes(&area).iter().all(|&byte| byte == 7), "{kind}");
        session.begin().unwrap().commit().unwrap();
        assert!(session.changes().is_empty(), "{kind}: what was undone is no change");
    }
}

#[test]
fn calls_out_of_order_are_refused() {
    let mut session = open(TrackerKind::Assisted);
    assert!(matches!(session.open_transaction(), Err(Error::State { .. })));
    session.begin().unwrap().detach();
    assert!(matches!(session.begin(), Err(Error::State { .. })));
    assert!(matches!(session.allocate("late", 1), Err(Error::State { .. })));
    assert!(matches!(session.recover(), Err(Error::State { .. })));
    session.open_transaction().unwrap().commit().unwrap();
    assert!(matches!(session.allocate("empty", 0), Err(Error::Size { .. })));
    session.allocate("one", 1).unwrap();
    assert!(matches!(session.allocate("one", 1), Err(Error::Overlap { .. })));
    let options = SessionOptions::new("test").tracker(TrackerKind::Assisted).undo(false);
    assert!(matches!(Session::open(options), Err(Error::Unavailable { .. })));
}

#[test]
#[should_panic(expected = "another session")]
fn an_area_belongs_to_its_session() {
    let (mut one, mut two) = (open(TrackerKind::Assisted), open(TrackerKind::Assisted));
    let area = one.allocate("area", 1).unwrap();
    two.allocate("area", 1).unwrap();
    two.begin().unwrap().bytes(&area)[0] = 1;
}

/// Not aligned, and not alone on its pages.
#[repr(align(4096))]
struct Shared([u8; 3 * 4096]);

#[test]
fn two_areas_may_share_a_page_and_two_sessions_may_not() {
    for kind in [TrackerKind::Pages, TrackerKind::Assisted, TrackerKind::Compare] {
        let mut memory = Box::new(Shared([0; 3 * 4096]));
        let start = NonNull::from(&mut memory.0).cast::<u8>();
        let at = |offset| start.map_addr(|address| address.checked_add(offset).unwrap());
        let (mut one, mut two) = (open(kind), open(kind));
        // SAFETY: the box outlives both sessions, and is written by this thread, outside of their
        // methods.
        let (a, b) = unsafe {
            let a = one.register("a", at(10), 5000).unwrap();
            let b = one.register("b", at(5010), 99).unwrap();
            assert!(matches!(one.register("c", at(5109 - 1), 1), Err(Error::Overlap { .. })));
            assert!(matches!(two.register("d", at(6000), 1), Err(Error::Taken { .. })));
            two.register("e", at(8192), 100).unwrap();
            (a, b)
        };
        one.begin().unwrap().commit().unwrap();
        one.begin().unwrap().detach();
        for offset in [9, 10, 5009, 5010, 5108, 5109] {
            // SAFETY: as above.
            unsafe { at(offset).write_volatile(1) };
        }
        one.open_transaction().unwrap().commit().unwrap();
        let told: Vec<_> =
            one.changes().iter().map(|change| (change.area, change.bytes.clone())).collect();
        assert_eq!(told, [(a, 0..8), (a, 4992..5000), (b, 0..8), (b, 96..99)], "{kind}");
        drop(one);
        // SAFETY: as above.
        unsafe { two.register("d", at(6000), 1).unwrap() };
    }
}

static STATIC: [AtomicUsize; 1000] = [const { AtomicUsize::new(0) }; 1000];

#[test]
fn a_static_can_be_an_area() {
    for kind in [TrackerKind::Pages, TrackerKind::Assisted] {
        let mut session = open(kind);
        let start = NonNull::from(&STATIC).cast();
        // SAFETY: a static lives for ever; it is written by this thread, outside of the session's
        // methods.
        let area = unsafe { session.register("static", start, size_of_val(&STATIC)).unwrap() };
        session.begin().unwrap().commit().unwrap();
        session.begin().unwrap().detach();
        STATIC[77].fetch_add(5, Ordering::Relaxed);
        session.open_transaction().unwrap().commit().unwrap();
        assert_eq!(changed(&session), [(77 * 8, 78 * 8)], "{kind}");
        assert_ne!(session.area_bytes(area).unwrap()[77 * 8], 0);
    }
}

#[test]
fn memory_that_cannot_be_mapped_twice_is_refused() {
    let mut bytes = vec![0_u8; 100];
    let start = NonNull::from(bytes.as_mut_slice()).cast();
    let mut session = open(TrackerKind::Emulate);
    // SAFETY: the vector outlives the session.
    let refused = unsafe { session.register("vector", start, 100) };
    assert!(matches!(refused, Err(Error::Foreign { kind: TrackerKind::Emulate })));
}

#[test]
fn writes_of_all_threads_are_reported() {
    for kind in TrackerKind::ALL {
        let mut session = open(kind);
        let area = session.allocate("area", 64 * 1000).unwrap();
        session.begin().unwrap().commit().unwrap();
        for round in 1..20_u8 {
            let mut transaction = session.begin().unwrap();
            // Neighbours share pages, and words of a page are written by different threads at once.
            let mut parts: Vec<_> = transaction.bytes(&area).chunks_mut(1000).collect();
            thread::scope(|scope| {
                for chunk in parts.chunks_mut(16) {
                    scope.spawn(move || {
                        chunk.iter_mut().for_each(|part| part[usize::from(round)] = round)
                    });
                }
            });
            transaction.commit().unwrap();
            let told: usize = session.changes().len();
            assert_eq!(told, 64, "{kind} in round {round}");
        }
    }
}

#[test]
fn a_system_call_may_write_an_area_where_the_kernel_helps() {
    for kind in [TrackerKind::Assisted, TrackerKind::Scan, TrackerKind::Compare] {
        let mut session = open(kind);
        let area = session.allocate("area", 10_000).unwrap();
        session.begin().unwrap().commit().unwrap();
        let mut transaction = session.begin().unwrap();
        let file = std::fs::File::open("/proc/self/exe").unwrap();
        std::io::Read::read_exact(&mut &file, &mut transaction.bytes(&area)[5000..5004]).unwrap();
        transaction.commit().unwrap();
        assert_eq!(changed(&session), [(5000, 5008)], "{kind}");
        assert_eq!(&session.bytes(&area)[5000..5004], b"\x7fELF");
    }
}

#[test]
fn stores_that_cannot_be_emulated_are_counted_and_reported() {
    let mut session = open(TrackerKind::Emulate);
    let area = session.allocate("area", 10_000).unwrap();
    session.begin().unwrap().commit().unwrap();
    let before = session.tracker_counts();
    let mut transaction = session.begin().unwrap();
    let bytes = transaction.bytes(&area);
    bytes[100] = 1;
    let place = bytes[5000..].as_mut_ptr();
    // SAFETY: a byte of the area.
    unsafe { std::arch::asm!("sar byte ptr [{p}], 1", "not byte ptr [{p}]", p = in(reg) place) };
    transaction.commit().unwrap();
    let after = session.tracker_counts();
    assert_eq!(after.unsupported - before.unsupported, 1);
    assert!(after.emulated > before.emulated);
    assert_eq!(changed(&session), [(96, 104), (5000, 5008)]);
    // The page is followed word by word again.
    let mut transaction = session.begin().unwrap();
    transaction.bytes(&area)[5000] = 7;
    transaction.commit().unwrap();
    assert_eq!(session.tracker_counts().unsupported, after.unsupported);
    assert_eq!(changed(&session), [(5000, 5008)]);
}

#[test]
fn more_stores_than_the_log_holds_are_followed_by_pages() {
    let options = SessionOptions::new("test").tracker(TrackerKind::Emulate).undo(false);
    let mut session = Session::open(options).unwrap();
    let words = 40_000;
    let area = session.allocate("area", words * 8).unwrap();
    session.begin().unwrap().commit().unwrap();
    let mut transaction = session.begin().unwrap();
    for (number, word) in transaction.words(&area).iter_mut().enumerate() {
        // SAFETY: a word of the area. Not merged into wider stores.
        unsafe { std::ptr::from_mut(word).write_volatile(number as u64 + 1) };
    }
    transaction.commit().unwrap();
    assert_eq!(session.changes().bytes(), words * 8);
    let mut transaction = session.begin().unwrap();
    transaction.words(&area)[39_999] = 0;
    transaction.commit().unwrap();
    assert_eq!(session.changes().bytes(), 8);
}

#[test]
fn one_is_chosen_by_measurement() {
    let mut session =
        Session::open(SessionOptions::new("test").source(MemorySource::Allocated)).unwrap();
    let area = session.allocate("area", 5000).unwrap();
    let mut transaction = session.begin().unwrap();
    transaction.bytes(&area)[4999] = 1;
    transaction.commit().unwrap();
    assert_eq!(session.changes().bytes(), 5000);
}

/// A tracker whose list comes from elsewhere.
struct Told(std::sync::Arc<AtomicUsize>, Option<PageSpan>);

impl Tracker for Told {
    fn kind(&self) -> TrackerKind {
        TrackerKind::External
    }

    fn watch_span(&mut self, span: PageSpan) -> Result<(), Error> {
        self.1 = Some(span);
        Ok(())
    }

    fn collect_writes(&mut self, found: &mut WrittenRuns) -> Result<(), Error> {
        let page = self.0.swap(usize::MAX, Ordering::Relaxed);
        if let Some(span) = self.1.filter(|_| page != usize::MAX) {
            found.push_run(span.start() + page * 4096, 4096);
        }
        Ok(())
    }
}

#[test]
fn a_list_may_come_from_outside() {
    let list = std::sync::Arc::new(AtomicUsize::new(usize::MAX));
    let tracker = Box::new(Told(list.clone(), None));
    let mut session = Session::open_with(SessionOptions::new("test"), tracker).unwrap();
    let area = session.allocate("area", 9000).unwrap();
    session.begin().unwrap().commit().unwrap();
    let mut transaction = session.begin().unwrap();
    transaction.bytes(&area)[4100] = 1;
    list.store(1, Ordering::Relaxed);
    transaction.commit().unwrap();
    assert_eq!(changed(&session), [(4096, 4104)]);
}

// What follows ends the process, or could: it runs in a child, which is this test program with one
// test.

const CHILD: &str = "FIRN_APP_TEST_FAULT";

fn child(test: &str, what: &str) -> std::process::Output {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture", "--test-threads=1"])
        .env(CHILD, what)
        .output()
        .unwrap()
}

fn somewhere_else() -> *mut u8 {
    std::hint::black_box(std::ptr::without_provenance_mut(8))
}

static CAUGHT: AtomicUsize = AtomicUsize::new(0);

extern "C" fn catch(_: i32, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel's.
    CAUGHT.store(unsafe { (*info).si_addr() }.addr(), Ordering::Relaxed);
    // SAFETY: async-signal-safe; ends the process with the number that the test asks for.
    unsafe { libc::_exit(if CAUGHT.load(Ordering::Relaxed) == 8 { 42 } else { 43 }) };
}

#[test]
fn faults_of_others_reach_their_handlers() {
    let Ok(what) = std::env::var(CHILD) else {
        let name = "session::faults_of_others_reach_their_handlers";
        let handled = child(name, "handled");
        assert_eq!(handled.status.code(), Some(42), "{handled:?}");
        for what in ["default", "raised"] {
            let ended = child(name, what);
            assert_eq!(ended.status.signal(), Some(libc::SIGSEGV), "{what}: {ended:?}");
        }
        let read_only = child(name, "read-only");
        assert_eq!(read_only.status.code(), Some(43), "{read_only:?}");
        return;
    };
    // SAFETY: zeros and a handler are a valid action; the faults that follow are the purpose.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        if what == "handled" || what == "read-only" {
            let handler: extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void) = catch;
            action.sa_sigaction = handler as usize;
            action.sa_flags = libc::SA_SIGINFO;
        }
        libc::sigaction(libc::SIGSEGV, &raw const action, std::ptr::null_mut());
        let mut session = open(TrackerKind::Pages);
        let area = session.allocate("area", 100).unwrap();
        session.begin().unwrap().bytes(&area)[3] = 1;
        match what.as_str() {
            "raised" => drop(libc::raise(libc::SIGSEGV)),
            // A write to memory that is mapped, protected, and no area.
            "read-only" => "text".as_ptr().cast_mut().write_volatile(1),
            _ => somewhere_else().write_volatile(1),
        }
    }
    panic!("it went on");
}

static REPLACED: std::sync::OnceLock<libc::sigaction> = std::sync::OnceLock::new();

/// Calls the handler that it replaced, as other libraries do.
extern "C" fn chain(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    CAUGHT.fetch_add(1, Ordering::Relaxed);
    let handler = REPLACED.get().unwrap().sa_sigaction;
    type SignalHandler = extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void);
    // SAFETY: the handler of the library, which was installed with SA_SIGINFO.
    unsafe { std::mem::transmute::<usize, SignalHandler>(handler)(signal, info, context) };
}

/// Without a check a replaced handler ends the program at its next write.
#[test]
fn a_handler_that_is_installed_later_is_noticed() {
    let Ok(what) = std::env::var(CHILD) else {
        for what in ["replaced", "chained"] {
            let ended = child("session::a_handler_that_is_installed_later_is_noticed", what);
            assert!(ended.status.success(), "{what}: {ended:?}");
        }
        return;
    };
    for kind in [TrackerKind::Pages, TrackerKind::Emulate] {
        let options = || SessionOptions::new("test").tracker(kind);
        let is_permitted = what == "chained";
        let mut session = Session::open(options().later_handler(is_permitted)).unwrap();
        let area = session.allocate("area", 100).unwrap();
        session.begin().unwrap().commit().unwrap();
        // SAFETY: a complete action, whose handler has the right type.
        let before = unsafe {
            let (mut action, mut before): (libc::sigaction, _) =
                (std::mem::zeroed(), std::mem::zeroed());
            let handler: extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void) = chain;
            action.sa_sigaction = handler as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_NODEFER;
            libc::sigaction(libc::SIGSEGV, &raw const action, &raw mut before);
            before
        };
        REPLACED.get_or_init(|| before);
        let refused = session.begin().err();
        assert_eq!(refused.is_none(), is_permitted, "{refused:?}");
        if let Some(error) = refused {
            assert!(matches!(error, Error::HandlerReplaced { .. }), "{error}");
            assert!(error.to_string().contains("pt_assisted"), "{error}");
        } else {
            let mut transaction = session.begin().unwrap();
            transaction.bytes(&area)[7] = 1;
            transaction.commit().unwrap();
            assert_eq!(session.changes().bytes(), 8);
            assert!(CAUGHT.load(Ordering::Relaxed) > 0);
        }
        // A tracker without signals works as before.
        let mut other = Session::open(SessionOptions::new("test").tracker(TrackerKind::Compare));
        other.as_mut().unwrap().begin().unwrap().commit().unwrap();
        // SAFETY: the action that was there.
        unsafe { libc::sigaction(libc::SIGSEGV, &raw const before, std::ptr::null_mut()) };
    }
}

/// Another thread writes data beside an area, on its first page, while transactions commit: what the
/// transactions write is reported each time.
#[test]
fn data_beside_an_area_may_be_written_during_a_commit() {
    const BESIDE: usize = 64;
    let mut memory = vec![0_u8; 3 * 4096];
    let page = memory.as_mut_ptr().wrapping_add(memory.as_ptr().align_offset(4096));
    let start = page.wrapping_add(BESIDE);
    let is_over = AtomicUsize::new(0);
    let other = page as usize;
    thread::scope(|scope| {
        scope.spawn(|| {
            while is_over.load(Ordering::Relaxed) == 0 {
                // SAFETY: a byte of the vector before the area, which only this thread uses.
                unsafe { AtomicU8::from_ptr(other as *mut u8) }.fetch_add(1, Ordering::Relaxed);
            }
        });
        let mut session = open(TrackerKind::Pages);
        // SAFETY: the vector lives longer than the session; only this thread uses these bytes.
        let area = unsafe { session.register("area", NonNull::new(start).unwrap(), 4096) };
        area.unwrap();
        session.begin().unwrap().commit().unwrap();
        let runs = std::env::var("FIRN_RUNS").map_or(100_000, |runs| runs.parse().unwrap());
        let missed = (1..=runs).filter(|number: &usize| {
            let (at, transaction) = (number * 8 % 4096, session.begin().unwrap());
            // SAFETY: a byte of the area.
            unsafe { start.add(at).write_volatile(start.add(at).read_volatile().wrapping_add(1)) };
            transaction.commit().unwrap();
            !changed(&session).iter().any(|(from, to)| (*from..*to).contains(&at))
        });
        let missed = missed.count();
        is_over.store(1, Ordering::Relaxed);
        assert_eq!(missed, 0, "transactions whose write was not reported");
    });
}

/// Another thread writes data beside an area while sessions open and end: its writes never end the
/// process, and never get lost.
#[test]
fn data_beside_an_area_may_be_written_while_sessions_end() {
    let mut memory = vec![0_u8; 3 * 4096];
    let page = memory.as_mut_ptr().wrapping_add(memory.as_ptr().align_offset(4096));
    let (other, is_over) = (page as usize, AtomicUsize::new(0));
    thread::scope(|scope| {
        let written = scope.spawn(|| {
            let mut written = 0_u8;
            while is_over.load(Ordering::Relaxed) == 0 {
                // SAFETY: a byte of the vector before the area, which only this thread uses.
                unsafe { AtomicU8::from_ptr(other as *mut u8) }.fetch_add(1, Ordering::Relaxed);
                written = written.wrapping_add(1);
            }
            written
        });
        let runs = std::env::var("FIRN_RUNS").map_or(3_000, |runs| runs.parse().unwrap());
        for _ in 0..runs {
            let mut session = open(TrackerKind::Pages);
            let start = NonNull::new(page.wrapping_add(64)).unwrap();
            // SAFETY: the vector lives longer than the session; only this thread uses these bytes.
            unsafe { session.register("area", start, 4096) }.unwrap();
            session.begin().unwrap().commit().unwrap();
        }
        is_over.store(1, Ordering::Relaxed);
        let written = written.join().unwrap();
        // SAFETY: as above; the thread has ended.
        assert_eq!(unsafe { page.read_volatile() }, written);
    });
}
