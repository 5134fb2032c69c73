//! How many prefetched pages are used later is counted exactly.

use std::time::{Duration, Instant};

use firn_image::{Codec, LocalityBlockId};
use firn_restore::{BackgroundFill, RestoreMode, RestoreOptions, RunCounts, RunningRestore};
use firn_types::Block;

use crate::scene::Scene;

/// Waits until the counts are complete: the guest continues before its fault is counted.
fn counted(restore: &RunningRestore, is_right: impl Fn(&RunCounts) -> bool) {
    let start = Instant::now();
    while !is_right(&restore.record().counts) {
        let counts = restore.record().counts;
        assert!(start.elapsed() < Duration::from_secs(2), "{counts:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn prefetched_pages_are_counted_when_they_are_touched() {
    let mut scene = Scene::new(&[2048], 2, Codec::None);
    let options = RestoreOptions {
        fill: BackgroundFill::Off,
        account_use: true,
        ..RestoreOptions::default()
    };
    let restore = scene.begin(options);
    let image = scene.image.clone();
    let blocks: Vec<u32> = image.entries(LocalityBlockId(3)).iter().map(|it| it.block.0).collect();
    let (first, others) = (blocks[0] * 2, &blocks[1..]);
    scene.check(0, first..first + 1);
    let others_pages = blocks.len() as u64 * 2 - 1;
    counted(&restore, |counts| counts.prefetched_pages == Some(others_pages));
    assert_eq!(restore.record().counts.prefetched_used_pages, Some(0));
    scene.check(0, first..first + 1);
    others[..3].iter().for_each(|block| scene.check(0, block * 2 + 1..block * 2 + 2));
    counted(&restore, |counts| counts.prefetched_used_pages == Some(3));
    assert_eq!(restore.record().counts.demand_units, 1);
    restore.set_fill(BackgroundFill::AtOnce);
    let record = scene.finish(restore);
    assert_eq!(record.counts.prefetched_used(), Some(3.0 / (blocks.len() as f64 * 2.0 - 1.0)));
}

#[test]
fn accesses_that_the_working_set_avoided_are_counted() {
    let working_set: Vec<Block> = (100..108).map(Block).collect();
    let mut scene = Scene::with(&[2048], 2, Codec::None, working_set);
    let options = RestoreOptions {
        mode: RestoreMode::WorkingSet,
        fill: BackgroundFill::Off,
        account_use: true,
        ..RestoreOptions::default()
    };
    let restore = scene.begin(options);
    restore.await_prefill().unwrap();
    let ahead = restore.record().counts;
    assert!(ahead.ahead_units > 0 && ahead.ahead_pages == 0, "{ahead:?}");
    scene.check(0, 200..204);
    counted(&restore, |counts| counts.prefetched_used_pages == Some(4));
    assert_eq!(restore.record().counts.prefetched_pages, ahead.prefetched_pages);
    restore.set_fill(BackgroundFill::AtOnce);
    scene.finish(restore);
}
