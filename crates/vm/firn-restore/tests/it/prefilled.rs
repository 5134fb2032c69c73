//! Memory that was filled before the hypervisor was paused is correct, or is discarded.

use std::thread::sleep;
use std::time::Duration;

use firn_image::Codec;
use firn_restore::{
    BackgroundFill, PrefillThreads, PrefilledMemory, ReadRecord, RestoreMode, RestoreOptions,
};
use firn_types::Block;

use crate::scene::Scene;

fn options(mode: RestoreMode) -> RestoreOptions {
    RestoreOptions { mode, fill: BackgroundFill::Off, ..RestoreOptions::default() }
}

/// Fills memory until all wanted units are filled, or this test has waited long enough: it must
/// succeed with any amount.
fn prefill(scene: &Scene, mode: RestoreMode) -> PrefilledMemory {
    let prefill = PrefillThreads::start_fill(
        scene.image.clone(),
        &RestoreOptions::new(mode),
        scene.guest.files(),
    );
    sleep(Duration::from_millis(300));
    prefill.finish_fill()
}

/// The reads of the prefill precede those of the page server, whose threads read at once.
#[test]
fn reads_are_recorded_in_the_order_of_their_time() {
    use RestoreMode::{Auto, Eager, Lazy, Locality, WorkingSet};
    for mode in [Lazy, Locality, WorkingSet, Auto, Eager] {
        let working_set: Vec<Block> = (0..512).map(Block).collect();
        let mut scene = Scene::with(&[8192], 2, Codec::None, working_set);
        let options = options(mode);
        let filling = PrefillThreads::start_fill(
            scene.image.clone(),
            &RestoreOptions { since: options.since, ..RestoreOptions::new(mode) },
            scene.guest.files(),
        );
        sleep(Duration::from_millis(30));
        let restore = scene.begin_prefilled(options, &filling.finish_fill());
        restore.await_prefill().unwrap();
        scene.check_all();
        restore.set_fill(BackgroundFill::AtOnce);
        let record = scene.finish(restore);
        assert!(record.reads.is_sorted_by_key(ReadRecord::ended_us), "{mode}: {:?}", record.reads);
        let last = record.reads.last().map_or(0, ReadRecord::ended_us);
        assert!(last <= record.recorded_us, "{mode}: a read ends after the record was made");
    }
}

#[test]
fn all_of_memory_can_be_there_before() {
    let mut scene = Scene::new(&[1003, 517], 16, Codec::Lz4);
    let prefilled = prefill(&scene, RestoreMode::Eager);
    let restore = scene.begin_prefilled(options(RestoreMode::Eager), &prefilled);
    restore.await_prefill().unwrap();
    assert!(restore.record().counts.ahead_pages > 0);
    scene.check_all();
    restore.set_fill(BackgroundFill::AtOnce);
    scene.finish(restore);
}

#[test]
fn prefilled_pages_that_the_hypervisor_wrote_are_dropped() {
    let working_set: Vec<Block> = (0..512).map(Block).collect();
    let mut scene = Scene::with(&[4096], 2, Codec::Lz4, working_set);
    // Before and after Firn wrote there, inside the working set and outside.
    scene.guest.ask(0, "write 4 9");
    scene.guest.ask(0, "write 3000 9");
    let filling = PrefillThreads::start_fill(
        scene.image.clone(),
        &RestoreOptions::new(RestoreMode::Auto),
        scene.guest.files(),
    );
    sleep(Duration::from_millis(300));
    scene.guest.ask(1, "write 700 9");
    scene.guest.ask(1, "write 4000 9");
    let prefilled = filling.finish_fill();
    let restore = scene.begin_prefilled(options(RestoreMode::Auto), &prefilled);
    restore.await_prefill().unwrap();
    assert!(restore.record().counts.ahead_pages > 0);
    for pages in [0..16, 690..710, 2990..3010, 3990..4010] {
        scene.check(2, pages);
    }
    scene.check_all();
    restore.set_fill(BackgroundFill::AtOnce);
    scene.finish(restore);
}

#[test]
fn a_prefill_that_is_given_up_leaves_its_threads_ended() {
    let scene = Scene::new(&[4096], 2, Codec::Lz4);
    drop(PrefillThreads::start_fill(
        scene.image.clone(),
        &RestoreOptions::new(RestoreMode::Eager),
        scene.guest.files(),
    ));
}
