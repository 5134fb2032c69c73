//! Every tracker gives the committed images that a plain copy of the program gives.

use firn_app::{Error, Kind, Options, Precision, Session, Source};
use firn_programs::{Extent, Variant, run_all};

/// Where randomness starts; another run may choose another start.
fn seed() -> u64 {
    std::env::var("FIRN_APP_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1)
}

fn all_programs(kind: Kind) {
    if let Err(error @ Error::Unavailable { .. }) = Session::open(Options::new("try").tracker(kind))
    {
        panic!("not tested: {error}");
    }
    let options = || Options::new("test").tracker(kind).source(Source::Allocated);
    let words = || Session::open(options()).unwrap();
    let pages = || Session::open(options().precision(Precision::Pages)).unwrap();
    let without = || {
        let options = match kind {
            Kind::Emulate => options().undo(false),
            _ => options().undo(false).precision(Precision::Pages),
        };
        Session::open(options).unwrap()
    };
    let mut variants =
        vec![Variant { undo: true, open: &words }, Variant { undo: true, open: &pages }];
    if kind != Kind::Compare {
        variants.push(Variant { undo: false, open: &without });
    }
    run_all(&variants, Extent::new(seed() ^ (kind as u64) << 32));
}

#[test]
fn pages() {
    all_programs(Kind::Pages);
}

#[test]
fn emulate() {
    all_programs(Kind::Emulate);
}

#[test]
fn assisted() {
    all_programs(Kind::Assisted);
}

#[test]
fn scan() {
    all_programs(Kind::Scan);
}

#[test]
fn compare() {
    all_programs(Kind::Compare);
}
