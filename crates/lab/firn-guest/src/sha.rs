//! `firn-guest sha`: a long computation with one right answer.
//!
//! Each thread fills an arena from a seed and executes `rounds` rounds: hash a page, let the digest
//! choose the next page, write the digest into the page just read. Any change of a bit of the arena
//! or of the program's state changes the final digest, and the digest is the same on every machine:
//! a guest restored in the middle must print the digest that an uninterrupted one prints.
//!
//! With `--progress-ms` it also prints its progress, as the walkers do:
//! `{"progress":12000,"seconds":1.0}`, in rounds of all threads together.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};
use clap::Args;
use serde_json::json;
use sha2::{Digest as _, Sha256};

use crate::arena::PageArena;
use crate::stamp::{PageWords, mix};
use crate::threads;

/// Computes a digest that depends on every step of a long computation.
#[derive(Args, Clone, Debug)]
pub struct ShaArgs {
    /// Chooses the computation.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Memory of each thread.
    #[arg(long, default_value_t = 16)]
    pub mib: usize,
    /// Pages that each thread hashes.
    #[arg(long, default_value_t = 20_000)]
    pub rounds: u64,
    /// Number of threads. Another number gives another digest.
    #[arg(long, default_value_t = 1)]
    pub threads: usize,
    /// Milliseconds between progress lines; 0 for none.
    #[arg(long, default_value_t = 0)]
    pub progress_ms: u64,
}

/// Prints the digest.
pub fn run(args: &ShaArgs) -> Result<()> {
    println!("{}", compute_digest(args)?);
    Ok(())
}

/// Computes the digest that an uninterrupted guest prints.
pub fn compute_digest(args: &ShaArgs) -> Result<String> {
    let done = Arc::new(AtomicU64::new(0));
    let workers: Vec<_> = (0..args.threads.max(1))
        .map(|number| {
            let (args, done) = (args.clone(), Arc::clone(&done));
            thread::spawn(move || {
                threads::pin_thread(number)?;
                let seed = mix(args.seed ^ (number as u64) << 48);
                anyhow::Ok(hash_rounds(seed, args.mib, args.rounds, &done))
            })
        })
        .collect();
    if args.progress_ms > 0 {
        print_progress(&done, Duration::from_millis(args.progress_ms), || {
            workers.iter().all(JoinHandle::is_finished)
        });
    }
    let mut whole = Sha256::new();
    for worker in workers {
        whole.update(worker.join().map_err(|_| anyhow!("a thread panicked"))??);
    }
    Ok(whole.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Prints the number of rounds that are done, until all are.
fn print_progress(done: &AtomicU64, every: Duration, is_over: impl Fn() -> bool) {
    let since = Instant::now();
    while !is_over() {
        thread::sleep(every);
        let (progress, seconds) = (done.load(Ordering::Relaxed), since.elapsed().as_secs_f64());
        println!("{}", json!({ "progress": progress, "seconds": seconds }));
    }
}

fn hash_rounds(seed: u64, mib: usize, rounds: u64, done: &AtomicU64) -> [u8; 32] {
    let mut arena = PageArena::of_mib(mib.max(1));
    for (index, page) in arena.all_pages_mut().iter_mut().enumerate() {
        page.iter_mut().enumerate().for_each(|(at, word)| {
            *word = mix(seed ^ (index * 512 + at) as u64);
        });
    }
    let mut state = [0; 32];
    for _ in 0..rounds {
        state = hash_next_page(&mut arena, state);
        done.fetch_add(1, Ordering::Relaxed);
    }
    arena.all_pages().iter().fold(Sha256::new_with_prefix(state), hash_page).finalize().into()
}

fn hash_next_page(arena: &mut PageArena, state: [u8; 32]) -> [u8; 32] {
    let words = words_of(state);
    let index = words.iter().copied().fold(0, u64::wrapping_add) % arena.page_count() as u64;
    let page = arena.page_mut(index as usize);
    let next: [u8; 32] = hash_page(Sha256::new_with_prefix(state), page).finalize().into();
    page.iter_mut().zip(words).for_each(|(slot, word)| *slot ^= word);
    next
}

fn words_of(digest: [u8; 32]) -> [u64; 4] {
    let mut words = [0; 4];
    for (at, byte) in digest.into_iter().enumerate() {
        words[at / 8] |= u64::from(byte) << (at % 8 * 8);
    }
    words
}

fn hash_page(mut hash: Sha256, page: &PageWords) -> Sha256 {
    for word in page {
        hash.update(word.to_le_bytes());
    }
    hash
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(rounds: u64, threads: usize) -> String {
        compute_digest(&ShaArgs { seed: 7, mib: 1, rounds, threads, progress_ms: 0 }).unwrap()
    }

    #[test]
    fn is_the_same_every_time_and_depends_on_every_round() {
        assert_eq!(with(50, 2), with(50, 2));
        assert_ne!(with(50, 1), with(51, 1));
        assert_ne!(with(50, 1), with(50, 2));
    }
}
