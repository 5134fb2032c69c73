//! Damaged images and storage that fails: the guest waits, the error names the place, and the guest
//! never sees wrong memory.

use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use firn_image::{Codec, HEADER_BYTES};
use firn_restore::{BackgroundFill, PrefillThreads, RestoreMode, RestoreOptions, RunningRestore};
use firn_types::{Block, Page};

use crate::driver::PATIENCE;
use crate::scene::{Scene, chain};

/// Flips one bit in the stored bytes of a block. Returns the offset.
fn flip(scene: &Scene, block: Block) -> u64 {
    let (id, entry) = scene.image.entry_of(block).unwrap();
    let at = scene.image.geometry().offset_of(id) + u64::from(entry.offset + entry.stored_len / 2);
    let path = scene.image_path();
    let file = std::fs::File::options().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 4], at).unwrap();
    at - u64::from(entry.stored_len / 2)
}

fn nothing_in_the_background(mode: RestoreMode) -> RestoreOptions {
    RestoreOptions { mode, fill: BackgroundFill::Off, ..RestoreOptions::default() }
}

fn a_damaged_block_is_never_seen(mode: RestoreMode, codec: Codec) {
    let mut scene = Scene::new(&[1024], 2, codec);
    let offset = flip(&scene, Block(33));
    let restore = scene.begin(nothing_in_the_background(mode));
    scene.guest.send(0, "sum 67 68");
    let failure = scene.fatal_within(PATIENCE).expect("the failure should be reported");
    for part in ["memory block 33", &format!("at byte {offset}"), "image.firn"] {
        assert!(failure.contains(part), "{failure:?} does not say {part:?}");
    }
    assert_eq!(scene.guest.result_within(0, Duration::from_millis(300)), None);
    assert!(restore.wait().is_err());
    // The process that stops the VM needs other pages: they are still restored.
    scene.check(1, 700..720);
    let record = restore.stop().unwrap().record;
    assert!(record.faults.iter().all(|fault| fault.page.0 / 2 != 33));
}

#[test]
fn a_damaged_block_in_a_locality_restore() {
    a_damaged_block_is_never_seen(RestoreMode::Locality, Codec::Lz4);
}

#[test]
fn a_damaged_block_that_is_not_compressed() {
    a_damaged_block_is_never_seen(RestoreMode::Locality, Codec::None);
}

#[test]
fn a_damaged_block_in_a_lazy_restore() {
    a_damaged_block_is_never_seen(RestoreMode::Lazy, Codec::Lz4);
}

#[test]
fn a_damaged_block_is_not_filled_in_beforehand() {
    let mut scene = Scene::new(&[1024], 2, Codec::None);
    flip(&scene, Block(33));
    let filling = PrefillThreads::start_fill(
        scene.image.clone(),
        &RestoreOptions::new(RestoreMode::Eager),
        scene.guest.files(),
    );
    std::thread::sleep(Duration::from_millis(300));
    let prefilled = filling.finish_fill();
    let restore =
        scene.begin_prefilled(nothing_in_the_background(RestoreMode::Locality), &prefilled);
    scene.guest.send(0, "sum 67 68");
    assert!(scene.fatal_within(PATIENCE).is_some());
    assert_eq!(scene.guest.result_within(0, Duration::from_millis(300)), None);
    scene.check(1, 700..720);
    drop(restore);
}

#[test]
fn an_eager_restore_of_a_damaged_image_does_not_start() {
    let scene = Scene::new(&[1024], 2, Codec::Lz4);
    flip(&scene, Block(8));
    let restore = scene.begin(nothing_in_the_background(RestoreMode::Eager));
    let error = restore.await_prefill().unwrap_err().to_string();
    assert!(error.contains("memory block 8 "), "{error}");
}

#[test]
fn damage_that_the_guest_does_not_touch_is_found_in_the_background() {
    let scene = Scene::new(&[1024], 2, Codec::Lz4);
    flip(&scene, Block(100));
    let restore = scene.begin(RestoreOptions::default());
    restore.await_prefill().unwrap();
    let error = restore.wait().unwrap_err().to_string();
    assert!(error.contains("memory block 100 "), "{error}");
    assert!(!restore.progress().finished);
}

#[test]
fn an_image_cut_short_while_it_is_used() {
    let mut scene = Scene::new(&[1024], 2, Codec::None);
    let file = std::fs::File::options().write(true).open(scene.image_path()).unwrap();
    let restore = scene.begin(nothing_in_the_background(RestoreMode::Locality));
    file.set_len(HEADER_BYTES + (64 << 10)).unwrap();
    let lost = (0..512)
        .map(Block)
        .find(|&block| scene.image.entry_of(block).is_some_and(|(id, _)| id.0 == 1));
    let page = lost.unwrap().0 * 2;
    scene.guest.send(0, &format!("sum {page} {}", page + 1));
    let failure = scene.fatal_within(PATIENCE).expect("the failure should be reported");
    assert!(failure.contains("cannot read") && failure.contains("69632"), "{failure}");
    assert_eq!(scene.guest.result_within(0, Duration::from_millis(100)), None);
    drop(restore);
}

/// Waits until the guest waits for this page without success; returns the error.
fn outage_at(restore: &RunningRestore, page: u32) -> String {
    let until = Instant::now() + PATIENCE;
    loop {
        match restore.outage() {
            Some(outage) if outage.page == Some(Page(page)) => return chain(&*outage.error),
            outage => assert!(Instant::now() < until, "{outage:?}"),
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The guest has its page a moment before the outage is over.
fn outage_ends(restore: &RunningRestore) {
    let until = Instant::now() + PATIENCE;
    while let Some(outage) = restore.outage() {
        assert!(Instant::now() < until, "{outage:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_guest_that_runs_waits_until_a_damaged_block_is_repaired() {
    let mut scene = Scene::new(&[1024], 2, Codec::Lz4);
    flip(&scene, Block(33));
    let restore = scene.begin(nothing_in_the_background(RestoreMode::Locality));
    restore.guest_may_run();
    scene.guest.send(0, "sum 67 68");
    let failure = outage_at(&restore, 67);
    assert!(failure.contains("memory block 33") && failure.contains("image.firn"), "{failure}");
    // Everything else is restored as usual.
    scene.check(1, 700..720);
    assert_eq!(scene.guest.result_within(0, Duration::from_millis(200)), None);
    flip(&scene, Block(33));
    assert_eq!(scene.guest.result(0), scene.model.sum(67..68).to_string());
    outage_ends(&restore);
    assert_eq!(scene.fatal_within(Duration::ZERO), None);
    restore.set_fill(BackgroundFill::AtOnce);
    scene.finish(restore);
}

#[test]
fn a_guest_that_runs_waits_until_an_image_is_put_back() {
    let mut scene = Scene::new(&[1024], 2, Codec::None);
    let whole = std::fs::read(scene.image_path()).unwrap();
    let file = std::fs::File::options().write(true).open(scene.image_path()).unwrap();
    let restore = scene.begin(nothing_in_the_background(RestoreMode::Lazy));
    restore.guest_may_run();
    file.set_len(HEADER_BYTES).unwrap();
    std::fs::remove_file(scene.image_path()).unwrap();
    scene.guest.send(0, "sum 67 68");
    let failure = outage_at(&restore, 67);
    assert!(failure.contains("cannot read"), "{failure}");
    std::fs::write(scene.image_path(), whole).unwrap();
    assert_eq!(scene.guest.result(0), scene.model.sum(67..68).to_string());
    restore.set_fill(BackgroundFill::AtOnce);
    scene.finish(restore);
}
