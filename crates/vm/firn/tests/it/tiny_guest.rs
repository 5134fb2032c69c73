//! A guest of one boot sector, which does to itself what a byte at its serial port says.
//!
//! ```text
//!   o       switches itself off, by ACPI        port 0x604, of the chip set `pc`
//!   p       reports a panic                     port 0x505, of the device `pvpanic`
//!   others  nothing                             each byte comes back, so that a test sees it alive
//! ```

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use crate::session::{Session, eventually, text};

const PATIENCE: Duration = Duration::from_secs(60);

/// 16-bit code, loaded at 0x7c00. It looks at the port at each tick of the timer.
const CODE: &[u8] = &[
    0xfa, //                   cli
    0x31, 0xc0, //             xor  ax, ax
    0x8e, 0xd8, //             mov  ds, ax
    0xfb, //                   sti
    0xf4, //             next: hlt
    0xba, 0xfd, 0x03, //       mov  dx, 0x3fd
    0xec, //                   in   al, dx
    0xa8, 0x01, //             test al, 1
    0x74, 0xf7, //             jz   next
    0xba, 0xf8, 0x03, //       mov  dx, 0x3f8
    0xec, //                   in   al, dx
    0xee, //                   out  dx, al
    0x3c, b'o', //             cmp  al, 'o'
    0x74, 0x0c, //             je   off
    0x3c, b'p', //             cmp  al, 'p'
    0x75, 0xea, //             jne  next
    0xba, 0x05, 0x05, //       mov  dx, 0x505
    0xb0, 0x01, //             mov  al, 1
    0xee, //                   out  dx, al
    0xeb, 0xe2, //             jmp  next
    0xba, 0x04, 0x06, // off:  mov  dx, 0x604
    0xb8, 0x00, 0x20, //       mov  ax, 0x2000
    0xef, //                   out  dx, ax
    0xeb, 0xd9, //             jmp  next
];

/// The other end of its serial port.
pub struct TinyGuest(UnixStream);

impl TinyGuest {
    /// Runs it as VM `web`, and waits until it listens. Other QEMUs of its command line take the
    /// name of its socket later, not its connection.
    pub fn run(session: &Session, more: &[&str]) -> Self {
        let mut guest = Self::run_code(session, CODE, more);
        guest.answers();
        guest
    }

    /// The same with other code, which answers each byte.
    pub fn run_code(session: &Session, code: &[u8], more: &[&str]) -> Self {
        let (disk, port) = (session.path("boot.raw"), session.path("serial"));
        let mut sector = code.to_vec();
        sector.resize(510, 0);
        sector.extend([0x55, 0xaa]);
        sector.resize(1 << 20, 0);
        std::fs::write(&disk, sector).unwrap();
        let drive = format!("file={},format=raw,if=none,id=boot,readonly=on", text(&disk));
        let serial = format!("unix:{},server=on,wait=off", text(&port));
        let machine = ["qemu-system-x86_64", "-M", "pc", "-m", "32", "-accel", "tcg,tb-size=8"];
        let screen = ["-nodefaults", "-display", "none", "-device", "pvpanic"];
        let devices =
            ["-serial", &serial, "-drive", &drive, "-device", "virtio-blk-pci,drive=boot"];
        let run = ["run", "web", "--quiet", "--"];
        session.firn(&[&run[..], &machine, &screen, &devices, more].concat()).succeeds();
        let guest = Self(UnixStream::connect(&port).unwrap());
        guest.0.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
        guest
    }

    /// Waits until it answers.
    pub fn answers(&mut self) {
        eventually("the guest answers", PATIENCE, || {
            self.send(b'e');
            self.0.read(&mut [0; 64]).is_ok_and(|bytes| bytes > 0)
        });
    }

    /// Switches itself off.
    pub fn power_off(&mut self) {
        self.send(b'o');
    }

    /// Reports a panic.
    pub fn panic(&mut self) {
        self.send(b'p');
    }

    fn send(&mut self, byte: u8) {
        self.0.write_all(&[byte]).unwrap();
    }
}
