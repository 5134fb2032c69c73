//! Threads that walk through memory: `firn-guest synthetic`, `toucher` and `random`.
//!
//! They differ in the pages that a thread visits, and in their order ([`path`]); everything else is
//! the same. One thread per vCPU, pinned, fills an arena of its own with self-describing pages,
//! waits for the others, and visits pages. A visit reads and checks every word of the page, so a
//! walk that ends without a wrong page also proves its memory correct.
//!
//! Output is JSON lines: `ready` after the fill, `progress` once per interval, `done` at the end:
//!
//! ```text
//!   {"ready":true,"threads":2,"pages":262144,"visited_pages":65536}
//!   {"progress":12000,"seconds":1.0,"wrong":0}
//!   {"done":true,"visits":100000,"seconds":8.1,"visits_per_s":12345.6,"wrong":0}
//! ```

pub mod path;
pub mod random;
pub mod synthetic;
pub mod toucher;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Result;
use serde_json::json;

use crate::arena::Arena;
use crate::pace::Pace;
use crate::stamp::{self, PageWords, Stamp, Style};
use crate::threads;
use path::Path;

/// Visits between checks of the clock.
const BATCH: u64 = 16;

/// A walk of several threads.
#[derive(Clone, Debug)]
struct Walk {
    threads: usize,
    /// Pages of each thread's arena.
    pages: usize,
    style: Style,
    path: Path,
    /// Visits of each thread; `u64::MAX` runs for ever.
    visits: u64,
    /// Visits per second of each thread; 0 is as fast as possible.
    rate: f64,
    /// How often a page is checked per visit, to simulate work.
    work: u32,
    /// The page is also written at one visit in this many; 0 for never.
    write_every: u64,
    progress: Duration,
}

/// The counts of all threads so far.
#[derive(Default)]
struct Tally {
    visits: AtomicU64,
    wrong: AtomicU64,
}

impl Walk {
    /// Walks to the end. False if a page was wrong.
    fn run(&self) -> Result<bool> {
        let tally = Arc::new(Tally::default());
        let filled = Arc::new(Barrier::new(self.threads + 1));
        let workers: Vec<_> = (0..self.threads)
            .map(|number| {
                let (walk, tally, filled) = (self.clone(), Arc::clone(&tally), Arc::clone(&filled));
                thread::spawn(move || walk.one_thread(number, &filled, &tally))
            })
            .collect();
        filled.wait();
        let start = Instant::now();
        println!("{}", self.ready());
        let mut next = self.progress;
        while workers.iter().any(|worker| !worker.is_finished()) {
            thread::sleep(Duration::from_millis(2));
            if !self.progress.is_zero() && start.elapsed() >= next {
                println!("{}", tally.progress(start));
                next = start.elapsed() + self.progress;
            }
        }
        println!("{}", tally.done(start));
        for worker in workers {
            worker.join().map_err(|_| anyhow::anyhow!("a thread panicked"))??;
        }
        Ok(tally.wrong.load(Ordering::Relaxed) == 0)
    }

    fn ready(&self) -> serde_json::Value {
        json!({
            "ready": true,
            "threads": self.threads,
            "pages": self.threads * self.pages,
            "visited_pages": self.threads * self.path.distinct(self.pages),
        })
    }

    fn one_thread(&self, number: usize, filled: &Barrier, tally: &Tally) -> Result<()> {
        let pinned = threads::pin(number);
        let mut arena = Arena::huge(self.pages);
        for (index, page) in arena.all_mut().iter_mut().enumerate() {
            let stamp = Stamp { region: number as u32, index: index as u64, sequence: 0 };
            stamp::fill(page, stamp, self.style);
        }
        filled.wait();
        pinned?;
        let mut pace = Pace::new(self.rate);
        let mut step = 0;
        while step < self.visits {
            let batch = BATCH.min(self.visits - step);
            let wrong = (step..step + batch).filter(|&step| !self.visit(&mut arena, step)).count();
            step += batch;
            tally.visits.fetch_add(batch, Ordering::Relaxed);
            tally.wrong.fetch_add(wrong as u64, Ordering::Relaxed);
            pace.wait(batch as u32);
        }
        Ok(())
    }

    /// Visits the page of a step. False if the page was wrong.
    fn visit(&self, arena: &mut Arena, step: u64) -> bool {
        let index = self.path.index(step, self.pages);
        let page = arena.page_mut(index);
        let mut found = stamp::check(page);
        for _ in 1..self.work {
            found = stamp::check(std::hint::black_box(&*page));
        }
        match found {
            Ok(stamp) if self.write_every > 0 && step % self.write_every == 0 => {
                rewrite(page, stamp, self.style);
                stamp.index == index as u64
            }
            Ok(stamp) => stamp.index == index as u64,
            Err(_) => false,
        }
    }
}

fn rewrite(page: &mut PageWords, stamp: Stamp, style: Style) {
    stamp::rewrite(page, Stamp { sequence: stamp.sequence + 1, ..stamp }, style);
}

impl Tally {
    fn progress(&self, start: Instant) -> serde_json::Value {
        json!({
            "progress": self.visits.load(Ordering::Relaxed),
            "seconds": start.elapsed().as_secs_f64(),
            "wrong": self.wrong.load(Ordering::Relaxed),
        })
    }

    fn done(&self, start: Instant) -> serde_json::Value {
        let (visits, seconds) =
            (self.visits.load(Ordering::Relaxed), start.elapsed().as_secs_f64());
        json!({
            "done": true,
            "visits": visits,
            "seconds": seconds,
            "visits_per_s": visits as f64 / seconds,
            "wrong": self.wrong.load(Ordering::Relaxed),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn walk(path: Path, write_every: u64) -> Walk {
        Walk {
            threads: 2,
            pages: 64,
            style: Style::compressing_to(50, false),
            path,
            visits: 500,
            rate: 0.0,
            work: 2,
            write_every,
            progress: Duration::from_millis(1),
        }
    }

    #[test]
    fn finds_its_memory_right() {
        assert!(walk(Path::Stride { stride: 16, used: 4 }, 0).run().unwrap());
        assert!(walk(Path::Random { among: 30, seed: 1 }, 3).run().unwrap());
    }

    #[test]
    fn finds_a_wrong_page() {
        let walk = walk(Path::Forwards, 0);
        let mut arena = Arena::huge(64);
        assert!(!walk.visit(&mut arena, 0), "never filled");
        stamp::fill(arena.page_mut(0), Stamp { region: 0, index: 7, sequence: 0 }, walk.style);
        assert!(!walk.visit(&mut arena, 0), "another page's contents");
    }
}
