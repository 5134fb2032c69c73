//! `halite-save`: what a checkpoint costs the guest that is being saved.
//!
//! Reproduces Table 3 of Halite (section 8.3), and asks besides what the paper does not: how long the guest stands
//! still, and whether that grows with its memory.
//!
//! **The pause** (`downtime`). *What varies*: RAM from 256 MiB to 8 GiB; and who pauses the guest: `firn checkpoint`, or
//! the *floor*: nothing but stop, device state and cont, on a monitor connection of its own. *Held equal*: the guest and
//! its load. Each vCPU writes pages at random, flat out, all over half to three quarters of RAM, all of it filled before. Both take turns on the same running guest. *Measured*: the pause as Firn reports it
//! (`downtime_ms`) and the floor (`floor_ms`), each between the hypervisor's events `STOP` and `RESUME`; and for both, how long the guest's own clock stood still (`stood_still_ms`,
//! `floor_stood_still_ms`), which rests on heartbeats and not on anybody's report.
//!
//! **The rest** (`overhead`). *What varies*: no save, a save, a save whose background sweep does not yield to the guest
//! (`unthrottled`). *Held equal*: the guest, its work. *Measured*: by how much longer the same work takes by the guest's
//! clock if a save begins in its midst (`save_overhead`, in seconds, and in percent). The guest's clock does not count
//! the pause, which is above. Redis and a write-heavy walk stand where the paper has pgbench and Worldbench.

mod downtime;
mod overhead;

use anyhow::Result;

use crate::lab::Lab;
use crate::report::Report;

/// Runs it.
pub fn run(lab: &Lab) -> Result<Report> {
    let mut report = lab.vm_report("halite-save");
    downtime::run(lab, &mut report)?;
    overhead::run(lab, &mut report)?;
    Ok(report)
}
