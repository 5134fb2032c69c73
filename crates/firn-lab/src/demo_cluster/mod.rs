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

use self::clients::{Clients, Outcome, Servers};
use self::graph::Graph;
use crate::guest::{GuestImage, QemuArgs, accel};
use crate::lab::Lab;
use crate::site::{Agreement, Host, Plan, Site, vm_network};

const HOSTS: [&str; 3] = ["a", "b", "c"];
/// The VMs, each on the host with the same index; their addresses end in these numbers.
const VMS: [(&str, u8); 2] = [("db", 15), ("replica", 16)];
const CLUSTER: &str = "shop";
/// The host with the standbys.
const KEEPER: usize = 2;
const REDIS: u16 = 6379;
const MEMORY_MIB: u32 = 256;
const LEASE: Duration = Duration::from_secs(4);
/// How long clients work before the kill, and after the VMs are protected again.
const STEADY: Duration = Duration::from_secs(5);
const BOOT: Duration = Duration::from_secs(180);
const LIMIT: Duration = Duration::from_secs(180);
/// How often the graph is drawn, and how often a host is asked for its record.
const FRAME: Duration = Duration::from_millis(100);
const LOOK: Duration = Duration::from_millis(500);

/// The result of one round.
struct Round {
    agreement: Agreement,
    gap: Duration,
    protected: Duration,
    outcome: Outcome,
}

/// Runs the demo once with each kind of consensus, and prints the table.
///
/// # Errors
/// If hosts can't be created, the service doesn't recover, or an acknowledged write is lost.
pub fn run(lab: &Lab, agreements: &[Agreement]) -> Result<()> {
    let accel = accel::decide();
    lab.say(&format!("guests run by {}: {}", accel.accel, accel.why));
    let rounds = agreements.iter().map(|it| Show::start(lab, *it)?.play());
    let rounds = rounds.collect::<Result<Vec<Round>>>()?;
    print(&rounds);
    Ok(())
}

/// One round of the demo.
struct Show<'a> {
    lab: &'a Lab,
    agreement: Agreement,
    site: Site,
    clients: Clients,
    graph: Graph,
}

impl<'a> Show<'a> {
    fn start(lab: &'a Lab, agreement: Agreement) -> Result<Self> {
        let site =
            Site::build(lab, &Plan { hosts: &HOSTS, agreement: Some(agreement), lease: LEASE })?;
        lab.say(&format!("hosts a, b and c use {} for consensus", name(agreement)));
        for (host, (vm, number)) in VMS.into_iter().enumerate() {
            site.host(host).firn().run(vm, &guest(number)?)?;
        }
        let [primary, replica] =
            VMS.map(|(_, number)| SocketAddr::from((Site::vm_address(number), REDIS)));
        let clients = Clients::start(Servers { primary, replica }, site.outside()?, BOOT)?;
        let mut show = Self { lab, agreement, site, clients, graph: Graph::new() };
        show.say(&format!(
            "two VMs of {MEMORY_MIB} MiB run Redis: at a, and its replica at b; clients outside write to the one and read from the other"
        ));
        Ok(show)
    }

    fn play(mut self) -> Result<Round> {
        self.go_on(STEADY / 2)?;
        let vms: Vec<String> =
            VMS.iter().zip(HOSTS).map(|((vm, _), host)| format!("{vm}@{host}")).collect();
        let keeper = self.site.host(KEEPER).firn();
        keeper.call("cluster", &["create", CLUSTER, "--vm", &vms[0], "--vm", &vms[1]])?;
        keeper.call("cluster", &["protect", CLUSTER])?;
        self.until("c is recorded as their backup", LIMIT, |show| show.is_at("backup", "c"))?;
        self.say(
            "firn cluster protect shop: what they send is held until c has the states of both that sent it",
        );
        self.go_on(STEADY)?;
        let killed = self.kill()?;
        self.until("the service is back", LIMIT, |show| {
            show.clients.timeline().first_after(killed + LEASE / 4).is_some()
        })?;
        let gap = self.gap(killed);
        self.say(&format!(
            "both VMs answer again, from c: nobody said so. Clients waited for {:.1} s",
            gap.as_secs_f64()
        ));
        self.until("they are protected by b", LIMIT, |show| {
            show.is_at("primary", "c") && show.is_at("backup", "b")
        })?;
        let protected = self.clients.now() - killed;
        self.say("protected again, by b");
        self.go_on(STEADY)?;
        self.end(killed, protected)
    }

    /// Kills every process of host a, and returns the time of the kill.
    fn kill(&mut self) -> Result<Duration> {
        let processes = self.site.host(0).processes()?;
        let all: Vec<String> = processes.iter().map(ToString::to_string).collect();
        let killed = self.clients.now();
        self.site.host(0).kill()?;
        self.say(&format!("host a is lost: kill -9 {}", all.join(" ")));
        Ok(killed)
    }

    /// The longest time without a reply since the kill.
    fn gap(&self, killed: Duration) -> Duration {
        let timeline = self.clients.timeline();
        let before = timeline.replies().iter().rev().find(|it| **it <= killed);
        timeline.longest_gap(before.copied().unwrap_or(killed)..self.clients.now())
    }

    fn end(mut self, killed: Duration, protected: Duration) -> Result<Round> {
        let gap = self.gap(killed);
        self.graph.hide();
        let outcome = self.clients.finish()?;
        let Outcome { acknowledged, lost } = outcome;
        self.lab.say(&format!("{acknowledged} writes were acknowledged, {lost} of them are gone"));
        ensure!(lost == 0, "{lost} of {acknowledged} acknowledged writes are gone");
        Ok(Round { agreement: self.agreement, gap, protected, outcome })
    }

    /// Whether the record at host c names a host in this role for all VMs.
    fn is_at(&self, what: &str, host: &str) -> bool {
        let is_it =
            |vm: &Value| vm[what].as_str().is_some_and(|it| it.split(' ').next() == Some(host));
        let record = self.site.host(KEEPER).cluster(CLUSTER);
        let vms = record.as_ref().and_then(|it| it["vms"].as_array());
        vms.is_some_and(|vms| vms.len() == VMS.len() && vms.iter().all(is_it))
    }

    /// Draws the graph until a condition holds, which it checks at intervals.
    fn until(&mut self, what: &str, limit: Duration, holds: impl Fn(&Self) -> bool) -> Result<()> {
        let (since, mut asked) = (Instant::now(), None::<Instant>);
        loop {
            self.graph.show(&self.clients.timeline(), self.clients.now());
            if asked.is_none_or(|it| it.elapsed() >= LOOK) {
                if holds(self) {
                    return Ok(());
                }
                asked = Some(Instant::now());
            }
            ensure!(
                since.elapsed() < limit,
                "{what}: not within {} s; {}",
                limit.as_secs(),
                self.logs()
            );
            std::thread::sleep(FRAME);
        }
    }

    fn go_on(&mut self, time: Duration) -> Result<()> {
        let until = Instant::now() + time;
        self.until("time passes", 2 * time, |_| Instant::now() >= until)
    }

    fn say(&mut self, text: &str) {
        self.graph.hide();
        self.lab.say(text);
    }

    /// The last log lines of all agents.
    fn logs(&self) -> String {
        self.site.hosts().iter().map(last_words).collect::<Vec<_>>().join("; ")
    }
}

fn guest(number: u8) -> Result<QemuArgs> {
    let (card, address) = vm_network(number);
    Ok(QemuArgs::new(&GuestImage::small()?, accel::decide().accel)
        .memory_mib(MEMORY_MIB)
        .vcpus(1)
        .append("no_timer_check")
        .append(&address)
        .more(&card.each_ref().map(String::as_str)))
}

fn last_words(host: &Host) -> String {
    let log = std::fs::read_to_string(host.log()).unwrap_or_default();
    format!("the last log line of {}'s agent: {}", host.name(), log.lines().last().unwrap_or("none"))
}

fn name(agreement: Agreement) -> &'static str {
    match agreement {
        Agreement::Embedded => "raft in the agents",
        Agreement::Etcd => "etcd",
    }
}

fn print(rounds: &[Round]) {
    println!();
    println!(
        "consensus                clients waited   protected again after   acknowledged   lost"
    );
    for Round { agreement, gap, protected, outcome } in rounds {
        println!(
            "{:22} {:12.1} s {:21.1} s {:14} {:6}",
            name(*agreement),
            gap.as_secs_f64(),
            protected.as_secs_f64(),
            outcome.acknowledged,
            outcome.lost
        );
    }
    println!();
    println!("Seconds from the kill; leases are of {} s.", LEASE.as_secs());
}
