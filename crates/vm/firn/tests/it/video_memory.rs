//! Video memory: it is copied ahead of the pause, and the image has it as it was at the cut.
//!
//! A QEMU without a guest: its firmware maps the video memory, and the test writes to it as a vCPU would.

use std::path::Path;
use std::process::{Child, Stdio};
use std::time::Duration;

use firn_image::Image;
use firn_memory::{Process, process_memory};
use firn_types::HostVirt;
use firn_vmm::QemuVm;

use crate::own_qemu::OwnQemu;
use crate::session::{Answer, Session, eventually, text};
use crate::vm::userfaultfds;

const PATIENCE: Duration = Duration::from_secs(60);
/// The VGA's memory, most of which the firmware never touches.
const BYTES: usize = 16 << 20;
/// Pages far from each other, that the firmware does not write to.
const BEFORE: [u64; 2] = [700 * 4096, 4095 * 4096];
const AFTER: u64 = 2000 * 4096;
/// After video memory was copied, and before the pause; the cut has been made.
const POINTS: [&str; 2] = ["save.rounds", "save.resumed"];

/// A VM that has video memory, under Firn. Its supervisor has active faults.
struct VideoVm {
    session: Session,
    _qemu: OwnQemu,
    process: Process,
    at: HostVirt,
}

impl VideoVm {
    /// Each point makes a file of its own name and waits, or kills the supervisor.
    fn attach(fault: impl Fn(&Session) -> String) -> Self {
        let mut session = Session::new();
        let monitor = session.path("test-qmp");
        let of_test = format!("unix:{},server=on,wait=off", text(&monitor));
        let qemu = OwnQemu::start(&session, &["-device", "VGA,vgamem_mb=16", "-qmp", &of_test]);
        let mut at = None;
        eventually("video memory", PATIENCE, || {
            at = video_memory(&monitor);
            at.is_some()
        });
        let process = Process::open(qemu.pid().parse().unwrap()).unwrap();
        session.arm(Some(&fault(&session)));
        session.firn(&["attach", "web", "--pid", &qemu.pid(), "--qmp", text(&qemu.qmp)]).succeeds();
        session.arm(None);
        Self { session, _qemu: qemu, process, at: at.unwrap() }
    }

    fn start_save(&self) -> Child {
        let save = ["--json", "checkpoint", "web", "-o", "web.firn"];
        let mut command = self.session.command(&save);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }

    /// Waits until the save is at a point.
    fn wait_for(&self, point: &str) {
        eventually(point, PATIENCE, || self.session.path(point).exists());
    }

    fn leave(&self, point: &str) {
        std::fs::remove_file(self.session.path(point)).unwrap();
    }

    fn write(&self, offset: u64, byte: u8) {
        process_memory::write_memory(&self.process, self.at.offset_by(offset), &[byte]).unwrap();
    }

    fn userfaultfds(&self) -> usize {
        userfaultfds(self.process.pid().into())
    }
}

fn video_memory(monitor: &Path) -> Option<HostVirt> {
    let layout = QemuVm::connect(monitor).ok()?.layout().ok()?;
    layout.aux.into_iter().find(|aux| aux.id.ends_with("vga.vram"))?.hva
}

fn waits(session: &Session) -> String {
    let wait = |point: &&str| format!("{point}=WAIT:{}", session.path(point).display());
    POINTS.iter().map(wait).collect::<Vec<_>>().join(",")
}

#[test]
fn what_is_written_until_the_cut_is_in_the_image() {
    let vm = VideoVm::attach(waits);
    let saving = vm.start_save();
    vm.wait_for(POINTS[0]);
    assert_eq!(vm.userfaultfds(), 2, "the writes to video memory are recorded as well");
    BEFORE.iter().for_each(|&offset| vm.write(offset, 0x5a));
    vm.leave(POINTS[0]);
    vm.wait_for(POINTS[1]);
    assert_eq!(vm.userfaultfds(), 1, "nothing records writes to video memory after the cut");
    vm.write(AFTER, 0xa5);
    vm.leave(POINTS[1]);
    Answer::of(saving.wait_with_output().unwrap()).succeeds();
    assert_eq!(vm.userfaultfds(), 0);
    let blocks = Image::open(&vm.session.path("web.firn")).unwrap().aux_blocks().unwrap();
    let video = blocks.iter().find(|block| block.id.ends_with("vga.vram")).unwrap();
    assert_eq!(video.bytes.len(), BYTES);
    BEFORE.iter().for_each(|&offset| assert_eq!(video.bytes[offset as usize], 0x5a, "{offset}"));
    assert_eq!(video.bytes[AFTER as usize], 0, "it was written after the cut");
}

#[test]
fn firn_killed_while_writes_to_video_memory_are_recorded() {
    let vm = VideoVm::attach(|_| POINTS[0].to_owned());
    Answer::of(vm.start_save().wait_with_output().unwrap()).fails(8, "aborted");
    eventually("the successor", PATIENCE, || vm.session.status("web")["recoveries"] == 1);
    assert_eq!(vm.userfaultfds(), 0, "a successor removes both descriptors");
    vm.session.firn(&["checkpoint", "web", "-o", "web.firn"]).succeeds();
}
