//! The process under test: this very executable, run again with [`VARIABLE`] set.
//!
//! It stands for a hypervisor: shared memory in memfds, threads that touch it. It knows nothing of
//! Firn. Each line on its standard input is a thread (`0`, `1`, or `m` for the main thread), a
//! command and numbers; each line on its standard output is the thread and the result.

use std::fs::File;
use std::io::{BufRead, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use memmap2::{MmapOptions, MmapRaw};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, ftruncate, memfd_create};

/// The sizes of the memfds in pages, separated by commas; with a `p` in front, of private anonymous
/// memory. An `h` in front of a size means huge pages, a `g` huge pages that are mapped privately.
pub const VARIABLE: &str = "FIRN_MEMORY_TEST_CHILD";

const PAGE: usize = 4096;
const WORDS: usize = PAGE / 8;

/// The child's memory, addressed by page over all memfds.
struct Ram {
    files: Vec<(File, MmapRaw)>,
}

/// The state that all threads share.
struct Shared {
    ram: Ram,
    pipe: (OwnedFd, OwnedFd),
    never: AtomicU32,
}

impl Ram {
    fn new(sizes: &str) -> Self {
        let private = sizes.strip_prefix('p');
        let files = private.unwrap_or(sizes).split(',').map(|pages| {
            let kind = pages.trim_end_matches(|digit: char| digit.is_ascii_digit());
            let flags = match kind {
                "" => MemfdFlags::CLOEXEC,
                _ => MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB,
            };
            let file = File::from(memfd_create("ram", flags).unwrap());
            let len = pages[kind.len()..].parse::<usize>().unwrap() * PAGE;
            ftruncate(&file, len as u64).unwrap();
            let map = match (private, kind) {
                (Some(_), _) => MmapRaw::from(MmapOptions::new().len(len).map_anon().unwrap()),
                (None, "g") => {
                    // SAFETY: only this process has the file, and it does not change its length.
                    let own = unsafe { MmapOptions::new().map_copy(&file) };
                    MmapRaw::from(own.unwrap())
                }
                (None, _) => MmapRaw::map_raw(&file).unwrap(),
            };
            (file, map)
        });
        Self { files: files.collect() }
    }

    /// The memfd that holds a page, and the page's number in it.
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
        assert!(word < WORDS);
        let (_, map, page) = self.locate(page);
        map.as_mut_ptr().wrapping_add(page * PAGE + word * 8).cast()
    }

    fn read(&self, page: usize, word: usize) -> u64 {
        // SAFETY: `word` gives an aligned address inside a live mapping; the access is volatile as
        // other processes write it.
        unsafe { self.word(page, word).read_volatile() }
    }

    fn write(&self, page: usize, word: usize, value: u64) {
        // SAFETY: as in `read`; the mapping is writable.
        unsafe { self.word(page, word).write_volatile(value) }
    }

    fn discard(&self, page: usize, pages: usize) {
        let (file, map, page) = self.locate(page);
        let (offset, len) = (page * PAGE, pages * PAGE);
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fallocate(file, flags, offset as u64, len as u64).unwrap();
        let start = map.as_mut_ptr().wrapping_add(offset).cast();
        // SAFETY: the range lies in a shared mapping of a memfd to which no reference exists.
        unsafe { rustix::mm::madvise(start, len, rustix::mm::Advice::LinuxDontNeed) }.unwrap();
    }
}

/// The content of a page after `fill`, word by word.
pub fn pattern(seed: u64, page: u64, word: u64) -> u64 {
    (seed << 48 | page << 16 | word).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1
}

/// Arithmetic that goes wrong if a register changes under it.
pub fn churn(rounds: u64) -> u64 {
    let (mut integer, mut float) = (1u64, 1.0f64);
    for round in 0..rounds {
        integer = integer.wrapping_mul(6364136223846793005).wrapping_add(round);
        float = (float * 1.000_001 + 0.5) % 1e6;
    }
    integer ^ float.to_bits()
}

#[test]
fn child_process() {
    let Ok(sizes) = std::env::var(VARIABLE) else { return };
    run(&sizes);
    std::process::exit(0);
}

fn run(sizes: &str) {
    let ram = Ram::new(sizes);
    let pipe = rustix::pipe::pipe().unwrap();
    let shared = Arc::new(Shared { ram, pipe, never: AtomicU32::new(0) });
    let (announce, announced) = channel();
    let threads = [0, 1].map(|name| {
        let (commands, queue) = channel::<Vec<String>>();
        let (shared, announce) = (shared.clone(), announce.clone());
        std::thread::spawn(move || {
            announce.send((name, rustix::thread::gettid())).unwrap();
            serve(&shared, &name.to_string(), &queue);
        });
        commands
    });
    let mut tids = [announced.recv().unwrap(), announced.recv().unwrap()];
    tids.sort_by_key(|(name, _)| *name);
    let places = shared.ram.files.iter().map(|(_, map)| format!(" {}", map.as_mut_ptr().addr()));
    let tids = tids.map(|(_, tid)| tid.as_raw_nonzero().get());
    say(&format!("m ready {} {}{}", tids[0], tids[1], places.collect::<String>()));
    for line in std::io::stdin().lock().lines() {
        let words: Vec<String> = line.unwrap().split(' ').map(str::to_owned).collect();
        match words[0].as_str() {
            "m" => say(&format!("m {}", obey(&shared, &words[1..]))),
            thread => threads[thread.parse::<usize>().unwrap()].send(words[1..].to_vec()).unwrap(),
        }
    }
}

fn serve(shared: &Shared, name: &str, queue: &Receiver<Vec<String>>) {
    while let Ok(command) = queue.recv() {
        say(&format!("{name} {}", obey(shared, &command)));
    }
}

/// One line, in one write.
fn say(line: &str) {
    std::io::stdout().lock().write_all(format!("\n{line}\n").as_bytes()).unwrap();
    std::io::stdout().flush().unwrap();
}

fn obey(shared: &Shared, command: &[String]) -> u64 {
    let number = |index: usize| command[index].parse::<u64>().unwrap();
    let pages = || number(1) as usize..number(2) as usize;
    let ram = &shared.ram;
    match command[0].as_str() {
        "read" => ram.read(number(1) as usize, 0),
        "write" => {
            ram.write(number(1) as usize, 0, number(2));
            0
        }
        "fill" => {
            let words = pages().flat_map(|page| (0..WORDS).map(move |word| (page, word)));
            words.for_each(|(page, word)| {
                ram.write(page, word, pattern(number(3), page as u64, word as u64))
            });
            0
        }
        "sum" => pages()
            .flat_map(|page| (0..WORDS).map(move |word| (page, word)))
            .fold(0u64, |sum, (page, word)| sum.rotate_left(5) ^ ram.read(page, word)),
        "increment" => {
            let end = Instant::now() + Duration::from_millis(number(3));
            let mut rounds = 0;
            while Instant::now() < end {
                pages().for_each(|page| ram.write(page, 0, ram.read(page, 0) + 1));
                rounds += 1;
            }
            rounds
        }
        "discard" => {
            ram.discard(number(1) as usize, (number(2) - number(1)) as usize);
            0
        }
        "lock" => {
            ram.files.iter().for_each(|(_, map)| map.lock().unwrap());
            0
        }
        "huge" => {
            ram.files.iter().for_each(|(_, map)| {
                let (start, len) = (map.as_mut_ptr().cast(), map.len());
                // SAFETY: a mapping to which no reference exists; its content stays.
                unsafe { rustix::mm::madvise(start, len, rustix::mm::Advice::LinuxHugepage) }
                    .unwrap();
            });
            0
        }
        "churn" => churn(number(1)),
        "handle" => handle_signals(),
        "filter" => filter(command[1] == "all"),
        "handled" => HANDLED.load(Ordering::Relaxed),
        "poke" => rustix::io::write(&shared.pipe.1, b"x").unwrap() as u64,
        wait => wait_in(shared, wait, command.get(1).map_or(0, |_| number(1))),
    }
}

/// Signals that were handled.
static HANDLED: AtomicU64 = AtomicU64::new(0);

/// Makes a system call of its own, too.
extern "C" fn handle(_: i32) {
    HANDLED.fetch_add(1, Ordering::Relaxed);
    rustix::thread::sched_yield();
}

fn handle_signals() -> u64 {
    use nix::sys::signal::{SigHandler, Signal, signal};
    // SAFETY: the handler adds to an atomic number and makes a system call: both may be done in a
    // handler.
    unsafe { signal(Signal::SIGUSR1, SigHandler::Handler(handle)) }.unwrap();
    0
}

/// Makes the kernel kill the process for userfaultfd(2) by this thread, or by any. Returns 0.
fn filter(all: bool) -> u64 {
    use nix::libc;
    const NUMBER: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    const IF_EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
    let step = |code, k, jf| libc::sock_filter { code, jt: 0, jf, k };
    let mut steps = [
        step(NUMBER, 0, 0),
        step(IF_EQUAL, libc::SYS_userfaultfd as u32, 1),
        step(RETURN, libc::SECCOMP_RET_KILL_PROCESS, 0),
        step(RETURN, libc::SECCOMP_RET_ALLOW, 0),
    ];
    let program = libc::sock_fprog { len: steps.len() as u16, filter: steps.as_mut_ptr() };
    let flags = if all { libc::SECCOMP_FILTER_FLAG_TSYNC } else { 0 };
    // SAFETY: prctl takes numbers here; seccomp reads `program`, which outlives the call, and the
    // steps it points to.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        let set = libc::SECCOMP_SET_MODE_FILTER;
        libc::syscall(libc::SYS_seccomp, set, flags, &raw const program) as u64
    }
}

/// Sleeps in one system call. Returns the milliseconds it took, or 1,000,000 if the call was
/// visibly interrupted.
fn wait_in(shared: &Shared, call: &str, ms: u64) -> u64 {
    const INTERRUPTED: u64 = 1_000_000;
    let start = Instant::now();
    let time = Timespec::try_from(Duration::from_millis(ms)).unwrap();
    let undisturbed = match call {
        "nanosleep" => {
            use rustix::thread::{NanosleepRelativeResult::Ok, nanosleep};
            matches!(nanosleep(&time), Ok)
        }
        "ppoll" => {
            let mut fds = [PollFd::from_borrowed_fd(shared.pipe.0.as_fd(), PollFlags::PRI)];
            poll(&mut fds, Some(&time)) == Ok(0)
        }
        "futex" => {
            use rustix::thread::futex::{Flags, wait};
            wait(&shared.never, Flags::PRIVATE, 0, Some(&time)) == Err(rustix::io::Errno::TIMEDOUT)
        }
        "pipe" => rustix::io::read(&shared.pipe.0, &mut [0u8; 1]) == Ok(1),
        other => panic!("unknown command {other}"),
    };
    if undisturbed { start.elapsed().as_millis() as u64 } else { INTERRUPTED }
}
