//! Noter: the notes of all applications, and the window that their reports are written to.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use firn_calls::{CallWindow, PluginOrder, StoreNotes};
use firn_memory::SharedWords;

use crate::filter::StoreFilter;

/// The pages whose stores are checked.
pub(crate) static FILTER: StoreFilter = StoreFilter::new();

static NOTER: Mutex<Option<StoreNoter>> = Mutex::new(None);

struct StoreNoter {
    window: SharedWords,
    slots: BTreeMap<u32, StoreNotes>,
}

/// Maps the window, which reports are written to from now on.
pub(crate) fn open_window(window: &Path) -> io::Result<()> {
    let window = SharedWords::map_file(&File::options().read(true).write(true).open(window)?)?;
    *lock_noter() = Some(StoreNoter { window, slots: BTreeMap::new() });
    Ok(())
}

/// Stops all noting.
pub(crate) fn stop_noting() {
    let mut noter = lock_noter();
    *noter = None;
    // After the noter is gone, and before noting can begin again: an epoch whose stores the filter
    // ignores must not end as if they had been noted.
    FILTER.replace_pages([].into_iter());
}

/// Carries out an order of the supervisor. When this returns, every store to the ordered areas is
/// noted. False if noting has stopped.
pub(crate) fn carry_out_order(order: PluginOrder) -> bool {
    let mut noter = lock_noter();
    let Some(noter) = noter.as_mut() else { return false };
    match order {
        PluginOrder::Note(order) => noter.slots.insert(order.slot, StoreNotes::new(order)),
        PluginOrder::End { slot } => noter.slots.remove(&slot),
    };
    FILTER.replace_pages(noter.slots.values().flat_map(StoreNotes::watched_pages));
    true
}

/// Notes a store of `bytes` bytes to a page that is in the filter.
pub(crate) fn note_store(at: u64, bytes: u64) {
    let mut noter = lock_noter();
    let Some(StoreNoter { window, slots }) = noter.as_mut() else { return };
    for (number, notes) in slots {
        match notes.is_end_word(at) {
            true => end_epoch(window, *number, notes),
            false => notes.note_store(at, bytes),
        }
    }
}

fn end_epoch(window: &SharedWords, number: u32, notes: &mut StoreNotes) {
    let slot = CallWindow::new(window.words()).ok().and_then(|window| window.slot(number as usize));
    let Some(slot) = slot else { return };
    if let Some(ended) = notes.end_epoch(slot.read_end_word()) {
        slot.write_report(ended.epoch, &ended.report);
    }
}

fn lock_noter() -> std::sync::MutexGuard<'static, Option<StoreNoter>> {
    NOTER.lock().unwrap_or_else(PoisonError::into_inner)
}
