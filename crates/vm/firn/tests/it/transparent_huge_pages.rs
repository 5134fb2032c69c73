//! VMs whose private RAM the kernel keeps in transparent huge pages, as on most hosts: a save splits them, and
//! afterwards they are put together again.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use crate::huge_pages::HugeVm;
use crate::session::{eventually, kill};

const PATIENCE: Duration = Duration::from_secs(120);
const MIB: u64 = 1 << 20;
/// QEMU asks the kernel for huge pages by itself.
const PRIVATE: &str = "memory-backend-ram,id=ram,size=192M";
const RAM_BYTES: u64 = 192 * MIB;

/// A guest at work, the addresses of its RAM in QEMU, and the bytes of it in huge pages.
struct ThpVm {
    guest: HugeVm,
    ram: Range<u64>,
    huge: u64,
}

impl ThpVm {
    /// None where the kernel has no huge pages.
    fn boot() -> Option<Self> {
        let setting = "/sys/kernel/mm/transparent_hugepage/enabled";
        let enabled = std::fs::read_to_string(setting).unwrap_or_default();
        if enabled.is_empty() || enabled.contains("[never]") {
            firn_skip::skip_test(format!("no transparent huge pages: {setting} is {enabled:?}"));
            return None;
        }
        let guest = HugeVm::boot(PRIVATE);
        let ram = mappings(&guest).find(|(range, _)| range.end - range.start == RAM_BYTES);
        let mut vm = Self { guest, ram: ram.unwrap().0, huge: 0 };
        // Until the guest has touched what its writers use.
        let mut last = 0;
        eventually("memory that does not grow", PATIENCE, || {
            std::thread::sleep(Duration::from_millis(500));
            let now = vm.ram_bytes("Rss:");
            std::mem::replace(&mut last, now) == now
        });
        vm.huge = vm.huge_bytes();
        assert!(vm.huge > 48 * MIB, "{} bytes", vm.huge);
        Some(vm)
    }

    fn huge_bytes(&self) -> u64 {
        self.ram_bytes("AnonHugePages:")
    }

    /// The sum of a field over the mappings of RAM: they are several for moments of a save.
    fn ram_bytes(&self, field: &str) -> u64 {
        let in_ram = mappings(&self.guest).filter(|(range, _)| self.ram.contains(&range.start));
        let values = in_ram.flat_map(|(_, fields)| fields).filter(|(name, _)| name == field);
        values.map(|(_, bytes)| bytes).sum()
    }
}

/// The addresses of a mapping, and its fields.
type Mapping = (Range<u64>, Vec<(String, u64)>);

/// QEMU's mappings, with the fields of each in bytes (proc_pid_smaps(5)).
fn mappings(guest: &HugeVm) -> impl Iterator<Item = Mapping> + use<> {
    let smaps = std::fs::read_to_string(format!("/proc/{}/smaps", guest.qemu.id())).unwrap();
    let mut all: Vec<Mapping> = Vec::new();
    for line in smaps.lines() {
        let mut words = line.split_whitespace();
        let (first, second) = (words.next().unwrap(), words.next().unwrap_or_default());
        if let Some((start, end)) = first.split_once('-') {
            let [start, end] = [start, end].map(|it| u64::from_str_radix(it, 16).unwrap());
            all.push((start..end, Vec::new()));
        } else if let (Ok(kib), Some((_, fields))) = (second.parse::<u64>(), all.last_mut()) {
            fields.push((first.to_owned(), kib * 1024));
        }
    }
    all.into_iter()
}

/// Saves, and returns the least that was in huge pages meanwhile.
fn save_sampled(vm: &ThpVm, image: &str, options: &[&str]) -> u64 {
    let (is_over, least) = (AtomicBool::new(false), AtomicU64::new(u64::MAX));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                least.fetch_min(vm.huge_bytes(), Ordering::Relaxed);
                std::thread::sleep(Duration::from_millis(5));
            }
        });
        vm.guest.save_exact(image, options);
        is_over.store(true, Ordering::Relaxed);
    });
    least.into_inner()
}

fn is_nearly(now: u64, before: u64) -> bool {
    now + 4 * MIB >= before
}

#[test]
fn a_save_gives_huge_pages_back() {
    let Some(vm) = ThpVm::boot() else { return };
    let resident = vm.ram_bytes("Rss:");
    for round in 0..2 {
        let least = save_sampled(&vm, &format!("cow{round}.firn"), &["--strategy", "cow"]);
        eprintln!("{} MiB before, {} MiB at least", vm.huge / MIB, least / MIB);
        assert!(least < vm.huge - 8 * MIB, "the save has split none: {least} of {}", vm.huge);
        eventually("huge pages again", PATIENCE, || is_nearly(vm.huge_bytes(), vm.huge));
        // What the guest has not touched stays out of memory.
        let now = vm.ram_bytes("Rss:");
        assert!(now < resident + 8 * MIB, "{now} bytes, {resident} before");
        vm.guest.vm.is_well();
    }
    // Writes are tracked after this one, by the page, until another strategy ends that.
    save_sampled(&vm, "pre-copy.firn", &["--strategy", "pre-copy"]);
    std::thread::sleep(Duration::from_secs(3));
    assert!(vm.huge_bytes() < vm.huge - 8 * MIB, "tracked pages are left alone");
    vm.guest.save_exact("stop.firn", &["--strategy", "stop"]);
    eventually("huge pages again", PATIENCE, || is_nearly(vm.huge_bytes(), vm.huge));
    vm.guest.vm.is_well();
}

/// The kernel puts pages together or not: no moment of a death leaves half of it.
#[test]
fn a_supervisor_may_die_meanwhile() {
    let Some(vm) = ThpVm::boot() else { return };
    let session = &vm.guest.vm.session;
    for delay_ms in [0, 30, 100] {
        vm.guest.save_exact(&format!("{delay_ms}.firn"), &["--strategy", "cow"]);
        std::thread::sleep(Duration::from_millis(delay_ms));
        kill(session.status("web")["supervisor_pid"].as_i64().unwrap());
        eventually("a successor", PATIENCE, || session.status("web")["state"] == "running");
        vm.guest.vm.is_well();
    }
    eprintln!("{} MiB of {} MiB", vm.huge_bytes() / MIB, vm.huge / MIB);
}
