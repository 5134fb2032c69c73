//! Random programs: areas, transactions, and stores of every kind in them.

use std::arch::asm;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use proptest::prelude::*;

/// Kinds of instructions that write memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StoreKind {
    Byte,
    Word16,
    Word32,
    Word64,
    HighByte,
    Immediate,
    Memcpy,
    RepMovsb,
    RepStosq,
    Stosd,
    Vector128,
    Vector256,
    NonTemporal,
    Low64,
    High64,
    Atomic,
    Exchange,
    CompareExchange,
    Increment,
    Negate,
    /// An instruction that no emulation here supports.
    Shift,
    Atomic128,
}

const STORE_KINDS: [StoreKind; 22] = [
    StoreKind::Byte,
    StoreKind::Word16,
    StoreKind::Word32,
    StoreKind::Word64,
    StoreKind::HighByte,
    StoreKind::Immediate,
    StoreKind::Memcpy,
    StoreKind::RepMovsb,
    StoreKind::RepStosq,
    StoreKind::Stosd,
    StoreKind::Vector128,
    StoreKind::Vector256,
    StoreKind::NonTemporal,
    StoreKind::Low64,
    StoreKind::High64,
    StoreKind::Atomic,
    StoreKind::Exchange,
    StoreKind::CompareExchange,
    StoreKind::Increment,
    StoreKind::Negate,
    StoreKind::Shift,
    StoreKind::Atomic128,
];

/// The bytes that any kind but the copying ones needs, with alignment.
const ROOM: usize = 48;

/// One write: the position in a stripe (as a fraction), the length if that varies, and the value.
#[derive(Clone, Debug)]
pub(crate) struct PlannedWrite {
    pub(crate) area: prop::sample::Index,
    pub(crate) offset: u32,
    pub(crate) len: u16,
    pub(crate) kind: StoreKind,
    pub(crate) value: u64,
}

#[derive(Clone, Debug)]
pub(crate) struct ProgramStep {
    pub(crate) writes: Vec<PlannedWrite>,
    pub(crate) threads: usize,
    pub(crate) commits: bool,
}

#[derive(Clone, Debug)]
pub(crate) struct AreaPlan {
    pub(crate) len: usize,
    /// For the program's own memory: its offset in a page.
    pub(crate) misaligned: usize,
}

#[derive(Clone, Debug)]
pub(crate) struct RandomProgram {
    pub(crate) areas: Vec<AreaPlan>,
    pub(crate) steps: Vec<ProgramStep>,
}

pub(crate) fn program_strategy(steps: usize) -> impl Strategy<Value = RandomProgram> {
    let len = prop_oneof![1_usize..300, 1000_usize..9000, 4090_usize..4100, 8192_usize..60_000];
    let area = (len, 0_usize..4096).prop_map(|(len, misaligned)| AreaPlan { len, misaligned });
    let areas = prop::collection::vec(area, 1..4);
    (areas, prop::collection::vec(step_strategy(), steps))
        .prop_map(|(areas, steps)| RandomProgram { areas, steps })
}

fn step_strategy() -> impl Strategy<Value = ProgramStep> {
    let write = (
        any::<prop::sample::Index>(),
        any::<u32>(),
        prop_oneof![4 => 1_u16..64, 1 => 1_u16..6000],
        prop::sample::select(&STORE_KINDS[..]),
        any::<u64>(),
    )
        .prop_map(|(area, offset, len, kind, value)| PlannedWrite {
            area,
            offset,
            len,
            kind,
            value,
        });
    let threads = prop_oneof![8 => Just(1_usize), 1 => 2_usize..4];
    (prop::collection::vec(write, 0..8), threads, prop::bool::weighted(0.85))
        .prop_map(|(writes, threads, commits)| ProgramStep { writes, threads, commits })
}

/// The part of an area for one of several threads. Borders are not aligned.
pub(crate) fn thread_range(len: usize, thread: usize, threads: usize) -> Range<usize> {
    len * thread / threads..len * (thread + 1) / threads
}

/// Writes to `len` bytes at `start`. The same call on equal memory elsewhere gives equal bytes.
///
/// # Safety
///
/// The bytes are allocated, and no other code accesses them.
pub(crate) unsafe fn perform_write(write: &PlannedWrite, start: *mut u8, len: usize) {
    if len == 0 {
        return;
    }
    let fits = len >= 2 * ROOM;
    let kind = if fits { write.kind } else { StoreKind::Byte };
    let offset = write.offset as usize % (if fits { len - ROOM } else { len });
    let room = (len - offset).min(usize::from(write.len));
    // Equal memory lies at other addresses: alignment is by offset, and checked where it matters.
    // SAFETY: `place` and the bytes written behind it lie in the `len` bytes that the caller
    // guarantees: at most `room` for the copying kinds, `ROOM` otherwise.
    unsafe { store_bytes(kind, start.add(offset), room, write.value) }
}

fn align_up(at: *mut u8, to: usize) -> *mut u8 {
    at.wrapping_add(at.align_offset(to))
}

unsafe fn store_bytes(kind: StoreKind, at: *mut u8, room: usize, value: u64) {
    let pattern: Vec<u8> = (0..room).map(|n| (value >> (n % 57)) as u8 ^ n as u8).collect();
    // SAFETY: the caller guarantees `room` bytes, and 48, at `at`; each instruction writes at most
    // 32, behind an alignment of up to 15. Registers and flags are declared.
    unsafe {
        match kind {
            StoreKind::Byte => at.write_volatile(value as u8),
            StoreKind::Word16 => asm!("mov [{a}], {v:x}", a = in(reg) at, v = in(reg) value),
            StoreKind::Word32 => asm!("mov [{a} + 4], {v:e}", a = in(reg) at, v = in(reg) value),
            StoreKind::Word64 => {
                asm!("mov [{a} + {i}*2 + 1], {v}", a = in(reg) at, i = in(reg) 3_u64, v = in(reg) value)
            }
            StoreKind::HighByte => asm!("mov [rdi], ch", in("rdi") at, in("rcx") value),
            StoreKind::Immediate => asm!("mov dword ptr [{a}], -559038737", a = in(reg) at),
            StoreKind::Memcpy => at.copy_from_nonoverlapping(pattern.as_ptr(), room),
            StoreKind::RepMovsb => {
                asm!("rep movsb", inout("rdi") at => _, inout("rsi") pattern.as_ptr() => _,
                inout("rcx") room => _)
            }
            StoreKind::RepStosq => {
                asm!("rep stosq", inout("rdi") at => _, inout("rcx") room / 8 => _, in("rax") value)
            }
            StoreKind::Stosd => asm!("stosd", inout("rdi") at => _, in("eax") value as u32),
            StoreKind::Vector128 => {
                asm!("movq xmm3, {v}", "punpcklqdq xmm3, xmm3", "movdqu [{a}], xmm3",
                a = in(reg) at, v = in(reg) value, out("xmm3") _)
            }
            StoreKind::Vector256 if is_x86_feature_detected!("avx2") => asm!("vmovq xmm9, {v}",
                "vpbroadcastq ymm9, xmm9", "vpslldq ymm9, ymm9, 3", "vmovdqu [{a}], ymm9", "vzeroupper",
                a = in(reg) at, v = in(reg) value, out("ymm9") _),
            StoreKind::Vector256 => at.write_bytes(value as u8, 32),
            StoreKind::NonTemporal => {
                asm!("movnti [{a}], {v}", "sfence", a = in(reg) at, v = in(reg) value)
            }
            StoreKind::Low64 => {
                asm!("movq xmm1, {v}", "movlps [{a}], xmm1", a = in(reg) at, v = in(reg) value,
                out("xmm1") _)
            }
            StoreKind::High64 => {
                asm!("movq xmm1, {v}", "punpcklqdq xmm1, xmm1", "movhps [{a}], xmm1",
                a = in(reg) at, v = in(reg) value, out("xmm1") _)
            }
            StoreKind::Increment => {
                asm!("inc dword ptr [{a}]", "adc byte ptr [{a} + 9], 0", a = in(reg) at)
            }
            StoreKind::Negate => {
                asm!("neg word ptr [{a}]", "sbb qword ptr [{a} + 8], {v}", "not byte ptr [{a} + 3]",
                a = in(reg) at, v = in(reg) value)
            }
            StoreKind::Shift => {
                asm!("shl dword ptr [{a}], 3", "bts dword ptr [{a}], 5", a = in(reg) at)
            }
            StoreKind::Atomic => add_and_swap(&*align_up(at, 8).cast(), value),
            StoreKind::Exchange => {
                asm!("xchg [{a}], {v:l}", a = in(reg) at, v = inout(reg) value => _)
            }
            StoreKind::CompareExchange => exchange_twice(&*align_up(at, 8).cast(), value),
            StoreKind::Atomic128 => exchange_128(align_up(at, 16), value),
        }
    }
}

fn add_and_swap(word: &AtomicU64, value: u64) {
    let before = word.fetch_add(value, Ordering::SeqCst);
    assert_eq!(word.swap(before ^ value, Ordering::SeqCst), before.wrapping_add(value));
}

/// One exchange that succeeds, and one that fails.
fn exchange_twice(word: &AtomicU64, value: u64) {
    let before = word.load(Ordering::SeqCst);
    let swap = |from, to| word.compare_exchange(from, to, Ordering::SeqCst, Ordering::SeqCst);
    assert_eq!(swap(before, value), Ok(before));
    assert_eq!(swap(!value, before), Err(value));
}

unsafe fn exchange_128(at: *mut u8, value: u64) {
    // SAFETY: the caller guarantees 16 aligned bytes; rbx, which the compiler reserves, is
    // restored. The other registers are named, as the compiler may choose rbx for one that is not.
    unsafe {
        asm!("mov r8, rbx", "mov rbx, rsi", "mov rax, [rdi]", "mov rdx, [rdi + 8]",
            "lock cmpxchg16b [rdi]", "mov rbx, r8",
            out("r8") _, in("rsi") value, in("rdi") at, in("rcx") !value,
            out("rax") _, out("rdx") _);
    }
}
