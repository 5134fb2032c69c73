//! `firn-lab demo-cluster`: what `make demo-cluster` shows.
//!
//! Three hosts, each a network namespace with an agent, agree who may run what. A VM with Redis runs on the first, protected by the second, and
//! clients outside write to it and read. Then every process of the first host is killed, and nobody does anything: the VM goes on at the second,
//! with all that was acknowledged to a client, and is protected again, by the third.
//!
//! ```text
//!   clients --- lan ---+--- a: firn-agent, VM "db" ------ epochs ---> b: firn-agent, standby         c: firn-agent
//!                      |        X   (SIGKILL)
//!                      +--------------------------------------------- b: VM "db" --- epochs -------> c: standby
//! ```

mod clients;
mod graph;
mod journal;

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use serde_json::Value;

use self::clients::{Clients, Outcome};
use self::graph::Graph;
use crate::guest::{GuestImage, QemuArgs, accel};
use crate::lab::Lab;
use crate::site::{Agreement, Host, Plan, Site, vm_network};

const HOSTS: [&str; 3] = ["a", "b", "c"];
const VM: &str = "db";
const REDIS: u16 = 6379;
/// The VM's address is the network's with this number.
const NUMBER: u8 = 15;
const MEMORY_MIB: u32 = 256;
const LEASE: Duration = Duration::from_secs(4);
/// How long clients work before the kill, and after the VM is protected again.
const STEADY: Duration = Duration::from_secs(5);
const BOOT: Duration = Duration::from_secs(180);
const LIMIT: Duration = Duration::from_secs(180);
/// How often the graph is drawn, and hosts are asked what is agreed on.
const FRAME: Duration = Duration::from_millis(100);
const LOOK: Duration = Duration::from_millis(500);

/// What one round was like.
struct Round {
    agreement: Agreement,
    gap: Duration,
    protected: Duration,
    outcome: Outcome,
}

/// Runs it by each of these, and prints the table.
///
/// # Errors
/// If hosts can't be made, the service doesn't come back, or something that was acknowledged is lost.
pub fn run(lab: &Lab, agreements: &[Agreement]) -> Result<()> {
    let accel = accel::decide();
    lab.say(&format!("guests run by {}: {}", accel.accel, accel.why));
    let rounds = agreements.iter().map(|it| Show::start(lab, *it)?.play());
    let rounds = rounds.collect::<Result<Vec<Round>>>()?;
    print(&rounds);
    Ok(())
}

/// One round.
struct Show<'a> {
    lab: &'a Lab,
    agreement: Agreement,
    site: Site,
    clients: Clients,
    graph: Graph,
}

impl<'a> Show<'a> {
    fn start(lab: &'a Lab, agreement: Agreement) -> Result<Self> {
        let accel = accel::decide();
        let site =
            Site::build(lab, &Plan { hosts: &HOSTS, agreement: Some(agreement), lease: LEASE })?;
        lab.say(&format!("hosts a, b and c agree by {}", name(agreement)));
        let (card, address) = vm_network(NUMBER);
        let card = card.each_ref().map(String::as_str);
        let guest = QemuArgs::new(&GuestImage::small()?, accel.accel)
            .memory_mib(MEMORY_MIB)
            .vcpus(1)
            .append("no_timer_check")
            .append(&address)
            .more(&card);
        site.host(0).firn().run(VM, &guest)?;
        let address = SocketAddr::from((Site::vm_address(NUMBER), REDIS));
        let clients = Clients::start(address, site.outside()?, BOOT)?;
        let mut show = Self { lab, agreement, site, clients, graph: Graph::new() };
        show.say(&format!(
            "a VM of {MEMORY_MIB} MiB runs at a, with Redis; clients outside write to it and read"
        ));
        Ok(show)
    }

    fn play(mut self) -> Result<Round> {
        self.go_on(STEADY / 2)?;
        self.site.host(0).firn().call("protect", &[VM, "--backup", "b"])?;
        self.until("b is recorded as its backup", LIMIT, |show| show.is_at(0, "a", "b"))?;
        self.say(
            "firn protect db --backup b: what db sends is held until b has the state that sent it",
        );
        self.go_on(STEADY)?;
        let killed = self.kill()?;
        self.until("the service is back", LIMIT, |show| {
            show.clients.timeline().first_after(killed + LEASE / 4).is_some()
        })?;
        let gap = self.gap(killed);
        self.say(&format!(
            "the VM answers again, from b: nobody said so. Clients waited for {:.1} s",
            gap.as_secs_f64()
        ));
        self.until("it is protected by c", LIMIT, |show| show.is_at(1, "b", "c"))?;
        let protected = self.clients.now() - killed;
        self.say("protected again, by c");
        self.go_on(STEADY)?;
        self.end(killed, protected)
    }

    /// Everything of host a.
    fn kill(&mut self) -> Result<Duration> {
        let processes = self.site.host(0).processes()?;
        let all: Vec<String> = processes.iter().map(ToString::to_string).collect();
        let killed = self.clients.now();
        self.site.host(0).kill()?;
        self.say(&format!("host a is lost: kill -9 {}", all.join(" ")));
        Ok(killed)
    }

    /// The longest time without an answer since then.
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

    /// Whether hosts have agreed on that, as this one says.
    fn is_at(&self, asked: usize, primary: &str, backup: &str) -> bool {
        let begins = |value: &Value, name: &str| {
            value.as_str().is_some_and(|it| it.split(' ').next() == Some(name))
        };
        self.site.host(asked).cluster(VM).is_some_and(|cluster| {
            let place = &cluster["vms"][0];
            begins(&place["primary"], primary) && begins(&place["backup"], backup)
        })
    }

    /// Draws until something holds, which is asked for now and then.
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

    /// What agents said last.
    fn logs(&self) -> String {
        self.site.hosts().iter().map(last_words).collect::<Vec<_>>().join("; ")
    }
}

fn last_words(host: &Host) -> String {
    let log = std::fs::read_to_string(host.log()).unwrap_or_default();
    format!("the agent of {} said last: {}", host.name(), log.lines().last().unwrap_or("nothing"))
}

fn name(agreement: Agreement) -> &'static str {
    match agreement {
        Agreement::Embedded => "their agents' own raft",
        Agreement::Etcd => "etcd",
    }
}

fn print(rounds: &[Round]) {
    println!();
    println!(
        "hosts agree by           clients waited   protected again after   acknowledged   lost"
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
