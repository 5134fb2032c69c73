//! Performs a store through the second mapping of a span. Runs inside the signal handler.

use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};

use libc::{c_int, ucontext_t};

use super::notes::{Noted, Notes};
use crate::instruction::{
    Action, FLAGS, LONGEST, Operation, Registers, Store, Unknown, evaluate, set_general,
};
use crate::span::PAGE;

/// The result of an attempt to perform a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Performed {
    /// Memory and registers are as after the instruction, or, if it repeats, after some of its
    /// iterations.
    Yes,
    /// Nothing has changed.
    Unsupported,
    /// The log is full. Nothing has changed.
    Full,
}

/// `gregs` index of each general register, in the order of the architecture.
const ORDER: [c_int; 16] = [
    libc::REG_RAX,
    libc::REG_RCX,
    libc::REG_RDX,
    libc::REG_RBX,
    libc::REG_RSP,
    libc::REG_RBP,
    libc::REG_RSI,
    libc::REG_RDI,
    libc::REG_R8,
    libc::REG_R9,
    libc::REG_R10,
    libc::REG_R11,
    libc::REG_R12,
    libc::REG_R13,
    libc::REG_R14,
    libc::REG_R15,
];
/// Offset and value of the mark of an XSAVE area, and the offset of its set of state components
/// (`struct _fpx_sw_bytes`).
const XSAVE_MAGIC: (usize, u32) = (464, 0x4650_5853);
const XSAVE_FEATURES: usize = 472;
/// State component: upper halves of the vector registers. In the standard format it has a fixed
/// offset.
const YMM: (u64, usize) = (1 << 2, 576);

/// Performs the instruction that faulted.
pub(crate) fn perform(notes: &Notes, context: &mut ucontext_t) -> Performed {
    let Some(store) = decode(context) else { return Performed::Unsupported };
    let window = Window { notes, alias: notes.alias().unwrap_or_default() };
    match &store.action {
        Action::Bytes(bytes) => window.bytes(&store, &bytes[..store.size], context),
        Action::Modify(operation) => window.modify(&store, *operation, context),
        Action::Fill { value, repeats } => window.fill(&store, *value, *repeats, context),
        Action::Copy { from, repeats } => window.copy(&store, *from, *repeats, context),
    }
}

fn decode(context: &ucontext_t) -> Option<Store> {
    let gregs = &context.uc_mcontext.gregs;
    let ip = gregs[libc::REG_RIP as usize] as u64;
    let (xmm, ymm_high) = vectors(context);
    let general = ORDER.map(|register| gregs[register as usize] as u64);
    let flags = gregs[libc::REG_EFL as usize] as u64;
    let registers = Registers { general, ip, flags, xmm, ymm_high };
    // The next page may not be mapped, unless the instruction extends into it.
    let to_page_end = PAGE - ip as usize % PAGE;
    match evaluate(code_at(ip, to_page_end.min(LONGEST)), &registers) {
        Err(Unknown::Incomplete) if to_page_end < LONGEST => {
            evaluate(code_at(ip, LONGEST), &registers).ok()
        }
        result => result.ok(),
    }
}

fn code_at(ip: u64, len: usize) -> &'static [u8] {
    // SAFETY: the processor has just read the instruction at `ip`. `len` ends within its page, or
    // the decoder has reported that the instruction continues in the next, which is therefore
    // mapped as well. Code that changes while it runs is not supported. (Pages that can be executed
    // and not read end the process here, as an unhandled fault.)
    unsafe { std::slice::from_raw_parts(std::ptr::with_exposed_provenance(ip as usize), len) }
}

type Halves<'a> = Option<&'a [[u8; 16]; 16]>;

fn vectors(context: &ucontext_t) -> (Halves<'_>, Halves<'_>) {
    let state = context.uc_mcontext.fpregs.cast::<u8>().cast_const();
    if state.is_null() {
        return (None, None);
    }
    // SAFETY: where it is not null, `fpregs` is an FXSAVE area of 512 bytes on the signal frame,
    // which lives as long as the context. Bytes 160 to 416 are the 16 registers. If the software
    // bytes name the magic and the component, the kernel has written an XSAVE area in standard
    // format behind it, where the upper halves lie at 576.
    unsafe {
        let xmm = Some(&*state.add(160).cast::<[[u8; 16]; 16]>());
        let magic = state.add(XSAVE_MAGIC.0).cast::<u32>().read_unaligned();
        let features = state.add(XSAVE_FEATURES).cast::<u64>().read_unaligned();
        let has = magic == XSAVE_MAGIC.1 && features & YMM.0 != 0;
        // A component in its initial state is all zeros, and the kernel marks that in the header at
        // 512 only.
        let present = has && state.add(512).cast::<u64>().read_unaligned() & YMM.0 != 0;
        let high = match (has, present) {
            (true, true) => Some(&*state.add(YMM.1).cast::<[[u8; 16]; 16]>()),
            (true, false) => Some(&[[0; 16]; 16]),
            (false, _) => None,
        };
        (xmm, high)
    }
}

fn set(context: &mut ucontext_t, register: c_int, value: u64) {
    context.uc_mcontext.gregs[register as usize] = value as i64;
}

fn get(context: &ucontext_t, register: c_int) -> u64 {
    context.uc_mcontext.gregs[register as usize] as u64
}

/// A span and its second mapping.
struct Window<'a> {
    notes: &'a Notes,
    alias: usize,
}

impl Window<'_> {
    /// The address to write to in the second mapping, if all bytes lie in the span.
    fn place(&self, address: u64, len: usize) -> Option<*mut u8> {
        let span = self.notes.span();
        let start = address as usize;
        let inside = start >= span.start() && start.checked_add(len)? <= span.end();
        let place = || std::ptr::with_exposed_provenance_mut(start - span.start() + self.alias);
        inside.then(place)
    }

    fn note(&self, address: u64, len: usize) -> bool {
        self.notes.note(Noted { address: address as usize, len })
    }

    fn bytes(&self, store: &Store, bytes: &[u8], context: &mut ucontext_t) -> Performed {
        let Some(to) = self.place(store.address, bytes.len()) else {
            return Performed::Unsupported;
        };
        if !self.note(store.address, bytes.len()) {
            return Performed::Full;
        }
        write(to, bytes);
        set(context, libc::REG_RIP, store.next);
        Performed::Yes
    }

    fn modify(&self, store: &Store, operation: Operation, context: &mut ucontext_t) -> Performed {
        let place = self.place(store.address, store.size);
        let Some(to) = place.filter(|to| to.addr() % store.size == 0) else {
            return Performed::Unsupported;
        };
        if !self.note(store.address, store.size) {
            return Performed::Full;
        }
        let flags = get(context, libc::REG_EFL);
        let rax = get(context, libc::REG_RAX);
        let old = update(to, store.size, |old| operation.apply(old, store.size, flags, rax).value);
        let outcome = operation.apply(old, store.size, flags, rax);
        if let Some(register) = outcome.old_to {
            let mut general = ORDER.map(|register| get(context, register));
            set_general(&mut general, register, old);
            for (register, value) in ORDER.into_iter().zip(general) {
                set(context, register, value);
            }
        }
        set(context, libc::REG_EFL, flags & !FLAGS | outcome.flags & FLAGS);
        set(context, libc::REG_RIP, store.next);
        Performed::Yes
    }

    fn fill(
        &self,
        store: &Store,
        value: u64,
        repeats: bool,
        context: &mut ucontext_t,
    ) -> Performed {
        let rounds = rounds(store, repeats, context, usize::MAX);
        let value = value.to_le_bytes();
        self.rounds(store, rounds, repeats, context, |to| write(to, &value[..store.size]))
    }

    fn copy(&self, store: &Store, from: u64, repeats: bool, context: &mut ucontext_t) -> Performed {
        // The processor has read the first element; the bytes in the next page may not be readable.
        let readable = PAGE - from as usize % PAGE;
        let rounds = rounds(store, repeats, context, readable).max(1);
        let mut from: *const u8 = std::ptr::with_exposed_provenance(from as usize);
        let performed = self.rounds(store, rounds, repeats, context, |to| {
            let mut element = [0; 8];
            // SAFETY: the first element has been read by the instruction before it faulted on the
            // write, and further ones lie wholly in the same page. Volatile: other threads may
            // write there, as they may natively.
            unsafe {
                for (index, byte) in element[..store.size].iter_mut().enumerate() {
                    *byte = from.add(index).read_volatile();
                }
                from = from.wrapping_add(store.size);
            }
            write(to, &element[..store.size]);
        });
        if performed == Performed::Yes {
            let moved = get(context, libc::REG_RDI) - store.address;
            let from = get(context, libc::REG_RSI).wrapping_add(moved);
            set(context, libc::REG_RSI, from);
        }
        performed
    }

    /// Performs the iterations of a string instruction that lie in the span. If more are left, the
    /// instruction runs again.
    fn rounds(
        &self,
        store: &Store,
        rounds: usize,
        repeats: bool,
        context: &mut ucontext_t,
        mut round: impl FnMut(*mut u8),
    ) -> Performed {
        let room = self.notes.span().end().saturating_sub(store.address as usize);
        let rounds = rounds.min(room / store.size);
        let place = self.place(store.address, rounds * store.size).filter(|_| rounds > 0);
        let Some(to) = place else { return Performed::Unsupported };
        if !self.note(store.address, rounds * store.size) {
            return Performed::Full;
        }
        for number in 0..rounds {
            round(to.wrapping_add(number * store.size));
        }
        set(context, libc::REG_RDI, store.address + (rounds * store.size) as u64);
        let left = get(context, libc::REG_RCX).wrapping_sub(rounds as u64);
        match repeats {
            true => set(context, libc::REG_RCX, left),
            false => set(context, libc::REG_RIP, store.next),
        }
        if repeats && left == 0 {
            set(context, libc::REG_RIP, store.next);
        }
        Performed::Yes
    }
}

/// The maximum count of iterations: limited by `rcx`, by the size of a page, and by the readable
/// bytes.
fn rounds(store: &Store, repeats: bool, context: &ucontext_t, readable: usize) -> usize {
    match repeats {
        true => (get(context, libc::REG_RCX) as usize).min(PAGE.min(readable) / store.size),
        false => 1,
    }
}

/// Writes bytes, each aligned natural width in one access.
fn write(to: *mut u8, bytes: &[u8]) {
    // SAFETY: callers take `to` from `AliasedSpan::alias_pointer`: that many bytes of the second
    // mapping, which is writable and lives as long as the span is watched. The casts are to widths
    // that the match found aligned; accesses are atomic, so that other threads of the application
    // see what they would natively.
    unsafe {
        match (bytes.len(), to.addr() % bytes.len().max(1)) {
            (8, 0) => (*to.cast::<AtomicU64>()).store(word(bytes), Ordering::Release),
            (4, 0) => (*to.cast::<AtomicU32>()).store(word(bytes) as u32, Ordering::Release),
            (2, 0) => (*to.cast::<AtomicU16>()).store(word(bytes) as u16, Ordering::Release),
            _ => write_in_parts(to, bytes),
        }
    }
}

fn write_in_parts(to: *mut u8, bytes: &[u8]) {
    let wide = bytes.len() % 8 == 0 && to.addr() % 8 == 0;
    for (number, part) in bytes.chunks(if wide { 8 } else { 1 }).enumerate() {
        let to = to.wrapping_add(number * part.len());
        // SAFETY: as in `write_atomically`; `wide` guarantees the alignment.
        unsafe {
            match wide {
                true => (*to.cast::<AtomicU64>()).store(word(part), Ordering::Release),
                false => (*to.cast::<AtomicU8>()).store(part[0], Ordering::Release),
            }
        }
    }
}

fn word(bytes: &[u8]) -> u64 {
    let mut word = [0; 8];
    word[..bytes.len()].copy_from_slice(bytes);
    u64::from_le_bytes(word)
}

/// Replaces a word atomically, also if the instruction was not atomic. Returns the old word.
fn update(at: *mut u8, size: usize, new: impl Fn(u64) -> u64) -> u64 {
    macro_rules! swap {
        ($atomic:ty, $word:ty) => {{
            // SAFETY: `modify_memory` takes `at` from `AliasedSpan::alias_pointer` and has checked
            // that it is aligned to `size`.
            let cell = unsafe { &*at.cast::<$atomic>() };
            let mut old = cell.load(Ordering::Acquire);
            loop {
                let next = new(u64::from(old)) as $word;
                match cell.compare_exchange_weak(old, next, Ordering::SeqCst, Ordering::Acquire) {
                    Ok(_) => break u64::from(old),
                    Err(seen) => old = seen,
                }
            }
        }};
    }
    match size {
        1 => swap!(AtomicU8, u8),
        2 => swap!(AtomicU16, u16),
        4 => swap!(AtomicU32, u32),
        _ => swap!(AtomicU64, u64),
    }
}
