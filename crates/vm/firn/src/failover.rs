//! `firn failover`
//!
//! Where hosts have no consensus, the command watches the standby's stream before it runs the VM:
//!
//! ```text
//!   the stream has ended                           --> run
//!   no epoch arrives for the rest of WATCH_TIME    --> run: the primary is frozen, or cut off
//!   epochs still arrive after SETTLE_TIME          --> refuse: the primary runs
//! ```

use std::thread;
use std::time::{Duration, Instant};

use clap::Args as ClapArgs;
use firn_control::api::FailoverVmRequest;
use firn_control::{AgentPaths, HostName, client};
use firn_supervisor::{
    FailoverRequest, Failure, FailureKind, RuntimeDir, SupervisorRequest, VmName, query_status,
    send_request,
};
use serde_json::Value;

use crate::output::FactPrinter;

/// How long the command watches a stream that has not ended. Epochs are at most 500 ms apart.
const WATCH_TIME: Duration = Duration::from_secs(3);
/// The time in which epochs may arrive that a primary sent before it died.
const SETTLE_TIME: Duration = Duration::from_millis(500);
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Continue a VM from its standby on this host, after its primary was lost.
///
/// The VM continues from its newest committed epoch: the one before the newest that arrived.
///
/// If hosts have consensus (`firn cluster status`), their record decides. The command waits until
/// the lease of the old primary's host is over, and is refused while that host renews the lease. If
/// the VM is dead there although the host renews the lease, declare the host dead by its name: then
/// the record fences the host, and none of the host's output is released.
///
/// Without consensus, Firn relies on you: make sure first that the VM runs on no other host. While
/// epochs arrive from the primary, the VM runs there, and the failover is refused.
///
/// A failover of a VM that was stopped, or whose guest shut down, is refused: that VM was not lost.
#[derive(Debug, ClapArgs)]
#[command(after_long_help = "Examples:
  firn failover web
  firn failover web --i-know-it-is-dead host1")]
pub struct FailoverArgs {
    /// The standby.
    name: VmName,
    /// The host of the old primary, which does not run the VM any more.
    #[arg(long, value_name = "HOST")]
    i_know_it_is_dead: Option<HostName>,
    /// Run the VM also if its primary was stopped or its guest shut down.
    #[arg(long)]
    accept_stopped: bool,
    /// Run the VM also while its primary runs and sends epochs. Then two instances of the VM run.
    #[arg(long)]
    accept_running: bool,
}

impl FailoverArgs {
    /// Runs the verb.
    pub fn run(&self, out: FactPrinter) -> Result<(), Failure> {
        let base = crate::hidden::runtime_dir()?;
        let is_leased = is_leased(&base, &self.name)?;
        let facts = self
            .fail_over(&base, is_leased)
            .map_err(|failure| failure.while_doing(format!("can't run {}", self.name)))?;
        out.print_facts(&facts, || self.describe_failover(&base, &facts, is_leased))
    }

    fn fail_over(&self, base: &RuntimeDir, is_leased: bool) -> Result<Value, Failure> {
        if is_leased {
            let (vm, dead) = (self.name.clone(), self.i_know_it_is_dead.clone());
            return client::fail_over_vm(base, &FailoverVmRequest { vm, dead });
        }
        self.check_host(base)?;
        if !self.accept_running {
            refuse_while_epochs_arrive(base, &self.name)?;
        }
        let how =
            FailoverRequest { accept_stopped: self.accept_stopped, ..FailoverRequest::default() };
        send_request(base, &self.name, &SupervisorRequest::Failover(how), &mut |_| ())
    }

    /// Refuses another host than the VM ran on: the user may mean another VM.
    fn check_host(&self, base: &RuntimeDir) -> Result<(), Failure> {
        let origin = AgentPaths::new(base.clone()).primary_host(&self.name);
        match (origin, &self.i_know_it_is_dead) {
            (Some(origin), Some(host)) if origin != *host => {
                let text = format!("its primary runs on host {origin}, not on {host}");
                Err(Failure::new(FailureKind::Refused, text)
                    .with_hint("`firn agent status` shows both"))
            }
            _ => Ok(()),
        }
    }

    fn describe_failover(&self, base: &RuntimeDir, facts: &Value, is_leased: bool) -> String {
        let name = &self.name;
        let ran = match facts["took_ms"].as_f64() {
            Some(ms) => {
                format!("{name} runs from the end of epoch {}, after {ms:.1} ms\n", facts["epoch"])
            }
            // A new supervisor has finished the failover that a dead one began.
            None => format!("{name} runs\n"),
        };
        let rests = match (is_leased, AgentPaths::new(base.clone()).primary_host(name)) {
            (true, _) => {
                format!("by the record of the hosts, generation {}\n", facts["generation"])
            }
            (false, Some(host)) => {
                format!(
                    "this rests on your word that it does not run on host {host}: the hosts keep no record of it\n"
                )
            }
            (false, None) => {
                "this rests on your word that its primary does not run: no record confirms it\n"
                    .to_owned()
            }
        };
        ran + &rests
    }
}

/// Watches the standby's stream, unless it has ended, and refuses if epochs still arrive.
fn refuse_while_epochs_arrive(base: &RuntimeDir, name: &VmName) -> Result<(), Failure> {
    let newest_epoch = || -> Result<Option<u64>, Failure> {
        let standby = query_status(base, &base.vm_dir(name))?.standby;
        Ok(standby.filter(|standby| standby.ended.is_none()).map(|standby| standby.complete))
    };
    let started = Instant::now();
    let mut settled = None;
    while started.elapsed() < WATCH_TIME {
        let Some(newest) = newest_epoch()? else { return Ok(()) };
        if started.elapsed() > SETTLE_TIME && newest > *settled.get_or_insert(newest) {
            return Err(still_running(newest));
        }
        thread::sleep(POLL_INTERVAL);
    }
    Ok(())
}

fn still_running(epoch: u64) -> Failure {
    let text = format!("its primary runs: it has just sent epoch {epoch}");
    Failure::new(FailureKind::Refused, text).with_hint(
        "end the VM there first (`firn stop --force`); `--accept-running` runs a second instance",
    )
}

/// Whether the hosts' consensus decides who runs it. The supervisor refuses a VM that is no
/// standby.
fn is_leased(base: &RuntimeDir, name: &VmName) -> Result<bool, Failure> {
    let standby = query_status(base, &base.vm_dir(name))?.standby;
    Ok(standby.is_some_and(|standby| standby.leased))
}
