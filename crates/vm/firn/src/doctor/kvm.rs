//! A check whether KVM runs a guest, by running two.
//!
//! On some hosts `/dev/kvm` exists, opens, and even runs 16-bit code, but no ordinary guest; on
//! others a small guest runs, but no kernel. The check of a kernel comes second ([`kernel_boot`]).
//! First Firn tries the smallest guest that does what ordinary ones need: a firmware of 64 KiB that
//! switches from reset to 64-bit mode with paging, works for a moment, and writes to a debug port,
//! which ends QEMU with an exit code that it has in no other case.
//!
//! ```text
//!   0x1000, 0x2000, 0x3000   page tables: the first 2 MiB, one to one
//!   0x8000                   code: see [`CODE`]
//!   0x9000                   segment descriptors: a null one, and 64-bit code
//!   0xfff0                   reset vector: far jump to f000:8000
//! ```
//!
//! The firmware is at 0xf0000 in the guest (and at 4 GiB - 64 KiB, where the processor starts).

use std::io::{self, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use firn_supervisor::{ProcessExit, ProcessIdentity};
use tempfile::NamedTempFile;

use super::kernel_boot::{self, KernelBoot};

const FIRMWARE_BYTES: usize = 64 << 10;

/// The address of the firmware in the guest.
const FIRMWARE_AT: u64 = 0xf_0000;

/// In Intel's notation; the far jump changes from 16-bit to 64-bit code.
const CODE: &[u8] = &[
    0xfa, // cli
    0x2e, 0x66, 0x0f, 0x01, 0x16, 0x00, 0x90, // lgdt cs:[0x9000]
    0x66, 0xb8, 0x00, 0x10, 0x0f, 0x00, 0x0f, 0x22, 0xd8, // mov eax, 0xf1000; mov cr3, eax
    0x66, 0xb8, 0x20, 0x00, 0x00, 0x00, 0x0f, 0x22, 0xe0, // mov eax, PAE; mov cr4, eax
    0x66, 0xb9, 0x80, 0x00, 0x00, 0xc0, 0x0f, 0x32, // mov ecx, EFER; rdmsr
    0x66, 0x0d, 0x00, 0x01, 0x00, 0x00, 0x0f, 0x30, // or eax, LME; wrmsr
    0x66, 0xb8, 0x01, 0x00, 0x00, 0x80, 0x0f, 0x22, 0xc0, // mov eax, PG | PE; mov cr0, eax
    0x66, 0xea, 0x3b, 0x80, 0x0f, 0x00, 0x08, 0x00, // jmp 8:0xf803b
    0xbc, 0x00, 0x10, 0x00, 0x00, // mov esp, 0x1000
    0xb9, 0x40, 0x42, 0x0f, 0x00, // mov ecx, 1000000
    0x51, 0x58, 0x48, 0x29, 0xc3, 0xe2,
    0xf9, // again: push rcx; pop rax; sub rbx, rax; loop again
    0xb0, 0x2a, 0xe6, 0xf4, // mov al, 0x2a; out 0xf4, al
    0xf4, // hlt
];

/// The debug port ends QEMU with exit code 2n + 1 for a written n.
const EXIT_CODE: i32 = 2 * 0x2a + 1;

/// The time that the guest may take. It takes some 100 ms, most of it for QEMU's own start.
const WAIT: Duration = Duration::from_secs(4);

/// Whether KVM can be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KvmState {
    /// It runs firmware; the value holds whether it boots a kernel.
    RunsFirmware(KernelBoot),
    /// There is no `/dev/kvm`.
    NoDevice,
    /// There is one, but the guest did not run, for this reason.
    Fails(String),
    /// It could not be tried, for this reason.
    Unknown(String),
}

/// Tries KVM, with this kernel or the host's own.
pub fn probe_kvm(qemu: &str, kernel: Option<&Path>) -> KvmState {
    if !Path::new("/dev/kvm").exists() {
        return KvmState::NoDevice;
    }
    match run_firmware(qemu, "kvm") {
        Ok(None) => KvmState::RunsFirmware(kernel_boot::probe_boot(qemu, kernel)),
        Ok(Some(why)) => KvmState::Fails(why),
        Err(error) => KvmState::Unknown(format!("{qemu}: {error}")),
    }
}

/// Runs the guest; returns the reason if it did not run.
fn run_firmware(qemu: &str, accel: &str) -> io::Result<Option<String>> {
    let mut firmware = NamedTempFile::new()?;
    firmware.write_all(&firmware_image())?;
    let mut command = Command::new(qemu);
    command.args(["-accel", accel, "-M", "pc", "-m", "16", "-nodefaults", "-no-user-config"]);
    command.args(["-display", "none", "-device", "isa-debug-exit,iobase=0xf4,iosize=4", "-bios"]);
    command.arg(firmware.path()).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn()?;
    let Some(handle) = ProcessIdentity::from_pid(child.id() as i32)?.open_handle()? else {
        return Ok(Some("QEMU ended at once".to_owned()));
    };
    if !handle.wait_gone(WAIT)? {
        child.kill()?;
        child.wait()?;
        return Ok(Some(format!("no reaction within {} s", WAIT.as_secs())));
    }
    let output = child.wait_with_output()?;
    match output.status.code() {
        Some(EXIT_CODE) => Ok(None),
        Some(code) => {
            Ok(Some(last_line(&output.stderr).unwrap_or(ProcessExit::Code(code).to_string())))
        }
        None => Ok(Some(last_line(&output.stderr).unwrap_or("QEMU was killed".to_owned()))),
    }
}

fn firmware_image() -> Vec<u8> {
    const PRESENT_WRITABLE_ACCESSED: u64 = 0x23;
    const PRESENT_WRITABLE_ACCESSED_DIRTY_LARGE: u64 = 0xe3;
    const CODE_64: u64 = 0x0020_9b00_0000_0000;
    let mut image = vec![0xf4; FIRMWARE_BYTES];
    image[0x1000..0x4000].fill(0);
    let mut put = |at: usize, bytes: &[u8]| image[at..at + bytes.len()].copy_from_slice(bytes);
    put(0x1000, &((FIRMWARE_AT + 0x2000) | PRESENT_WRITABLE_ACCESSED).to_le_bytes());
    put(0x2000, &((FIRMWARE_AT + 0x3000) | PRESENT_WRITABLE_ACCESSED).to_le_bytes());
    put(0x3000, &PRESENT_WRITABLE_ACCESSED_DIRTY_LARGE.to_le_bytes());
    put(0x8000, CODE);
    put(0x9000, &[15, 0]);
    put(0x9002, &(FIRMWARE_AT as u32 + 0x9010).to_le_bytes());
    put(0x9010, &0u64.to_le_bytes());
    put(0x9018, &CODE_64.to_le_bytes());
    put(0xfff0, &[0xea, 0x00, 0x80, 0x00, 0xf0]);
    image
}

fn last_line(output: &[u8]) -> Option<String> {
    let text = String::from_utf8_lossy(output);
    text.lines().rfind(|line| !line.trim().is_empty()).map(|line| line.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_guest_runs_without_kvm() {
        match run_firmware("qemu-system-x86_64", "tcg") {
            Ok(why) => assert_eq!(why, None),
            Err(error) => firn_skip::skip_test(format_args!("no QEMU here ({error})")),
        }
    }

    #[test]
    fn a_qemu_that_is_not_there_is_not_the_same_as_no_kvm() {
        assert!(run_firmware("no-such-qemu", "kvm").is_err());
    }
}
