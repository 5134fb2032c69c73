//! Random sequences of commands on two QEMUs of one command line each, against a model of which VMs must be there.
//!
//! ```text
//!   a QEMU of the user's        attach, detach, power cycle by its own command line
//!   a VM of Firn's              checkpoint, stop
//!   an image                    restore beside whatever runs, under a name of its own
//! ```
//!
//! After each command the VMs that `firn ls` shows are those of the model, and no process has ended that was not named. A sequence
//! follows from its number: `FIRN_SEED=N` replays one, `FIRN_RUNS=N` runs as many.

use std::collections::BTreeMap;

use crate::own_qemu::OwnQemu;
use crate::session::{Session, eventually};
use std::time::Duration;

const STEPS: usize = 12;
const RUNS: u64 = 2;
/// VMs of Firn's at once, so that a sequence does not take more memory than it needs.
const VMS_MAX: usize = 4;
const PATIENCE: Duration = Duration::from_secs(120);

/// A generator of numbers (xorshift64*); enough to choose commands.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) as usize % end
    }
}

/// One of the user's QEMUs, with a session directory of its own for its monitor and its log.
struct Original {
    place: Session,
    qemu: OwnQemu,
    /// The VM that Firn has of it.
    attached: Option<String>,
}

impl Original {
    fn start() -> Self {
        let place = Session::new();
        let qemu = OwnQemu::start(&place, &["-pidfile", "own.pid", "-serial", "file:serial"]);
        Self { place, qemu, attached: None }
    }
}

struct Sequence {
    numbers: Numbers,
    session: Session,
    originals: Vec<Original>,
    /// VMs of Firn's, and their processes.
    vms: BTreeMap<String, i64>,
    images: Vec<String>,
    names: usize,
    done: Vec<String>,
}

impl Sequence {
    fn new(seed: u64) -> Self {
        let originals = (0..2).map(|_| Original::start()).collect();
        let numbers = Numbers(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
        let (vms, images, done) = Default::default();
        Self { numbers, session: Session::new(), originals, vms, images, names: 0, done }
    }

    fn name(&mut self) -> String {
        self.names += 1;
        format!("vm{}", self.names)
    }

    /// One of the VMs of Firn's.
    fn any_vm(&mut self) -> Option<String> {
        let names: Vec<_> = self.vms.keys().cloned().collect();
        (!names.is_empty()).then(|| names[self.numbers.below(names.len())].clone())
    }

    fn step(&mut self) {
        let which = self.numbers.below(self.originals.len());
        match self.numbers.below(6) {
            0 => self.attach(which),
            1 => self.checkpoint(),
            2 => self.restore(),
            3 => self.stop(),
            4 => self.detach(which),
            _ => self.power_cycle(which),
        }
        self.check();
    }

    fn attach(&mut self, which: usize) {
        let name = self.name();
        self.done.push(format!("attach {which} as {name}"));
        let original = &mut self.originals[which];
        let answer = original.qemu.try_attach(&self.session, &name);
        if original.attached.is_some() {
            answer.fails(4, "already");
            return;
        }
        answer.succeeds();
        original.attached = Some(name.clone());
        self.vms.insert(name, original.qemu.pid().parse().unwrap());
    }

    fn checkpoint(&mut self) {
        let Some(name) = self.any_vm() else { return };
        let image = format!("{}.firn", self.name());
        self.done.push(format!("checkpoint {name} to {image}"));
        self.session.firn(&["checkpoint", &name, "-o", &image]).succeeds();
        self.images.push(image);
    }

    fn restore(&mut self) {
        if self.images.is_empty() || self.vms.len() >= VMS_MAX {
            return;
        }
        let image = self.images[self.numbers.below(self.images.len())].clone();
        let name = self.name();
        self.done.push(format!("restore {image} as {name}"));
        let restored = self.session.json(&["restore", &image, "--name", &name, "--wait"]);
        self.vms.insert(name, restored["pid"].as_i64().unwrap());
    }

    fn stop(&mut self) {
        let Some(name) = self.any_vm() else { return };
        self.done.push(format!("stop {name}"));
        self.session.firn(&["stop", &name]).succeeds();
        self.vms.remove(&name);
        let of_it = |original: &&mut Original| original.attached.as_ref() == Some(&name);
        if let Some(original) = self.originals.iter_mut().find(of_it) {
            assert_eq!(original.qemu.ended().code(), Some(0), "it was killed");
            original.qemu = OwnQemu::again(&original.place, &original.qemu);
            original.attached = None;
        }
    }

    fn detach(&mut self, which: usize) {
        let Some(name) = self.originals[which].attached.take() else { return };
        self.done.push(format!("detach {name}"));
        self.session.firn(&["detach", &name]).succeeds();
        self.vms.remove(&name);
    }

    /// The user ends a QEMU, and starts the same command line. What Firn had of the first has ended.
    fn power_cycle(&mut self, which: usize) {
        self.done.push(format!("power cycle {which}"));
        let original = &mut self.originals[which];
        original.qemu.kill();
        original.qemu = OwnQemu::again(&original.place, &original.qemu);
        let Some(name) = original.attached.take() else { return };
        let session = &self.session;
        eventually("its end", PATIENCE, || session.status(&name)["state"] == "ended");
        session.firn(&["rm", &name]).succeeds();
        self.vms.remove(&name);
    }

    /// What must be true whatever has been done.
    fn check(&mut self) {
        let mut listed: Vec<String> = self.session.ls().into_iter().map(|(name, _)| name).collect();
        listed.sort();
        assert_eq!(listed, self.vms.keys().cloned().collect::<Vec<_>>());
        for (name, pid) in &self.vms {
            let status = self.session.status(name);
            assert_eq!(status["state"], "running", "{status}");
            assert_eq!(status["pid"].as_i64(), Some(*pid), "{status}");
        }
        for original in &mut self.originals {
            assert!(original.qemu.is_running(), "one of the user's QEMUs has ended");
            assert_eq!(original.qemu.listener(), original.qemu.pid(), "its socket is another's");
        }
    }
}

/// Says which sequence failed, and where it was.
impl Drop for Sequence {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("after: {}", self.done.join("; "));
        }
    }
}

#[test]
fn no_vm_but_the_named_one_ends() {
    let number = |name: &str| std::env::var(name).ok()?.parse::<u64>().ok();
    let seeds = match number("FIRN_SEED") {
        Some(seed) => seed..seed + 1,
        None => 1..1 + number("FIRN_RUNS").unwrap_or(RUNS),
    };
    for seed in seeds {
        eprintln!("FIRN_SEED={seed}");
        let mut sequence = Sequence::new(seed);
        (0..STEPS).for_each(|_| sequence.step());
    }
}
