//! `halite-save`: the pause and the overhead of a checkpoint for the guest that is saved.
//!
//! Reproduces Table 3 of Halite (section 8.3), and measures besides what the paper does not: the
//! length of the guest's pause, and whether it grows with its memory.
//!
//! **The pause** (`downtime`). *What varies*: RAM from 256 MiB to 8 GiB; and the system that pauses
//! the guest: `firn checkpoint`, or the *floor*: nothing but stop, device state and cont, on its
//! own monitor connection. *Held equal*: the guest and its load. Each vCPU writes random pages as
//! fast as it can, all over half to three quarters of RAM, which was filled before. Both systems
//! pause the same running guest alternately. *Measured*: the pause as Firn reports it
//! (`downtime_ms`) and the floor (`floor_ms`), each between the hypervisor's events `STOP` and
//! `RESUME`; and for both, how long the guest's own clock stopped (`stood_still_ms`,
//! `floor_stood_still_ms`), which is measured by heartbeats and does not depend on any report.
//!
//! **The overhead** (`overhead`). *What varies*: no save, a save, a save whose background sweep has
//! no throttle (`unthrottled`). *Held equal*: the guest, its work. *Measured*: by how much longer
//! the same work takes by the guest's clock if a save begins in the middle of it (`save_overhead`,
//! in seconds, and in percent). The guest's clock does not count the pause, which is measured
//! separately. Redis and a write-heavy walk replace the paper's pgbench and Worldbench.

mod downtime;
mod overhead;

use anyhow::Result;

use crate::lab::Lab;
use crate::report::Report;

/// Runs the experiment.
pub fn run(lab: &Lab) -> Result<Report> {
    let mut report = lab.vm_report("halite-save");
    downtime::run_downtime(lab, &mut report)?;
    overhead::run_overhead(lab, &mut report)?;
    Ok(report)
}
