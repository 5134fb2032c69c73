//! Events: what happens to a VM before or during its saves, by its user or another manager.

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use firn_vmm::QemuVm;
use serde_json::{Value, json};

use super::configurations::MatrixHost;
use crate::guest::GuestControl;
use crate::lab::wait_for;

/// How long after the start of the command the event happens: after the cut, before the end.
const DELAY: Duration = Duration::from_millis(400);
/// How long a busy client asks.
const BUSY: Duration = Duration::from_secs(2);
const TIMEOUT: Duration = Duration::from_secs(60);
const MIB: u64 = 1 << 20;
/// What a balloon leaves to the guest.
const LITTLE: u64 = 144 * MIB;
const ALL: u64 = 192 * MIB;

/// What happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SaveEvent {
    Nothing,
    /// The balloon grows, and shrinks again.
    BalloonGrows,
    /// The balloon has grown before.
    BalloonHasGrown,
    /// A user pauses the VM, and continues it after the save.
    Pause,
    /// A user makes an internal snapshot.
    InternalSnapshot,
    /// Another manager copies the disk.
    DiskBackup,
    /// Another client asks without a break.
    BusyMonitor,
    /// The guest starts again.
    Reboot,
    /// The guest powers off.
    PowerOff,
    /// A disk was added while the VM ran.
    DiskAdded,
    /// A network card was added.
    CardAdded,
    /// A vCPU was added.
    VcpuAdded,
    /// The guest uses memory of a virtio-mem device that was plugged while the VM ran.
    MemoryPlugged,
}

impl SaveEvent {
    /// Whether the programs in the guest end.
    pub(super) fn ends_guest(self) -> bool {
        matches!(self, Self::Reboot | Self::PowerOff)
    }
}

fn second_monitor(host: &MatrixHost) -> Result<QemuVm> {
    QemuVm::connect(&host.socket("second")).context("connecting to the second monitor")
}

fn execute(host: &MatrixHost, commands: &[(&str, Value)]) -> Result<()> {
    let mut vm = second_monitor(host)?;
    for (command, arguments) in commands {
        vm.qmp().execute(command, arguments.clone())?;
    }
    Ok(())
}

/// What happens before Firn attaches.
pub(super) fn prepare_vm(event: SaveEvent, host: &MatrixHost) -> Result<()> {
    match event {
        SaveEvent::BalloonHasGrown => resize_balloon(host, LITTLE),
        SaveEvent::DiskAdded => {
            let file = host.create_disk("added", "qcow2")?;
            let node = json!({ "node-name": "added", "driver": "qcow2",
                "file": { "driver": "file", "filename": file } });
            let device = json!({ "driver": "virtio-blk-pci", "id": "added", "drive": "added",
                "bus": "port9" });
            execute(host, &[("blockdev-add", node), ("device_add", device)])
        }
        SaveEvent::CardAdded => {
            let card = json!({ "driver": "virtio-net-pci", "id": "added", "netdev": "added",
                "bus": "port9", "romfile": "" });
            let netdev = json!({ "type": "user", "id": "added" });
            execute(host, &[("netdev_add", netdev), ("device_add", card)])
        }
        SaveEvent::VcpuAdded => {
            let vcpu = describe_missing_vcpu(
                second_monitor(host)?.qmp().query("query-hotpluggable-cpus")?,
            )?;
            execute(host, &[("device_add", vcpu)])
        }
        SaveEvent::MemoryPlugged => {
            let size = json!({ "path": "vm0", "property": "requested-size", "value": 64 * MIB });
            execute(host, &[("qom-set", size)])
        }
        _ => Ok(()),
    }
}

/// The arguments of `device_add` for the first vCPU that is not there.
fn describe_missing_vcpu(vcpus: Value) -> Result<Value> {
    let is_missing = |vcpu: &&Value| vcpu["qom-path"].is_null();
    let all = vcpus.as_array().context("no list of vCPUs")?;
    let vcpu = all.iter().find(is_missing).context("all vCPUs are there")?;
    let mut arguments = vcpu["props"].clone();
    arguments["driver"] = vcpu["type"].clone();
    arguments["id"] = "added".into();
    Ok(arguments)
}

/// What happens during a save with that strategy.
pub(super) fn cause_event(event: SaveEvent, strategy: &str, host: &MatrixHost) -> Result<()> {
    match event {
        // QEMU ignores `stop` in the pause, which is the whole save here.
        SaveEvent::Pause if strategy == "stop" => Ok(()),
        SaveEvent::BalloonGrows => {
            thread::sleep(DELAY);
            resize_balloon(host, LITTLE)?;
            resize_balloon(host, ALL)
        }
        SaveEvent::Pause => {
            thread::sleep(DELAY);
            execute(host, &[("stop", json!({}))])?;
            thread::sleep(DELAY);
            let state = second_monitor(host)?.status()?;
            ensure!(!state.running, "Firn has continued a VM that its user paused");
            execute(host, &[("cont", json!({}))])
        }
        SaveEvent::InternalSnapshot => {
            thread::sleep(DELAY);
            // While Firn copies the disk, QEMU refuses: the user tries again.
            wait_for("the user's snapshot", TIMEOUT, || {
                let said = second_monitor(host)?.qmp().execute_hmp("savevm by-user")?;
                Ok(said.trim().is_empty().then_some(()))
            })?;
            second_monitor(host)?.qmp().execute_hmp("delvm by-user")?;
            Ok(())
        }
        SaveEvent::DiskBackup => {
            let target = host.file(&format!("backup-{}.qcow2", host.next_number()));
            let job = json!({ "job-id": "by-user", "device": "disk0", "sync": "full",
                "target": target, "format": "qcow2" });
            execute(host, &[("drive-backup", job)])?;
            wait_for("the user's job", TIMEOUT, || {
                let jobs: Value = second_monitor(host)?.qmp().query("query-block-jobs")?;
                let is_theirs = |job: &Value| job["device"] == "by-user";
                Ok((!jobs.as_array().is_some_and(|jobs| jobs.iter().any(is_theirs))).then_some(()))
            })
        }
        SaveEvent::BusyMonitor => {
            let (mut vm, since) = (second_monitor(host)?, Instant::now());
            while since.elapsed() < BUSY {
                vm.status()?;
            }
            Ok(())
        }
        SaveEvent::Reboot => run_in_guest(&host.socket("agent"), "reboot"),
        SaveEvent::PowerOff => run_in_guest(&host.socket("agent"), "poweroff"),
        _ => Ok(()),
    }
}

/// The guest may be gone already: each save of a configuration does this.
fn run_in_guest(agent: &Path, program: &str) -> Result<()> {
    thread::sleep(DELAY);
    if let Ok(mut control) = GuestControl::connect(agent, Duration::from_secs(5)) {
        let _ = control.spawn_job(program, &[program, "-f"]);
    }
    Ok(())
}

fn resize_balloon(host: &MatrixHost, bytes: u64) -> Result<()> {
    execute(host, &[("balloon", json!({ "value": bytes }))])?;
    wait_for("the balloon", TIMEOUT, || {
        let balloon = second_monitor(host)?.balloon()?;
        let actual = balloon.context("the VM has no balloon")?.actual_bytes;
        Ok((actual.abs_diff(bytes) < 4 * MIB).then_some(()))
    })
}
