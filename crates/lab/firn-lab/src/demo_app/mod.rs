//! Application demo: `firn-lab demo-app`, which `make demo-app` runs.
//!
//! The demo kills memcached (SIGKILL) under load, again and again, at random instants, and restarts
//! it each time. The clients know which operations were acknowledged, and check all of them
//! afterwards. Three rows: stock memcached; memcached with its own restartable cache (`-e FILE`);
//! memcached with its items in a critical data area (`examples/memcached`).
//!
//! ```text
//!   start -> clients work -> SIGKILL -> restart -> each client reads back its keys -> clients work -> ...
//! ```

mod client;
mod server;

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use firn_guest::stamp::mix;

use crate::lab::Lab;
use client::{CacheClient, LostOperations};
use server::{CacheStorage, MemcachedProgram, MemcachedServer};

/// How many clients work at once.
const CLIENTS: u64 = 4;
/// How long clients work before the kill: the minimum, and the range above it.
const WORK_TIME: (Duration, Duration) = (Duration::from_millis(300), Duration::from_millis(500));

/// The result of one system.
struct SystemResult {
    system: CacheStorage,
    acknowledged: u64,
    lost: LostOperations,
    work: Duration,
    /// Times from each start after a kill to the first reply.
    back: Vec<Duration>,
}

/// Runs the demo and prints the table.
///
/// # Errors
/// If memcached can't be built or started, or if an acknowledged operation is lost where that must
/// not happen.
pub fn run_demo(lab: &Lab, kills: u64) -> Result<()> {
    let program = MemcachedProgram::build_example()?;
    let rows = CacheStorage::ALL.map(|system| measure_system(lab, &program, system, kills));
    let rows = rows.into_iter().collect::<Result<Vec<_>>>()?;
    print_table(&rows, kills);
    let firn = rows.iter().find(|row| row.system == CacheStorage::Firn);
    let lost = firn.map(|row| row.lost).unwrap_or_default();
    ensure!(lost == LostOperations::default(), "acknowledged operations were lost: {lost:?}");
    Ok(())
}

fn measure_system(
    lab: &Lab,
    program: &MemcachedProgram,
    system: CacheStorage,
    kills: u64,
) -> Result<SystemResult> {
    lab.log_progress(&format!("{}: is killed {kills} times under load", system.name()));
    let mut clients: Vec<CacheClient> = (0..CLIENTS).map(CacheClient::new).collect();
    let mut row = SystemResult {
        system,
        acknowledged: 0,
        lost: LostOperations::default(),
        work: Duration::ZERO,
        back: Vec::new(),
    };
    let mut server = program.start_server(lab, system)?;
    server.wait_for_reply()?;
    for kill in 0..kills {
        let time = WORK_TIME.0 + WORK_TIME.1.mul_f64(random_fraction(lab.extent.seed + kill));
        row.work += work_and_kill(&mut clients, server, time)?;
        server = program.start_server(lab, system)?;
        row.back.push(server.wait_for_reply()?);
        for client in &mut clients {
            row.lost += client.count_losses(server.address())?;
        }
    }
    row.acknowledged = clients.iter().map(CacheClient::acknowledged).sum();
    Ok(row)
}

/// Lets the clients work for a time, then kills the server under load. Returns how long they
/// worked.
fn work_and_kill(
    clients: &mut [CacheClient],
    server: MemcachedServer,
    time: Duration,
) -> Result<Duration> {
    let (since, address): (Instant, SocketAddr) = (Instant::now(), server.address());
    let is_over = &AtomicBool::new(false);
    thread::scope(|scope| {
        let work =
            |client| scope.spawn(move || CacheClient::run_until_killed(client, address, is_over));
        let working: Vec<_> = clients.iter_mut().map(work).collect();
        thread::sleep(time);
        is_over.store(true, Ordering::Release);
        let worked = since.elapsed();
        let killed = server.kill();
        for client in working {
            client.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        }
        killed.map(|()| worked)
    })
}

/// A pseudorandom number from 0 to 1.
fn random_fraction(seed: u64) -> f64 {
    (mix(seed) >> 11) as f64 / (1_u64 << 53) as f64
}

fn print_table(rows: &[SystemResult], kills: u64) {
    println!();
    println!(
        "                             acknowledged   kills       lost   per second   replies again after"
    );
    for row in rows {
        let mut back = row.back.clone();
        back.sort_unstable();
        println!(
            "{:28} {:12}   {kills:5}   {:8}   {:10.0}   {:14.0} ms",
            row.system.name(),
            row.acknowledged,
            row.lost.total(),
            row.acknowledged as f64 / row.work.as_secs_f64(),
            back.get(back.len() / 2).map_or(f64::NAN, |time| time.as_secs_f64() * 1e3),
        );
    }
    println!();
    println!(
        "lost: keys whose last acknowledged value was gone or older after the kill, and counters that missed an increment.\n\
         Each client waits for each reply before it sends the next request. The last column is a median."
    );
}
