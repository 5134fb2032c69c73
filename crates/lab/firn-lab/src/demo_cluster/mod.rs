//! Cluster demo: `firn-lab demo-cluster`, which `make demo-cluster` runs.
//!
//! Three hosts, each a network namespace with an agent, use consensus to decide which host runs
//! which VM. Redis runs in two VMs, a primary on the first host and its replica on the second. The
//! third host protects both as a virtual cluster. External clients write to the primary, count a
//! write as acknowledged when the replica has it, and read it there. Then the demo kills every
//! process of the first host and does nothing else: both VMs resume at the third host from one
//! global checkpoint, with every write that was acknowledged to a client, and the second host
//! protects them.
//!
//! ```text
//!   clients --- lan ---+--- a: firn-agent, VM "db" --------- epochs ---+
//!                      |        X   (SIGKILL)                          v
//!                      +--- b: firn-agent, VM "replica" --- epochs --> c: firn-agent, standbys
//!                      |
//!                      +--- c: VMs "db" and "replica" ----- epochs --> b: standbys
//! ```

mod clients;
mod graph;
mod journal;

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use serde_json::Value;

use self::clients::{ExternalClients, RedisServers, WriteOutcome};
use self::graph::ReplyGraph;
use crate::guest::{GuestImage, QemuArgs, accel};
use crate::lab::Lab;
use crate::site::{ConsensusKind, HostSite, SiteHost, SitePlan, vm_network};

const HOSTS: [&str; 3] = ["a", "b", "c"];
/// The VMs, each on the host with the same index; their addresses end in these numbers.
const VMS: [(&str, u8); 2] = [("db", 15), ("replica", 16)];
const CLUSTER: &str = "shop";
/// The host with the standbys.
const BACKUP_HOST: usize = 2;
const REDIS: u16 = 6379;
const MEMORY_MIB: u32 = 256;
/// Replies that arrive so long after the kill come from the host that continues.
const IN_FLIGHT_MAX: Duration = Duration::from_secs(1);
/// How long clients work before the kill, and after the VMs are protected again.
const STEADY: Duration = Duration::from_secs(5);
const BOOT: Duration = Duration::from_secs(180);
const LIMIT: Duration = Duration::from_secs(180);
/// How often the graph is drawn, and how often a host is asked for its record.
const FRAME_INTERVAL: Duration = Duration::from_millis(100);
const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// The result of one round.
struct RoundResult {
    agreement: ConsensusKind,
    gap: Duration,
    protected: Duration,
    outcome: WriteOutcome,
}

/// Runs the demo once with each kind of consensus, and prints the table.
///
/// # Errors
/// If hosts can't be created, the service doesn't recover, or an acknowledged write is lost.
pub fn run_demo(lab: &Lab, agreements: &[ConsensusKind]) -> Result<()> {
    let accel = accel::choose_accel();
    lab.log_progress(&format!("guests run by {}: {}", accel.accel, accel.why));
    let rounds = agreements.iter().map(|it| DemoRound::build_round(lab, *it)?.run_round());
    let rounds = rounds.collect::<Result<Vec<RoundResult>>>()?;
    print_table(&rounds);
    Ok(())
}

/// One round of the demo.
struct DemoRound<'a> {
    lab: &'a Lab,
    agreement: ConsensusKind,
    site: HostSite,
    clients: ExternalClients,
    graph: ReplyGraph,
}

impl<'a> DemoRound<'a> {
    fn build_round(lab: &'a Lab, agreement: ConsensusKind) -> Result<Self> {
        let site = HostSite::build_site(
            lab,
            &SitePlan {
                hosts: &HOSTS,
                agreement: Some(agreement),
                lease: agreement.default_lease(),
            },
        )?;
        lab.log_progress(&format!(
            "hosts a, b and c use {} for consensus",
            consensus_name(agreement)
        ));
        for (host, (vm, number)) in VMS.into_iter().enumerate() {
            site.host(host).firn().run_vm(vm, &guest_args(number)?)?;
        }
        let [primary, replica] =
            VMS.map(|(_, number)| SocketAddr::from((HostSite::vm_address(number), REDIS)));
        let clients = ExternalClients::start_all(
            RedisServers { primary, replica },
            site.outside_namespace()?,
            BOOT,
        )?;
        let mut show = Self { lab, agreement, site, clients, graph: ReplyGraph::new() };
        show.print_message(&format!(
            "two VMs of {MEMORY_MIB} MiB run Redis: at a, and its replica at b; clients outside write to the one and read from the other"
        ));
        Ok(show)
    }

    fn run_round(mut self) -> Result<RoundResult> {
        self.draw_for(STEADY / 2)?;
        let vms: Vec<String> =
            VMS.iter().zip(HOSTS).map(|((vm, _), host)| format!("{vm}@{host}")).collect();
        let keeper = self.site.host(BACKUP_HOST).firn();
        keeper.run_verb("cluster", &["create", CLUSTER, "--vm", &vms[0], "--vm", &vms[1]])?;
        keeper.run_verb("cluster", &["protect", CLUSTER])?;
        self.draw_until("c is recorded as their backup", LIMIT, |show| {
            show.is_role_at("backup", "c")
        })?;
        self.print_message(
            "firn cluster protect shop: what they send is held until c has the states of both that sent it",
        );
        self.draw_for(STEADY)?;
        let killed = self.kill_first_host()?;
        self.draw_until("the service is back", LIMIT, |show| {
            show.clients.timeline().first_after(killed + IN_FLIGHT_MAX).is_some()
        })?;
        let gap = self.longest_gap_since(killed);
        self.print_message(&format!(
            "both VMs answer again, from c: nobody said so. Clients waited for {:.1} s",
            gap.as_secs_f64()
        ));
        self.draw_until("they are protected by b", LIMIT, |show| {
            show.is_role_at("primary", "c") && show.is_role_at("backup", "b")
        })?;
        let protected = self.clients.now() - killed;
        self.print_message("protected again, by b");
        self.draw_for(STEADY)?;
        self.finish_round(killed, protected)
    }

    /// Kills every process of host a, and returns the time of the kill.
    fn kill_first_host(&mut self) -> Result<Duration> {
        let processes = self.site.host(0).list_processes()?;
        let all: Vec<String> = processes.iter().map(ToString::to_string).collect();
        let killed = self.clients.now();
        self.site.host(0).kill_all()?;
        self.print_message(&format!("host a is lost: kill -9 {}", all.join(" ")));
        Ok(killed)
    }

    /// The longest time without a reply since the kill.
    fn longest_gap_since(&self, killed: Duration) -> Duration {
        let timeline = self.clients.timeline();
        let before = timeline.replies().iter().rev().find(|it| **it <= killed);
        timeline.longest_gap(before.copied().unwrap_or(killed)..self.clients.now())
    }

    fn finish_round(mut self, killed: Duration, protected: Duration) -> Result<RoundResult> {
        let gap = self.longest_gap_since(killed);
        self.graph.hide_graph();
        let outcome = self.clients.stop_and_check()?;
        let WriteOutcome { acknowledged, lost } = outcome;
        self.lab.log_progress(&format!(
            "{acknowledged} writes were acknowledged, {lost} of them are gone"
        ));
        ensure!(lost == 0, "{lost} of {acknowledged} acknowledged writes are gone");
        Ok(RoundResult { agreement: self.agreement, gap, protected, outcome })
    }

    /// Whether the record at host c names a host in this role for all VMs.
    fn is_role_at(&self, what: &str, host: &str) -> bool {
        let is_it =
            |vm: &Value| vm[what].as_str().is_some_and(|it| it.split(' ').next() == Some(host));
        let record = self.site.host(BACKUP_HOST).cluster_record(CLUSTER);
        let vms = record.as_ref().and_then(|it| it["vms"].as_array());
        vms.is_some_and(|vms| vms.len() == VMS.len() && vms.iter().all(is_it))
    }

    /// Draws the graph until a condition holds, which it checks at intervals.
    fn draw_until(
        &mut self,
        what: &str,
        limit: Duration,
        holds: impl Fn(&Self) -> bool,
    ) -> Result<()> {
        let (since, mut asked) = (Instant::now(), None::<Instant>);
        loop {
            self.graph.draw_graph(&self.clients.timeline(), self.clients.now());
            if asked.is_none_or(|it| it.elapsed() >= POLL_INTERVAL) {
                if holds(self) {
                    return Ok(());
                }
                asked = Some(Instant::now());
            }
            ensure!(
                since.elapsed() < limit,
                "{what}: not within {} s; {}",
                limit.as_secs(),
                self.last_log_lines()
            );
            std::thread::sleep(FRAME_INTERVAL);
        }
    }

    fn draw_for(&mut self, time: Duration) -> Result<()> {
        let until = Instant::now() + time;
        self.draw_until("time passes", 2 * time, |_| Instant::now() >= until)
    }

    fn print_message(&mut self, text: &str) {
        self.graph.hide_graph();
        self.lab.log_progress(text);
    }

    /// The last log lines of all agents.
    fn last_log_lines(&self) -> String {
        self.site.hosts().iter().map(last_log_line).collect::<Vec<_>>().join("; ")
    }
}

fn guest_args(number: u8) -> Result<QemuArgs> {
    let (card, address) = vm_network(number);
    Ok(QemuArgs::new(&GuestImage::small()?, accel::choose_accel().accel)
        .memory_mib(MEMORY_MIB)
        .vcpus(1)
        .append_kernel_arg("no_timer_check")
        .append_kernel_arg(&address)
        .add_args(&card.each_ref().map(String::as_str)))
}

fn last_log_line(host: &SiteHost) -> String {
    let log = std::fs::read_to_string(host.agent_log()).unwrap_or_default();
    format!(
        "the last log line of {}'s agent: {}",
        host.name(),
        log.lines().last().unwrap_or("none")
    )
}

fn consensus_name(agreement: ConsensusKind) -> &'static str {
    match agreement {
        ConsensusKind::Embedded => "raft in the agents",
        ConsensusKind::Etcd => "etcd",
    }
}

fn print_table(rounds: &[RoundResult]) {
    println!();
    println!(
        "consensus                clients waited   protected again after   acknowledged   lost"
    );
    for RoundResult { agreement, gap, protected, outcome } in rounds {
        println!(
            "{:22} {:12.1} s {:21.1} s {:14} {:6}",
            consensus_name(*agreement),
            gap.as_secs_f64(),
            protected.as_secs_f64(),
            outcome.acknowledged,
            outcome.lost
        );
    }
    println!();
    let [raft, etcd] = [ConsensusKind::Embedded, ConsensusKind::Etcd]
        .map(|kind| kind.default_lease().as_secs_f64());
    println!("Seconds from the kill; leases are of {raft} s, and with etcd of {etcd} s.");
}
