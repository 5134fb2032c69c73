//! Checkpoint demo: `firn-lab demo`, which `make demo` runs.
//!
//! The demo boots a real VM with Redis, loads it, checkpoints it while a client sends requests,
//! kills it, and restores it in each mode. After each restore it reads and compares every key. One
//! table at the end shows what the client measured.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::disk_profile::{DiskProfile, DiskThrottle, make_cold};
use crate::firn::SaveArgs;
use crate::guest::{
    GuestImage, HostForward, QemuArgs, RedisClient, RedisLoad, accel, free_tcp_port,
};
use crate::lab::{Lab, wait_for};
use crate::prober::Prober;
use crate::traffic::{KeyPopularity, RedisGets};

const VM: &str = "demo";
const REDIS: u16 = 6379;
const KEYS: u64 = 50_000;
const VALUE_BYTES: usize = 1000;
const MEMORY_MIB: u32 = 1024;
/// Requests per second of the client.
const RATE: f64 = 100.0;
/// How long the client sends requests before the checkpoint.
const STEADY: Duration = Duration::from_secs(4);
/// A restored guest has recovered when it reaches this share of its steady rate ...
const RECOVERED_SHARE: f64 = 0.9;
/// ... over this time.
const WINDOW: Duration = Duration::from_secs(1);
const BOOT: Duration = Duration::from_secs(180);
const LIMIT: Duration = Duration::from_secs(120);
const MODES: [&str; 4] = ["eager", "lazy", "locality", "auto"];

/// The result of one restore.
struct RestoreRow {
    mode: &'static str,
    running: f64,
    first_reply: f64,
    back: f64,
    keys: u64,
}

/// Runs the demo and prints the table.
pub fn run_demo(lab: &Lab) -> Result<()> {
    let demo = CheckpointDemo::new(lab)?;
    let steady = demo.start_and_save()?;
    let rows = MODES
        .into_iter()
        .map(|mode| demo.restore_and_measure(mode, steady))
        .collect::<Result<Vec<_>>>()?;
    print_table(&rows);
    Ok(())
}

struct CheckpointDemo<'a> {
    lab: &'a Lab,
    args: QemuArgs,
    address: SocketAddr,
    load: RedisLoad,
    image: PathBuf,
    disk: DiskThrottle,
}

impl<'a> CheckpointDemo<'a> {
    fn new(lab: &'a Lab) -> Result<Self> {
        let accel = accel::choose_accel();
        lab.log_progress(&format!("guests run by {}: {}", accel.accel, accel.why));
        let image = GuestImage::small()?;
        let port = free_tcp_port()?;
        let args = QemuArgs::new(&image, accel.accel)
            .memory_mib(MEMORY_MIB)
            .vcpus(2)
            .with_console(&lab.file("console"))
            .add_network(&[HostForward::tcp(port, REDIS)]);
        Ok(Self {
            lab,
            args,
            address: (Ipv4Addr::LOCALHOST, port).into(),
            load: RedisLoad::new(KEYS, VALUE_BYTES),
            image: lab.file("demo.firn"),
            disk: DiskThrottle::new(DiskProfile::None, lab.dir())?,
        })
    }

    /// Boots the VM, loads it, checkpoints it while the client sends requests, and kills it.
    /// Returns the client's steady rate.
    fn start_and_save(&self) -> Result<f64> {
        let firn = self.lab.firn();
        firn.run_vm(VM, &self.args)?;
        let mut redis = RedisClient::connect(self.address, BOOT)?;
        self.lab.log_progress(&format!("a VM of {MEMORY_MIB} MiB runs, with Redis"));
        self.load.write_all(&mut redis)?;
        self.lab.log_progress(&format!(
            "{KEYS} keys of {VALUE_BYTES} bytes written; a client asks {RATE} times a second"
        ));
        let client = self.start_client(0);
        std::thread::sleep(WINDOW + STEADY);
        let (from, to) = (client.now() - STEADY, client.now());
        let steady = client.timeline().rate_in(from..to);
        self.checkpoint_vm(&client)?;
        drop(client);
        self.kill_hypervisor()?;
        Ok(steady)
    }

    fn checkpoint_vm(&self, client: &Prober) -> Result<()> {
        let before = client.now();
        let save_output = self.lab.firn().checkpoint(VM, &self.image, &SaveArgs::default())?;
        let gap = client.timeline().longest_gap(before..client.now());
        let pause =
            save_output.number("/report/pause/downtime_ms").context("firn reported no downtime")?;
        let mib = std::fs::metadata(&self.image)?.len() as f64 / f64::from(1 << 20);
        self.lab.log_progress(&format!(
            "checkpointed while it ran: {mib:.0} MiB in {:.1} s; the guest was paused for {pause:.1} ms; the client \
             never waited longer than {:.0} ms",
            save_output.took.as_secs_f64(),
            gap.as_secs_f64() * 1e3
        ));
        Ok(())
    }

    /// Sends SIGKILL to the hypervisor, which ends the VM.
    fn kill_hypervisor(&self) -> Result<()> {
        let status = self.lab.firn().status(VM)?;
        let pid = pid_in(&status).context("firn status reports no process id")?;
        kill(Pid::from_raw(pid), Signal::SIGKILL)?;
        self.lab.log_progress("killed (SIGKILL)");
        wait_for("the end of the VM", LIMIT, || {
            Ok((!Path::new(&format!("/proc/{pid}")).exists()).then_some(()))
        })?;
        self.lab.firn().stop(VM);
        Ok(())
    }

    fn start_client(&self, seed: u64) -> Prober {
        let (keys, seed) = (self.load.keys.end, self.lab.extent.seed + seed);
        Prober::start(RedisGets::new(self.address, keys, KeyPopularity::Zipf, seed), RATE)
    }

    fn restore_and_measure(&self, mode: &'static str, steady: f64) -> Result<RestoreRow> {
        make_cold([self.image.as_path()])?;
        let client = self.start_client(1);
        let (event, start) = (client.now(), Instant::now());
        let restore_output =
            self.lab.firn().restore(&self.image, VM, &["--mode", mode], &self.disk)?;
        let back = wait_for("the steady rate", LIMIT, || {
            Ok(client.timeline().recovery_after(event, steady * RECOVERED_SHARE, WINDOW))
        })?;
        let first_reply = client.timeline().first_after(event).context("no reply")?;
        drop(client);
        let keys = self.verify_keys()?;
        self.lab.log_progress(&format!(
            "restored ({mode}) and checked after {:.1} s",
            start.elapsed().as_secs_f64()
        ));
        self.lab.firn().stop(VM);
        let row = RestoreRow {
            mode,
            running: restore_output.took.as_secs_f64(),
            first_reply: first_reply.as_secs_f64(),
            back: back.as_secs_f64(),
            keys,
        };
        Ok(row)
    }

    /// Reads every key and compares its value.
    fn verify_keys(&self) -> Result<u64> {
        let mut redis = RedisClient::connect(self.address, BOOT)?;
        let report = self.load.verify_all(&mut redis)?;
        ensure!(
            report.is_right(),
            "the restored data differs from the saved data: {:?}",
            report.problems
        );
        Ok(report.keys)
    }
}

/// The hypervisor's process id in the output of `firn status`.
fn pid_in(status: &serde_json::Value) -> Option<i32> {
    i32::try_from(status.get("pid")?.as_i64()?).ok()
}

fn print_table(rows: &[RestoreRow]) {
    println!();
    println!("mode       running   first reply   back to 90 %   keys right");
    for RestoreRow { mode, running, first_reply, back, keys } in rows {
        println!(
            "{mode:9} {running:7.2} s   {first_reply:9.2} s   {back:10.2} s   {keys:6} of {KEYS}"
        );
    }
    println!();
    println!("Seconds from the restore command; the image was not in the page cache.");
}
