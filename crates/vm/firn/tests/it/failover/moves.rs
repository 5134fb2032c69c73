//! Planned moves: a VM goes to its backup and back while clients ask it; also if a process dies at any step.

use std::time::{Duration, Instant};

use serde_json::Value;

use super::{HOSTS, Hosts, Kind, PATIENCE, place};
use crate::agent::Agent;
use crate::parts::part_of;
use crate::session::{Session, eventually};

/// One way to disturb a move: a fault point in one of four processes.
#[derive(Clone, Copy, Debug)]
enum Victim {
    /// The supervisor of the VM, at `a`.
    Supervisor,
    /// The supervisor of the standby, at `b`.
    Standby,
    /// The agent of `a`.
    Agent,
    /// The agent of `b`.
    AgentOfBackup,
}

impl Hosts {
    fn sessions(&self) -> [&Session; 3] {
        [&self.vm.session, &self.others[0], &self.others[1]]
    }

    fn faulty(victim: Victim, point: &str) -> Self {
        let (supervisor, agents) = match victim {
            Victim::Supervisor => (Some(point), [None; 3]),
            Victim::Agent => (None, [Some(point), None, None]),
            Victim::Standby | Victim::AgentOfBackup => (None, [None, Some(point), None]),
        };
        Self::start_faulty(
            Kind::Embedded,
            |uplink| format!("firn,id=net,uplink={uplink}"),
            supervisor,
            agents,
        )
    }

    /// Starts the agent of a host again, if it has died.
    fn revive(&mut self, host: usize) {
        let program = Session::program_beside("firn-agent");
        let command = self.site.command(host, &program);
        self.agents[host].kill();
        self.agents[host] = Agent::spawn(command, self.sessions()[host]);
    }

    /// The hosts that run the VM: its hypervisor is there, and it is no standby.
    fn running(&self) -> Vec<&'static str> {
        let runs =
            |session: &&Session| matches!(&state(session)[..], "running" | "protected" | "paused");
        let pairs = HOSTS.into_iter().zip(self.sessions());
        pairs.filter(|(_, session)| runs(session)).map(|(host, _)| host).collect()
    }

    /// Everything that the guest has answered was heard, once, and nothing was undone.
    #[track_caller]
    fn nothing_is_lost(&self) {
        let unheard = self.outside.unheard();
        let heard = self.outside.heard();
        assert!(heard.undone.is_empty(), "undone: {:?}", heard.undone);
        assert_eq!(heard.repeated, 0, "answers came twice");
        // The newest may still be on their way.
        let old: Vec<u64> = unheard.into_iter().filter(|it| it + 500 < heard.newest).collect();
        assert!(old.is_empty(), "never heard: {old:?} of {}", heard.newest);
    }
}

/// The state of the VM at a host; empty if the host has none.
fn state(session: &Session) -> String {
    let status = session.firn(&["--json", "status", "web"]).out;
    let status: Value = serde_json::from_str(&status).unwrap_or_default();
    status["state"].as_str().unwrap_or_default().to_owned()
}

fn move_to(by: &Session, host: &str) -> Value {
    let moved = by.firn(&["move", "web", "--to", host, "--json"]);
    eprintln!("{}{}", moved.out, moved.err);
    assert_eq!(moved.code, 0);
    serde_json::from_str(&moved.out).unwrap()
}

#[test]
fn a_vm_moves_to_and_fro_and_nothing_is_lost() {
    let hosts = Hosts::start(Kind::Embedded);
    hosts.protect();
    let [a, b, c] = hosts.sessions();
    hosts.outside.longest_gap();
    // The command may be given at the host that runs it, at the one that will, and at a third.
    for (generation, (by, to)) in (1_u64..).zip([(a, "b"), (a, "a"), (c, "b"), (b, "a")]) {
        let report = move_to(by, to);
        let other = if to == "a" { "b" } else { "a" };
        assert_eq!((&report["to"], &report["from"]), (&to.into(), &other.into()));
        assert_eq!(report["generation"], generation);
        assert_eq!(report["backup"], other, "it is protected again, by its old host");
        hosts.outside.is_answered(50);
        eprintln!("the longest wait for an answer: {:?}", hosts.outside.longest_gap());
        hosts.nothing_is_lost();
        eventually("it runs once", PATIENCE, || hosts.running() == [to]);
    }
    // What can't be moved is refused, and runs on.
    let refused = a.firn(&["move", "web", "--to", "c"]);
    assert_eq!(refused.code, 5, "{}", refused.err);
    assert!(refused.err.contains("the backup of web is host b"), "{}", refused.err);
    let refused = a.firn(&["move", "web", "--to", "a"]);
    assert_eq!(refused.code, 2, "{}", refused.err);
    let refused = a.firn(&["move", "other", "--to", "b"]);
    assert_eq!(refused.code, 3, "{}", refused.err);
    hosts.outside.is_answered(50);
    hosts.nothing_is_lost();
}

#[test]
fn a_host_is_drained_and_has_no_standbys_until_that_ends() {
    let hosts = Hosts::start(Kind::Embedded);
    let [a, b, c] = hosts.sessions();
    let refused = c.firn(&["agent", "drain", "a"]);
    assert_eq!(refused.code, 5, "{}", refused.err);
    assert!(refused.err.contains("web (running, not protected)"), "{}", refused.err);
    hosts.protect();
    let drained = c.json(&["agent", "drain", "a"]);
    assert_eq!((&drained["moved"][0]["vm"], &drained["drained"]), (&"web".into(), &true.into()));
    assert_eq!(a.json(&["agent", "status"])["drained"], true);
    eventually("another host protects it", PATIENCE, || {
        place(b)["backup"].as_str().is_some_and(|it| it.starts_with("c "))
            && b.status("web")["state"] == "protected"
    });
    eventually("nothing of it is left", PATIENCE, || hosts.running() == ["b"]);
    hosts.outside.is_answered(50);
    hosts.nothing_is_lost();
    b.firn(&["release", "web"]).succeeds();
    eventually("it has no record", PATIENCE, || place(b).is_null());
    let refused = b.firn(&["protect", "web", "--backup", "a"]);
    assert_eq!(refused.code, 5, "{}", refused.err);
    assert!(refused.err.contains("drained"), "{}", refused.err);
    c.firn(&["agent", "undrain", "a"]).succeeds();
    eventually("it is protected", PATIENCE, || {
        b.firn(&["protect", "web", "--backup", "a"]).code == 0
    });
}

/// A process dies at this point of a move. The VM runs once, is heard, and nothing was undone.
fn a_process_dies(victim: Victim, point: &str) {
    eprintln!("{victim:?} dies at {point}");
    let mut hosts = Hosts::faulty(victim, point);
    hosts.protect();
    let since = Instant::now();
    let moved = hosts.others[1].firn(&["move", "web", "--to", "b"]);
    eprintln!("{} {}{} after {:?}", moved.code, moved.out, moved.err, since.elapsed());
    hosts.outside.is_answered(50);
    eprintln!("{victim:?} at {point}: it is heard after {:?}", since.elapsed());
    match victim {
        Victim::Agent => hosts.revive(0),
        Victim::AgentOfBackup | Victim::Standby => hosts.revive(1),
        Victim::Supervisor => {}
    }
    eventually("it runs once", PATIENCE, || hosts.running().len() == 1);
    eventually("it is protected again", PATIENCE, || {
        let at = hosts.running();
        let session = HOSTS.into_iter().zip(hosts.sessions()).find(|(host, _)| at == [*host]);
        session.is_some_and(|(_, session)| {
            state(session) == "protected" && place(session)["backup"].is_string()
        })
    });
    hosts.outside.is_answered(50);
    std::thread::sleep(Duration::from_millis(300));
    let heard = hosts.outside.heard();
    assert!(heard.undone.is_empty(), "{:?}", heard.undone);
}

#[test]
fn the_supervisor_of_the_vm_dies_in_a_move() {
    for point in part_of(["move.paused", "move.committed"]) {
        a_process_dies(Victim::Supervisor, point);
    }
}

#[test]
fn the_supervisor_of_the_standby_dies_in_a_move() {
    for point in part_of(["failover.loaded", "failover.started", "failover.running"]) {
        a_process_dies(Victim::Standby, point);
    }
}

#[test]
fn the_agent_of_the_primary_dies_in_a_move() {
    for point in part_of(["move.running", "move.given-up", "move.recorded"]) {
        a_process_dies(Victim::Agent, point);
    }
}

#[test]
fn the_agent_of_the_backup_dies_in_a_move() {
    for point in part_of(["move.asked", "move.ran"]) {
        a_process_dies(Victim::AgentOfBackup, point);
    }
}
