//! Many clones that write all the time, and check what they wrote. `FIRN_CLONES` is their number.

use std::time::Duration;

use firn_memory::process_memory;
use firn_types::HostVirt;

use crate::fork::{HostileQemu, PAGE, QUIET, holders, page_with, read_ram, write_ram};
use crate::session::{Session, eventually, kill, text};
use crate::vm::userfaultfds;
use crate::writer_guest::{WRITTEN_PAGES, WriterPort, key_of, run_writer};

const PATIENCE: Duration = Duration::from_secs(600);

/// Clones without `FIRN_CLONES`. The first is hostile, the second loses its supervisor, the third is killed.
const CLONES: u8 = 6;

fn clone_count() -> u8 {
    let count = std::env::var("FIRN_CLONES").ok().and_then(|count| count.parse().ok());
    count.unwrap_or(CLONES).max(5)
}

/// A saved VM whose guest writes. The rest of each of its pages has other contents everywhere.
fn save_writer(session: &Session) {
    run_writer(session);
    let pid = session.status("web")["pid"].as_i64().unwrap();
    for page in 0..QUIET.len() / PAGE {
        let at = QUIET.start + page * PAGE;
        write_ram(pid, at + 4, &page_with(at as u64)[4..]);
    }
    session.firn(&["checkpoint", "web", "-o", "web.firn"]).succeeds();
    session.firn(&["stop", "web"]).succeeds();
}

fn name(number: u8) -> String {
    format!("web-{number}")
}

fn port(session: &Session, number: u8) -> WriterPort {
    WriterPort::connect(&session.path(&format!("run/web-{number}/user-serial")))
}

fn pid(session: &Session, number: u8) -> i64 {
    session.status(&name(number))["pid"].as_i64().unwrap()
}

/// It has never found a wrong word, and continues to write.
#[track_caller]
fn writes_well(session: &Session, number: u8) {
    let mut port = port(session, number);
    let first = port.ask(number);
    eventually("a clone writes on", PATIENCE, || {
        let now = port.ask(number);
        assert!(!now.is_wrong, "clone {number} found a word that it did not write");
        now.round != first.round
    });
}

/// Each word has the key of this clone, and the rest of each page is that of the image.
#[track_caller]
fn has_its_memory(session: &Session, number: u8) {
    let ram = read_ram(pid(session, number), QUIET.start, QUIET.len());
    for (page, bytes) in ram.chunks(PAGE).enumerate() {
        let expected = page_with((QUIET.start + page * PAGE) as u64);
        assert!(bytes[4..] == expected[4..], "clone {number}, page {page}");
        if page < WRITTEN_PAGES {
            let word = u32::from_le_bytes(bytes[..4].try_into().unwrap());
            assert_eq!(key_of(page, word), Some(number), "clone {number}, page {page}: {word:#x}");
        }
    }
}

/// Maps the template once more, without a userfaultfd: over its own RAM, which it then overwrites, and
/// at another address, to which it moves more of its RAM.
fn attack(session: &Session, number: u8) {
    let hostile = HostileQemu::new(pid(session, number));
    let again = hostile.map_template(None, QUIET);
    hostile.read(again, QUIET.len());
    process_memory::write_memory(&hostile.process, HostVirt(again), &vec![0xaa; QUIET.len()])
        .unwrap();
    let first = QUIET.start..QUIET.start + (1 << 20);
    let replaced = hostile.map_template(Some(hostile.ram + first.start as u64), first.clone());
    process_memory::write_memory(&hostile.process, HostVirt(replaced), &vec![0x55; first.len()])
        .unwrap();
    hostile.move_ram(QUIET.end - (1 << 20)..QUIET.end, again);
}

#[test]
fn no_clone_sees_a_write_of_another() {
    let mut session = Session::new();
    save_writer(&session);
    let (filling, count) = (session.path("filling"), clone_count());
    session.arm(Some(&format!("template.fill@4=WAIT:{}", text(&filling))));
    let begun = std::time::Instant::now();
    let start = ["restore", "web.firn", "--mode", "lazy", "--count", &count.to_string()];
    session.json(&start);
    session.arm(None);
    eprintln!("{count} clones run after {:?}", begun.elapsed());
    (1..=count).for_each(|number| _ = port(&session, number).ask(number));
    attack(&session, 1);
    let supervisor = session.status("web-2")["supervisor_pid"].as_i64().unwrap();
    kill(supervisor);
    kill(pid(&session, 3));
    let [holder] = holders(&session)[..] else { panic!("there is one holder") };
    kill(holder);
    eventually("a successor", PATIENCE, || session.status("web-2")["recoveries"] == 1);
    let others = || (2..=count).filter(|&number| number != 3);
    for number in others() {
        session.firn(&["status", &name(number), "--watch"]).succeeds();
        assert_eq!(userfaultfds(pid(&session, number)), 0, "clone {number}");
    }
    // Two rounds with its key, so that each word has it.
    for _ in 0..2 {
        others().for_each(|number| writes_well(&session, number));
    }
    others().for_each(|number| has_its_memory(&session, number));
    // Later kills, of what has no part in the memory any more.
    kill(session.status("web-4")["supervisor_pid"].as_i64().unwrap());
    kill(pid(&session, 1));
    for number in others() {
        writes_well(&session, number);
        has_its_memory(&session, number);
    }
    eprintln!("{count} clones checked after {:?}", begun.elapsed());
    let _ = std::fs::remove_file(&filling);
}
