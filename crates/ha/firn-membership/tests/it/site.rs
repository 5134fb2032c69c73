//! Three hosts, each in a network namespace of its own, that can be cut off; and a small disk for
//! each.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicU32, Ordering};

pub const HOSTS: [&str; 3] = ["a", "b", "c"];

/// Size of a disk, in MiB: etcd needs 64 for each segment of its log, and the next one ahead.
const DISK_MIB: u32 = 320;

/// The network of one test. Where the machine does not allow namespaces, all hosts are on its
/// loopback, and can't be cut off.
pub struct Site {
    pub dir: tempfile::TempDir,
    number: u32,
    has_namespaces: bool,
}

fn run(program: &str, args: &[&str]) -> Output {
    Command::new(program).args(args).output().unwrap()
}

fn steps(steps: &[Vec<&str>]) -> Result<(), String> {
    for step in steps {
        let done = run("ip", step);
        if !done.status.success() {
            return Err(format!("{step:?}: {}", String::from_utf8_lossy(&done.stderr).trim()));
        }
    }
    Ok(())
}

/// A directory in memory, where that can be had: a server that waits for seconds for a disk that
/// other tests write to loses its term, which is right and which no test here is about.
fn directory() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

impl Site {
    pub fn new() -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = (std::process::id() * 16 + NUMBER.fetch_add(1, Ordering::Relaxed)) % 60_000;
        let mut site = Self { dir: directory(), number, has_namespaces: true };
        if let Err(why) = site.cabled() {
            eprintln!("no network namespaces here, all hosts are on the loopback: {why}");
            site.has_namespaces = false;
        }
        site
    }

    fn bridge(&self) -> String {
        format!("fm{}", self.number)
    }

    fn namespace(&self, host: usize) -> String {
        format!("firn-m{}-{}", self.number, HOSTS[host])
    }

    /// An address of a network that is reserved for tests (RFC 2544), or of the loopback.
    pub fn address(&self, host: usize) -> String {
        format!("{}.{}", self.subnet(), host + 1)
    }

    fn subnet(&self) -> String {
        let (high, low) = (self.number / 250, self.number % 250);
        match self.has_namespaces {
            true => format!("198.{}.{low}", 18 + high % 2),
            false => format!("127.{}.{low}", 1 + high % 250),
        }
    }

    fn cabled(&self) -> Result<(), String> {
        let (bridge, own) = (self.bridge(), format!("{}.254/24", self.subnet()));
        steps(&[
            vec!["link", "add", &bridge, "type", "bridge"],
            vec!["address", "add", &own, "dev", &bridge],
            vec!["link", "set", &bridge, "up"],
        ])?;
        (0..HOSTS.len()).try_for_each(|host| {
            let (space, port) = (self.namespace(host), self.port(host));
            let address = format!("{}/24", self.address(host));
            steps(&[
                vec!["netns", "add", &space],
                vec![
                    "link", "add", &port, "type", "veth", "peer", "name", "cable", "netns", &space,
                ],
                vec!["link", "set", &port, "master", &bridge, "up"],
                vec!["-n", &space, "address", "add", &address, "dev", "cable"],
                vec!["-n", &space, "link", "set", "cable", "up"],
                vec!["-n", &space, "link", "set", "lo", "up"],
            ])
        })
    }

    fn port(&self, host: usize) -> String {
        format!("fm{}{}", self.number, HOSTS[host])
    }

    /// Cuts a host off, or connects it again. False if that can't be done here.
    pub fn connect(&self, host: usize, is_on: bool) -> bool {
        let state = if is_on { "up" } else { "down" };
        self.has_namespaces && steps(&[vec!["link", "set", &self.port(host), state]]).is_ok()
    }

    /// A command at a host.
    pub fn command(&self, host: usize, program: &Path) -> Command {
        match self.has_namespaces {
            true => {
                let mut command = Command::new("ip");
                command.args(["netns", "exec", &self.namespace(host)]).arg(program);
                command
            }
            false => Command::new(program),
        }
    }

    /// The directory of a host's server with its durable state.
    pub fn disk(&self, host: usize) -> PathBuf {
        let path = self.dir.path().join(HOSTS[host]);
        fs::create_dir_all(&path).unwrap();
        path
    }

    /// Gives all hosts small disks. False if that can't be done here.
    pub fn bound_disks(&self) -> bool {
        let size = format!("size={DISK_MIB}m");
        (0..HOSTS.len()).all(|host| {
            let path = self.disk(host);
            run("mount", &["-t", "tmpfs", "-o", &size, "firn", path.to_str().unwrap()])
                .status
                .success()
        })
    }

    /// Fills a host's disk, or frees it again.
    pub fn fill(&self, host: usize, is_full: bool) {
        let file = self.disk(host).join("full");
        match is_full {
            true => {
                let out = format!("of={}", file.display());
                assert!(
                    !run("dd", &["if=/dev/zero", &out, "bs=4k"]).status.success(),
                    "it has room"
                );
            }
            false => fs::remove_file(file).unwrap(),
        }
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        for host in 0..HOSTS.len() {
            run("umount", &["-l", self.disk(host).to_str().unwrap()]);
            run("ip", &["netns", "delete", &self.namespace(host)]);
            run("ip", &["link", "delete", &self.port(host)]);
        }
        run("ip", &["link", "delete", &self.bridge()]);
    }
}
