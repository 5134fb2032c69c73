//! Devices by which a guest gives memory back, and their work during a save.
//!
//! ```text
//!   balloon               another client of the monitor changes the balloon's size all the time
//!   free-page-reporting   the guest reports by itself what it freed, every two seconds
//!   virtio-mem            another client changes the device's requested size all the time
//! ```
//!
//! In the guest a program allocates memory, fills and checks it, and frees it, over and over. So
//! memory that is given back had contents before, and may have had them at the cut.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use firn_vmm::QemuVm;
use serde_json::{Value, json};

use crate::guest::QemuArgs;

const MIB: u64 = 1 << 20;
/// How long a guest may take to change a size before the next one is requested.
const RESIZE_TIMEOUT: Duration = Duration::from_secs(3);
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// A size that is this close counts as reached.
const CLOSE_BYTES: u64 = 2 * MIB;
/// The size of a virtio-mem device.
const PLUGGABLE_MIB: u64 = 256;
/// The unit in which it is plugged.
const PLUGGED_UNIT: u64 = 2 * MIB;
/// Debian's kernels clear each page that they allocate, also for the balloon: then a fault handler
/// copies the page before it is given back, and nothing can be lost.
const KERNEL_WORD: &str = "init_on_alloc=0";

/// A device by which a guest gives memory back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MemoryDevice {
    Balloon,
    FreePageReporting,
    VirtioMem,
}

impl MemoryDevice {
    pub(super) const ALL: [Self; 3] = [Self::Balloon, Self::FreePageReporting, Self::VirtioMem];

    /// The word that selects it, and the beginning of its keys.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Balloon => "balloon",
            Self::FreePageReporting => "free-page-reporting",
            Self::VirtioMem => "virtio-mem",
        }
    }

    /// Adds the device to a guest's command line.
    pub(super) fn add_to(self, args: QemuArgs, private: bool, monitor: &Path) -> QemuArgs {
        let monitor = format!("unix:{},server=on,wait=off", monitor.display());
        let args = args.append_kernel_arg(KERNEL_WORD).add_args(&["-qmp", &monitor]);
        match self {
            Self::Balloon => args.add_args(&["-device", "virtio-balloon-pci"]),
            Self::FreePageReporting => {
                args.add_args(&["-device", "virtio-balloon-pci,free-page-reporting=on"])
            }
            Self::VirtioMem => {
                let kind = if private { "ram,share=off" } else { "memfd,share=on" };
                let backend =
                    format!("memory-backend-{kind},id=vmem,size={PLUGGABLE_MIB}M,reserve=off");
                let most = format!("{}K,maxmem=4G", args.memory_bytes() >> 10);
                let device = "virtio-mem-pci,id=vm0,memdev=vmem,requested-size=0";
                args.add_args(&["-m", &most, "-object", &backend, "-device", device])
            }
        }
    }
}

/// The sizes that another client of the monitor requests in turn.
#[derive(Clone, Debug)]
pub(super) struct DeviceWork {
    pub(super) device: MemoryDevice,
    pub(super) monitor: PathBuf,
    /// RAM, without the device.
    pub(super) ram_bytes: u64,
    /// How much is given back, and received again.
    pub(super) step_bytes: u64,
    /// The time between two requests.
    pub(super) interval: Duration,
}

impl DeviceWork {
    /// Changes the size until `is_done`. Returns the number of changes.
    pub(super) fn run_until(&self, is_done: &AtomicBool) -> Result<u64> {
        if self.device == MemoryDevice::FreePageReporting {
            return Ok(0);
        }
        let mut vm = QemuVm::connect(&self.monitor).context("connecting to the second monitor")?;
        let mut changes = 0;
        while !is_done.load(Ordering::Relaxed) {
            self.request_size(&mut vm, self.size_of(changes + 1), is_done)?;
            changes += 1;
            wait_unless(is_done, self.interval);
        }
        // A VM with little memory would not come to its end.
        self.request_size(&mut vm, self.size_of(0), &AtomicBool::new(false))?;
        Ok(changes)
    }

    /// The size after a number of changes: the whole and a part alternate.
    fn size_of(&self, changes: u64) -> u64 {
        let is_odd = changes % 2 == 1;
        match (self.device, is_odd) {
            (MemoryDevice::VirtioMem, true) => self.step_bytes.next_multiple_of(PLUGGED_UNIT),
            (MemoryDevice::VirtioMem, false) => 0,
            (_, true) => self.ram_bytes - self.step_bytes,
            (_, false) => self.ram_bytes,
        }
    }

    /// Requests a size, and waits for a while until the guest has it.
    fn request_size(&self, vm: &mut QemuVm, bytes: u64, is_done: &AtomicBool) -> Result<()> {
        match self.device {
            MemoryDevice::VirtioMem => {
                let size = json!({ "path": "vm0", "property": "requested-size", "value": bytes });
                vm.qmp().execute("qom-set", size)?
            }
            _ => vm.qmp().execute("balloon", json!({ "value": bytes }))?,
        };
        let since = Instant::now();
        while since.elapsed() < RESIZE_TIMEOUT && !is_done.load(Ordering::Relaxed) {
            if self.current_size(vm)?.abs_diff(bytes) < CLOSE_BYTES {
                break;
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        Ok(())
    }

    fn current_size(&self, vm: &mut QemuVm) -> Result<u64> {
        match self.device {
            MemoryDevice::VirtioMem => {
                let property = json!({ "path": "vm0", "property": "size" });
                let size: Value = vm.qmp().execute("qom-get", property)?;
                size.as_u64().context("the device has no size")
            }
            _ => Ok(vm.balloon()?.context("the VM has no balloon")?.actual_bytes),
        }
    }
}

fn wait_unless(is_done: &AtomicBool, time: Duration) {
    let since = Instant::now();
    while since.elapsed() < time && !is_done.load(Ordering::Relaxed) {
        std::thread::sleep(POLL_INTERVAL.min(time));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn work(device: MemoryDevice) -> DeviceWork {
        let (monitor, interval) = (PathBuf::new(), Duration::ZERO);
        DeviceWork { device, monitor, ram_bytes: 256 * MIB, step_bytes: 33 * MIB, interval }
    }

    #[test]
    fn each_request_changes_the_size() {
        let sizes = |device| [0, 1, 2, 3].map(|changes| work(device).size_of(changes) / MIB);
        assert_eq!(sizes(MemoryDevice::Balloon), [256, 223, 256, 223]);
        assert_eq!(sizes(MemoryDevice::VirtioMem), [0, 34, 0, 34]);
    }
}
