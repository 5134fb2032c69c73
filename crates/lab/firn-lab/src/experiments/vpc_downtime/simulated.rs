//! Simulated clusters, of more VMs than this machine can run: the protocol's own core
//! (`firn_cluster::failover`), and hosts that behave as this one did when it was measured.
//!
//! ```text
//!   detected   the primaries' leases have expired   FailoverController, for these VMs and hosts:
//!     |                                               run and timed
//!     |        register: generation + 1, fence      written to a disk, and encoded for each host:
//!     |                                               timed; all hosts asked once, as measured
//!     |                                               with three
//!     |        register: fence = {}                 the same
//!     |        each backup obeys it                 decoded and obeyed by each host's HostGuard:
//!     |                                               run, and the slowest is timed
//!     v        each host runs its VMs               a measured turn of this machine, drawn for
//!                                                     each host
//!   the last VM of the last host runs
//! ```
//!
//! Every host is the backup of as many VMs as the largest measured turn had, so that nothing is
//! extrapolated on a host: the protocol grows with the cluster, and so does the slowest of its
//! hosts. For the other system all is the same, with turns of its own.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::Write as _;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use firn_cluster::cut::GlobalCheckpoint;
use firn_cluster::failover::{
    ControllerDecision, FailoverController, FailoverRecord, GuardAction, HostGuard, LeaseTerms,
    VmPlacement,
};
use firn_cluster::{Epoch, HostId, VmId};
use firn_guest::stamp::mix;

/// Terms of leases. No step waits for one: time begins with the detection.
const TERMS: LeaseTerms = LeaseTerms { ttl: Duration::from_secs(5), drift_ppm_max: 1000 };
/// Backup hosts are numbered from here.
const BACKUPS: u16 = 1 << 15;

/// The times of one turn of a system, in seconds since the failover was requested.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RecoveryTimes {
    /// When each VM ran.
    pub ran: Vec<f64>,
    /// When each answered its first request.
    pub answered: Vec<f64>,
}

impl RecoveryTimes {
    /// The time until all VMs run.
    pub fn downtime(&self) -> f64 {
        latest_time(&self.ran)
    }

    /// The time until any VM answered its first request.
    pub fn first_answer(&self) -> f64 {
        self.answered.iter().copied().fold(f64::INFINITY, f64::min)
    }

    /// The time until every VM had answered one.
    pub fn all_answer(&self) -> f64 {
        latest_time(&self.answered)
    }
}

fn latest_time(times: &[f64]) -> f64 {
    times.iter().copied().fold(f64::NEG_INFINITY, f64::max)
}

/// The outcome of the protocol for a cluster: its duration, and the VMs that each host has to run.
#[derive(Clone, Debug, PartialEq)]
pub struct ProtocolOutcome {
    /// Changes of the register: for each, all hosts are asked once.
    pub rounds: u32,
    /// The rest of the protocol's time, in seconds: the controller, writing the register to the
    /// disk and encoding it for each host, and the slowest host.
    pub cores_s: f64,
    /// The number of VMs that each host runs then.
    pub hosts: Vec<usize>,
}

/// Runs the protocol: all primaries are lost, with `per_host` VMs at each host. The register is
/// stored in this directory.
///
/// # Errors
/// If the outcome is anything but that all VMs run at their backups.
pub fn run_protocol(vms: usize, per_host: usize, dir: &Path) -> Result<ProtocolOutcome> {
    let hosts = u16::try_from(vms.div_ceil(per_host))?;
    let backups: BTreeSet<HostId> = (0..hosts).map(|host| HostId(BACKUPS + host)).collect();
    let register = protected_register(vms, per_host)?;
    let mut controller = FailoverController::new(register.clone(), backups.clone());
    let mut guards: Vec<HostGuard> =
        backups.iter().map(|&host| HostGuard::new(host, TERMS)).collect();
    guards.iter_mut().for_each(|guard| drop(guard.learn_record(&register)));
    let (since, mut rounds) = (Instant::now(), 0);
    let settled = loop {
        let ControllerDecision::Propose(register) = controller.next_decision() else {
            bail!("nothing is decided")
        };
        let kept = store_register(&register, dir)?;
        // Each host gets the register, one after another.
        guards.iter().try_for_each(|_| serde_json::to_writer(std::io::sink(), &register))?;
        controller.learn_record(&register);
        rounds += 1;
        if register.fence.is_empty() {
            break kept;
        }
    };
    let mut decided =
        ProtocolOutcome { rounds, cores_s: since.elapsed().as_secs_f64(), hosts: Vec::new() };
    let mut slowest = Duration::ZERO;
    for guard in &mut guards {
        let since = Instant::now();
        let actions = guard.learn_record(&serde_json::from_slice(&settled)?);
        slowest = slowest.max(since.elapsed());
        let run = actions.into_iter().find_map(|action| match action {
            GuardAction::Run { vms, .. } => Some(vms.len()),
            _ => None,
        });
        decided.hosts.push(run.context("a host runs nothing")?);
    }
    decided.cores_s += slowest.as_secs_f64();
    ensure!(decided.hosts.iter().sum::<usize>() == vms, "not all VMs run");
    Ok(decided)
}

/// Stores a register durably; returns its text.
fn store_register(register: &FailoverRecord, dir: &Path) -> Result<Vec<u8>> {
    let text = serde_json::to_vec(register)?;
    let (new, kept) = (dir.join("register.new"), dir.join("register"));
    let mut file = File::create(&new)?;
    file.write_all(&text)?;
    file.sync_all()?;
    fs::rename(&new, &kept)?;
    Ok(text)
}

/// The register of a protected cluster, with a global checkpoint.
fn protected_register(vms: usize, per_host: usize) -> Result<FailoverRecord> {
    let place_vm = |vm: u16| -> Result<(VmId, VmPlacement)> {
        let at = u16::try_from(usize::from(vm) / per_host)?;
        Ok((VmId(vm), VmPlacement { primary: HostId(at), backup: Some(HostId(BACKUPS + at)) }))
    };
    let placements = (0..u16::try_from(vms)?).map(place_vm);
    let placements: BTreeMap<VmId, VmPlacement> = placements.collect::<Result<_>>()?;
    let register = FailoverRecord::new(placements);
    let checkpoint = GlobalCheckpoint {
        number: 1,
        marks: register.placements.keys().map(|&vm| (vm, Epoch(1))).collect(),
        ..register.checkpoint.clone()
    };
    register.with_checkpoint(&checkpoint).context("the checkpoint is of another layout")
}

/// One failover of a cluster: each host takes the times of a turn that is drawn from a seed; asking
/// all hosts takes `round_s`.
pub fn simulate_failover(
    decided: &ProtocolOutcome,
    turns: &[RecoveryTimes],
    round_s: f64,
    seed: u64,
) -> RecoveryTimes {
    let before = f64::from(decided.rounds) * round_s + decided.cores_s;
    let mut all = RecoveryTimes::default();
    for (host, &vms) in decided.hosts.iter().enumerate() {
        let drawn = mix(seed ^ mix(host as u64)) % turns.len().max(1) as u64;
        let Some(turn) = turns.get(drawn as usize) else { continue };
        let later = |times: &[f64]| -> Vec<f64> {
            times.iter().take(vms).map(|time| before + time).collect()
        };
        all.ran.extend(later(&turn.ran));
        all.answered.extend(later(&turn.answered));
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_vms_run_at_their_backups_after_two_changes() {
        let dir = tempfile::tempdir().unwrap();
        for vms in [8, 32, 1024] {
            let decided = run_protocol(vms, 8, dir.path()).unwrap();
            assert_eq!(decided.rounds, 2, "the new generation, and the end of the fence");
            assert_eq!(decided.hosts, vec![8; vms / 8]);
        }
        assert_eq!(run_protocol(10, 8, dir.path()).unwrap().hosts, [8, 2]);
        assert!(
            run_protocol(8, 8, &dir.path().join("none")).is_err(),
            "nothing is decided that is not kept"
        );
    }

    #[test]
    fn the_worst_host_is_waited_for_and_the_best_answers_first() {
        let turn = |ran: f64| RecoveryTimes { ran: vec![0.1, ran], answered: vec![ran, 0.2 + ran] };
        let turns = [turn(0.5), turn(1.0)];
        let decided = ProtocolOutcome { rounds: 2, cores_s: 0.25, hosts: vec![2; 64] };
        let all = simulate_failover(&decided, &turns, 0.125, 1);
        assert_eq!(all.ran.len(), 128);
        assert_eq!(all.downtime(), 1.5);
        assert_eq!((all.first_answer(), all.all_answer()), (1.0, 1.7));
        assert_eq!(all, simulate_failover(&decided, &turns, 0.125, 1), "it is drawn from a seed");
    }
}
