//! VMs whose private RAM the kernel keeps in transparent huge pages, as on most hosts: a save splits them, and
//! afterwards they are put together again.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use crate::huge_pages::HugeVm;
use crate::session::{eventually, kill};

const PATIENCE: Duration = Duration::from_secs(120);
const MIB: u64 = 1 << 20;
/// QEMU asks the kernel for huge pages by itself.
const PRIVATE: &str = "memory-backend-ram,id=ram,size=192M";
const RAM_BYTES: u64 = 192 * MIB;

/// A guest at work, and the bytes of its RAM in huge pages. None where the kernel has none.
fn boot() -> Option<(HugeVm, u64)> {
    let setting = "/sys/kernel/mm/transparent_hugepage/enabled";
    let enabled = std::fs::read_to_string(setting).unwrap_or_default();
    if enabled.is_empty() || enabled.contains("[never]") {
        firn_skip::skip_test(format!("no transparent huge pages: {setting} is {enabled:?}"));
        return None;
    }
    let guest = HugeVm::boot(PRIVATE);
    // Until the guest has touched what its writers use.
    let mut last = 0;
    eventually("memory that does not grow", PATIENCE, || {
        std::thread::sleep(Duration::from_millis(500));
        let now = ram_bytes(&guest, "Rss:");
        std::mem::replace(&mut last, now) == now
    });
    let huge = huge_bytes(&guest);
    assert!(huge > 48 * MIB, "{huge} bytes");
    Some((guest, huge))
}

fn huge_bytes(guest: &HugeVm) -> u64 {
    ram_bytes(guest, "AnonHugePages:")
}

/// The sum of a field over the mappings of the guest's RAM, which are one where nothing is registered.
fn ram_bytes(guest: &HugeVm, field: &str) -> u64 {
    let smaps = std::fs::read_to_string(format!("/proc/{}/smaps", guest.qemu.id())).unwrap();
    let (mut ram, mut is_ram, mut sum) = (0..0, false, 0);
    for line in smaps.lines() {
        let (first, rest) = line.split_once(' ').unwrap_or((line, ""));
        if let Some((start, end)) = first.split_once('-') {
            let [start, end] = [start, end].map(|it| u64::from_str_radix(it, 16).unwrap());
            if end - start == RAM_BYTES {
                ram = start..end;
            }
            is_ram = ram.contains(&start);
        } else if is_ram && first == field {
            sum += rest.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024;
        }
    }
    assert_eq!(ram.end - ram.start, RAM_BYTES);
    sum
}

/// Saves, and returns the least that was in huge pages meanwhile.
fn save_sampled(guest: &HugeVm, image: &str, options: &[&str]) -> u64 {
    let (is_over, least) = (AtomicBool::new(false), AtomicU64::new(u64::MAX));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                least.fetch_min(huge_bytes(guest), Ordering::Relaxed);
                std::thread::sleep(Duration::from_millis(5));
            }
        });
        guest.save_exact(image, options);
        is_over.store(true, Ordering::Relaxed);
    });
    least.into_inner()
}

fn is_nearly(now: u64, before: u64) -> bool {
    now + 4 * MIB >= before
}

#[test]
fn a_save_gives_huge_pages_back() {
    let Some((guest, before)) = boot() else { return };
    let resident = ram_bytes(&guest, "Rss:");
    for round in 0..2 {
        let least = save_sampled(&guest, &format!("cow{round}.firn"), &["--strategy", "cow"]);
        eprintln!("{} MiB before, {} MiB at least", before / MIB, least / MIB);
        assert!(least < before - 8 * MIB, "the save has split none: {least} of {before}");
        eventually("huge pages again", PATIENCE, || is_nearly(huge_bytes(&guest), before));
        // What the guest has not touched stays out of memory.
        let now = ram_bytes(&guest, "Rss:");
        assert!(now < resident + 8 * MIB, "{now} bytes, {resident} before");
        guest.vm.is_well();
    }
    // Writes are tracked after this one, by the page, until another strategy ends that.
    save_sampled(&guest, "pre-copy.firn", &["--strategy", "pre-copy"]);
    std::thread::sleep(Duration::from_secs(3));
    assert!(huge_bytes(&guest) < before - 8 * MIB, "tracked pages are left alone");
    guest.save_exact("stop.firn", &["--strategy", "stop"]);
    eventually("huge pages again", PATIENCE, || is_nearly(huge_bytes(&guest), before));
    guest.vm.is_well();
}

/// The kernel puts pages together or not: no moment of a death leaves half of it.
#[test]
fn a_supervisor_may_die_meanwhile() {
    let Some((guest, before)) = boot() else { return };
    let session = &guest.vm.session;
    for delay_ms in [0, 30, 100] {
        guest.save_exact(&format!("{delay_ms}.firn"), &["--strategy", "cow"]);
        std::thread::sleep(Duration::from_millis(delay_ms));
        kill(session.status("web")["supervisor_pid"].as_i64().unwrap());
        eventually("a successor", PATIENCE, || session.status("web")["state"] == "running");
        guest.vm.is_well();
    }
    eprintln!("{} MiB of {} MiB", huge_bytes(&guest) / MIB, before / MIB);
}
