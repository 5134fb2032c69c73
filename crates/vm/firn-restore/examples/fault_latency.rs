//! How long a page fault takes with a cached image, against a bare loop that answers the same
//! faults from memory.
//!
//! `cargo run --release -p firn-restore --example fault_latency -- [CODEC] [PAUSE_US]`
#![allow(clippy::unwrap_used, clippy::panic, missing_docs, reason = "a measurement, not a product")]
#![allow(dead_code, reason = "the modules of the tests have more than is needed here")]

#[path = "../tests/it/content.rs"]
mod content;
#[path = "../tests/it/driver.rs"]
mod driver;
#[path = "../tests/it/guest.rs"]
mod guest;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use content::Model;
use driver::Guest;
use firn_image::{Codec, Image};
use firn_memory::{MemoryEvent, PageFaults};
use firn_restore::{
    BackgroundFill, PresenceFile, RestoreMode, RestoreOptions, RunRecord, RunningRestore,
};
use firn_types::{Block, Page};

const PAGES: u64 = 16 << 10;
const ROUNDS: usize = 15;

fn main() {
    guest::run_if_asked();
    let mut arguments = std::env::args().skip(1);
    let codec: Codec = arguments.next().as_deref().unwrap_or("lz4").parse().unwrap();
    let pause: u64 = arguments.next().map_or(0, |pause| pause.parse().unwrap());
    let model = Model::new(&[PAGES], 1);
    let geometry = model.geometry(2);
    let dir = tempfile::tempdir().unwrap();
    let order = model.shuffled(&geometry, 7);
    let image = model.write(&dir.path().join("image"), geometry, codec, &order, Vec::new());
    let image = Arc::new(image);
    let touches = first_of_each(&image);
    println!("{codec}, {pause} us between touches, {} touches a round", touches.len());
    let mut rounds = Rounds::default();
    for round in 0..ROUNDS {
        rounds.floor.push(at(&floor(&model, &touches, pause), 0.5));
        for (mode, to) in
            [(RestoreMode::Locality, &mut rounds.locality), (RestoreMode::Lazy, &mut rounds.lazy)]
        {
            let options = RestoreOptions {
                mode,
                fill: BackgroundFill::Off,
                workers: std::env::var("W").map_or(2, |w| w.parse().unwrap()),
                ..RestoreOptions::default()
            };
            let (times, record) = restore(&model, &image, &touches, pause, options);
            to.push(at(&times, 0.5));
            if round == 0 {
                report(&mode.to_string(), &times, &record);
            }
        }
    }
    rounds.report();
}

/// The medians of all rounds, in microseconds.
#[derive(Default)]
struct Rounds {
    floor: Vec<f64>,
    locality: Vec<f64>,
    lazy: Vec<f64>,
}

impl Rounds {
    fn report(&self) {
        let floor = middle(&self.floor);
        println!("p50 over {ROUNDS} rounds:  floor {floor:.1} us");
        for (name, p50s) in [("locality", &self.locality), ("lazy", &self.lazy)] {
            let p50 = middle(p50s);
            println!("  {name:>8} {p50:5.1} us, {:.2} times the floor", p50 / floor);
        }
    }
}

fn middle(values: &[f64]) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// One page of each locality block, in stored order: each touch is a fault that nothing has
/// prepared.
fn first_of_each(image: &Image) -> Vec<u32> {
    let ids = (0..image.locality_blocks()).map(firn_image::LocalityBlockId);
    ids.map(|id| image.entries(id)[0].block.0 * 2).collect()
}

fn command(touches: &[u32], pause: u64) -> String {
    let pages: Vec<_> = touches.iter().map(u32::to_string).collect();
    format!("time {pause} {}", pages.join(","))
}

fn times(result: &str) -> Vec<u64> {
    let mut times: Vec<u64> = result.split(',').map(|time| time.parse().unwrap()).collect();
    times.sort_unstable();
    times
}

/// The time in microseconds that this share of all touches stays below.
fn at(times: &[u64], share: f64) -> f64 {
    times[(times.len() as f64 * share) as usize] as f64 / 1000.0
}

fn report(what: &str, times: &[u64], record: &RunRecord) {
    let quantiles = [0.1, 0.5, 0.9, 0.99].map(|share| at(times, share));
    let cached = record.counts.demand_units - record.counts.demand_reads;
    let faults = record.counts.faults;
    println!(
        "{what:>10}, first round: p10, 50, 90, 99: {quantiles:.1?} us; {faults} faults, {cached} cached"
    );
}

fn floor(model: &Model, touches: &[u32], pause: u64) -> Vec<u64> {
    let mut guest = Guest::spawn(&model.map, &[]);
    let faults = guest.attach();
    faults.register_all().unwrap();
    let stop = AtomicBool::new(false);
    let result = std::thread::scope(|scope| {
        scope.spawn(|| answer(model, &faults, &stop));
        guest.send(0, &command(touches, pause));
        let result = guest.result(0);
        stop.store(true, Ordering::Relaxed);
        result
    });
    guest.detach(faults);
    times(&result)
}

fn answer(model: &Model, faults: &PageFaults, stop: &AtomicBool) {
    let geometry = model.geometry(2);
    let mut events = Vec::with_capacity(64);
    while !stop.load(Ordering::Relaxed) {
        faults.wait_for_events(&mut events, Duration::from_millis(50)).unwrap();
        for event in events.drain(..) {
            let MemoryEvent::Fault { page, .. } = event else { continue };
            let block = Block(page.0 / 2);
            let start = block.index() * geometry.block_size.byte_count();
            let bytes = &model.bytes[start..start + geometry.block_size.byte_count()];
            faults.install_pages(Page(block.0 * 2), bytes).unwrap();
        }
    }
}

fn restore(
    model: &Model,
    image: &Arc<Image>,
    touches: &[u32],
    pause: u64,
    options: RestoreOptions,
) -> (Vec<u64>, RunRecord) {
    let mut guest = Guest::spawn(&model.map, &[]);
    let dir = tempfile::tempdir().unwrap();
    let presence =
        PresenceFile::create(&dir.path().join("presence"), model.map.total_pages()).unwrap();
    let on_fatal = Box::new(|error: &firn_restore::RestoreError| panic!("{error}"));
    let memory = guest.memory.clone();
    let faults = guest.attach();
    let restore =
        RunningRestore::begin(image.clone(), memory, faults, options, presence, on_fatal).unwrap();
    guest.send(0, &command(touches, pause));
    let result = guest.result(0);
    restore.set_fill(BackgroundFill::AtOnce);
    restore.wait().unwrap();
    let stopped = restore.stop().unwrap();
    assert_eq!(guest.ask(0, &format!("sum 0 {PAGES}")), model.sum(0..PAGES as u32));
    guest.detach(stopped.faults);
    (times(&result), stopped.record)
}
