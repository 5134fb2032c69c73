//! A restore whose process is killed is adopted by another, and the guest never sees wrong memory.

use std::io::{BufRead, BufReader};
use std::ops::Range;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use firn_image::{Codec, Image};
use firn_memory::{PageFaults, Process, TraceMode, Tracee};
use firn_restore::{BackgroundFill, PresenceFile, RestoreOptions, RunningRestore};
use firn_types::{Block, ThreadId};

use crate::driver;
use crate::scene::{CHILD, Scene};

/// The values that another process needs to restore a scene's guest: `PID TIDS HVAS DIRECTORY
/// FILL`, lists with commas.
const VARIABLE: &str = "FIRN_RESTORE_TEST_RESTORER";

/// Restores as another process, if the environment requests it. Does not return then.
pub fn run_if_asked() {
    let Ok(what) = std::env::var(VARIABLE) else { return };
    let words: Vec<&str> = what.split(' ').collect();
    let numbers =
        |list: &str| -> Vec<u64> { list.split(',').map(|it| it.parse().unwrap()).collect() };
    let tids: Vec<ThreadId> =
        numbers(words[1]).into_iter().map(|tid| ThreadId(tid as i32)).collect();
    let dir = std::path::Path::new(words[3]);
    let image = Arc::new(Image::open(&dir.join("image.firn")).unwrap());
    let process = Arc::new(Process::open(words[0].parse().unwrap()).unwrap());
    let memory = Arc::new(driver::open(&process, image.regions(), &numbers(words[2])));
    let mut tracee = Tracee::seize(&process, &tids).unwrap();
    let faults = PageFaults::create(&mut tracee, memory.clone(), TraceMode::Restore).unwrap();
    drop(tracee);
    let pages = image.regions().total_pages();
    let presence = PresenceFile::create(&dir.join("presence"), pages).unwrap();
    let fill = if words[4] == "off" { BackgroundFill::Off } else { BackgroundFill::AtOnce };
    let options = RestoreOptions { fill, ..RestoreOptions::default() };
    let on_fatal = Box::new(|error: &firn_restore::RestoreError| panic!("{error}"));
    let restore =
        RunningRestore::begin(image, memory, faults, options, presence, on_fatal).unwrap();
    restore.await_prefill().unwrap();
    println!("\nbegun");
    restore.wait().unwrap();
    drop(restore);
    std::process::exit(0);
}

/// Runs a restore in a process of its own that dies at a fault point, while the guest touches
/// memory.
fn die_at(scene: &mut Scene, point: &str, fill: &str) {
    let list = |numbers: Vec<String>| numbers.join(",");
    let tids = list(scene.guest.tids.iter().map(|tid| tid.0.to_string()).collect());
    let hvas = list(scene.guest.hvas.iter().map(u64::to_string).collect());
    let pid = scene.guest.process.pid();
    let mut restorer = Command::new(std::env::current_exe().unwrap())
        .args(CHILD)
        .env(VARIABLE, format!("{pid} {tids} {hvas} {} {fill}", scene.dir.path().display()))
        .env("FIRN_FAULT", point)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(restorer.stdout.take().unwrap()).lines();
    // Until it has begun, or died before that.
    let begun = lines.map_while(Result::ok).find(|line| line == "begun");
    scene.guest.send(1, "random 5 300 4096");
    let status = restorer.wait().unwrap();
    assert_eq!(status.signal(), Some(9), "{point}: begun {begun:?}, then {status}");
}

fn killed_at(point: &str, fill: &str) {
    let mut scene = Scene::new(&[4096], 2, Codec::Lz4);
    die_at(&mut scene, point, fill);
    let start = Instant::now();
    let restore = scene.resume(RestoreOptions::default());
    let found: u64 = scene.guest.result(1).parse().unwrap();
    assert!(start.elapsed() < Duration::from_secs(1), "{point}: {:?}", start.elapsed());
    assert_eq!(found, scene.model.random(5, 300, 4096), "{point}");
    scene.finish(restore);
    assert_eq!(scene.close_stale(), 0, "{point}");
}

#[test]
fn killed_while_it_answers() {
    killed_at("restore.fault", "off");
    killed_at("restore.fault@2", "off");
}

#[test]
fn killed_while_it_installs() {
    killed_at("restore.install", "off");
    killed_at("restore.install@500", "off");
}

#[test]
fn killed_while_it_fills() {
    killed_at("restore.fill", "quiet");
    killed_at("restore.fill@5", "quiet");
}

#[test]
fn killed_at_the_end() {
    killed_at("restore.filled", "quiet");
    killed_at("restore.unregistered", "quiet");
}

/// A page that is in none of the locality blocks of these.
fn page_far_from(scene: &Scene, pages: Range<u32>) -> u32 {
    let locality_block = |page: u32| Some(scene.image.entry_of(Block(page / 2))?.0);
    let near: Vec<_> = pages.filter_map(locality_block).collect();
    let is_far = |page: &u32| locality_block(*page).is_some_and(|id| !near.contains(&id));
    (1100..2048).find(is_far).unwrap()
}

#[test]
fn one_that_was_stopped_is_taken_up() {
    let mut scene = Scene::new(&[2048], 2, Codec::Lz4);
    let options = || RestoreOptions { fill: BackgroundFill::Off, ..RestoreOptions::default() };
    let restore = scene.begin(options());
    scene.check(0, 0..10);
    scene.guest.ask(1, "give-back 4 6");
    scene.guest.ask(1, "give-back 1000 1100");
    scene.model.clear(4..6);
    scene.model.clear(1000..1100);
    scene.guest.ask(0, "write 8 123456");
    scene.model.bytes[8 * 4096..8 * 4096 + 8].copy_from_slice(&123_456u64.to_le_bytes());
    drop(restore);
    let far = page_far_from(&scene, 0..10);
    let (start, end) = (far, far + 1);
    scene.guest.send(0, &format!("sum {start} {end}"));
    assert_eq!(scene.guest.result_within(0, Duration::from_millis(100)), None, "nobody answers");
    let restore = scene.resume(options());
    let found: u64 = scene.guest.result(0).parse().unwrap();
    assert_eq!(found, scene.model.sum(start..end));
    scene.check(1, 990..1110);
    restore.set_fill(BackgroundFill::AtOnce);
    scene.finish(restore);
}
