//! `firn-guest heartbeat`: a steady signal that the guest is alive, for an observer outside.
//!
//! ```text
//!   SEQUENCE GUEST_NS WORK STALL_US\n        one line per beat, decimal
//! ```
//!
//! `GUEST_NS` is the guest's monotonic clock and `WORK` counts the steps of a thread that walks
//! through memory. So a prober distinguishes three things: whether the guest answers at all, the
//! length of a pause by its own clock, and how fast it really makes progress. `STALL_US` is the
//! longest delay since the last beat of a vCPU's write to a page of its own. The guest's clock does
//! not show that, as it continues while the vCPU waits for a page. Beats without a listener are
//! dropped, never queued.

use std::fs::File;
use std::io::Write as _;
use std::net::UdpSocket;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use clap::Args;
use rustix::time::{ClockId, clock_gettime};

use crate::arena::PageArena;
use crate::port;
use crate::protocol::HEARTBEAT_PORT;
use crate::rate_limiter::RateLimiter;
use crate::stamp::mix;
use crate::threads::{pin_thread, vcpu_count};

/// Sends a line with clock and work count at a fixed rate.
#[derive(Args, Debug)]
pub struct HeartbeatArgs {
    /// Name of the virtio port, or path of a device.
    #[arg(long, default_value = HEARTBEAT_PORT)]
    port: String,
    /// Send by UDP to HOST:PORT instead.
    #[arg(long)]
    udp: Option<String>,
    /// Beats per second.
    #[arg(long, default_value_t = 100.0)]
    rate: f64,
    /// Memory that the working thread walks through; 0 for no work.
    #[arg(long, default_value_t = 8)]
    work_mib: usize,
    /// Pages that the working thread visits per second; 0 is as fast as possible.
    #[arg(long, default_value_t = 2000.0)]
    work_rate: f64,
    /// On each vCPU, detect stalls by writing to this much memory; 0 detects none.
    #[arg(long, default_value_t = 0)]
    stall_mib: usize,
}

/// The interval at which a vCPU's watch writes a page.
const WATCH_INTERVAL: Duration = Duration::from_millis(1);

enum BeatOutlet {
    Port(File),
    Udp(UdpSocket),
}

/// Sends beats for ever.
pub fn run(args: &HeartbeatArgs) -> Result<()> {
    let mut outlet = BeatOutlet::open_outlet(args)?;
    let work = Arc::new(AtomicU64::new(0));
    start_work(args.work_mib, args.work_rate, Arc::clone(&work))?;
    let stalls = StallRecorder::watch_vcpus(args.stall_mib)?;
    let mut limiter = RateLimiter::new(args.rate);
    for sequence in 0_u64.. {
        let (work, stall) = (work.load(Ordering::Relaxed), stalls.take_longest());
        if !outlet.send_beat(&format!("{sequence} {} {work} {stall}\n", guest_clock_ns())) {
            stalls.record_stall(stall);
        }
        limiter.wait_for(1);
    }
    Ok(())
}

impl BeatOutlet {
    fn open_outlet(args: &HeartbeatArgs) -> Result<Self> {
        let Some(address) = &args.udp else {
            return Ok(Self::Port(port::open_port(&args.port, false)?));
        };
        let socket = UdpSocket::bind("0.0.0.0:0")?;
        socket.connect(address).with_context(|| format!("cannot send to {address}"))?;
        Ok(Self::Udp(socket))
    }

    /// Sends a beat, if that is possible now: later it is useless. Returns whether it was sent.
    fn send_beat(&mut self, line: &str) -> bool {
        let sent = match self {
            Self::Port(port) => port.write(line.as_bytes()),
            Self::Udp(socket) => socket.send(line.as_bytes()),
        };
        sent.is_ok_and(|bytes| bytes == line.len())
    }
}

/// The longest stall of any vCPU that was not reported yet, in microseconds.
#[derive(Clone, Debug, Default)]
struct StallRecorder(Arc<AtomicU64>);

impl StallRecorder {
    /// Watches each vCPU with a thread that writes a page of its own at a fixed interval. Its delay
    /// is the time that it waited for the page, for the vCPU, or for other programs that run there.
    fn watch_vcpus(mib: usize) -> Result<Self> {
        let stalls = Self::default();
        let watched = if mib == 0 { 0 } else { vcpu_count() };
        for vcpu in 0..watched {
            let (stalls, mut arena) = (stalls.clone(), PageArena::of_mib(mib));
            arena.all_pages_mut().iter_mut().for_each(|page| page[0] = 1);
            thread::Builder::new().name(format!("watch {vcpu}")).spawn(move || {
                // A thread that can't be pinned watches some vCPU.
                let _ = pin_thread(vcpu);
                stalls.watch_vcpu(&mut arena);
            })?;
        }
        Ok(stalls)
    }

    fn watch_vcpu(&self, arena: &mut PageArena) {
        let mut due = Instant::now();
        for step in 0_u64.. {
            due += WATCH_INTERVAL;
            thread::sleep(due.saturating_duration_since(Instant::now()));
            let page = arena.page_mut(mix(step) as usize);
            page[0] = mix(page[0] ^ step);
            let now = Instant::now();
            self.record_stall(now.saturating_duration_since(due).as_micros() as u64);
            // A late write postpones the following ones.
            due = due.max(now - WATCH_INTERVAL);
        }
    }

    fn record_stall(&self, us: u64) {
        self.0.fetch_max(us, Ordering::Relaxed);
    }

    fn take_longest(&self) -> u64 {
        self.0.swap(0, Ordering::Relaxed)
    }
}

fn start_work(mib: usize, rate: f64, count: Arc<AtomicU64>) -> Result<()> {
    if mib == 0 {
        return Ok(());
    }
    thread::Builder::new().name("work".into()).spawn(move || {
        let mut arena = PageArena::of_mib(mib);
        let mut limiter = RateLimiter::new(rate);
        let batch = ((rate / 100.0) as u32).max(1);
        for step in 0_u64.. {
            let page = arena.page_mut(step as usize);
            page[0] = mix(page[0] ^ step);
            count.fetch_add(1, Ordering::Relaxed);
            if step % u64::from(batch) == 0 {
                limiter.wait_for(batch);
            }
        }
    })?;
    Ok(())
}

/// The guest's monotonic clock.
pub fn guest_clock_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    (now.tv_sec * 1_000_000_000 + now.tv_nsec).unsigned_abs()
}
