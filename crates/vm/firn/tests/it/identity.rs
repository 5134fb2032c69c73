//! The VM generation ID: a guest finds out from its own memory that it was restored.

use firn_memory::{Process, process_memory};
use firn_types::HostVirt;

use crate::session::Session;
use crate::tiny_guest::TinyGuest;

const RAM_BYTES: usize = 32 << 20;

/// The bytes of the GUID that QEMU was started with, as it writes them to guest memory: the first
/// three numbers have their lowest byte first.
fn find_guid(session: &Session, vm: &str) -> Option<Vec<u8>> {
    let line = std::fs::read(format!("/proc/{}/cmdline", pid(session, vm))).unwrap();
    let line = String::from_utf8_lossy(&line).into_owned();
    let (_, guid) = line.split_once("vmgenid,guid=")?;
    let digits: String = guid.chars().take(36).filter(|digit| *digit != '-').collect();
    let byte = |at: usize| u8::from_str_radix(&digits[2 * at..2 * at + 2], 16).unwrap();
    Some([3, 2, 1, 0, 5, 4, 7, 6, 8, 9, 10, 11, 12, 13, 14, 15].map(byte).to_vec())
}

fn pid(session: &Session, vm: &str) -> i64 {
    session.status(vm)["pid"].as_i64().unwrap()
}

/// All of guest RAM. Reading it through QEMU's mapping loads what is missing.
fn read_ram(session: &Session, vm: &str) -> Vec<u8> {
    let pid = pid(session, vm);
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let regions = maps.lines().filter_map(|line| {
        let (start, end) = line.split_whitespace().next()?.split_once('-')?;
        Some((usize::from_str_radix(start, 16).ok()?, usize::from_str_radix(end, 16).ok()?))
    });
    let is_ram = |&(start, end): &(usize, usize)| end - start == RAM_BYTES;
    let (start, _) = regions.into_iter().find(is_ram).unwrap();
    let mut bytes = vec![0; RAM_BYTES];
    let process = Process::open(pid as i32).unwrap();
    process_memory::read_memory(&process, HostVirt(start as u64), &mut bytes).unwrap();
    bytes
}

fn contains(ram: &[u8], guid: &[u8]) -> bool {
    ram.windows(guid.len()).any(|bytes| bytes == guid)
}

#[test]
fn a_restored_guest_has_another_generation_id_in_its_memory() {
    let session = Session::new();
    let mut guest = TinyGuest::run(&session, &[]);
    guest.answers();
    let first = find_guid(&session, "web").unwrap();
    assert!(contains(&read_ram(&session, "web"), &first));
    session.firn(&["checkpoint", "web", "-o", "web.firn"]).succeeds();
    session.firn(&["stop", "web"]).succeeds();

    session.firn(&["restore", "web.firn", "--name", "copy", "--mode", "lazy"]).succeeds();
    let copied = find_guid(&session, "copy").unwrap();
    assert_ne!(copied, first);
    let ram = read_ram(&session, "copy");
    assert!(contains(&ram, &copied) && !contains(&ram, &first));

    let same = ["restore", "web.firn", "--name", "same", "--mode", "lazy", "--same-identity"];
    session.firn(&same).succeeds();
    assert_eq!(find_guid(&session, "same"), Some(first.clone()));
    assert!(contains(&read_ram(&session, "same"), &first));
}

#[test]
fn clones_have_different_generation_ids() {
    let session = Session::new();
    TinyGuest::run(&session, &[]).answers();
    let first = find_guid(&session, "web").unwrap();
    session.firn(&["checkpoint", "web", "-o", "web.firn"]).succeeds();
    session.firn(&["stop", "web"]).succeeds();
    session.firn(&["restore", "web.firn", "--count", "2", "--wait"]).succeeds();
    let guids = ["web-1", "web-2"].map(|vm| find_guid(&session, vm).unwrap());
    assert!(guids[0] != guids[1] && !guids.contains(&first));
    for (vm, guid) in ["web-1", "web-2"].into_iter().zip(&guids) {
        let ram = read_ram(&session, vm);
        assert!(contains(&ram, guid) && !contains(&ram, &first), "{vm}");
    }
}

#[test]
fn a_user_may_choose_the_generation_id_or_have_none() {
    let session = Session::new();
    let guid = "324e6eaf-d1d1-4bf6-bf41-b9bb6c91fb87";
    TinyGuest::run(&session, &["-device", &format!("vmgenid,id=g,guid={guid}")]).answers();
    assert_eq!(find_guid(&session, "web"), None, "Firn adds no second device");
    session.firn(&["checkpoint", "web", "-o", "web.firn"]).succeeds();
    session.firn(&["stop", "web"]).succeeds();
    let set = format!("device.g.guid={guid}");
    session.firn(&["restore", "web.firn", "--set", &set]).succeeds();
    let line = std::fs::read(format!("/proc/{}/cmdline", pid(&session, "web"))).unwrap();
    assert!(String::from_utf8_lossy(&line).contains(&format!("vmgenid,id=g,guid={guid}")));
    session.firn(&["stop", "web"]).succeeds();

    let plain = ["qemu-system-x86_64", "-M", "pc", "-m", "32", "-nodefaults", "-display", "none"];
    session.firn(&[&["run", "bare", "--no-vmgenid", "--"], &plain[..]].concat()).succeeds();
    assert_eq!(find_guid(&session, "bare"), None);
}
