//! Noter: the notes of all applications, and the window that their reports are written to.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use firn_calls::{Notes, Order, Window};
use firn_memory::SharedWords;

use crate::filter::Filter;

/// The pages whose stores are checked.
pub(crate) static FILTER: Filter = Filter::new();

static NOTER: Mutex<Option<Noter>> = Mutex::new(None);

struct Noter {
    window: SharedWords,
    slots: BTreeMap<u32, Notes>,
}

/// Maps the window, which reports are written to from now on.
pub(crate) fn begin(window: &Path) -> io::Result<()> {
    let window = SharedWords::map(&File::options().read(true).write(true).open(window)?)?;
    *lock() = Some(Noter { window, slots: BTreeMap::new() });
    Ok(())
}

/// Stops all noting.
pub(crate) fn end() {
    let mut noter = lock();
    *noter = None;
    // After the noter is gone, and before noting can begin again: an epoch whose stores the filter
    // ignores must not end as if they had been noted.
    FILTER.set([].into_iter());
}

/// Carries out an order of the supervisor. When this returns, every store to the ordered areas is
/// noted. False if noting has stopped.
pub(crate) fn carry_out(order: Order) -> bool {
    let mut noter = lock();
    let Some(noter) = noter.as_mut() else { return false };
    match order {
        Order::Note(order) => noter.slots.insert(order.slot, Notes::new(order)),
        Order::End { slot } => noter.slots.remove(&slot),
    };
    FILTER.set(noter.slots.values().flat_map(Notes::pages));
    true
}

/// Notes a store of `bytes` bytes to a page that is in the filter.
pub(crate) fn note(at: u64, bytes: u64) {
    let mut noter = lock();
    let Some(Noter { window, slots }) = noter.as_mut() else { return };
    for (number, notes) in slots {
        match notes.is_end(at) {
            true => end_epoch(window, *number, notes),
            false => notes.store(at, bytes),
        }
    }
}

fn end_epoch(window: &SharedWords, number: u32, notes: &mut Notes) {
    let slot = Window::new(window.words()).ok().and_then(|window| window.slot(number as usize));
    let Some(slot) = slot else { return };
    if let Some(ended) = notes.end(slot.ended()) {
        slot.tell(ended.epoch, &ended.told);
    }
}

fn lock() -> std::sync::MutexGuard<'static, Option<Noter>> {
    NOTER.lock().unwrap_or_else(PoisonError::into_inner)
}
