//! The stub: instructions that return a borrowed thread to its own work, even if Firn dies.
//!
//! A thread whose registers Firn has set must not depend on Firn to restore them. So a few
//! instructions make the call and continue by themselves: they load the thread's own registers,
//! which lie below its stack, and jump to the address where the thread was.
//!
//! ```text
//!   the thread's stack                     the stub
//!   rsp        what is in use              syscall
//!   rsp - 128  the red zone                mov  rax, [rsp + 8]    rax, rcx, r11 (which a call changes), the arguments
//!   rsp - 256  return address, registers   ...
//!              ^ rsp in the stub           ret  248               pops the address, and all the rest
//! ```
//!
//! Only the last instruction sets the stack pointer back: wherever in the stub a thread is stopped,
//! by a signal or by the next process to borrow it, this data is above its stack pointer and safe.
//! A user's shadow stack would reject such a return: Firn does not touch processes that have one.
//!
//! Nothing else of the thread is changed: no flag (a system call keeps them), no signal mask. Where
//! a thread slept in a system call, the stub leads to the restart of that call, as the kernel would
//! do it.
//!
//! The code needs no mapping of its own. A mapping ends at the end of a page, its contents usually
//! before: behind the end of the vDSO, or of some library's code, there are zeros that can be
//! executed. ptrace writes there like a debugger that sets a breakpoint, into a copy of the page
//! that belongs to the process. The code stays, and serves the next call.

use nix::libc;

use super::inject::{NO_CALL, SYSCALL, is_in_call};
use crate::sys::ptrace::Registers;

/// The distance of the saved registers below the thread's stack pointer: beyond what it may use
/// there (the System V ABI's red zone, 128 bytes).
pub(super) const DISTANCE: u64 = 256;
/// Numbers of the registers that are loaded, as instructions encode them: rax, rcx, r11, rdi, rsi,
/// rdx, r10, r8, r9.
const LOADED: [u8; 9] = [0, 1, 11, 7, 6, 2, 10, 8, 9];
/// The alignment of the code: ptrace writes words.
const WORD: usize = 8;

/// The kernel's values in rax of an interrupted call (`linux/errno.h`, not for user space).
const ERESTARTSYS: u64 = -512i64 as u64;
const ERESTARTNOINTR: u64 = -513i64 as u64;
const ERESTARTNOHAND: u64 = -514i64 as u64;
const ERESTART_RESTARTBLOCK: u64 = -516i64 as u64;

/// The code, in whole words.
pub(super) fn stub_code() -> Vec<u8> {
    let mut code = SYSCALL.to_vec();
    for (register, offset) in LOADED.into_iter().zip((8u8..).step_by(8)) {
        // mov register, [rsp + place]
        let high = if register >= 8 { 0x4c } else { 0x48 };
        code.extend([high, 0x8b, 0x40 | (register & 7) << 3 | 0b100, 0x24, offset]);
    }
    // ret DISTANCE - 8
    code.push(0xc2);
    code.extend((DISTANCE as u16 - 8).to_le_bytes());
    code.resize(code.len().next_multiple_of(WORD), 0);
    code
}

/// Finds the code among these executable bytes, or an offset where it may be written: behind all
/// bytes in use.
pub(super) fn find_location(executable: &[u8]) -> Option<StubLocation> {
    let code = stub_code();
    let there = |offset: &usize| executable[*offset..].starts_with(&code);
    let mut offsets = (0..executable.len()).step_by(WORD);
    offsets.rfind(there).map(StubLocation::There).or_else(|| {
        let used = executable.iter().rposition(|&byte| byte != 0).map_or(0, |last| last + 1);
        // The first zeros may belong to the bytes in use.
        let free = used.next_multiple_of(WORD) + WORD;
        (free + code.len() <= executable.len()).then_some(StubLocation::Free(free))
    })
}

/// An offset at which the code is, or can be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StubLocation {
    There(usize),
    Free(usize),
}

/// The data below the stack: the return address and the registers to load, from `registers`.
pub(super) fn return_data(registers: &Registers) -> Vec<u8> {
    let r = registers;
    let loaded = [r.rax, r.rcx, r.r11, r.rdi, r.rsi, r.rdx, r.r10, r.r8, r.r9];
    [r.rip].into_iter().chain(loaded).flat_map(u64::to_le_bytes).collect()
}

/// The thread's registers, changed to make a call with the code at `stub`.
pub(super) fn registers_for_call(
    own: &Registers,
    stub: u64,
    number: i64,
    arguments: [u64; 6],
) -> Registers {
    let [rdi, rsi, rdx, r10, r8, r9] = arguments;
    let (rax, orig_rax) = (number as u64, NO_CALL);
    let (rip, rsp) = (stub, own.rsp.saturating_sub(DISTANCE));
    Registers { rax, orig_rax, rip, rsp, rdi, rsi, rdx, r10, r8, r9, ..*own }
}

/// Whether a thread that was stopped at a system call makes the one of `calling`, and not one of a
/// signal handler.
pub(super) fn is_at_call(calling: &Registers, stopped: &Registers) -> bool {
    (stopped.rip, stopped.rsp) == (calling.rip + SYSCALL.len() as u64, calling.rsp)
}

/// Whether the kernel would repeat the call that returned this value.
pub(super) fn is_to_be_repeated(value: u64) -> bool {
    [ERESTARTSYS, ERESTARTNOINTR, ERESTARTNOHAND, ERESTART_RESTARTBLOCK].contains(&value)
}

/// The registers with which a stopped thread would continue: at the restart of its call, if the
/// kernel would restart it.
pub(super) fn resumption_registers(stopped: &Registers) -> Registers {
    let again = match stopped.rax {
        ERESTARTSYS | ERESTARTNOINTR | ERESTARTNOHAND => stopped.orig_rax,
        ERESTART_RESTARTBLOCK => libc::SYS_restart_syscall as u64,
        _ => return *stopped,
    };
    match is_in_call(stopped) {
        true => Registers { rax: again, rip: stopped.rip - SYSCALL.len() as u64, ..*stopped },
        false => *stopped,
    }
}

/// As [`resumption_registers`], if a signal was handled meanwhile: some calls are not restarted
/// then (signal(7)). A signal without a handler ends them as well; a program that makes such a call
/// has to expect that.
pub(super) fn resumption_after_signal(stopped: &Registers) -> Registers {
    match stopped.rax {
        ERESTARTNOHAND | ERESTART_RESTARTBLOCK if is_in_call(stopped) => {
            Registers { rax: (-i64::from(libc::EINTR)) as u64, ..*stopped }
        }
        _ => resumption_registers(stopped),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stub_has_the_documented_instructions() {
        let code = stub_code();
        // The call, 5 bytes for each register, 3 for the return.
        assert_eq!(code.len(), (2 + 9 * 5 + 3_usize).next_multiple_of(8));
        assert_eq!(code[..7], [0x0f, 0x05, 0x48, 0x8b, 0x44, 0x24, 0x08]);
        assert_eq!(code[12..17], [0x4c, 0x8b, 0x5c, 0x24, 0x18], "mov r11, [rsp + 24]");
        assert_eq!(code[47..50], [0xc2, 0xf8, 0x00], "ret 248");
    }

    #[test]
    fn the_code_goes_behind_what_is_in_use_and_is_found_again() {
        let mut page = vec![0; 4096];
        page[..3001].fill(0xcc);
        assert_eq!(find_location(&page), Some(StubLocation::Free(3016)));
        page[3016..][..stub_code().len()].copy_from_slice(&stub_code());
        assert_eq!(find_location(&page), Some(StubLocation::There(3016)));
        page[4090] = 1;
        assert_eq!(find_location(&page), Some(StubLocation::There(3016)));
        page[3016] = 0;
        assert_eq!(find_location(&page), None);
    }

    /// The registers of a thread.
    fn stopped(rax: i64, orig_rax: u64) -> Registers {
        Registers { rax: rax as u64, orig_rax, rip: 0x1002, ..no_registers() }
    }

    fn no_registers() -> Registers {
        Registers {
            r15: 0,
            r14: 0,
            r13: 0,
            r12: 0,
            rbp: 0,
            rbx: 0,
            r11: 0,
            r10: 0,
            r9: 0,
            r8: 0,
            rax: 0,
            rcx: 0,
            rdx: 0,
            rsi: 0,
            rdi: 0,
            orig_rax: 0,
            rip: 0,
            cs: 0,
            eflags: 0,
            rsp: 0,
            ss: 0,
            fs_base: 0,
            gs_base: 0,
            ds: 0,
            es: 0,
            fs: 0,
            gs: 0,
        }
    }

    #[test]
    fn the_stub_restarts_an_interrupted_call() {
        let back = |rax, orig| {
            let registers = resumption_registers(&stopped(rax, orig));
            (registers.rip, registers.rax as i64)
        };
        assert_eq!(back(-512, 202), (0x1000, 202));
        assert_eq!(back(-514, 271), (0x1000, 271));
        assert_eq!(back(-516, 230), (0x1000, 219));
        assert_eq!(back(-4, 232), (0x1002, -4));
        assert_eq!(back(5, 0), (0x1002, 5));
        assert_eq!(back(-512, NO_CALL), (0x1002, -512));
        let after_signal = |rax, orig| {
            let registers = resumption_after_signal(&stopped(rax, orig));
            (registers.rip, registers.rax as i64)
        };
        assert_eq!(after_signal(-514, 271), (0x1002, -4));
        assert_eq!(after_signal(-516, 230), (0x1002, -4));
        assert_eq!(after_signal(-512, 202), (0x1000, 202));
    }
}
