//! The process under test: this very executable, run again with [`VARIABLE`] set.
//!
//! It plays a hypervisor: shared memory in memfds, and threads that touch it. It does not use Firn.
//! Each line on its standard input is a thread's number, a command and its arguments; each line on
//! its standard output is that thread's number and the result.

use std::fs::File;
use std::io::{BufRead, Write};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use memmap2::MmapRaw;
use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, ftruncate, memfd_create};

use crate::content::{Dice, mix};

/// The sizes of the memfds in pages, separated by commas.
pub const VARIABLE: &str = "FIRN_RESTORE_TEST_GUEST";

/// How many threads take commands.
pub const THREADS: usize = 4;

const PAGE: usize = 4096;

/// The guest's memory, addressed by page over all memfds, each of which starts at a multiple of 16
/// pages.
struct Ram {
    files: Vec<(File, MmapRaw)>,
}

impl Ram {
    fn new(sizes: &str) -> Self {
        let files = sizes.split(',').map(|pages| {
            let file = File::from(memfd_create("ram", MemfdFlags::CLOEXEC).unwrap());
            ftruncate(&file, pages.parse::<u64>().unwrap() * PAGE as u64).unwrap();
            let map = MmapRaw::map_raw(&file).unwrap();
            (file, map)
        });
        Self { files: files.collect() }
    }

    fn locate(&self, mut page: usize) -> (&File, &MmapRaw, usize) {
        for (file, map) in &self.files {
            if page < map.len() / PAGE {
                return (file, map, page);
            }
            page -= (map.len() / PAGE).next_multiple_of(16);
        }
        panic!("no such page");
    }

    fn word(&self, page: usize, word: usize) -> *mut u64 {
        assert!(word < PAGE / 8);
        let (_, map, page) = self.locate(page);
        map.as_mut_ptr().wrapping_add(page * PAGE + word * 8).cast()
    }

    fn read(&self, page: usize, word: usize) -> u64 {
        // SAFETY: `word` gives an aligned address inside a live mapping; the access is volatile as
        // others write it.
        unsafe { self.word(page, word).read_volatile() }
    }

    fn write(&self, page: usize, word: usize, value: u64) {
        // SAFETY: as in `read`; the mapping is writable.
        unsafe { self.word(page, word).write_volatile(value) }
    }

    /// Does as QEMU does with pages that a balloon takes: removes them from both the file and the
    /// mapping.
    fn give_back(&self, page: usize, pages: usize) {
        let (file, map, page) = self.locate(page);
        let (offset, len) = (page * PAGE, pages * PAGE);
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fallocate(file, flags, offset as u64, len as u64).unwrap();
        let start = map.as_mut_ptr().wrapping_add(offset).cast();
        // SAFETY: the range lies in a shared mapping of a memfd to which no reference exists.
        unsafe { rustix::mm::madvise(start, len, rustix::mm::Advice::LinuxRemove) }.unwrap();
    }
}

/// Runs as the guest, if the environment requests it. Does not return then.
pub fn run_if_asked() {
    if let Ok(sizes) = std::env::var(VARIABLE) {
        run(&sizes);
        std::process::exit(0);
    }
}

fn run(sizes: &str) {
    let ram = Arc::new(Ram::new(sizes));
    let (announce, announced) = channel();
    let threads: Vec<_> = (0..THREADS)
        .map(|name| {
            let (commands, queue) = channel::<Vec<String>>();
            let (ram, announce) = (ram.clone(), announce.clone());
            std::thread::spawn(move || {
                let tid = rustix::thread::gettid().as_raw_nonzero().get();
                announce.send((name, tid)).unwrap();
                serve(&ram, name, &queue);
            });
            commands
        })
        .collect();
    let mut tids: Vec<(usize, i32)> = announced.iter().take(THREADS).collect();
    tids.sort_unstable();
    let tids: String = tids.iter().map(|(_, tid)| format!(" {tid}")).collect();
    let places = ram.files.iter().map(|(_, map)| format!(" {}", map.as_mut_ptr().addr()));
    say(&format!("ready{tids}{}", places.collect::<String>()));
    for line in std::io::stdin().lock().lines() {
        let words: Vec<String> = line.unwrap().split(' ').map(str::to_owned).collect();
        threads[words[0].parse::<usize>().unwrap()].send(words[1..].to_vec()).unwrap();
    }
}

fn serve(ram: &Ram, name: usize, queue: &Receiver<Vec<String>>) {
    while let Ok(command) = queue.recv() {
        say(&format!("{name} {}", obey(ram, &command)));
    }
}

/// One line, in one write.
fn say(line: &str) {
    std::io::stdout().lock().write_all(format!("\n{line}\n").as_bytes()).unwrap();
    std::io::stdout().flush().unwrap();
}

fn obey(ram: &Ram, command: &[String]) -> String {
    let number = |index: usize| command[index].parse::<u64>().unwrap();
    let pages = || number(1) as usize..number(2) as usize;
    match command[0].as_str() {
        "sum" => pages().fold(0, |sum, page| mix(sum, sum_of(ram, page))).to_string(),
        "sums" => {
            let sums = pages().map(|page| sum_of(ram, page).to_string());
            sums.collect::<Vec<_>>().join(" ")
        }
        "write" => {
            ram.write(number(1) as usize, 0, number(2));
            "0".into()
        }
        "give-back" => {
            ram.give_back(number(1) as usize, (number(2) - number(1)) as usize);
            "0".into()
        }
        "random" => random(ram, number(1), number(2), number(3)),
        "time" => time(ram, &command[1..]),
        other => panic!("unknown command {other}"),
    }
}

/// All words of a page, mixed.
fn sum_of(ram: &Ram, page: usize) -> u64 {
    (0..PAGE / 8).fold(0, |sum, word| mix(sum, ram.read(page, word)))
}

/// Touches `count` pages below `pages` at random, and sums them up as
/// [`crate::content::Model::random`] does.
fn random(ram: &Ram, seed: u64, count: u64, pages: u64) -> String {
    let mut dice = Dice(seed);
    let mut sum = 0;
    for _ in 0..count {
        sum = mix(sum, sum_of(ram, dice.below(pages) as usize));
    }
    sum.to_string()
}

/// Touches the pages given as `PAUSE_US FIRST,SECOND,...`; returns the time of each touch, in
/// nanoseconds.
fn time(ram: &Ram, arguments: &[String]) -> String {
    let pause = Duration::from_micros(arguments[0].parse().unwrap());
    let pages: Vec<usize> = arguments[1].split(',').map(|page| page.parse().unwrap()).collect();
    let mut times = Vec::with_capacity(pages.len());
    for page in pages {
        let start = Instant::now();
        std::hint::black_box(ram.read(page, 0));
        times.push(start.elapsed().as_nanos().to_string());
        pass(pause);
    }
    times.join(",")
}

/// Computes for a while, as a guest does between faults.
fn pass(time: Duration) {
    let end = Instant::now() + time;
    while Instant::now() < end {
        std::hint::spin_loop();
    }
}
