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
use client::{Client, Lost};
use server::{Program, Server, System};

/// How many clients work at once.
const CLIENTS: u64 = 4;
/// How long clients work before the kill: the minimum, and the range above it.
const WORK: (Duration, Duration) = (Duration::from_millis(300), Duration::from_millis(500));

/// The result of one system.
struct Row {
    system: System,
    acknowledged: u64,
    lost: Lost,
    work: Duration,
    /// Times from each start after a kill to the first reply.
    back: Vec<Duration>,
}

/// Runs the demo and prints the table.
///
/// # Errors
/// If memcached can't be built or started, or if an acknowledged operation is lost where that must
/// not happen.
pub fn run(lab: &Lab, kills: u64) -> Result<()> {
    let program = Program::build()?;
    let rows = System::ALL.map(|system| row(lab, &program, system, kills));
    let rows = rows.into_iter().collect::<Result<Vec<_>>>()?;
    print(&rows, kills);
    let firn = rows.iter().find(|row| row.system == System::Firn);
    let lost = firn.map(|row| row.lost).unwrap_or_default();
    ensure!(lost == Lost::default(), "acknowledged operations were lost: {lost:?}");
    Ok(())
}

fn row(lab: &Lab, program: &Program, system: System, kills: u64) -> Result<Row> {
    lab.say(&format!("{}: is killed {kills} times under load", system.name()));
    let mut clients: Vec<Client> = (0..CLIENTS).map(Client::new).collect();
    let mut row = Row {
        system,
        acknowledged: 0,
        lost: Lost::default(),
        work: Duration::ZERO,
        back: Vec::new(),
    };
    let mut server = program.start(lab, system)?;
    server.wait()?;
    for kill in 0..kills {
        let time = WORK.0 + WORK.1.mul_f64(chance(lab.extent.seed + kill));
        row.work += work(&mut clients, server, time)?;
        server = program.start(lab, system)?;
        row.back.push(server.wait()?);
        for client in &mut clients {
            row.lost += client.look(server.address())?;
        }
    }
    row.acknowledged = clients.iter().map(Client::acknowledged).sum();
    Ok(row)
}

/// Lets the clients work for a time, then kills the server under load. Returns how long they
/// worked.
fn work(clients: &mut [Client], server: Server, time: Duration) -> Result<Duration> {
    let (since, address): (Instant, SocketAddr) = (Instant::now(), server.address());
    let is_over = &AtomicBool::new(false);
    thread::scope(|scope| {
        let work = |client| scope.spawn(move || Client::work(client, address, is_over));
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
fn chance(seed: u64) -> f64 {
    (mix(seed) >> 11) as f64 / (1_u64 << 53) as f64
}

fn print(rows: &[Row], kills: u64) {
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
            row.lost.all(),
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
