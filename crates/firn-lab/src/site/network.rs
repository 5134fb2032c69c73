//! Namespaces, cables, and what runs in them. By `ip`, as anybody would do it.

use std::fmt;
use std::fs::{self, File};
use std::net::Ipv4Addr;
use std::os::fd::AsFd as _;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::lab::{Lab, wait_for};

/// What a host's agent connects its VMs to, and what that is in.
pub(super) const TAP: &str = "tap0";
const BRIDGE: &str = "bridge";
const CABLE: &str = "cable";

/// How long a process may take to end that was killed.
const PATIENCE: Duration = Duration::from_secs(30);

/// The address of a host.
pub(super) fn host_address(number: usize) -> Ipv4Addr {
    Ipv4Addr::new(10, 77, 0, number as u8 + 1)
}

/// The address of a VM. Those of hosts, and of the outside, are in networks of their own.
pub(super) fn vm_address(number: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 77, 1, number)
}

/// The namespaces of one site; they go with it, and all that runs in them before.
#[derive(Debug)]
pub(super) struct Network {
    name: String,
    namespaces: Arc<Namespaces>,
}

/// In the order of the hosts; the last is outside.
#[derive(Debug)]
struct Namespaces(Vec<String>);

impl Network {
    /// Makes them, with their cables.
    pub(super) fn lay(lab: &Lab, hosts: &[&str]) -> Result<Self> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("firn-{}-{number}", std::process::id());
        let all = hosts.iter().chain(&["outside"]).map(|host| format!("{name}-{host}")).collect();
        let namespaces = Arc::new(Namespaces(all));
        let weak = Arc::downgrade(&namespaces);
        lab.when_interrupted(move || {
            if let Some(namespaces) = weak.upgrade() {
                namespaces.remove();
            }
        });
        let network = Self { name, namespaces };
        network.cabled(hosts).context(
            "hosts are network namespaces, which this machine did not let us make: run it as root, where there is `ip netns`",
        )?;
        Ok(network)
    }

    fn cabled(&self, hosts: &[&str]) -> Result<()> {
        let outside = self.outside();
        ip(&["netns", "add", outside])?;
        within(outside, &["link", "set", "lo", "up"])?;
        within(outside, &["link", "add", BRIDGE, "type", "bridge"])?;
        within(outside, &["address", "add", "10.77.0.254/24", "dev", BRIDGE])?;
        within(outside, &["address", "add", "10.77.1.254/24", "dev", BRIDGE])?;
        within(outside, &["link", "set", BRIDGE, "up"])?;
        (0..hosts.len()).try_for_each(|host| self.host(host))
    }

    /// A host, with its end of a cable in a bridge, beside a tap device for its VMs.
    fn host(&self, number: usize) -> Result<()> {
        let (space, outside, port) = (self.namespace(number), self.outside(), port(number));
        let address = format!("{}/24", host_address(number));
        ip(&["netns", "add", &space])?;
        within(&space, &["link", "set", "lo", "up"])?;
        let ends = ["type", "veth", "peer", "name", CABLE, "netns", &space];
        within(outside, &[&["link", "add", &port][..], &ends].concat())?;
        within(outside, &["link", "set", &port, "master", BRIDGE, "up"])?;
        within(&space, &["link", "add", BRIDGE, "type", "bridge"])?;
        within(&space, &["tuntap", "add", "dev", TAP, "mode", "tap"])?;
        for device in [CABLE, TAP] {
            within(&space, &["link", "set", device, "master", BRIDGE, "up"])?;
        }
        within(&space, &["address", "add", &address, "dev", BRIDGE])?;
        within(&space, &["link", "set", BRIDGE, "up"])
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn namespace(&self, host: usize) -> String {
        self.namespaces.0[host].clone()
    }

    pub(super) fn outside(&self) -> &str {
        self.namespaces.0.last().map_or("", String::as_str)
    }

    /// Cuts a host's cable, or mends it.
    pub(super) fn connect(&self, host: usize, is_on: bool) -> Result<()> {
        within(self.outside(), &["link", "set", &port(host), if is_on { "up" } else { "down" }])
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        self.namespaces.remove();
    }
}

impl Namespaces {
    fn remove(&self) {
        // What can't be made or removed is told where it matters.
        for space in &self.0 {
            let _ = kill_all(space);
        }
        for space in &self.0 {
            let _ = ip(&["netns", "delete", space]);
        }
    }
}

fn port(host: usize) -> String {
    format!("to{host}")
}

fn ip(words: &[&str]) -> Result<String> {
    let done = Command::new("ip").args(words).output().context("starting ip")?;
    if !done.status.success() {
        let said = String::from_utf8_lossy(&done.stderr);
        bail!("ip {}: {}", words.join(" "), said.trim());
    }
    Ok(String::from_utf8_lossy(&done.stdout).into_owned())
}

/// The same inside a namespace.
fn within(space: &str, words: &[&str]) -> Result<()> {
    ip(&[&["-n", space], words].concat()).map(drop)
}

/// Something that runs at a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Process {
    /// Its number.
    pub pid: i32,
    /// Its program.
    pub name: String,
}

impl fmt::Display for Process {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.pid, self.name)
    }
}

/// What runs in a namespace.
pub(super) fn processes(space: &str) -> Result<Vec<Process>> {
    let pids = ip(&["netns", "pids", space])?;
    let pids = pids.lines().filter_map(|line| line.trim().parse().ok());
    let named = |pid: i32| Process { pid, name: program(pid) };
    Ok(pids.map(named).collect())
}

/// The program that a process runs, and what it does if that is one of Firn's.
fn program(pid: i32) -> String {
    let line = fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let mut words = line.split('\0').filter(|word| !word.is_empty());
    let first = words.next().unwrap_or("?");
    let name = first.rsplit('/').next().unwrap_or(first);
    let verb = words.next().filter(|word| name.starts_with("firn") && !word.starts_with('-'));
    let verb = verb.map(|it| format!(" {}", it.trim_start_matches('_')));
    format!("{name}{}", verb.unwrap_or_default())
}

/// Ends everything in a namespace at once; again, until nothing is there: somebody may have been starting something.
pub(super) fn kill_all(space: &str) -> Result<()> {
    wait_for("the end of all processes", PATIENCE, || {
        let left = processes(space)?;
        for Process { pid, .. } in &left {
            match kill(Pid::from_raw(*pid), Signal::SIGKILL) {
                Ok(()) | Err(Errno::ESRCH) => {}
                Err(error) => bail!("ending process {pid}: {error}"),
            }
        }
        Ok(left.is_empty().then_some(()))
    })
}

/// The way into a namespace for one thread.
#[derive(Clone, Debug)]
pub struct Inside(Arc<File>);

impl Inside {
    pub(super) fn of(space: &str) -> Result<Self> {
        let path = format!("/run/netns/{space}");
        let file = File::open(&path).with_context(|| format!("opening {path}"))?;
        Ok(Self(Arc::new(file)))
    }

    /// Takes the calling thread there, for ever. Sockets that it makes from now on are of that network.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn enter(&self) -> Result<()> {
        let network = Some(LinkNameSpaceType::Network);
        Ok(move_into_link_name_space(self.0.as_fd(), network)?)
    }
}
