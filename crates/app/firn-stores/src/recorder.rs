//! Store recorder: the recorded stores of all applications, and the window that their reports are
//! written to.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use firn_calls::{CallWindow, PluginOrder, RecordedStores};
use firn_memory::SharedWords;

use crate::filter::StoreFilter;

/// The pages whose stores are checked.
pub(crate) static FILTER: StoreFilter = StoreFilter::new();

static RECORDER: Mutex<Option<StoreRecorder>> = Mutex::new(None);

struct StoreRecorder {
    window: SharedWords,
    /// By the number of the application's slot in the window.
    slots: BTreeMap<u32, RecordedStores>,
}

/// Maps the window, which reports are written to from now on.
pub(crate) fn open_window(window: &Path) -> io::Result<()> {
    let window = SharedWords::map_file(&File::options().read(true).write(true).open(window)?)?;
    *lock_recorder() = Some(StoreRecorder { window, slots: BTreeMap::new() });
    Ok(())
}

/// Stops all recording.
pub(crate) fn stop_recording() {
    let mut recorder = lock_recorder();
    *recorder = None;
    // After the recorder is gone, and before recording can begin again: an epoch whose stores the
    // filter ignores must not end as if they had been recorded.
    FILTER.replace_pages([].into_iter());
}

/// Carries out an order of the supervisor. When this returns, every store to the ordered areas is
/// recorded. False if recording has stopped.
pub(crate) fn carry_out_order(order: PluginOrder) -> bool {
    let mut recorder = lock_recorder();
    let Some(recorder) = recorder.as_mut() else { return false };
    match order {
        PluginOrder::RecordStores(order) => {
            recorder.slots.insert(order.slot, RecordedStores::new(order))
        }
        PluginOrder::End { slot } => recorder.slots.remove(&slot),
    };
    FILTER.replace_pages(recorder.slots.values().flat_map(RecordedStores::watched_pages));
    true
}

/// Handles a store of `bytes` bytes to the virtual address `at`, whose page is in the filter:
/// records it for each application that has an area there. A store to an application's end word
/// ends its epoch instead.
pub(crate) fn handle_store(at: u64, bytes: u64) {
    let mut recorder = lock_recorder();
    let Some(StoreRecorder { window, slots }) = recorder.as_mut() else { return };
    for (number, stores) in slots {
        match stores.is_end_word(at) {
            true => end_epoch(window, *number, stores),
            false => stores.record_store(at, bytes),
        }
    }
}

/// Ends the epoch of the application in a slot, if its end word has the epoch's token, and writes
/// the report to the slot.
fn end_epoch(window: &SharedWords, number: u32, stores: &mut RecordedStores) {
    let slot = CallWindow::new(window.words()).ok().and_then(|window| window.slot(number as usize));
    let Some(slot) = slot else { return };
    if let Some(ended) = stores.end_epoch(slot.read_end_word()) {
        slot.write_report(ended.epoch, &ended.report);
    }
}

fn lock_recorder() -> std::sync::MutexGuard<'static, Option<StoreRecorder>> {
    RECORDER.lock().unwrap_or_else(PoisonError::into_inner)
}
