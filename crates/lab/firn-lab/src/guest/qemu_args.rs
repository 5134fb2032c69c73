//! QEMU arguments: the command line of a guest, as a user would type it.
//!
//! It has no RAM backend and no monitor: `firn run` adds those, and a guest started without Firn
//! needs none. The machine type is versioned, so that device state has one meaning in every QEMU.
//! It uses only devices without RAM of their own, and the network card has no boot ROM.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use super::accel::Accel;
use super::image::GuestImage;
use firn_guest::protocol::{AGENT_PORT, HEARTBEAT_PORT};

/// Default machine type of guests.
pub const MACHINE: &str = "pc-q35-7.2";
/// Machine type of guests that are paused many times a second. Its device state takes 15 KiB, that
/// of the default type 34 KiB, and a pause takes 0.2 ms less of the hypervisor's processor.
pub const LEAN_MACHINE: &str = "pc-i440fx-7.2";
/// Options of virtio devices that shorten pauses (docs/design/008).
///
/// - Legacy devices: a modern device saves the state of 1024 queues (`VIRTIO_QUEUE_MAX`), whether
///   it has them or not. That is 45 KiB, and 0.25 ms of a pause. A legacy device saves only the
///   queues that it has.
/// - Without KVM, the vCPU itself notifies a device: otherwise QEMU removes and recreates each
///   queue's event descriptor in each pause, which takes 0.15 ms for nine queues and gains nothing.
pub fn lean_virtio_options(accel: Accel) -> &'static str {
    match accel {
        Accel::Kvm => "disable-modern=on",
        Accel::Tcg => "disable-modern=on,ioeventfd=off",
    }
}
/// Environment variable that names another QEMU program.
pub const QEMU_VARIABLE: &str = "FIRN_QEMU";

/// A port of the host's loopback interface that QEMU's user networking forwards to a port of the
/// guest.
///
/// Use few connections at a time: its listen backlog is tiny, and twenty simultaneous connections
/// stall for seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostForward {
    /// Whether it is a UDP port; otherwise TCP.
    pub udp: bool,
    /// Port of the host.
    pub host: u16,
    /// Port of the guest.
    pub guest: u16,
}

impl HostForward {
    /// A TCP port.
    pub fn tcp(host: u16, guest: u16) -> Self {
        Self { udp: false, host, guest }
    }

    /// A UDP port.
    pub fn udp(host: u16, guest: u16) -> Self {
        Self { udp: true, host, guest }
    }
}

/// A virtio disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VirtioDisk {
    /// The file.
    pub file: PathBuf,
    /// QEMU's name of its format: `raw`, `qcow2`.
    pub format: &'static str,
    /// Whether the guest cannot write it.
    pub read_only: bool,
}

/// Builder of a command line. The defaults are a guest of 512 MiB and 2 vCPUs with no devices
/// attached.
#[derive(Clone, Debug)]
pub struct QemuArgs {
    program: OsString,
    accel: Accel,
    machine: String,
    memory_kib: u64,
    vcpus: u32,
    kernel: PathBuf,
    initrd: PathBuf,
    append: Vec<String>,
    console: Option<PathBuf>,
    ports: Vec<(&'static str, PathBuf)>,
    disks: Vec<VirtioDisk>,
    network: Option<Vec<HostForward>>,
    more: Vec<String>,
    /// Whether QEMU ends when the guest reboots.
    ends_at_reboot: bool,
}

/// The hypervisor: the environment's, or the default.
pub fn default_program() -> OsString {
    std::env::var_os(QEMU_VARIABLE).unwrap_or_else(|| "qemu-system-x86_64".into())
}

impl QemuArgs {
    /// A guest that boots `image`. This does not attach the image's disk, if there is one: see
    /// [`QemuArgs::add_disk`].
    pub fn new(image: &GuestImage, accel: Accel) -> Self {
        Self {
            program: default_program(),
            accel,
            machine: MACHINE.to_owned(),
            memory_kib: 512 << 10,
            vcpus: 2,
            kernel: image.kernel.clone(),
            initrd: image.initrd.clone(),
            append: vec!["console=ttyS0".into(), "quiet".into(), "panic=-1".into()],
            console: None,
            ports: Vec::new(),
            disks: Vec::new(),
            network: None,
            more: Vec::new(),
            ends_at_reboot: true,
        }
    }

    /// Starts the guest again when it reboots; otherwise QEMU ends.
    pub fn with_reboots(mut self) -> Self {
        self.ends_at_reboot = false;
        self
    }

    /// Adds a word to the machine type: a property.
    pub fn with_machine_property(mut self, property: &str) -> Self {
        self.machine = format!("{},{property}", self.machine);
        self
    }

    /// Uses another QEMU program.
    pub fn with_program(mut self, program: impl Into<OsString>) -> Self {
        self.program = program.into();
        self
    }

    /// Uses another machine type.
    pub fn with_machine(mut self, machine: &str) -> Self {
        machine.clone_into(&mut self.machine);
        self
    }

    /// Uses a machine type with few devices, whose state is saved fast.
    pub fn with_lean_machine(self) -> Self {
        self.with_machine(LEAN_MACHINE)
    }

    /// Sets the size of guest memory.
    pub fn memory_mib(self, mib: u32) -> Self {
        self.memory_kib(u64::from(mib) << 10)
    }

    /// Sets the size of guest memory; QEMU rounds it up to a multiple of 8 KiB.
    pub fn memory_kib(mut self, kib: u64) -> Self {
        self.memory_kib = kib;
        self
    }

    /// Size of guest memory, in bytes.
    pub fn memory_bytes(&self) -> u64 {
        self.memory_kib << 10
    }

    /// Sets the number of vCPUs.
    pub fn vcpus(mut self, vcpus: u32) -> Self {
        self.vcpus = vcpus;
        self
    }

    /// Adds a word to the kernel's command line.
    pub fn append_kernel_arg(mut self, word: &str) -> Self {
        self.append.push(word.to_owned());
        self
    }

    /// Writes the guest's serial console to a file.
    pub fn with_console(mut self, file: &Path) -> Self {
        self.console = Some(file.to_owned());
        self
    }

    /// Connects the agent's port, which [`super::GuestControl`] uses, to a unix socket that QEMU
    /// creates.
    pub fn with_agent_socket(mut self, socket: &Path) -> Self {
        self.ports.push((AGENT_PORT, socket.to_owned()));
        self
    }

    /// Connects the heartbeat port, which a prober reads, to a unix socket that QEMU creates.
    pub fn with_heartbeat_socket(mut self, socket: &Path) -> Self {
        self.ports.push((HEARTBEAT_PORT, socket.to_owned()));
        self
    }

    /// Adds a virtio disk; the first is `/dev/vda`.
    pub fn add_disk(mut self, disk: VirtioDisk) -> Self {
        self.disks.push(disk);
        self
    }

    /// Adds the disk of `image` read-only; the guest's writes stay in its memory. A checkpoint of
    /// such a guest needs no copy of a disk, and can be restored any number of times.
    pub fn root_in_memory(self, image: &GuestImage) -> Self {
        let Some(file) = image.disk.clone() else { return self };
        self.add_disk(VirtioDisk { file, format: "qcow2", read_only: true })
            .append_kernel_arg("firn.root=ram")
    }

    /// The same, read through the page cache: if a disk is read past the page cache, no page is
    /// copied ahead of a cut (docs/design/010).
    pub fn cached_root_in_memory(self, image: &GuestImage) -> Self {
        let Some(file) = &image.disk else { return self };
        let drive = format!(
            "if=none,id=root,file={},format=qcow2,readonly=on,cache=writeback",
            escape_commas(file)
        );
        let device = format!("virtio-blk-pci,drive=root,{}", lean_virtio_options(self.accel));
        self.add_args(&["-drive", &drive, "-device", &device]).append_kernel_arg("firn.root=ram")
    }

    /// Adds a virtio network card on QEMU's user networking. Forwards of several calls add up.
    pub fn add_network(mut self, forwards: &[HostForward]) -> Self {
        self.network.get_or_insert_default().extend_from_slice(forwards);
        self
    }

    /// Adds any other arguments.
    pub fn add_args(mut self, args: &[&str]) -> Self {
        self.more.extend(args.iter().map(|&arg| arg.to_owned()));
        self
    }

    /// The file of the console, if any.
    pub(super) fn console_file(&self) -> Option<&Path> {
        self.console.as_deref()
    }

    /// The QEMU program.
    pub fn program_name(&self) -> &OsString {
        &self.program
    }

    /// All arguments after the program.
    pub fn args(&self) -> Vec<String> {
        let mut args = self.base_args();
        args.extend(self.serial_args());
        for (number, disk) in self.disks.iter().enumerate() {
            args.extend(disk_args(number, disk));
        }
        if let Some(forwards) = &self.network {
            args.extend(network_args(forwards, self.accel));
        }
        args.extend(self.more.iter().cloned());
        args.extend(self.ends_at_reboot.then(|| "-no-reboot".to_owned()));
        args
    }

    fn base_args(&self) -> Vec<String> {
        to_strings(&[
            "-nodefaults",
            "-no-user-config",
            "-display",
            "none",
            "-machine",
            &self.machine,
            "-accel",
            self.accel.option(),
            "-cpu",
            self.accel.cpu(),
            "-m",
            &format_size(self.memory_kib),
            "-smp",
            &self.vcpus.to_string(),
            "-kernel",
            &self.kernel.to_string_lossy(),
            "-initrd",
            &self.initrd.to_string_lossy(),
            "-append",
            &self.append.join(" "),
        ])
    }

    fn serial_args(&self) -> Vec<String> {
        let mut args = Vec::new();
        if let Some(console) = &self.console {
            let file = format!("file,id=console,path={}", escape_commas(console));
            args.extend(to_strings(&["-chardev", &file, "-serial", "chardev:console"]));
        }
        if !self.ports.is_empty() {
            // By default QEMU creates 31 ports: 64 queues, which it stops and starts in each pause.
            // The first port is a console's.
            let most = self.ports.len() + 1;
            let lean = lean_virtio_options(self.accel);
            let bus = format!("virtio-serial-pci,id=ports,max_ports={most},{lean}");
            args.extend(to_strings(&["-device", &bus]));
        }
        for (name, socket) in &self.ports {
            let socket =
                format!("socket,id={name},path={},server=on,wait=off", escape_commas(socket));
            let port = format!("virtserialport,bus=ports.0,chardev={name},name={name}");
            args.extend(to_strings(&["-chardev", &socket, "-device", &port]));
        }
        args
    }
}

/// A size in QEMU's notation: in MiB where that is exact.
fn format_size(kib: u64) -> String {
    match kib % 1024 {
        0 => format!("{}M", kib / 1024),
        _ => format!("{kib}K"),
    }
}

fn disk_args(number: usize, disk: &VirtioDisk) -> Vec<String> {
    let read_only = if disk.read_only { "on" } else { "off" };
    let drive = format!(
        "if=none,id=disk{number},file={},format={},readonly={read_only},cache=none,aio=threads",
        escape_commas(&disk.file),
        disk.format
    );
    to_strings(&["-drive", &drive, "-device", &format!("virtio-blk-pci,drive=disk{number}")])
}

fn network_args(forwards: &[HostForward], accel: Accel) -> Vec<String> {
    let mut netdev = "user,id=net".to_owned();
    for HostForward { udp, host, guest } in forwards {
        let protocol = if *udp { "udp" } else { "tcp" };
        netdev += &format!(",hostfwd={protocol}:127.0.0.1:{host}-:{guest}");
    }
    let device = format!("virtio-net-pci,netdev=net,romfile=,{}", lean_virtio_options(accel));
    to_strings(&["-netdev", &netdev, "-device", &device])
}

/// A path for a comma-separated option: commas are doubled.
fn escape_commas(path: &Path) -> String {
    path.to_string_lossy().replace(',', ",,")
}

fn to_strings(words: &[&str]) -> Vec<String> {
    words.iter().map(|&word| word.to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image() -> GuestImage {
        GuestImage {
            name: "small".into(),
            kernel: "/k".into(),
            initrd: "/i".into(),
            disk: Some("/d,1".into()),
        }
    }

    #[test]
    fn only_requested_devices_are_attached() {
        let plain = QemuArgs::new(&image(), Accel::Tcg).memory_mib(256).args().join(" ");
        assert!(plain.contains("-m 256M -smp 2 -kernel /k -initrd /i"), "{plain}");
        assert!(!plain.contains("virtio"), "{plain}");
        let odd = QemuArgs::new(&image(), Accel::Tcg).memory_kib(262_152).args().join(" ");
        assert!(odd.contains("-m 262152K "), "{odd}");
    }

    #[test]
    fn a_root_in_memory_may_use_the_page_cache() {
        let args = QemuArgs::new(&image(), Accel::Tcg).cached_root_in_memory(&image()).args();
        let args = args.join(" ");
        assert!(args.contains("file=/d,,1,format=qcow2,readonly=on,cache=writeback"), "{args}");
        assert!(args.contains("drive=root") && args.contains("firn.root=ram"), "{args}");
    }

    #[test]
    fn ports_disks_and_forwards() {
        let disk = VirtioDisk { file: "/d,1".into(), format: "qcow2", read_only: true };
        let args = QemuArgs::new(&image(), Accel::Kvm)
            .with_agent_socket(Path::new("/a"))
            .with_heartbeat_socket(Path::new("/h"))
            .add_disk(disk)
            .add_network(&[HostForward::tcp(7000, 6379)])
            .add_network(&[HostForward::udp(7001, 7)])
            .args()
            .join(" ");
        assert_eq!(args.matches("virtio-serial-pci").count(), 1, "{args}");
        assert!(args.contains("file=/d,,1,format=qcow2,readonly=on,cache=none"), "{args}");
        assert!(
            args.contains("hostfwd=tcp:127.0.0.1:7000-:6379,hostfwd=udp:127.0.0.1:7001-:7"),
            "{args}"
        );
    }
}
