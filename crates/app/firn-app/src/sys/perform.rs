//! Performs a store through the second mapping of a span. Runs inside the signal handler.

use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};

use libc::{c_int, ucontext_t};

use super::write_log::{RecordedStore, WriteLog};
use crate::instruction::{
    ArithmeticOperation, DecodedStore, EvaluationError, FLAGS, INSTRUCTION_BYTES_MAX,
    ProcessorState, StoreAction, evaluate_store, set_general,
};
use crate::span::PAGE;

/// The result of an attempt to perform a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StoreOutcome {
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
const YMM_COMPONENT: (u64, usize) = (1 << 2, 576);

/// Performs the instruction that faulted.
pub(crate) fn perform_store(log: &WriteLog, context: &mut ucontext_t) -> StoreOutcome {
    let Some(store) = decode_store(context) else { return StoreOutcome::Unsupported };
    let window = AliasedSpan { log, alias: log.alias().unwrap_or_default() };
    match &store.action {
        StoreAction::Bytes(bytes) => window.write_bytes(&store, &bytes[..store.size], context),
        StoreAction::Modify(operation) => window.modify_memory(&store, *operation, context),
        StoreAction::Fill { value, repeats } => {
            window.fill_memory(&store, *value, *repeats, context)
        }
        StoreAction::Copy { from, repeats } => window.copy_memory(&store, *from, *repeats, context),
    }
}

fn decode_store(context: &ucontext_t) -> Option<DecodedStore> {
    let gregs = &context.uc_mcontext.gregs;
    let ip = gregs[libc::REG_RIP as usize] as u64;
    let (xmm, ymm_high) = vector_registers(context);
    let general = ORDER.map(|register| gregs[register as usize] as u64);
    let flags = gregs[libc::REG_EFL as usize] as u64;
    let registers = ProcessorState { general, ip, flags, xmm, ymm_high };
    // The next page may not be mapped, unless the instruction extends into it.
    let to_page_end = PAGE - ip as usize % PAGE;
    match evaluate_store(code_at(ip, to_page_end.min(INSTRUCTION_BYTES_MAX)), &registers) {
        Err(EvaluationError::Incomplete) if to_page_end < INSTRUCTION_BYTES_MAX => {
            evaluate_store(code_at(ip, INSTRUCTION_BYTES_MAX), &registers).ok()
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

type VectorHalves<'a> = Option<&'a [[u8; 16]; 16]>;

fn vector_registers(context: &ucontext_t) -> (VectorHalves<'_>, VectorHalves<'_>) {
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
        let has = magic == XSAVE_MAGIC.1 && features & YMM_COMPONENT.0 != 0;
        // A component in its initial state is all zeros, and the kernel marks that in the header at
        // 512 only.
        let present = has && state.add(512).cast::<u64>().read_unaligned() & YMM_COMPONENT.0 != 0;
        let high = match (has, present) {
            (true, true) => Some(&*state.add(YMM_COMPONENT.1).cast::<[[u8; 16]; 16]>()),
            (true, false) => Some(&[[0; 16]; 16]),
            (false, _) => None,
        };
        (xmm, high)
    }
}

fn write_register(context: &mut ucontext_t, register: c_int, value: u64) {
    context.uc_mcontext.gregs[register as usize] = value as i64;
}

fn read_register(context: &ucontext_t, register: c_int) -> u64 {
    context.uc_mcontext.gregs[register as usize] as u64
}

/// A span and its second mapping.
struct AliasedSpan<'a> {
    log: &'a WriteLog,
    alias: usize,
}

impl AliasedSpan<'_> {
    /// The address to write to in the second mapping, if all bytes lie in the span.
    fn alias_pointer(&self, address: u64, len: usize) -> Option<*mut u8> {
        let span = self.log.span();
        let start = address as usize;
        let inside = start >= span.start() && start.checked_add(len)? <= span.end();
        let pointer = || std::ptr::with_exposed_provenance_mut(start - span.start() + self.alias);
        inside.then(pointer)
    }

    fn record_store(&self, address: u64, len: usize) -> bool {
        self.log.record_store(RecordedStore { address: address as usize, len })
    }

    fn write_bytes(
        &self,
        store: &DecodedStore,
        bytes: &[u8],
        context: &mut ucontext_t,
    ) -> StoreOutcome {
        let Some(to) = self.alias_pointer(store.address, bytes.len()) else {
            return StoreOutcome::Unsupported;
        };
        if !self.record_store(store.address, bytes.len()) {
            return StoreOutcome::Full;
        }
        write_atomically(to, bytes);
        write_register(context, libc::REG_RIP, store.next);
        StoreOutcome::Yes
    }

    fn modify_memory(
        &self,
        store: &DecodedStore,
        operation: ArithmeticOperation,
        context: &mut ucontext_t,
    ) -> StoreOutcome {
        let pointer = self.alias_pointer(store.address, store.size);
        let Some(to) = pointer.filter(|to| to.addr() % store.size == 0) else {
            return StoreOutcome::Unsupported;
        };
        if !self.record_store(store.address, store.size) {
            return StoreOutcome::Full;
        }
        let flags = read_register(context, libc::REG_EFL);
        let rax = read_register(context, libc::REG_RAX);
        let old = update_atomically(to, store.size, |old| {
            operation.compute(old, store.size, flags, rax).value
        });
        let outcome = operation.compute(old, store.size, flags, rax);
        if let Some(register) = outcome.old_to {
            let mut general = ORDER.map(|register| read_register(context, register));
            set_general(&mut general, register, old);
            for (register, value) in ORDER.into_iter().zip(general) {
                write_register(context, register, value);
            }
        }
        write_register(context, libc::REG_EFL, flags & !FLAGS | outcome.flags & FLAGS);
        write_register(context, libc::REG_RIP, store.next);
        StoreOutcome::Yes
    }

    fn fill_memory(
        &self,
        store: &DecodedStore,
        value: u64,
        repeats: bool,
        context: &mut ucontext_t,
    ) -> StoreOutcome {
        let rounds = iterations_max(store, repeats, context, usize::MAX);
        let value = value.to_le_bytes();
        self.run_iterations(store, rounds, repeats, context, |to| {
            write_atomically(to, &value[..store.size])
        })
    }

    fn copy_memory(
        &self,
        store: &DecodedStore,
        from: u64,
        repeats: bool,
        context: &mut ucontext_t,
    ) -> StoreOutcome {
        // The processor has read the first element; the bytes in the next page may not be readable.
        let readable = PAGE - from as usize % PAGE;
        let rounds = iterations_max(store, repeats, context, readable).max(1);
        let mut from: *const u8 = std::ptr::with_exposed_provenance(from as usize);
        let performed = self.run_iterations(store, rounds, repeats, context, |to| {
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
            write_atomically(to, &element[..store.size]);
        });
        if performed == StoreOutcome::Yes {
            let moved = read_register(context, libc::REG_RDI) - store.address;
            let from = read_register(context, libc::REG_RSI).wrapping_add(moved);
            write_register(context, libc::REG_RSI, from);
        }
        performed
    }

    /// Performs the iterations of a string instruction that lie in the span. If more are left, the
    /// instruction runs again.
    fn run_iterations(
        &self,
        store: &DecodedStore,
        rounds: usize,
        repeats: bool,
        context: &mut ucontext_t,
        mut round: impl FnMut(*mut u8),
    ) -> StoreOutcome {
        let room = self.log.span().end().saturating_sub(store.address as usize);
        let rounds = rounds.min(room / store.size);
        let pointer = self.alias_pointer(store.address, rounds * store.size).filter(|_| rounds > 0);
        let Some(to) = pointer else { return StoreOutcome::Unsupported };
        if !self.record_store(store.address, rounds * store.size) {
            return StoreOutcome::Full;
        }
        for number in 0..rounds {
            round(to.wrapping_add(number * store.size));
        }
        write_register(context, libc::REG_RDI, store.address + (rounds * store.size) as u64);
        let left = read_register(context, libc::REG_RCX).wrapping_sub(rounds as u64);
        match repeats {
            true => write_register(context, libc::REG_RCX, left),
            false => write_register(context, libc::REG_RIP, store.next),
        }
        if repeats && left == 0 {
            write_register(context, libc::REG_RIP, store.next);
        }
        StoreOutcome::Yes
    }
}

/// The maximum count of iterations: limited by `rcx`, by the size of a page, and by the readable
/// bytes.
fn iterations_max(
    store: &DecodedStore,
    repeats: bool,
    context: &ucontext_t,
    readable: usize,
) -> usize {
    match repeats {
        true => {
            (read_register(context, libc::REG_RCX) as usize).min(PAGE.min(readable) / store.size)
        }
        false => 1,
    }
}

/// Writes bytes, each aligned natural width in one access.
fn write_atomically(to: *mut u8, bytes: &[u8]) {
    // SAFETY: callers take `to` from `AliasedSpan::alias_pointer`: that many bytes of the second
    // mapping, which is writable and lives as long as the span is watched. The casts are to widths
    // that the match found aligned; accesses are atomic, so that other threads of the application
    // see what they would natively.
    unsafe {
        match (bytes.len(), to.addr() % bytes.len().max(1)) {
            (8, 0) => (*to.cast::<AtomicU64>()).store(word_from_bytes(bytes), Ordering::Release),
            (4, 0) => {
                (*to.cast::<AtomicU32>()).store(word_from_bytes(bytes) as u32, Ordering::Release)
            }
            (2, 0) => {
                (*to.cast::<AtomicU16>()).store(word_from_bytes(bytes) as u16, Ordering::Release)
            }
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
                true => (*to.cast::<AtomicU64>()).store(word_from_bytes(part), Ordering::Release),
                false => (*to.cast::<AtomicU8>()).store(part[0], Ordering::Release),
            }
        }
    }
}

fn word_from_bytes(bytes: &[u8]) -> u64 {
    let mut word = [0; 8];
    word[..bytes.len()].copy_from_slice(bytes);
    u64::from_le_bytes(word)
}

/// Replaces a word atomically, also if the instruction was not atomic. Returns the old word.
fn update_atomically(at: *mut u8, size: usize, new: impl Fn(u64) -> u64) -> u64 {
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
