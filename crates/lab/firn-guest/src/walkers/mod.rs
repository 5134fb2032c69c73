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

use crate::arena::PageArena;
use crate::rate_limiter::RateLimiter;
use crate::stamp::{self, PageStamp, PageWords, StampStyle};
use crate::threads;
use path::WalkPath;

/// Visits between checks of the clock.
const BATCH: u64 = 16;
/// Up to this rate, in visits per second, the clock is checked after each visit: a burst of visits
/// at longer intervals is another load than single visits.
const SINGLE_RATE_MAX: f64 = 2000.0;

/// A walk of several threads.
#[derive(Clone, Debug)]
struct MemoryWalk {
    threads: usize,
    /// Pages of each thread's arena.
    pages: usize,
    style: StampStyle,
    path: WalkPath,
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
struct WalkTally {
    visits: AtomicU64,
    wrong: AtomicU64,
}

impl MemoryWalk {
    /// Walks to the end. False if a page was wrong.
    fn run(&self) -> Result<bool> {
        let tally = Arc::new(WalkTally::default());
        let filled = Arc::new(Barrier::new(self.threads + 1));
        let workers: Vec<_> = (0..self.threads)
            .map(|number| {
                let (walk, tally, filled) = (self.clone(), Arc::clone(&tally), Arc::clone(&filled));
                thread::spawn(move || walk.walk_thread(number, &filled, &tally))
            })
            .collect();
        filled.wait();
        let start = Instant::now();
        println!("{}", self.ready_line());
        let mut next = self.progress;
        while workers.iter().any(|worker| !worker.is_finished()) {
            thread::sleep(Duration::from_millis(2));
            if !self.progress.is_zero() && start.elapsed() >= next {
                println!("{}", tally.progress_line(start));
                next = start.elapsed() + self.progress;
            }
        }
        println!("{}", tally.done_line(start));
        for worker in workers {
            worker.join().map_err(|_| anyhow::anyhow!("a thread panicked"))??;
        }
        Ok(tally.wrong.load(Ordering::Relaxed) == 0)
    }

    fn ready_line(&self) -> serde_json::Value {
        json!({
            "ready": true,
            "threads": self.threads,
            "pages": self.threads * self.pages,
            "visited_pages": self.threads * self.path.distinct_pages(self.pages),
        })
    }

    fn walk_thread(&self, number: usize, filled: &Barrier, tally: &WalkTally) -> Result<()> {
        let pinned = threads::pin_thread(number);
        let mut arena = PageArena::with_huge_pages(self.pages);
        for (index, page) in arena.all_pages_mut().iter_mut().enumerate() {
            let stamp = PageStamp { region: number as u32, index: index as u64, sequence: 0 };
            stamp::fill_page(page, stamp, self.style);
        }
        filled.wait();
        pinned?;
        let mut limiter = RateLimiter::new(self.rate);
        let mut step = 0;
        let is_slow = self.rate > 0.0 && self.rate <= SINGLE_RATE_MAX;
        let batch_max = if is_slow { 1 } else { BATCH };
        while step < self.visits {
            let batch = batch_max.min(self.visits - step);
            let wrong =
                (step..step + batch).filter(|&step| !self.visit_page(&mut arena, step)).count();
            step += batch;
            tally.visits.fetch_add(batch, Ordering::Relaxed);
            tally.wrong.fetch_add(wrong as u64, Ordering::Relaxed);
            limiter.wait_for(batch as u32);
        }
        Ok(())
    }

    /// Visits the page of a step. False if the page was wrong.
    fn visit_page(&self, arena: &mut PageArena, step: u64) -> bool {
        let index = self.path.page_index(step, self.pages);
        let page = arena.page_mut(index);
        let mut found = stamp::check_page(page);
        for _ in 1..self.work {
            found = stamp::check_page(std::hint::black_box(&*page));
        }
        match found {
            Ok(stamp) if self.write_every > 0 && step % self.write_every == 0 => {
                rewrite_page(page, stamp, self.style);
                stamp.index == index as u64
            }
            Ok(stamp) => stamp.index == index as u64,
            Err(_) => false,
        }
    }
}

fn rewrite_page(page: &mut PageWords, stamp: PageStamp, style: StampStyle) {
    stamp::rewrite_page(page, PageStamp { sequence: stamp.sequence + 1, ..stamp }, style);
}

impl WalkTally {
    fn progress_line(&self, start: Instant) -> serde_json::Value {
        json!({
            "progress": self.visits.load(Ordering::Relaxed),
            "seconds": start.elapsed().as_secs_f64(),
            "wrong": self.wrong.load(Ordering::Relaxed),
        })
    }

    fn done_line(&self, start: Instant) -> serde_json::Value {
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

    fn walk(path: WalkPath, write_every: u64) -> MemoryWalk {
        MemoryWalk {
            threads: 2,
            pages: 64,
            style: StampStyle::compressing_to(50, false),
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
        assert!(walk(WalkPath::Stride { stride: 16, used: 4 }, 0).run().unwrap());
        assert!(walk(WalkPath::Random { among: 30, seed: 1 }, 3).run().unwrap());
    }

    #[test]
    fn finds_a_wrong_page() {
        let walk = walk(WalkPath::Forwards, 0);
        let mut arena = PageArena::with_huge_pages(64);
        assert!(!walk.visit_page(&mut arena, 0), "never filled");
        stamp::fill_page(
            arena.page_mut(0),
            PageStamp { region: 0, index: 7, sequence: 0 },
            walk.style,
        );
        assert!(!walk.visit_page(&mut arena, 0), "another page's contents");
    }
}
