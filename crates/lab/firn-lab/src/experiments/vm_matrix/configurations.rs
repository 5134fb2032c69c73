//! Kinds of VMs. Each adds options to the command line of a VM with 192 MiB of RAM, 2 vCPUs, a
//! virtio disk (most of them), a port for its agent, and two monitors.
//!
//! Sources: `virsh domxml-to-native` for libvirt, qemu-server's `src/test/cfg2cmd` for Proxmox VE,
//! nova's `nova/virt/libvirt` and virt-launcher's converter for OpenStack and KubeVirt.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context as _, Result, bail, ensure};

use super::events::SaveEvent;
use crate::guest::accel::{self, Accel};
use crate::guest::{QemuArgs, VirtioDisk};

/// The size of every disk.
const DISK_MIB: u32 = 16;
/// Free huge pages that a VM needs, of 2 MiB.
const HUGE_PAGES: u64 = 96;
const SHARED: &str = "memory-backend-memfd,id=ram,size=192M,share=on";
const TWO_NODES: &str = "-object memory-backend-memfd,id=n0,size=96M,share=on \
    -object memory-backend-memfd,id=n1,size=96M,share=on \
    -numa node,memdev=n0,cpus=0 -numa node,memdev=n1,cpus=1";

/// A kind of VM.
pub(super) struct MatrixConfiguration {
    pub(super) name: &'static str,
    /// Whether libvirt, OpenStack, KubeVirt or Proxmox VE make such a VM by default.
    pub(super) is_default: bool,
    /// Whether it has a disk that its guest writes to. `firn protect` refuses such a VM, unless Firn
    /// serves the disk.
    pub(super) has_disk: bool,
    /// What happens before or during its saves.
    pub(super) event: SaveEvent,
    /// Adds its options. An error says what this host lacks.
    pub(super) arrange: fn(&mut MatrixHost, QemuArgs) -> Result<QemuArgs>,
}

impl MatrixConfiguration {
    fn new(name: &'static str, arrange: fn(&mut MatrixHost, QemuArgs) -> Result<QemuArgs>) -> Self {
        Self { name, is_default: false, has_disk: true, event: SaveEvent::Nothing, arrange }
    }

    fn without_disk(self) -> Self {
        Self { has_disk: false, ..self }
    }

    fn made_by_default(self) -> Self {
        Self { is_default: true, ..self }
    }

    fn with_event(self, event: SaveEvent) -> Self {
        Self { event, ..self }
    }
}

/// The files, devices and processes of the host that a VM uses.
pub(super) struct MatrixHost {
    dir: PathBuf,
    numbers: AtomicU32,
    devices: Vec<PathBuf>,
    volume_groups: Vec<String>,
    processes: Vec<Child>,
}

impl MatrixHost {
    pub(super) fn new(dir: &Path) -> Self {
        let (devices, volume_groups, processes) = Default::default();
        let numbers = AtomicU32::new(0);
        Self { dir: dir.to_owned(), numbers, devices, volume_groups, processes }
    }

    pub(super) fn file(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// A socket that the VM's QEMU makes. The standby has another directory there: both QEMUs have
    /// the same command line.
    pub(super) fn socket(&self, name: &str) -> PathBuf {
        self.sockets().join(name)
    }

    pub(super) fn sockets(&self) -> PathBuf {
        self.dir.join("sockets")
    }

    /// A number that was not given before.
    pub(super) fn next_number(&self) -> u32 {
        self.numbers.fetch_add(1, Ordering::Relaxed)
    }

    /// Creates an empty disk.
    pub(super) fn create_disk(&self, name: &str, format: &str) -> Result<PathBuf> {
        let file = self.file(&format!("{name}.{format}"));
        let mut command = Command::new("qemu-img");
        command.args(["create", "-q", "-f", format]).arg(&file).arg(format!("{DISK_MIB}M"));
        run_command(command)?;
        Ok(file)
    }

    fn disk(&self, name: &str, format: &str) -> Result<String> {
        Ok(self.create_disk(name, format)?.display().to_string())
    }

    /// A logical volume of a new group, which is on a loop device.
    fn create_logical_volume(&mut self) -> Result<String> {
        need_file("/dev/mapper/control")?;
        let file = self.file("group.raw");
        std::fs::File::create(&file)?.set_len(u64::from(4 * DISK_MIB) << 20)?;
        let (device, group) =
            (self.attach_loop_device(&file)?, format!("firn{}", std::process::id()));
        let mut create_group = Command::new("vgcreate");
        create_group.args([&group, &device]);
        run_command(create_group)?;
        self.volume_groups.push(group.clone());
        let mut create_volume = Command::new("lvcreate");
        create_volume.args(["--yes", "--name", "disk", "--size", &format!("{DISK_MIB}m"), &group]);
        run_command(create_volume)?;
        Ok(format!("/dev/{group}/disk"))
    }

    /// A loop device over a new file.
    fn create_loop_device(&mut self) -> Result<String> {
        let file = self.create_disk("block", "raw")?;
        self.attach_loop_device(&file)
    }

    fn attach_loop_device(&mut self, file: &Path) -> Result<String> {
        let output = Command::new("losetup").args(["--find", "--show"]).arg(file).output();
        let output = output.context("cannot run losetup")?;
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr).trim());
        let device = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        self.devices.push(device.clone().into());
        Ok(device)
    }

    /// Starts a server of a new disk, for any number of clients. Returns its socket.
    fn start_nbd_server(&mut self) -> Result<String> {
        let (file, socket) = (self.create_disk("remote", "raw")?, self.file("nbd"));
        let mut command = Command::new("qemu-nbd");
        command.args(["--persistent", "--shared=0", "--format=raw", "--socket"]).arg(&socket);
        command.arg(file);
        self.start_server(command, &socket)?;
        Ok(socket.display().to_string())
    }

    /// Starts a program that serves the VM, and waits for its socket.
    fn start_server(&mut self, mut command: Command, socket: &Path) -> Result<()> {
        let child = command.stdin(Stdio::null()).stderr(Stdio::null()).spawn();
        self.processes.push(child.context("cannot start it")?);
        for _ in 0..500 {
            if socket.exists() {
                return Ok(());
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        bail!("it made no socket")
    }
}

impl Drop for MatrixHost {
    fn drop(&mut self) {
        for process in &mut self.processes {
            let _ = process.kill();
            let _ = process.wait();
        }
        for group in &self.volume_groups {
            let _ = Command::new("vgremove").args(["--yes", group]).status();
        }
        for device in &self.devices {
            let _ = Command::new("losetup").arg("--detach").arg(device).status();
        }
    }
}

fn run_command(mut command: Command) -> Result<()> {
    let output = command.output().with_context(|| format!("cannot run {command:?}"))?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr).trim());
    Ok(())
}

fn need_file(path: &str) -> Result<()> {
    ensure!(Path::new(path).exists(), "this host has no {path}");
    Ok(())
}

/// Adds options that are written as on a command line.
fn add_options(args: QemuArgs, line: &str) -> QemuArgs {
    let words: Vec<&str> = line.split_whitespace().collect();
    args.add_args(&words)
}

fn with_memory(args: QemuArgs, backend: &str) -> QemuArgs {
    add_options(args, &format!("-object {backend} -machine memory-backend=ram"))
}

/// A second disk, on another bus.
fn with_disk(host: &MatrixHost, args: QemuArgs, device: &str) -> Result<QemuArgs> {
    let file = host.disk("other", "qcow2")?;
    let line = format!("-drive if=none,id=other,format=qcow2,file={file} {device},drive=other");
    Ok(add_options(args, &line))
}

fn check_huge_pages() -> Result<()> {
    let file = "/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages";
    let free: u64 = std::fs::read_to_string(file)?.trim().parse()?;
    ensure!(free >= HUGE_PAGES, "{free} huge pages of 2 MiB are free, {HUGE_PAGES} are needed");
    Ok(())
}

const LIBVIRT: &str = "-name guest=web,debug-threads=on -uuid 1f1a1f1e-0000-4000-8000-000000000001 \
    -rtc base=utc,driftfix=slew -global kvm-pit.lost_tick_policy=delay -boot strict=on \
    -overcommit mem-lock=off -sandbox on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny \
    -global ICH9-LPC.disable_s3=1 -global ICH9-LPC.disable_s4=1 \
    -device pcie-root-port,port=16,chassis=1,id=pci.1,bus=pcie.0,multifunction=on,addr=0x10 \
    -device pcie-root-port,port=17,chassis=2,id=pci.2,bus=pcie.0,addr=0x10.0x1 \
    -device pcie-root-port,port=18,chassis=3,id=pci.3,bus=pcie.0,addr=0x10.0x2 \
    -device pcie-root-port,port=19,chassis=4,id=pci.4,bus=pcie.0,addr=0x10.0x3 \
    -device qemu-xhci,p2=15,p3=15,id=usb,bus=pci.2,addr=0x0 \
    -netdev user,id=hostnet0 \
    -device virtio-net-pci,netdev=hostnet0,id=net0,mac=52:54:00:00:00:01,bus=pci.1,addr=0x0 \
    -chardev null,id=charserial0 -device usb-tablet,id=input0,bus=usb.0,port=1 \
    -device VGA,id=video0,vgamem_mb=16,bus=pcie.0,addr=0x11 \
    -device virtio-balloon-pci,id=balloon0,bus=pci.3,addr=0x0 \
    -object rng-random,id=objrng0,filename=/dev/urandom \
    -device virtio-rng-pci,rng=objrng0,id=rng0,bus=pci.4,addr=0x0 -msg timestamp=on";

const OPENSTACK: &str = "-name guest=instance-00000001,debug-threads=on -boot strict=on \
    -overcommit mem-lock=off -rtc base=utc,driftfix=slew -global kvm-pit.lost_tick_policy=delay \
    -smbios type=1,manufacturer=OpenStack,product=Nova -device piix3-usb-uhci,id=usb \
    -netdev user,id=hostnet0 -device virtio-net-pci,rx_queue_size=512,host_mtu=1450,netdev=hostnet0,id=net0 \
    -device usb-tablet,id=input0,bus=usb.0,port=1 -device virtio-vga,id=video0,max_outputs=1 \
    -device virtio-balloon-pci,id=balloon0 -object rng-random,id=objrng0,filename=/dev/urandom \
    -device virtio-rng-pci,rng=objrng0,id=rng0 -device vmcoreinfo";

const KUBEVIRT: &str = "-name guest=default_vm,debug-threads=on -boot strict=on \
    -overcommit mem-lock=off -rtc base=utc -no-shutdown \
    -device pcie-root-port,port=16,chassis=1,id=pci.1,bus=pcie.0,multifunction=on,addr=0x10 \
    -device pcie-root-port,port=17,chassis=2,id=pci.2,bus=pcie.0,addr=0x10.0x1 \
    -device pcie-root-port,port=18,chassis=3,id=pci.3,bus=pcie.0,addr=0x10.0x2 \
    -device pcie-root-port,port=19,chassis=4,id=pci.4,bus=pcie.0,addr=0x10.0x3 \
    -device pcie-root-port,port=20,chassis=5,id=pci.5,bus=pcie.0,addr=0x10.0x4 \
    -device virtio-scsi-pci-non-transitional,id=scsi0,bus=pci.2,addr=0x0 \
    -netdev user,id=hostua-default \
    -device virtio-net-pci-non-transitional,host_mtu=1480,netdev=hostua-default,id=ua-default,mac=02:00:00:00:00:01,bus=pci.1,addr=0x0,romfile= \
    -device VGA,id=video0,vgamem_mb=16,bus=pcie.0,addr=0x11 \
    -device virtio-balloon-pci-non-transitional,id=balloon0,free-page-reporting=on,bus=pci.3,addr=0x0";

const PROXMOX: &str = "-name web,debug-threads=on -no-shutdown \
    -smbios type=1,uuid=7b10d7af-b932-4c66-b2c3-3996152ec465 -boot menu=on,strict=on,reboot-timeout=1000 \
    -global PIIX4_PM.disable_s3=1 -global PIIX4_PM.disable_s4=1 \
    -device pci-bridge,id=pci.1,chassis_nr=1,bus=pci.0,addr=0x1e \
    -device vmgenid,guid=c773c261-d800-4348-9f5d-167fadd53cf8 -device piix3-usb-uhci,id=uhci,bus=pci.0,addr=0x1.0x2 \
    -device usb-tablet,id=tablet,bus=uhci.0,port=1 -device VGA,id=vga,bus=pci.0,addr=0xf \
    -device virtio-balloon-pci,id=balloon0,bus=pci.0,addr=0x10,free-page-reporting=on \
    -netdev type=user,id=net0 -device virtio-net-pci,mac=A2:C0:43:77:08:A0,netdev=net0,bus=pci.0,addr=0x12,id=net0,rx_queue_size=1024,tx_queue_size=256";

/// Devices of `q35` in a file, as Proxmox VE gives them.
const PROXMOX_Q35: &str = r#"[device "ehci"]
  driver = "ich9-usb-ehci1"
  multifunction = "on"
  bus = "pcie.0"
  addr = "1d.7"

[device "ich9-pcie-port-1"]
  driver = "pcie-root-port"
  multifunction = "on"
  bus = "pcie.0"
  addr = "1c.0"
  port = "1"
  chassis = "1"
"#;

/// All kinds of VMs.
pub(super) fn all_configurations() -> Vec<MatrixConfiguration> {
    [managed_kinds(), diskless_kinds(), memory_kinds(), disk_kinds(), device_kinds(), event_kinds()]
        .into_iter()
        .flatten()
        .collect()
}

/// VMs as their managers make them.
fn managed_kinds() -> Vec<MatrixConfiguration> {
    type Kind = MatrixConfiguration;
    vec![
        Kind::new("plain-q35", |_, args| Ok(args)),
        Kind::new("plain-pc", |_, args| Ok(args.with_machine("pc-i440fx-7.2"))),
        Kind::new("microvm", |_, args| {
            let chosen = accel::choose_accel();
            ensure!(chosen.accel == Accel::Kvm, "its guest needs KVM's clock: {}", chosen.why);
            Ok(args.with_machine("microvm,pcie=on,acpi=on"))
        }),
        Kind::new("libvirt-private", |_, args| Ok(add_options(args, LIBVIRT))).made_by_default(),
        Kind::new("libvirt-memfd", |_, args| Ok(with_memory(add_options(args, LIBVIRT), SHARED)))
            .made_by_default(),
        Kind::new("openstack", |_, args| {
            Ok(add_options(args.with_machine("pc-i440fx-7.2"), OPENSTACK))
        })
        .made_by_default(),
        Kind::new("kubevirt", |_, args| Ok(add_options(args, KUBEVIRT))).made_by_default(),
        Kind::new("proxmox-pc", |_, args| {
            let args = args.with_machine("pc-i440fx-7.2").with_machine_property("hpet=off");
            Ok(add_options(args, PROXMOX))
        })
        .made_by_default(),
        Kind::new("proxmox-q35", |host, args| {
            let file = host.file("q35.cfg");
            std::fs::write(&file, PROXMOX_Q35)?;
            let line = format!(
                "-readconfig {} -device usb-tablet,bus=ehci.0,port=1 -device VGA,bus=pcie.0,addr=0x11 \
                 -device virtio-balloon-pci,free-page-reporting=on",
                file.display()
            );
            Ok(add_options(args, &line))
        })
        .made_by_default(),
    ]
}

/// VMs that write to no disk: a standby can have all of their state.
fn diskless_kinds() -> Vec<MatrixConfiguration> {
    type Kind = MatrixConfiguration;
    let kinds = vec![
        Kind::new("diskless", |_, args| Ok(args)),
        Kind::new("diskless-memfd", |_, args| Ok(with_memory(args, SHARED))),
        Kind::new("diskless-pc", |_, args| Ok(args.with_machine("pc-i440fx-7.2"))),
        Kind::new("diskless-libvirt", |_, args| Ok(add_options(args, LIBVIRT))),
        Kind::new("diskless-balloon", |_, args| {
            Ok(with_memory(add_options(args, "-device virtio-balloon-pci"), SHARED))
        }),
        Kind::new("diskless-nodes", |_, args| Ok(add_options(args, TWO_NODES))),
        Kind::new("diskless-cd-rom", |host, args| {
            let file = host.disk("medium", "raw")?;
            Ok(add_options(args, &format!("-drive if=virtio,readonly=on,format=raw,file={file}")))
        }),
    ];
    kinds.into_iter().map(Kind::without_disk).collect()
}

fn memory_kinds() -> Vec<MatrixConfiguration> {
    type Kind = MatrixConfiguration;
    vec![
        Kind::new("memfd", |_, args| Ok(with_memory(args, SHARED))),
        Kind::new("shared-file", |host, args| {
            let file = host.file("ram");
            let backend =
                format!("memory-backend-file,id=ram,size=192M,share=on,mem-path={}", file.display());
            Ok(with_memory(args, &backend))
        }),
        Kind::new("private-file", |host, args| {
            let file = host.file("ram");
            let backend =
                format!("memory-backend-file,id=ram,size=192M,share=off,mem-path={}", file.display());
            Ok(with_memory(args, &backend))
        }),
        Kind::new("huge-pages", |_, args| {
            check_huge_pages()?;
            let backend = "memory-backend-memfd,id=ram,size=192M,share=on,hugetlb=on,hugetlbsize=2M";
            Ok(with_memory(args, backend))
        }),
        Kind::new("private-huge-pages", |_, args| {
            check_huge_pages()?;
            let args = add_options(args, "-device virtio-balloon-pci");
            let backend =
                "memory-backend-memfd,id=ram,size=192M,share=off,hugetlb=on,hugetlbsize=2M";
            Ok(with_memory(args, backend))
        }),
        Kind::new("two-nodes", |_, args| Ok(add_options(args, TWO_NODES))),
        Kind::new("two-private-nodes", |_, args| {
            Ok(add_options(
                args,
                "-object memory-backend-ram,id=n0,size=96M -object memory-backend-ram,id=n1,size=96M \
                 -numa node,memdev=n0,cpus=0 -numa node,memdev=n1,cpus=1",
            ))
        }),
        Kind::new("pc-dimm", |_, args| {
            Ok(add_options(
                args,
                "-m 192M,slots=2,maxmem=1G -object memory-backend-memfd,id=d0,size=128M,share=on \
                 -device pc-dimm,memdev=d0,id=dimm0",
            ))
        }),
        Kind::new("above-4-gib", |_, args| Ok(args.memory_mib(4608))),
        Kind::new("locked", |_, args| Ok(add_options(args, "-overcommit mem-lock=on"))),
        Kind::new("virtio-mem", |_, args| {
            Ok(add_options(
                args,
                "-m 192M,maxmem=1G -object memory-backend-memfd,id=vmem,size=256M,share=on,reserve=off \
                 -device virtio-mem-pci,id=vm0,memdev=vmem,requested-size=0",
            ))
        })
        .with_event(SaveEvent::MemoryPlugged),
    ]
}

fn disk_kinds() -> Vec<MatrixConfiguration> {
    type Kind = MatrixConfiguration;
    vec![
        Kind::new("nvme", |host, args| with_disk(host, args, "-device nvme,serial=1")),
        Kind::new("ahci", |host, args| with_disk(host, args, "-device ide-hd,bus=ide.0")),
        Kind::new("ide", |host, args| {
            with_disk(host, args.with_machine("pc-i440fx-7.2"), "-device ide-hd,bus=ide.0")
        }),
        Kind::new("virtio-scsi", |host, args| {
            with_disk(host, add_options(args, "-device virtio-scsi-pci,id=scsi"), "-device scsi-hd,bus=scsi.0")
        })
        .made_by_default(),
        Kind::new("iothread", |host, args| {
            let args = add_options(args, "-object iothread,id=io");
            with_disk(host, args, "-device virtio-blk-pci,iothread=io")
        })
        .made_by_default(),
        Kind::new("raw", |host, args| {
            let file = host.create_disk("other", "raw")?;
            Ok(args.add_disk(VirtioDisk { file, format: "raw", read_only: false }))
        })
        .made_by_default(),
        Kind::new("writeback", |host, args| {
            let file = host.disk("other", "qcow2")?;
            let drive = format!("-drive if=virtio,cache=writeback,format=qcow2,file={file}");
            Ok(add_options(args, &drive))
        })
        .made_by_default(),
        Kind::new("blockdev", |host, args| {
            let file = host.disk("other", "qcow2")?;
            let line = format!(
                "-blockdev driver=file,filename={file},node-name=storage,cache.direct=on,cache.no-flush=off,auto-read-only=on,discard=unmap \
                 -blockdev node-name=format,read-only=off,driver=qcow2,file=storage \
                 -device virtio-blk-pci,drive=format,id=other,write-cache=on"
            );
            Ok(add_options(args, &line))
        })
        .made_by_default(),
        Kind::new("backing-file", |host, args| {
            let (base, file) = (host.disk("base", "qcow2")?, host.file("top.qcow2"));
            let mut command = Command::new("qemu-img");
            command.args(["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", &base]).arg(&file);
            run_command(command)?;
            Ok(args.add_disk(VirtioDisk { file, format: "qcow2", read_only: false }))
        })
        .made_by_default(),
        Kind::new("loop-device", |host, args| {
            let device = host.create_loop_device()?;
            let line = format!(
                "-blockdev driver=host_device,filename={device},node-name=block,cache.direct=on \
                 -blockdev driver=raw,file=block,node-name=format \
                 -device virtio-blk-pci,drive=format"
            );
            Ok(add_options(args, &line))
        })
        .made_by_default(),
        Kind::new("network-disk", |host, args| {
            let socket = host.start_nbd_server()?;
            let line = format!(
                "-blockdev driver=nbd,server.type=unix,server.path={socket},node-name=store \
                 -blockdev driver=raw,file=store,node-name=format \
                 -device virtio-blk-pci,drive=format"
            );
            Ok(add_options(args, &line))
        })
        .made_by_default(),
        Kind::new("lvm", |host, args| {
            let device = host.create_logical_volume()?;
            let line = format!(
                "-blockdev driver=host_device,filename={device},node-name=block,cache.direct=on \
                 -blockdev driver=raw,file=block,node-name=format \
                 -device virtio-blk-pci,drive=format"
            );
            Ok(add_options(args, &line))
        })
        .made_by_default(),
        Kind::new("throttled", |host, args| {
            let file = host.disk("other", "qcow2")?;
            let line = format!(
                "-object throttle-group,id=limits,x-iops-total=1000 \
                 -blockdev driver=file,filename={file},node-name=e \
                 -blockdev driver=qcow2,file=e,node-name=f \
                 -blockdev driver=throttle,throttle-group=limits,file=f,node-name=d \
                 -device virtio-blk-pci,drive=d"
            );
            Ok(add_options(args, &line))
        })
        .made_by_default(),
        Kind::new("cd-rom", |host, args| {
            let file = host.disk("medium", "raw")?;
            let line = format!(
                "-drive if=none,id=cd,media=cdrom,readonly=on,format=raw,file={file} \
                 -device ide-cd,drive=cd,bus=ide.1"
            );
            Ok(add_options(args, &line))
        })
        .made_by_default(),
        Kind::new("vhost-user", |host, args| {
            let (file, socket) = (host.disk("other", "raw")?, host.file("vhost-user"));
            let mut command = Command::new("qemu-storage-daemon");
            command.arg("--blockdev").arg(format!("driver=file,node-name=d,filename={file}"));
            command.arg("--export").arg(format!(
                "type=vhost-user-blk,id=e,node-name=d,writable=on,addr.type=unix,addr.path={}",
                socket.display()
            ));
            host.start_server(command, &socket).context("qemu-storage-daemon")?;
            let line = format!(
                "-chardev socket,id=user,path={} -device vhost-user-blk-pci,chardev=user,num-queues=1",
                socket.display()
            );
            Ok(add_options(with_memory(args, SHARED), &line))
        }),
    ]
}

fn device_kinds() -> Vec<MatrixConfiguration> {
    type Kind = MatrixConfiguration;
    vec![
        Kind::new("vga", |_, args| Ok(add_options(args, "-device VGA"))).made_by_default(),
        Kind::new("qxl", |_, args| Ok(add_options(args, "-device qxl-vga"))),
        Kind::new("virtio-vga", |_, args| Ok(add_options(args, "-device virtio-vga")))
            .made_by_default(),
        Kind::new("cirrus", |_, args| Ok(add_options(args, "-device cirrus-vga"))),
        Kind::new("xhci-tablet", |_, args| {
            Ok(add_options(args, "-device qemu-xhci,id=usb -device usb-tablet,bus=usb.0"))
        })
        .made_by_default(),
        Kind::new("sound", |_, args| {
            Ok(add_options(
                args,
                "-audiodev none,id=audio1 -device ich9-intel-hda,id=sound0 \
                 -device hda-duplex,id=codec0,bus=sound0.0,audiodev=audio1",
            ))
        }),
        Kind::new("spice", |host, args| {
            let line = format!(
                "-spice unix=on,addr={},disable-ticketing=on -device qxl-vga \
                 -chardev spicevmc,id=vdagent,name=vdagent \
                 -device virtio-serial-pci,id=agents \
                 -device virtserialport,bus=agents.0,chardev=vdagent,name=com.redhat.spice.0",
                host.file("spice").display()
            );
            Ok(add_options(args, &line))
        }),
        Kind::new("watchdog", |_, args| {
            Ok(add_options(args, "-device i6300esb -device pvpanic -device virtio-rng-pci"))
        }),
        Kind::new("e1000e", |_, args| {
            Ok(add_options(args, "-netdev user,id=n -device e1000e,netdev=n"))
        }),
        Kind::new("9p", |host, args| {
            let dir = host.file("shared");
            std::fs::create_dir(&dir)?;
            let line = format!(
                "-fsdev local,id=fs,path={},security_model=none -device virtio-9p-pci,fsdev=fs,mount_tag=t",
                dir.display()
            );
            Ok(add_options(args, &line))
        }),
        Kind::new("vhost-vsock", |_, args| {
            need_file("/dev/vhost-vsock")?;
            Ok(add_options(args, "-device vhost-vsock-pci,guest-cid=4242"))
        }),
        Kind::new("vhost-net", |_, args| {
            need_file("/dev/vhost-net")?;
            need_file("/dev/kvm")?;
            Ok(add_options(
                args,
                "-netdev tap,id=n,script=no,downscript=no,vhost=on -device virtio-net-pci,netdev=n",
            ))
        }),
        Kind::new("tap", |_, args| {
            need_file("/dev/net/tun")?;
            Ok(add_options(
                args,
                "-netdev tap,id=n,script=no,downscript=no -device virtio-net-pci,netdev=n",
            ))
        }),
        Kind::new("ovmf", |host, args| {
            let code = "/usr/share/OVMF/OVMF_CODE.fd";
            need_file(code)?;
            let vars = host.file("vars.fd");
            std::fs::copy("/usr/share/OVMF/OVMF_VARS.fd", &vars)?;
            let line = format!(
                "-drive if=pflash,format=raw,unit=0,readonly=on,file={code} \
                 -drive if=pflash,format=raw,unit=1,file={}",
                vars.display()
            );
            Ok(add_options(args, &line))
        }),
        Kind::new("swtpm", |host, args| {
            let (state, socket) = (host.file("tpm"), host.file("tpm.sock"));
            std::fs::create_dir(&state)?;
            let mut command = Command::new("swtpm");
            command
                .args(["socket", "--tpm2", "--tpmstate"])
                .arg(format!("dir={}", state.display()));
            command.arg("--ctrl").arg(format!("type=unixio,path={}", socket.display()));
            host.start_server(command, &socket).context("swtpm")?;
            let line = format!(
                "-chardev socket,id=tpm,path={} -tpmdev emulator,id=tpm0,chardev=tpm \
                 -device tpm-crb,tpmdev=tpm0",
                socket.display()
            );
            Ok(add_options(args, &line))
        }),
        Kind::new("virtiofs", |host, args| {
            let (dir, socket) = (host.file("shared"), host.file("fs.sock"));
            std::fs::create_dir(&dir)?;
            let mut command = Command::new("/usr/libexec/virtiofsd");
            command.arg(format!("--socket-path={}", socket.display()));
            command.arg(format!("--shared-dir={}", dir.display()));
            host.start_server(command, &socket).context("virtiofsd")?;
            let line = format!(
                "-chardev socket,id=fs,path={} -device vhost-user-fs-pci,chardev=fs,tag=t",
                socket.display()
            );
            Ok(add_options(with_memory(args, SHARED), &line))
        }),
    ]
}

fn event_kinds() -> Vec<MatrixConfiguration> {
    type Kind = MatrixConfiguration;
    let balloon = |_: &mut MatrixHost, args| Ok(add_options(args, "-device virtio-balloon-pci"));
    let slot = |_: &mut MatrixHost, args| {
        Ok(add_options(args, "-device pcie-root-port,id=port9,chassis=9"))
    };
    vec![
        Kind::new("balloon-idle", balloon).made_by_default(),
        Kind::new("balloon-inflates", balloon).with_event(SaveEvent::BalloonGrows),
        Kind::new("balloon-inflated", balloon)
            .with_event(SaveEvent::BalloonHasGrown)
            .made_by_default(),
        Kind::new("shared-balloon-inflates", |_, args| {
            Ok(with_memory(add_options(args, "-device virtio-balloon-pci"), SHARED))
        })
        .with_event(SaveEvent::BalloonGrows),
        Kind::new("free-page-reporting", |_, args| {
            Ok(add_options(args, "-device virtio-balloon-pci,free-page-reporting=on"))
        })
        .made_by_default(),
        Kind::new("busy-monitor", |_, args| Ok(args))
            .with_event(SaveEvent::BusyMonitor)
            .made_by_default(),
        Kind::new("user-pauses", |_, args| Ok(args)).with_event(SaveEvent::Pause),
        Kind::new("user-savevm", |_, args| Ok(args)).with_event(SaveEvent::InternalSnapshot),
        Kind::new("user-backup", |_, args| Ok(args)).with_event(SaveEvent::DiskBackup),
        Kind::new("reboots", |_, args| Ok(args.with_reboots())).with_event(SaveEvent::Reboot),
        Kind::new("powers-off", |_, args| Ok(args)).with_event(SaveEvent::PowerOff),
        Kind::new("disk-added", slot).with_event(SaveEvent::DiskAdded),
        Kind::new("card-added", slot).with_event(SaveEvent::CardAdded),
        Kind::new("vcpu-added", |_, args| Ok(add_options(args, "-smp 2,maxcpus=3")))
            .with_event(SaveEvent::VcpuAdded),
    ]
}
