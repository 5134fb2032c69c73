//! Every mode restores the contents of every page.

use firn_image::Codec;
use firn_restore::{
    AnswerKind, BackgroundFill, RestoreError, RestoreMode, RestoreOptions, RunRecord,
};
use firn_types::{Block, RegionMap};

use crate::driver::{Guest, PATIENCE};
use crate::scene::{CHILD, Scene};

fn options(mode: RestoreMode) -> RestoreOptions {
    RestoreOptions { mode, ..RestoreOptions::default() }
}

/// Four threads touch pages at random while memory is restored.
fn under_load(mode: RestoreMode, sizes: &[u64], block_pages: u8, codec: Codec) -> RunRecord {
    let mut scene = Scene::new(sizes, block_pages, codec);
    let restore = scene.begin(RestoreOptions { fill: BackgroundFill::Off, ..options(mode) });
    restore.await_prefill().unwrap();
    scene.check(0, 0..8);
    restore.set_fill(BackgroundFill::AtOnce);
    for thread in 0..4 {
        scene.guest.send(thread, &format!("random {thread} 2000 {}", sizes[0]));
    }
    for thread in 0..4u64 {
        let found: u64 = scene.guest.result(thread as usize).parse().unwrap();
        assert_eq!(found, scene.model.random(thread, 2000, sizes[0]));
    }
    scene.finish(restore)
}

#[test]
fn locality() {
    let record = under_load(RestoreMode::Locality, &[4096], 2, Codec::Lz4);
    let counts = record.counts;
    assert!(counts.faults > 0 && counts.demand_units > 0);
    let brought = counts.on_demand_pages + counts.beside_pages + counts.fill_pages;
    assert_eq!(brought, u64::from(record.stored_pages));
    assert_eq!(record.faults.len() as u64, counts.faults);
}

#[test]
fn lazy() {
    let record = under_load(RestoreMode::Lazy, &[4096], 2, Codec::None);
    let counts = record.counts;
    assert!(counts.beside_pages <= counts.on_demand_pages, "one block of two pages per fault");
    assert_eq!(counts.ahead_units, 0);
}

#[test]
fn eager() {
    let record = under_load(RestoreMode::Eager, &[4096], 2, Codec::Lz4);
    assert_eq!(record.counts.ahead_pages, u64::from(record.stored_pages));
    assert_eq!(record.counts.demand_units, 0);
    assert!(record.prefilled_us.is_some() && record.finished_us.is_some());
}

#[test]
fn regions_of_odd_sizes_and_large_blocks() {
    under_load(RestoreMode::Locality, &[1003, 517], 16, Codec::Zstd { level: 1 });
}

#[test]
fn single_page_blocks() {
    under_load(RestoreMode::Lazy, &[700, 3], 1, Codec::Lz4);
}

#[test]
fn the_working_set_is_there_before_the_guest_runs() {
    let working_set: Vec<Block> = (100..164).map(Block).collect();
    let mut scene = Scene::with(&[4096], 2, Codec::Lz4, working_set);
    let options = RestoreOptions { fill: BackgroundFill::Off, ..options(RestoreMode::WorkingSet) };
    let restore = scene.begin(options);
    restore.await_prefill().unwrap();
    scene.check(0, 200..328);
    let counts = restore.record().counts;
    assert_eq!(counts.demand_units, 0);
    assert!(counts.ahead_pages < 4096 * 7 / 8, "{counts:?}");
    restore.set_fill(BackgroundFill::AtOnce);
    scene.finish(restore);
}

#[test]
fn pages_given_back_are_zeros() {
    let mut scene = Scene::new(&[2048], 2, Codec::Lz4);
    let restore =
        scene.begin(RestoreOptions { fill: BackgroundFill::Off, ..options(RestoreMode::Locality) });
    scene.check(0, 0..64);
    for range in [10..20, 101..102, 500..900] {
        scene.guest.ask(1, &format!("give-back {} {}", range.start, range.end));
        scene.model.clear(range);
    }
    scene.check(0, 0..128);
    restore.set_fill(BackgroundFill::AtOnce);
    scene.check(2, 0..2048);
    scene.finish(restore);
}

#[test]
fn pages_are_given_back_while_others_are_touched() {
    let mut scene = Scene::new(&[8192], 2, Codec::Lz4);
    let restore = scene.begin(options(RestoreMode::Locality));
    restore.await_prefill().unwrap();
    for round in 0..40 {
        let (start, end) = (4096 + round * 64, 4096 + round * 64 + 50);
        scene.guest.send(1, &format!("give-back {start} {end}"));
        scene.guest.send(0, &format!("random {round} 50 4096"));
        scene.guest.result(1);
        let found: u64 = scene.guest.result(0).parse().unwrap();
        assert_eq!(found, scene.model.random(u64::from(round), 50, 4096));
        scene.model.clear(start..end);
    }
    scene.finish(restore);
}

#[test]
fn pages_that_the_guest_writes_are_not_overwritten() {
    let mut scene = Scene::new(&[1024], 2, Codec::Lz4);
    let restore =
        scene.begin(RestoreOptions { fill: BackgroundFill::Off, ..options(RestoreMode::Locality) });
    for page in (0..1024).step_by(7) {
        scene.guest.ask(0, &format!("write {page} {page}"));
        let start = page * 4096;
        scene.model.bytes[start..start + 8].copy_from_slice(&(page as u64).to_le_bytes());
    }
    restore.set_fill(BackgroundFill::AtOnce);
    scene.finish(restore);
}

#[test]
fn an_image_that_is_not_cached_is_read_once() {
    let mut scene = Scene::new(&[8192], 2, Codec::None);
    let image = std::fs::File::open(scene.image_path()).unwrap();
    image.sync_all().unwrap();
    rustix::fs::fadvise(&image, 0, None, rustix::fs::Advice::DontNeed).unwrap();
    let restore =
        scene.begin(RestoreOptions { fill: BackgroundFill::Off, ..options(RestoreMode::Locality) });
    scene.check(0, 0..1000);
    let record = restore.record();
    restore.set_fill(BackgroundFill::AtOnce);
    scene.finish(restore);
    let mut offsets: Vec<u64> = record.reads.iter().map(|read| read.offset).collect();
    let reads = offsets.len();
    offsets.sort_unstable();
    offsets.dedup();
    assert_eq!(offsets.len(), reads, "something was read twice");
    let waited = record.faults.iter().filter(|it| it.answered == AnswerKind::Storage).count();
    assert!(reads == 0 || waited > 0, "{} reads, but nobody waited", reads);
}

#[test]
fn a_vm_with_other_ram_is_refused() {
    let scene = Scene::new(&[64], 2, Codec::Lz4);
    let other = RegionMap::lay_out([("ram0", 128 * 4096)]).unwrap();
    let guest = Guest::spawn(&other, &CHILD);
    let presence =
        firn_restore::PresenceFile::create(&scene.presence_path(), other.total_pages()).unwrap();
    let begun = firn_restore::RunningRestore::begin(
        scene.image.clone(),
        guest.memory.clone(),
        guest.attach(),
        RestoreOptions::default(),
        presence,
        scene.on_fatal(),
    );
    let error = begun.map(drop).unwrap_err();
    assert!(matches!(error, RestoreError::Regions { .. }));
    assert_eq!(
        error.to_string(),
        "the image has RAM regions ram0 (256 KiB), the VM has ram0 (512 KiB)"
    );
    assert!(!guest.is_registered());
}

#[test]
fn the_end_of_the_hypervisor_is_reported() {
    let mut scene = Scene::new(&[2048], 2, Codec::Lz4);
    let restore =
        scene.begin(RestoreOptions { fill: BackgroundFill::Off, ..options(RestoreMode::Locality) });
    scene.check(0, 0..10);
    scene.guest.kill();
    let error = restore.wait().unwrap_err();
    assert!(error.to_string().contains(&scene.guest.process.pid().to_string()), "{error}");
    assert!(scene.fatal_within(PATIENCE).is_some());
}
