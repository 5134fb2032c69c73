//! Power is cut at all hosts at once.

use std::fs;

use rustix::process::Signal;

use super::{Kind, PATIENCE, Site, configure, place};
use crate::agent::Agent;
use crate::session::{Session, eventually, signal};

/// Three hosts, and at `a` a machine without a guest, with a disk that Firn serves.
pub(super) struct Machines {
    sessions: [Session; 3],
    agents: Vec<Agent>,
    site: Site,
}

impl Machines {
    pub(super) fn start() -> Self {
        let (sessions, site) = ([Session::new(), Session::new(), Session::new()], Site::new());
        configure(Kind::Embedded, &site, sessions.each_ref());
        fs::write(sessions[0].path("d0.raw"), vec![0; 1 << 20]).unwrap();
        let mut machines = Self { sessions, agents: Vec::new(), site };
        machines.start_agents();
        machines
    }

    pub(super) fn session(&self, host: usize) -> &Session {
        &self.sessions[host]
    }

    pub(super) fn kill_agent(&mut self, host: usize) {
        self.agents[host].kill();
    }

    fn start_agents(&mut self) {
        let program = Session::program_beside("firn-agent");
        for (host, session) in self.sessions.iter().enumerate() {
            let mut command = self.site.command(host, &program);
            command.current_dir(session.path(""));
            self.agents.push(Agent::spawn(command, session));
        }
    }

    fn run(&self) {
        let drive = "file=d0.raw,format=raw,if=none,id=d0,firn=on";
        let machine = ["-M", "pc", "-m", "64", "-nodefaults", "-display", "none", "-drive", drive];
        let words = ["run", "web", "--quiet", "--", "qemu-system-x86_64", "-accel", "tcg"];
        let device = ["-device", "virtio-blk-pci,drive=d0"];
        self.sessions[0].firn(&[&words[..], &machine, &device].concat()).succeeds();
    }

    pub(super) fn protect(&self) {
        let a = &self.sessions[0];
        eventually("it is protected", PATIENCE, || {
            let protect = a.firn(&["protect", "web", "--backup", "b"]);
            eprintln!("{}{}", protect.out, protect.err);
            protect.code == 0
        });
        eventually("it has a backup", PATIENCE, || {
            place(a)["backup"].as_str().is_some_and(|it| it.starts_with("b "))
        });
    }

    /// All processes of all hosts end, and what was only in memory is gone: `/run` is.
    fn lose_power(&mut self) {
        for session in &self.sessions[..2] {
            let status = session.status("web");
            for pid in ["guard_pid", "supervisor_pid", "pid"] {
                signal(status[pid].as_i64().unwrap(), Signal::KILL);
            }
        }
        self.agents.drain(..).for_each(|mut agent| agent.kill());
        for session in &self.sessions {
            eventually("what was in memory is gone", PATIENCE, || {
                let _ = fs::remove_dir_all(session.runtime_dir());
                !session.runtime_dir().exists()
            });
        }
    }
}

/// Name, disk and standby are free again by two commands, each of which the one before names.
#[test]
fn after_a_power_cut_of_all_hosts_the_vm_can_be_started() {
    let mut machines = Machines::start();
    machines.run();
    machines.protect();
    let refused = machines.sessions[2].firn(&["cluster", "forget", "web"]);
    eprintln!("{}", refused.err);
    assert_eq!(refused.code, 5);
    machines.lose_power();
    machines.start_agents();
    machines.run();
    let [a, b, c] = &machines.sessions;
    eventually("the name is taken", PATIENCE, || {
        let refused = a.firn(&["protect", "web", "--backup", "b"]);
        eprintln!("{}", refused.err);
        refused.code == 4 && refused.err.contains("`firn cluster forget web`")
    });
    let mut rests = String::new();
    eventually("leases are over", PATIENCE, || {
        let forget = c.firn(&["cluster", "forget", "web"]);
        rests = format!("{}{}", forget.out, forget.err);
        eprintln!("{rests}");
        forget.code == 0
    });
    assert!(rests.contains("host a (") && rests.contains("has none of the VMs"), "{rests}");
    machines.protect();
    assert_eq!(a.status("web")["state"], "protected");
    assert!(b.path("web.d0.raw").exists(), "what the power cut left stays");
    assert!(b.path("web.d0.2.raw").exists());
}
