//! Every tracker gives the committed images that a plain copy of the program gives.

use firn_app::{
    Error, MemorySource, Precision, Session, SessionOptions, TrackerKind, open_with_small_parts,
};
use firn_programs::{SessionVariant, TestExtent, run_all};

/// Where randomness starts; another run may choose another start.
fn seed() -> u64 {
    std::env::var("FIRN_APP_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1)
}

fn all_programs(kind: TrackerKind) {
    if let Err(error @ Error::Unavailable { .. }) =
        Session::open(SessionOptions::new("try").tracker(kind))
    {
        panic!("not tested: {error}");
    }
    let options = || SessionOptions::new("test").tracker(kind).source(MemorySource::Allocated);
    let words = || Session::open(options()).unwrap();
    let pages = || Session::open(options().precision(Precision::Pages)).unwrap();
    let without = || {
        let options = match kind {
            TrackerKind::Emulate => options().undo(false),
            _ => options().undo(false).precision(Precision::Pages),
        };
        Session::open(options).unwrap()
    };
    let mut variants = vec![
        SessionVariant { can_abort: true, open: &words },
        SessionVariant { can_abort: true, open: &pages },
    ];
    if kind != TrackerKind::Compare {
        variants.push(SessionVariant { can_abort: false, open: &without });
    }
    run_all(&variants, TestExtent::new(seed() ^ (kind as u64) << 32));
}

#[test]
fn pages() {
    all_programs(TrackerKind::Pages);
}

#[test]
fn emulate() {
    all_programs(TrackerKind::Emulate);
}

#[test]
fn assisted() {
    all_programs(TrackerKind::Assisted);
}

/// The same, but most of the memory is in quiet parts.
#[test]
fn assisted_in_small_parts() {
    let open = |options| Session::open_with(options, open_with_small_parts().unwrap()).unwrap();
    let options = || SessionOptions::new("test").source(MemorySource::Allocated);
    let words = || open(options());
    let pages = || open(options().precision(Precision::Pages));
    let without = || open(options().undo(false).precision(Precision::Pages));
    let variants = [
        SessionVariant { can_abort: true, open: &words },
        SessionVariant { can_abort: true, open: &pages },
        SessionVariant { can_abort: false, open: &without },
    ];
    run_all(&variants, TestExtent::new(seed()));
}

#[test]
fn scan() {
    all_programs(TrackerKind::Scan);
}

#[test]
fn compare() {
    all_programs(TrackerKind::Compare);
}
