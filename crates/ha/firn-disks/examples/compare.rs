//! Measures what serving a disk costs QEMU: `qemu-img bench` sends the same requests to a file and
//! to its served disk, alternately.
//!
//! Prints ratios of medians, above 1 where the disk is slower, and in brackets the smallest and the
//! largest ratio of one round.
//! `cargo run --release -p firn-disks --example compare -- [TURNS]`

use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use firn_disks::LoggedDisk;
use firn_disks::nbd::{NbdExports, NbdServer};

const BYTES: u64 = 256 << 20;
/// Name, and arguments of qemu-img.
const LOADS: &[(&str, &[&str])] = &[
    ("read 4k, one at a time", &["-c", "20000", "-d", "1", "-s", "4k", "-S", "68k"]),
    ("read 4k, 16 at once", &["-c", "40000", "-d", "16", "-s", "4k", "-S", "68k"]),
    ("read 128k, 16 at once", &["-c", "8000", "-d", "16", "-s", "128k"]),
    ("write 4k, 16 at once", &["-w", "-c", "40000", "-d", "16", "-s", "4k", "-S", "68k"]),
    ("write 128k, 16 at once", &["-w", "-c", "4000", "-d", "16", "-s", "128k"]),
];

fn main() -> Result<()> {
    let turns = std::env::args().nth(1).map_or(Ok(5), |turns| turns.parse())?;
    let dir = tempfile::tempdir()?;
    let file = dir.path().join("disk");
    std::fs::write(&file, vec![7; BYTES as usize])?;
    for (name, load) in LOADS {
        let mut seconds = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..turns {
            seconds.0.push(run_bench(
                load,
                &format!("driver=raw,file.driver=file,file.filename={}", file.display()),
            )?);
            seconds.1.push(bench_served(&file, dir.path(), load, false)?);
            seconds.2.push(bench_served(&file, dir.path(), load, true)?);
        }
        println!(
            "{name}: {:.3} s from the file; served {}; and protected {}",
            median_seconds(&seconds.0),
            format_ratio(&seconds.1, &seconds.0),
            format_ratio(&seconds.2, &seconds.0)
        );
    }
    Ok(())
}

/// Seconds that the load takes on a served disk. If the disk is protected, its log is cut
/// regularly.
fn bench_served(file: &Path, dir: &Path, load: &[&str], is_protected: bool) -> Result<f64> {
    let disk = Arc::new(LoggedDisk::open(file, None)?);
    let socket = dir.join("nbd");
    let _server =
        NbdServer::start(&socket, NbdExports::from_iter([("vda".into(), Arc::clone(&disk))]))?;
    let options = format!(
        "driver=raw,file.driver=nbd,file.server.type=unix,file.server.path={},file.export=vda",
        socket.display()
    );
    if is_protected {
        disk.begin_protection(64 << 20);
        while !disk.seed_step()?.is_whole {}
    }
    std::thread::scope(|scope| {
        let bench = scope.spawn(|| run_bench(load, &options));
        while is_protected && !bench.is_finished() {
            std::thread::sleep(std::time::Duration::from_millis(100));
            drop(disk.cut_log()?);
        }
        bench.join().ok().context("a thread died")?
    })
}

fn run_bench(load: &[&str], options: &str) -> Result<f64> {
    let output = Command::new("qemu-img")
        .arg("bench")
        .args(load)
        .args(["--image-opts", options])
        .output()?;
    let words = String::from_utf8_lossy(&output.stdout);
    let seconds = words.split("completed in ").nth(1).and_then(|rest| rest.split(' ').next());
    ensure!(output.status.success(), "qemu-img: {}", String::from_utf8_lossy(&output.stderr));
    Ok(seconds.context("qemu-img says no time")?.parse()?)
}

fn median_seconds(seconds: &[f64]) -> f64 {
    let mut sorted = seconds.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
}

fn format_ratio(seconds: &[f64], file: &[f64]) -> String {
    let each = || seconds.iter().zip(file).map(|(one, other)| one / other);
    let (least, most) = (each().fold(f64::MAX, f64::min), each().fold(0.0, f64::max));
    format!("{:.2} [{least:.2}, {most:.2}]", median_seconds(seconds) / median_seconds(file))
}
