//! Long calls, from which the thread finds its own way back.
//!
//! Dropping the page tables of many GiB takes a while. A thread that is borrowed so long must not depend on Firn's being
//! there at the end. So a page of code is mapped into the hypervisor: it makes the call, loads the thread's own
//! registers, which are stored beside it, and jumps to where the thread was.
//!
//! ```text
//!   page   0   syscall                      rip, rax and the arguments are set by ptrace
//!              mov  [result], rax
//!              mov  dword [done], 1
//!              mov  rax, [registers + 0]    rax, rcx, r11 (which a call changes), and the arguments
//!              ...
//!              jmp  [return]
//!       2048   done, result, return, registers
//! ```
//!
//! Nothing else of the thread is changed: no stack, no flag (a system call keeps them), no signal mask. Where a thread
//! slept in a system call, the way back leads to the restart of that call, as the kernel would do it.

use std::io::IoSlice;
use std::time::Duration;

use nix::errno::Errno;
use nix::libc;
use nix::sys::uio::{RemoteIoVec, process_vm_writev};
use nix::unistd::Pid;

use super::inject::{Failure, NO_CALL, SYSCALL, Stopped, is_in_call, result};
use crate::sys::ptrace::{self, Registers, Stop};

const PAGE: u64 = firn_types::PAGE_SIZE as u64;
/// Where the data of the page starts.
const DATA: u64 = PAGE / 2;
const DONE: u64 = DATA;
const RESULT: u64 = DATA + 8;
const RETURN: u64 = DATA + 16;
const REGISTERS: u64 = DATA + 24;
/// Numbers of the registers that are loaded, as instructions encode them: rax, rcx, r11, rdi, rsi, rdx, r10, r8, r9.
const LOADED: [u8; 9] = [0, 1, 11, 7, 6, 2, 10, 8, 9];

/// Pauses between looks at a call that runs.
const PAUSE_MIN: Duration = Duration::from_micros(20);
const PAUSE_MAX: Duration = Duration::from_millis(1);

/// What the kernel leaves in rax of an interrupted call (`linux/errno.h`, not for user space).
const ERESTARTSYS: u64 = -512i64 as u64;
const ERESTARTNOINTR: u64 = -513i64 as u64;
const ERESTARTNOHAND: u64 = -514i64 as u64;
const ERESTART_RESTARTBLOCK: u64 = -516i64 as u64;

/// A page of code in the hypervisor.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stub {
    start: u64,
}

/// The code, for any address: it reaches its data relative to itself.
fn code() -> Vec<u8> {
    let mut code = SYSCALL.to_vec();
    // mov [result], rax
    relative(&mut code, &[0x48, 0x89, 0x05], RESULT, &[]);
    // mov dword [done], 1
    relative(&mut code, &[0xc7, 0x05], DONE, &1u32.to_le_bytes());
    for (register, place) in LOADED.into_iter().zip((REGISTERS..).step_by(8)) {
        // mov register, [place]
        let high = if register >= 8 { 0x4c } else { 0x48 };
        relative(&mut code, &[high, 0x8b, (register & 7) << 3 | 0b101], place, &[]);
    }
    // jmp [return]
    relative(&mut code, &[0xff, 0x25], RETURN, &[]);
    code
}

/// Adds an instruction with an operand at `place`, as an offset from the instruction's end.
fn relative(code: &mut Vec<u8>, opcode: &[u8], place: u64, immediate: &[u8]) {
    let end = code.len() + opcode.len() + 4 + immediate.len();
    code.extend_from_slice(opcode);
    code.extend_from_slice(&(place as u32 - end as u32).to_le_bytes());
    code.extend_from_slice(immediate);
}

/// The data: not done, and the way back to `registers`.
fn data(registers: &Registers) -> Vec<u8> {
    let r = registers;
    let loaded = [r.rax, r.rcx, r.r11, r.rdi, r.rsi, r.rdx, r.r10, r.r8, r.r9];
    [0, 0, r.rip].into_iter().chain(loaded).flat_map(u64::to_le_bytes).collect()
}

/// Where a stopped thread would go on: with the restart of its call, if the kernel would restart it.
fn resumption(stopped: &Registers) -> Registers {
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

impl Stopped<'_> {
    /// Runs a long system call. The thread is stopped again afterwards, but has been on its way in between.
    pub(super) fn run_long(&mut self, number: i64, arguments: [u64; 6]) -> Result<u64, Failure> {
        let Some(stub) = self.stub()? else { return self.run(number, arguments) };
        let tid = self.target.tid;
        let way_back = resumption(&self.saved);
        self.write(stub.start + DATA, &data(&way_back))?;
        let registers = self.registers_for(stub.start, number, arguments);
        ptrace::set_registers(tid, &registers).map_err(Failure::at("set registers"))?;
        ptrace::resume(tid, 0).map_err(Failure::at("resume"))?;
        let value = self.await_done(stub)?;
        self.stop_again(stub, &way_back)?;
        Ok(value)
    }

    /// The stub, mapped if it is not yet. `None` if the hypervisor may not map code (SELinux: execmem).
    fn stub(&mut self) -> Result<Option<Stub>, Failure> {
        if self.stub.is_some() {
            return Ok(self.stub);
        }
        let protection = libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let arguments = [0, PAGE, protection as u64, flags as u64, u64::MAX, 0];
        let Ok(start) = result(self.run(libc::SYS_mmap, arguments)?) else { return Ok(None) };
        self.stub = Some(Stub { start });
        self.write(start, &code())?;
        Ok(self.stub)
    }

    pub(super) fn remove_stub(&mut self) -> Result<(), Failure> {
        match self.stub.take() {
            Some(stub) => self.run(libc::SYS_munmap, [stub.start, PAGE, 0, 0, 0, 0]).map(drop),
            None => Ok(()),
        }
    }

    /// Waits until the call has returned; gives rax. Signals reach the thread meanwhile.
    fn await_done(&self, stub: Stub) -> Result<u64, Failure> {
        let tid = self.target.tid;
        let mut pause = PAUSE_MIN;
        loop {
            match ptrace::poll(tid).map_err(Failure::at("wait"))? {
                Some(Stop::Gone) => return Err(Failure::Gone),
                Some(Stop::Signal(signal)) => {
                    ptrace::resume(tid, signal).map_err(Failure::at("resume"))?;
                }
                Some(_) => ptrace::resume(tid, 0).map_err(Failure::at("resume"))?,
                None => {}
            }
            if let Some([1, value]) = self.target.words(stub.start + DONE) {
                return Ok(value);
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }

    /// Stops the thread again. If it is still on its way back, it is there at once.
    fn stop_again(&mut self, stub: Stub, way_back: &Registers) -> Result<(), Failure> {
        let stopped = self.target.stop_at_a_good_moment().map_err(Failure::at("interrupt"))?;
        self.saved = stopped.ok_or(Failure::Ptrace("interrupt", Errno::ETIMEDOUT))?;
        if (stub.start..stub.start + PAGE).contains(&self.saved.rip) {
            self.saved = Registers { orig_rax: NO_CALL, ..*way_back };
            let put = ptrace::set_registers(self.target.tid, &self.saved);
            put.map_err(Failure::at("restore registers"))?;
        }
        Ok(())
    }

    fn write(&self, at: u64, bytes: &[u8]) -> Result<(), Failure> {
        let remote = [RemoteIoVec { base: at as usize, len: bytes.len() }];
        process_vm_writev(Pid::from_raw(self.target.pid), &[IoSlice::new(bytes)], &remote)
            .map(drop)
            .map_err(Failure::at("write code"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_code_is_what_the_drawing_says() {
        let code = code();
        assert_eq!(code[..9], [0x0f, 0x05, 0x48, 0x89, 0x05, 0xff, 0x07, 0x00, 0x00]);
        // 2 + 7 bytes, then 10 for the flag, 7 for each register, 6 for the jump.
        assert_eq!(code.len(), 9 + 10 + 9 * 7 + 6);
        let target = |end: usize, at: usize| {
            end as u64 + u64::from(u32::from_le_bytes(code[at..at + 4].try_into().unwrap()))
        };
        assert_eq!((target(9, 5), target(19, 11)), (RESULT, DONE));
        assert_eq!(target(code.len(), code.len() - 4), RETURN);
        assert_eq!(target(26, 22), REGISTERS);
        assert_eq!(target(33, 29), REGISTERS + 8);
    }

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
    fn an_interrupted_call_is_restarted_on_the_way_back() {
        let back = |rax, orig| {
            let registers = resumption(&stopped(rax, orig));
            (registers.rip, registers.rax as i64)
        };
        assert_eq!(back(-512, 202), (0x1000, 202));
        assert_eq!(back(-514, 271), (0x1000, 271));
        assert_eq!(back(-516, 230), (0x1000, 219));
        assert_eq!(back(-4, 232), (0x1002, -4));
        assert_eq!(back(5, 0), (0x1002, 5));
        assert_eq!(back(-512, NO_CALL), (0x1002, -512));
    }
}
