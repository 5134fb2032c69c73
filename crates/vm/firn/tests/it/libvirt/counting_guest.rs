//! A guest of one boot sector that checks its memory and counts how often it was asked to.
//!
//! ```text
//!   start     seed = time stamp counter, count = 0; fill 512 KiB with a sequence that begins at the seed
//!   a byte    count += 1; compare the 512 KiB with the sequence; send seed (4 B), count (1 B), 'k' or 'b'
//! ```
//!
//! A guest that has started again, or that is another one, has another seed and another count.

use std::fs::{File, OpenOptions};
use std::io::{Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::session::{eventually, text};

const PATIENCE: Duration = Duration::from_secs(60);

/// The interval between questions to a guest that has not started yet.
const ASK_INTERVAL: Duration = Duration::from_secs(2);

/// The length of an answer, in bytes.
const ANSWER_BYTES: usize = 6;

/// 16-bit code, loaded at 0x7c00. The seed is at 0x600, the count at 0x604, the result at 0x605.
#[rustfmt::skip]
const CODE: &[u8] = &[
    0xfa, 0x31, 0xc0, 0x8e, 0xd8, 0x8e, 0xd0, 0xbc, 0x00, 0x7c, 0xfb, // cli; ds = ss = 0; sp = 0x7c00; sti
    0x0f, 0x31, 0x66, 0xa3, 0x00, 0x06, // rdtsc; mov [seed], eax
    0xc6, 0x06, 0x04, 0x06, 0x00, 0xb1, 0x00, 0xe8, 0x32, 0x00, // mov [count], 0; mov cl, 0; call walk
    0xf4, // next: hlt
    0xba, 0xfd, 0x03, 0xec, 0xa8, 0x01, 0x74, 0xf7, // is there a byte at the serial port?  jz next
    0xba, 0xf8, 0x03, 0xec, // in al, dx
    0xfe, 0x06, 0x04, 0x06, 0xb1, 0x01, 0xc6, 0x06, 0x05, 0x06, 0x6b, // inc [count]; mov cl, 1; mov [same], 'k'
    0xe8, 0x17, 0x00, // call walk
    0xbe, 0x00, 0x06, 0xb9, 0x06, 0x00, // mov si, seed; mov cx, 6
    0xba, 0xfd, 0x03, 0xec, 0xa8, 0x20, 0x74, 0xf8, // send: is the port free?  jz send
    0xba, 0xf8, 0x03, 0xac, 0xee, 0xe2, 0xf1, 0xeb, 0xce, // lodsb; out dx, al; loop send; jmp next
    0x66, 0x8b, 0x1e, 0x00, 0x06, 0xb8, 0x00, 0x10, // walk: mov ebx, [seed]; mov ax, 0x1000
    0x8e, 0xc0, 0x31, 0xff, // segment: mov es, ax; xor di, di
    0x66, 0x69, 0xdb, 0x6d, 0x4e, 0xc6, 0x41, 0x66, 0x81, 0xc3, 0x39, 0x30, 0x00, 0x00, // word: ebx = ebx * 1103515245 + 12345
    0x84, 0xc9, 0x75, 0x04, 0x26, 0x66, 0x89, 0x1d, // test cl, cl; jz: mov es:[di], ebx
    0x26, 0x66, 0x39, 0x1d, 0x74, 0x05, 0xc6, 0x06, 0x05, 0x06, 0x62, // cmp es:[di], ebx; jne: mov [same], 'b'
    0x83, 0xc7, 0x04, 0x75, 0xda, // add di, 4; jnz word
    0x05, 0x00, 0x10, 0x3d, 0x00, 0x90, 0x72, 0xce, 0xc3, // add ax, 0x1000; cmp ax, 0x9000; jb segment; ret
];

/// What the guest answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GuestAnswer {
    /// The beginning of its memory's sequence.
    pub seed: u32,
    /// How often it was asked.
    pub count: u8,
}

/// Makes a qcow2 disk that the guest starts from.
pub fn create_disk(disk: &Path) {
    let raw = disk.with_extension("raw");
    let mut sector = CODE.to_vec();
    sector.resize(510, 0);
    sector.extend([0x55, 0xaa]);
    sector.resize(1 << 20, 0);
    std::fs::write(&raw, sector).unwrap();
    let convert = ["convert", "-q", "-f", "raw", "-O", "qcow2", text(&raw), text(disk)];
    assert!(Command::new("qemu-img").args(convert).status().unwrap().success());
}

/// Asks the guest at a pseudo terminal; it must find its memory as it left it.
#[track_caller]
pub fn ask_guest(terminal: &str) -> GuestAnswer {
    let mut port = open_port(terminal);
    let mut answer = Vec::new();
    let mut asked_at: Option<Instant> = None;
    eventually("the guest answers", PATIENCE, || {
        if answer.is_empty() && asked_at.is_none_or(|at| at.elapsed() >= ASK_INTERVAL) {
            port.write_all(b"?").unwrap();
            asked_at = Some(Instant::now());
        }
        let mut part = [0; 64];
        answer.extend(port.read(&mut part).map_or(&[][..], |bytes| &part[..bytes]));
        answer.len() >= ANSWER_BYTES
    });
    // It may have been asked more than once: the last answer counts.
    let last = &answer[answer.len() - ANSWER_BYTES..];
    assert_eq!(last[5], b'k', "its memory is another one: {answer:?}");
    GuestAnswer { seed: u32::from_le_bytes(last[..4].try_into().unwrap()), count: last[4] }
}

fn open_port(terminal: &str) -> File {
    const NOCTTY_NONBLOCK: i32 = 0o400 | 0o4000;
    let mut options = OpenOptions::new();
    options.read(true).write(true).custom_flags(NOCTTY_NONBLOCK);
    let mut port = options.open(terminal).unwrap();
    // What another has not read.
    while port.read(&mut [0; 64]).is_ok_and(|bytes| bytes > 0) {}
    port
}
