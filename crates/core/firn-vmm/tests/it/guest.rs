//! A minimal guest: a boot sector that counts.
//!
//! At each timer tick it adds one to a byte of its RAM and writes it to the first serial port.
//! After a restore, the next byte shows whether the guest's memory, its vCPU, its timer and its
//! serial port continued where they stopped.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// 16-bit code, loaded at 0x7c00. The counter is at 0x600.
const CODE: &[u8] = &[
    0xfa, //                   cli
    0x31, 0xc0, //             xor  ax, ax
    0x8e, 0xd8, //             mov  ds, ax
    0xfb, //                   sti
    0xf4, //             next: hlt
    0xfe, 0x06, 0x00, 0x06, // inc  byte [0x600]
    0xa0, 0x00, 0x06, //       mov  al, [0x600]
    0xba, 0xf8, 0x03, //       mov  dx, 0x3f8
    0xee, //                   out  dx, al
    0xeb, 0xf2, //             jmp  next
];

/// Makes the guest's disk in `dir`.
pub fn disk(dir: &Path) -> PathBuf {
    let mut sector = vec![0; 512];
    sector[..CODE.len()].copy_from_slice(CODE);
    sector[510..].copy_from_slice(&[0x55, 0xaa]);
    let mut disk = sector;
    disk.resize(1 << 20, 0);
    let path = dir.join("disk.raw");
    std::fs::write(&path, disk).unwrap();
    path
}

/// The guest's output on the serial port that is written to `file`, once it has at least `bytes`
/// bytes.
pub fn counted(file: &Path, bytes: usize) -> Vec<u8> {
    let begun = Instant::now();
    loop {
        let counted = std::fs::read(file).unwrap_or_default();
        if counted.len() >= bytes {
            return counted;
        }
        assert!(begun.elapsed() < Duration::from_secs(30), "the guest counted to {counted:?} only");
        std::thread::sleep(Duration::from_millis(20));
    }
}
