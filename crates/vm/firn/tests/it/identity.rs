//! The VM generation ID: a guest finds out from its own memory that it was restored, and draws other random numbers than
//! its copies.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, SystemTime};

use firn_lab::guest::GuestImage;
use firn_memory::{Process, process_memory};
use firn_types::HostVirt;

use crate::session::{Session, eventually, text};
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
    // One of them does not exist: the others are ended all the same.
    let stop = ["stop", "web-1", "nobody", "web-2", "web-1", "--discard"];
    let stopped = session.firn(&stop).fails(3, "there is no VM called nobody");
    assert_eq!(stopped.out.matches("has ended").count(), 2, "{}", stopped.out);
    assert_eq!(session.json(&["ls"]), serde_json::json!([]));
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

const PATIENCE: Duration = Duration::from_secs(120);
/// A guest whose kernel has a driver for the generation ID, and which has an agent.
const LINE: &str = "qemu-system-x86_64 -M q35 -m 128 -nodefaults -display none -serial chardev:port \
    -device virtio-serial -device virtserialport,chardev=agent,name=org.qemu.guest_agent.0";
/// How far a clock that was set may be off.
const CLOCK_MS: i128 = 100;
const KERNEL_WORDS: &str = "console=ttyS0 quiet no_timer_check mitigations=off";

/// The serial port of a guest that prints a random number and its time for each line that it receives.
pub struct RandomGuest(BufReader<UnixStream>);

impl RandomGuest {
    fn run(session: &Session) {
        Self::run_with(session, &[]);
    }

    /// With more words on its command line.
    pub fn run_with(session: &Session, more: &[&str]) {
        let image = GuestImage::find_guest("identity").unwrap();
        let port =
            format!("socket,id=port,path={},server=on,wait=off", text(&session.path("port")));
        let agent = port.replace("port", "agent");
        let mut words: Vec<&str> = LINE.split_whitespace().collect();
        words.extend(["-chardev", &port, "-chardev", &agent, "-append", KERNEL_WORDS]);
        words.extend(["-kernel", text(&image.kernel), "-initrd", text(&image.initrd)]);
        session.firn(&[&["run", "web", "--"], &words[..], more].concat()).succeeds();
        assert_eq!(Self::connect(session).read_word("ready"), "");
    }

    pub fn connect(session: &Session) -> Self {
        Self::connect_to(&session.path("port"))
    }

    pub fn connect_to(path: &Path) -> Self {
        let mut stream = None;
        eventually("the serial port", PATIENCE, || {
            stream = UnixStream::connect(path).ok();
            stream.is_some()
        });
        let stream = stream.unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        Self(BufReader::new(stream))
    }

    pub fn read_word(&mut self, word: &str) -> String {
        loop {
            let mut line = String::new();
            assert_ne!(self.0.read_line(&mut line).unwrap(), 0, "the guest has ended");
            if let Some((_, rest)) = line.split_once(word) {
                return rest.trim().to_owned();
            }
        }
    }

    /// Sends a line, and returns what follows this word in the answer.
    pub fn order(&mut self, line: &str, word: &str) -> String {
        writeln!(self.0.get_mut(), "{line}").unwrap();
        self.read_word(word)
    }

    /// Sends a line.
    pub fn send(&mut self, line: &str) {
        writeln!(self.0.get_mut(), "{line}").unwrap();
    }

    fn draw(&mut self) -> String {
        self.ask().0
    }

    /// A random number, and the time in nanoseconds since 1970.
    fn ask(&mut self) -> (String, i128) {
        self.0.get_mut().write_all(b"\n").unwrap();
        let answer = self.read_word("random");
        let (number, time) = answer.split_once(" time ").unwrap();
        (number.to_owned(), time.parse().unwrap())
    }

    /// How far its clock is off at least, in milliseconds.
    fn clock_error_ms(&mut self) -> i128 {
        let (before, (_, time), after) = (now(), self.ask(), now());
        (before - time).max(time - after).max(0) / 1_000_000
    }
}

fn now() -> i128 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
    now.as_nanos() as i128
}

/// The first random number that a copy of a saved guest draws.
fn draw_first(session: &Session, image: &str, options: &[&str]) -> String {
    let restore = ["restore", image, "--name", "web", "--mode", "lazy"];
    session.firn(&[&restore[..], options].concat()).succeeds();
    let drawn = RandomGuest::connect(session).draw();
    session.firn(&["stop", "web"]).succeeds();
    drawn
}

/// The control: copies that don't know that they are copies draw the same number. Only a guest that mixes its random numbers
/// anew just then does not, which it does every few seconds: so there are three images.
#[test]
fn copies_draw_different_random_numbers() {
    let images = ["a.firn", "b.firn", "c.firn"];
    let session = Session::new();
    RandomGuest::run(&session);
    let mut guest = RandomGuest::connect(&session);
    for image in images {
        assert_ne!(guest.draw(), guest.draw());
        session.firn(&["checkpoint", "web", "-o", image]).succeeds();
    }
    drop(guest);
    session.firn(&["stop", "web"]).succeeds();
    let (image, same) = images
        .into_iter()
        .find_map(|image| {
            let [one, other] = [(); 2].map(|()| draw_first(&session, image, &["--same-identity"]));
            (one == other).then_some((image, one))
        })
        .unwrap();
    let mut all = std::collections::BTreeSet::from([same]);
    for _ in 0..3 {
        let drawn = draw_first(&session, image, &[]);
        assert!(all.insert(drawn), "{image}: one of {all:?} twice");
    }
}

/// By the guest's agent. The control: a copy that is to be the same VM has the time of the checkpoint.
#[test]
fn a_copy_has_the_right_time() {
    const AGE: Duration = Duration::from_secs(3);
    let session = Session::new();
    RandomGuest::run(&session);
    session.firn(&["checkpoint", "web", "-o", "web.firn"]).succeeds();
    session.firn(&["stop", "web"]).succeeds();
    std::thread::sleep(AGE);
    let restore = ["restore", "web.firn", "--mode", "lazy"];
    session.firn(&[&restore[..], &["--same-identity"]].concat()).succeeds();
    let mut old = RandomGuest::connect(&session);
    assert!(old.clock_error_ms() > AGE.as_millis() as i128, "{}", old.clock_error_ms());
    drop(old);
    session.firn(&["stop", "web"]).succeeds();
    session.firn(&restore).succeeds();
    let mut copy = RandomGuest::connect(&session);
    eventually("the clock is set", PATIENCE, || copy.clock_error_ms() <= CLOCK_MS);
    let log = session.firn(&["logs", "web"]).succeeds().out;
    assert!(log.contains("the guest agent has set the guest's clock"), "{log}");
}

/// Its clock stays what it was, and the restore is none the worse.
#[test]
fn a_guest_whose_agent_does_not_answer_runs_all_the_same() {
    let session = Session::new();
    let port = format!("socket,id=agent,path={},server=on,wait=off", text(&session.path("agent")));
    let device = "virtserialport,chardev=agent,name=org.qemu.guest_agent.0";
    let words = ["-chardev", &port, "-device", "virtio-serial", "-device", device];
    TinyGuest::run(&session, &words).answers();
    session.firn(&["checkpoint", "web", "-o", "web.firn"]).succeeds();
    session.firn(&["stop", "web"]).succeeds();
    session.firn(&["restore", "web.firn", "--wait"]).succeeds();
    assert_eq!(session.status("web")["state"], "running");
    session.firn(&["checkpoint", "web", "-o", "again.firn"]).succeeds();
}
