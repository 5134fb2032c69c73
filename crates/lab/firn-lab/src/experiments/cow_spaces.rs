//! `cow-spaces`: the effect of copying the written pages of recently run programs first.
//!
//! Tests an optimization of Sun and Blough ("Fast, Lightweight Virtual Machine Checkpointing",
//! section 4.4), who found that it gains little: faults cost their guest less than the copying did.
//!
//! **What varies**: the number of address spaces whose written pages are copied first
//! (`--first-spaces`), none to eight. **What is held equal**: copy-on-write; a guest in which three
//! programs write random pages of their own memory, and a fourth sends heartbeats.
//!
//! **What is measured**: `faults.N`, after the cut; `let_go.N`, memory blocks that were copied
//! first; `stall_ms.N`, the longest time for which the guest's clock stopped around the checkpoint;
//! `total_ms.N`, the whole save.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use firn_report::plot::BarPlot;
use serde_json::{Value, json};

use crate::experiments::synthetic::split_words;
use crate::firn::SaveArgs;
use crate::guest::{GuestControl, GuestImage, QemuArgs, accel};
use crate::lab::{Lab, run_interleaved};
use crate::prober::GuestClock;
use crate::report::Report;
use crate::stats::Sample;

const VM: &str = "spaces";
const MIB: u32 = 512;
const BOOT: Duration = Duration::from_secs(120);
const FILL: Duration = Duration::from_secs(300);
const SETTLE: Duration = Duration::from_millis(300);
const PROGRAMS: u32 = 3;
/// Memory of each program, and the pages a second that it writes.
const WRITES: &str = "--mib 24 --rate 4000 --order random --compresses-to 50";
const SPACES: [u32; 5] = [0, 1, 2, 4, 8];
/// Checkpoints of each kind, in quick and in full runs.
const ROUNDS: (usize, usize) = (3, 20);
const FIELDS: [&str; 4] = ["faults", "let_go", "stall_ms", "total_ms"];

/// Runs the experiment.
pub fn run(lab: &Lab) -> Result<Report> {
    let mut report = lab.vm_report("cow-spaces");
    let clock = boot_guest(lab)?;
    run_interleaved(lab.extent.runs(ROUNDS.0, ROUNDS.1), &SPACES, |_, &spaces| {
        measure_checkpoint(lab, &clock, spaces, &mut report)
    })?;
    lab.firn().stop(VM);
    for (spaces, field) in SPACES.iter().flat_map(|n| FIELDS.iter().map(move |field| (n, field))) {
        let key = format!("{field}.{spaces}");
        match Sample::new(measured_values(&report, *spaces, field)) {
            Some(sample) => {
                report.add_number(format!("{key}.p50"), sample.p50());
                report.add_number(format!("{key}.p95"), sample.p95());
            }
            None => report.add_missing(format!("{key}.p50"), "it was not measured"),
        }
    }
    let drawing = draw_plot(&report)?;
    report.add_drawing("cow-spaces", drawing);
    Ok(report)
}

fn boot_guest(lab: &Lab) -> Result<GuestClock> {
    let [agent, beats] = ["agent", "beats"].map(|name| lab.file(name));
    let args = QemuArgs::new(&GuestImage::small()?, accel::choose_accel().accel)
        .memory_mib(MIB)
        .vcpus(2)
        .with_console(&lab.file("console"))
        .with_agent_socket(&agent)
        .with_heartbeat_socket(&beats);
    lab.firn().run_vm(VM, &args)?;
    let mut control = GuestControl::connect(&agent, BOOT)?;
    let clock = GuestClock::start(&beats)?;
    control.spawn_job("beats", &split_words("firn-guest heartbeat --rate 500 --work-mib 0"))?;
    for number in 0..PROGRAMS {
        let job = format!("writers-{number}");
        control.spawn_job(&job, &split_words(&format!("firn-guest writers {WRITES}")))?;
        control.wait_output(&job, "\"ready\":true", FILL)?;
    }
    Ok(clock)
}

fn measure_checkpoint(
    lab: &Lab,
    clock: &GuestClock,
    spaces: u32,
    report: &mut Report,
) -> Result<()> {
    let how = SaveArgs::default().with_option("--strategy", "cow");
    let how = if spaces > 0 { how.with_option("--first-spaces", spaces.to_string()) } else { how };
    let before = Instant::now();
    let save_output = lab.firn().checkpoint(VM, &lab.file("spaces.firn"), &how)?;
    std::thread::sleep(SETTLE);
    let stall_ms = clock.paused_since(before).map(|pause| pause.as_secs_f64() * 1e3);
    let number = |path: &str| save_output.number(path).with_context(|| format!("no {path}"));
    let by = ["by_vcpu", "by_worker", "by_neighbour", "by_others"];
    let faults: f64 =
        by.iter().map(|by| number(&format!("/report/faults/{by}"))).sum::<Result<_>>()?;
    let let_go = number("/report/blocks_let_go")?;
    lab.log_progress(&format!("{spaces} address spaces: {let_go} blocks first, {faults} faults"));
    report.add_repetition(json!({ "spaces": spaces, "faults": faults, "let_go": let_go,
        "stall_ms": stall_ms, "total_ms": number("/report/total_ms")? }));
    Ok(())
}

fn measured_values(report: &Report, spaces: u32, field: &str) -> Vec<f64> {
    let is_it = |run: &&Value| run["spaces"] == spaces;
    report.repetitions().iter().filter(is_it).filter_map(|run| run[field].as_f64()).collect()
}

fn draw_plot(report: &Report) -> Result<String> {
    let faults =
        SPACES.map(|spaces| report.figure_value(&format!("faults.{spaces}.p50")).unwrap_or(0.0));
    let plot = BarPlot {
        title: "Faults after a copy-on-write checkpoint's cut".into(),
        y: "faults, median".into(),
        series: vec![("by address spaces whose pages are copied first".into(), faults.to_vec())],
        groups: SPACES.map(|spaces| spaces.to_string()).to_vec(),
    };
    plot.to_svg().context("the faults")
}
