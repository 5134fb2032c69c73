//! Site network: namespaces, cables, and the processes in them, by the `ip` program.

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

/// Names of the tap device that an agent connects its VMs to, of the bridge with it, and of the
/// host's cable.
pub(super) const TAP: &str = "tap0";
const BRIDGE: &str = "bridge";
const CABLE: &str = "cable";

/// How long a killed process may take to end.
const KILL_TIMEOUT: Duration = Duration::from_secs(30);

/// The address of a host.
pub(super) fn host_address(number: usize) -> Ipv4Addr {
    Ipv4Addr::new(10, 77, 0, number as u8 + 1)
}

/// The address of a VM. Hosts, and the outside, have addresses in other networks.
pub(super) fn vm_address(number: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 77, 1, number)
}

/// The namespaces of one site. They are removed with it, after all processes in them have been
/// killed.
#[derive(Debug)]
pub(super) struct SiteNetwork {
    name: String,
    namespaces: Arc<SiteNamespaces>,
}

/// Names of the namespaces, in the order of the hosts; the last is outside.
#[derive(Debug)]
struct SiteNamespaces(Vec<String>);

impl SiteNetwork {
    /// Creates the namespaces, with their cables.
    pub(super) fn create_network(lab: &Lab, hosts: &[&str]) -> Result<Self> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("firn-{}-{number}", std::process::id());
        let all = hosts.iter().chain(&["outside"]).map(|host| format!("{name}-{host}")).collect();
        let namespaces = Arc::new(SiteNamespaces(all));
        let weak = Arc::downgrade(&namespaces);
        lab.when_interrupted(move || {
            if let Some(namespaces) = weak.upgrade() {
                namespaces.remove_all();
            }
        });
        let network = Self { name, namespaces };
        network.connect_hosts(hosts).context(
            "hosts are network namespaces, which this machine does not allow: run as root, where `ip netns` exists",
        )?;
        Ok(network)
    }

    fn connect_hosts(&self, hosts: &[&str]) -> Result<()> {
        let outside = self.outside();
        run_ip(&["netns", "add", outside])?;
        run_ip_in(outside, &["link", "set", "lo", "up"])?;
        run_ip_in(outside, &["link", "add", BRIDGE, "type", "bridge"])?;
        run_ip_in(outside, &["address", "add", "10.77.0.254/24", "dev", BRIDGE])?;
        run_ip_in(outside, &["address", "add", "10.77.1.254/24", "dev", BRIDGE])?;
        run_ip_in(outside, &["link", "set", BRIDGE, "up"])?;
        (0..hosts.len()).try_for_each(|host| self.create_host(host))
    }

    /// Creates a host's namespace: one end of a cable in a bridge, and a tap device for its VMs.
    fn create_host(&self, number: usize) -> Result<()> {
        let (space, outside, port) = (self.namespace(number), self.outside(), cable_name(number));
        let address = format!("{}/24", host_address(number));
        run_ip(&["netns", "add", &space])?;
        run_ip_in(&space, &["link", "set", "lo", "up"])?;
        let ends = ["type", "veth", "peer", "name", CABLE, "netns", &space];
        run_ip_in(outside, &[&["link", "add", &port][..], &ends].concat())?;
        run_ip_in(outside, &["link", "set", &port, "master", BRIDGE, "up"])?;
        run_ip_in(&space, &["link", "add", BRIDGE, "type", "bridge"])?;
        run_ip_in(&space, &["tuntap", "add", "dev", TAP, "mode", "tap"])?;
        for device in [CABLE, TAP] {
            run_ip_in(&space, &["link", "set", device, "master", BRIDGE, "up"])?;
        }
        run_ip_in(&space, &["address", "add", &address, "dev", BRIDGE])?;
        run_ip_in(&space, &["link", "set", BRIDGE, "up"])
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

    /// Disconnects a host's cable, or connects it.
    pub(super) fn set_connected(&self, host: usize, is_on: bool) -> Result<()> {
        run_ip_in(
            self.outside(),
            &["link", "set", &cable_name(host), if is_on { "up" } else { "down" }],
        )
    }
}

impl Drop for SiteNetwork {
    fn drop(&mut self) {
        self.namespaces.remove_all();
    }
}

impl SiteNamespaces {
    fn remove_all(&self) {
        // Errors that matter show up elsewhere.
        for space in &self.0 {
            let _ = kill_all(space);
        }
        for space in &self.0 {
            let _ = run_ip(&["netns", "delete", space]);
        }
    }
}

fn cable_name(host: usize) -> String {
    format!("to{host}")
}

fn run_ip(words: &[&str]) -> Result<String> {
    let done = Command::new("ip").args(words).output().context("starting ip")?;
    if !done.status.success() {
        let said = String::from_utf8_lossy(&done.stderr);
        bail!("ip {}: {}", words.join(" "), said.trim());
    }
    Ok(String::from_utf8_lossy(&done.stdout).into_owned())
}

/// Runs `ip` inside a namespace.
fn run_ip_in(space: &str, words: &[&str]) -> Result<()> {
    run_ip(&[&["-n", space], words].concat()).map(drop)
}

/// A process on a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostProcess {
    /// Its process id.
    pub pid: i32,
    /// Its program, and its verb if the program is one of Firn's.
    pub name: String,
}

impl fmt::Display for HostProcess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.pid, self.name)
    }
}

/// The processes that run in a namespace.
pub(super) fn list_processes(space: &str) -> Result<Vec<HostProcess>> {
    let pids = run_ip(&["netns", "pids", space])?;
    let pids = pids.lines().filter_map(|line| line.trim().parse().ok());
    let named = |pid: i32| HostProcess { pid, name: program_name(pid) };
    Ok(pids.map(named).collect())
}

/// The program of a process, and its verb if the program is one of Firn's.
fn program_name(pid: i32) -> String {
    let line = fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let mut words = line.split('\0').filter(|word| !word.is_empty());
    let first = words.next().unwrap_or("?");
    let name = first.rsplit('/').next().unwrap_or(first);
    let verb = words.next().filter(|word| name.starts_with("firn") && !word.starts_with('-'));
    let verb = verb.map(|it| format!(" {}", it.trim_start_matches('_')));
    format!("{name}{}", verb.unwrap_or_default())
}

/// Kills all processes in a namespace at once, repeatedly until none is left: one may just have
/// started another.
pub(super) fn kill_all(space: &str) -> Result<()> {
    wait_for("the end of all processes", KILL_TIMEOUT, || {
        let left = list_processes(space)?;
        for HostProcess { pid, .. } in &left {
            match kill(Pid::from_raw(*pid), Signal::SIGKILL) {
                Ok(()) | Err(Errno::ESRCH) => {}
                Err(error) => bail!("ending process {pid}: {error}"),
            }
        }
        Ok(left.is_empty().then_some(()))
    })
}

/// A network namespace that a thread can enter.
#[derive(Clone, Debug)]
pub struct NetworkNamespace(Arc<File>);

impl NetworkNamespace {
    pub(super) fn open_namespace(space: &str) -> Result<Self> {
        let path = format!("/run/netns/{space}");
        let file = File::open(&path).with_context(|| format!("opening {path}"))?;
        Ok(Self(Arc::new(file)))
    }

    /// Moves the calling thread into the namespace, for ever. The sockets that it creates from now
    /// on belong to that network.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn enter(&self) -> Result<()> {
        let network = Some(LinkNameSpaceType::Network);
        Ok(move_into_link_name_space(self.0.as_fd(), network)?)
    }
}
