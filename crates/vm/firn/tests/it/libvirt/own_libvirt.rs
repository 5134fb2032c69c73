//! A libvirt of the test's own: its files and its users are in a private mount namespace, its sockets
//! in the session's directory.

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use firn_skip::skip_test;
use serde_json::Value;

use super::counting_guest::{self, GuestAnswer};
use crate::session::{Answer, Session, eventually, text};

/// The environment variable of the process that starts the daemon, and the test that it runs.
const REAPER: &str = "FIRN_TEST_LIBVIRT";
const REAPER_TEST: &str = "libvirt::own_libvirt::the_daemon_of_a_test_runs";

/// How long libvirt may take to start, or QEMU to end, on a busy host. The first start examines QEMU.
const PATIENCE: Duration = Duration::from_secs(120);

/// Starts libvirt with other directories, and with the user that its QEMUs run as.
const START: &str = r#"
mount --make-rprivate /
mkdir -p /run/libvirt && mount -t tmpfs none /run/libvirt
for part in lib:/var/lib/libvirt etc:/etc/libvirt log:/var/log/libvirt; do
  mkdir -p "$D/${part%%:*}" "${part#*:}" && mount --bind "$D/${part%%:*}" "${part#*:}" || exit 1
done
mkdir -p "$CACHE" /var/cache/libvirt && mount --bind "$CACHE" /var/cache/libvirt || exit 1
for users in passwd group; do
  grep -v '^libvirt-qemu:' /etc/$users > "$D/$users"
done
echo 'libvirt-qemu:x:64055:64055::/var/lib/libvirt:/usr/sbin/nologin' >> "$D/passwd"
echo 'libvirt-qemu:x:64055:' >> "$D/group"
mount --bind "$D/passwd" /etc/passwd && mount --bind "$D/group" /etc/group || exit 1
# libvirt examines QEMU before each call if QEMU reports a KVM that libvirt-qemu can't open.
: > "$D/no-kvm" && chmod 0 "$D/no-kvm"
[ ! -e /dev/kvm ] || mount --bind "$D/no-kvm" /dev/kvm
libvirtd="libvirtd -f /etc/libvirt/libvirtd.conf -p /run/libvirt/libvirtd.pid"
[ -n "$CONTAINER" ] || exec setpriv --pdeathsig KILL $libvirtd
# The first process of a PID namespace reaps all others.
$libvirtd &
wait $!
"#;

const QEMU_CONF: &str = r#"
user = "libvirt-qemu"
group = "libvirt-qemu"
stdio_handler = "file"
cgroup_controllers = []
namespaces = []
security_driver = "none"
"#;

/// A libvirt. Its domains end with it.
pub struct OwnLibvirt {
    daemon: Child,
    pub dir: PathBuf,
}

impl OwnLibvirt {
    /// Starts one; `None` where that is impossible.
    pub fn start(session: &Session) -> Option<Self> {
        Self::start_in(session, false)
    }

    /// Starts one that has, with its domains, a PID namespace of its own, as in a container.
    pub fn start_in_container(session: &Session) -> Option<Self> {
        Self::start_in(session, true)
    }

    fn start_in(session: &Session, is_contained: bool) -> Option<Self> {
        let is_there = |program: &str| {
            ["/usr/sbin", "/usr/bin"].iter().any(|dir| Path::new(dir).join(program).exists())
        };
        if !is_there("libvirtd") || !is_there("virsh") {
            skip_test("libvirt is not installed");
            return None;
        }
        if !rustix::process::geteuid().is_root() {
            skip_test("libvirt's directories can be replaced by root only");
            return None;
        }
        let dir = session.path("libvirt");
        for part in ["etc", "sock", "disks"] {
            std::fs::create_dir_all(dir.join(part)).unwrap();
        }
        // QEMU runs as another user.
        let others = std::fs::Permissions::from_mode(0o711);
        std::fs::set_permissions(session.path(""), others).unwrap();
        let conf = format!(
            "unix_sock_dir = \"{}\"\nauth_unix_rw = \"none\"\nauth_unix_ro = \"none\"\nlog_outputs = \"2:file:{}\"\n",
            text(&dir.join("sock")),
            text(&dir.join("libvirtd.log"))
        );
        std::fs::write(dir.join("etc/libvirtd.conf"), conf).unwrap();
        std::fs::write(dir.join("etc/qemu.conf"), QEMU_CONF).unwrap();
        let cache = Path::new(env!("CARGO_TARGET_TMPDIR")).join("libvirt-cache");
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", REAPER_TEST]).env(REAPER, "1").env("D", &dir).env("CACHE", cache);
        command.env("CONTAINER", if is_contained { "1" } else { "" });
        command.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").stdin(Stdio::null());
        let log = std::fs::File::create(dir.join("out")).unwrap();
        let daemon = command.stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap();
        let libvirt = Self { daemon, dir };
        eventually("libvirt", PATIENCE, || libvirt.try_virsh(&["version"]).code == 0);
        Some(libvirt)
    }

    pub fn uri(&self) -> String {
        format!("qemu+unix:///system?socket={}", text(&self.dir.join("sock/libvirt-sock")))
    }

    pub fn try_virsh(&self, args: &[&str]) -> Answer {
        let mut command = Command::new("virsh");
        Answer::of(command.args(["-q", "-c", &self.uri()]).args(args).output().unwrap())
    }

    #[track_caller]
    pub fn virsh(&self, args: &[&str]) -> String {
        self.try_virsh(args).succeeds().out.trim().to_owned()
    }

    /// Starts a domain as a user has it: a qcow2 disk, private RAM, a balloon, QEMU's sandbox.
    pub fn start_domain(&self, name: &str) {
        self.define_domain(name);
        self.virsh(&["start", name]);
    }

    pub fn define_domain(&self, name: &str) {
        let disk = self.dir.join(format!("disks/{name}.qcow2"));
        counting_guest::create_disk(&disk);
        let xml = format!(
            "<domain type='qemu'><name>{name}</name><memory unit='MiB'>64</memory><vcpu>1</vcpu>
            <os><type arch='x86_64' machine='q35'>hvm</type></os><features><acpi/></features><devices>
            <disk type='file' device='disk'><driver name='qemu' type='qcow2'/><source file='{}'/>
            <target dev='vda' bus='virtio'/></disk><interface type='user'><model type='virtio'/></interface>
            <channel type='unix'><target type='virtio' name='org.qemu.guest_agent.0'/></channel>
            <serial type='pty'/><memballoon model='virtio'/></devices></domain>",
            text(&disk)
        );
        let file = self.dir.join(format!("{name}.xml"));
        std::fs::write(&file, xml).unwrap();
        self.virsh(&["define", text(&file)]);
    }

    /// Block nodes, jobs and descriptor sets of a domain's QEMU.
    pub fn monitor_state(&self, name: &str) -> Vec<Value> {
        let query = |command: &str| -> Value {
            let text = self.virsh(&[
                "qemu-monitor-command",
                name,
                &format!("{{\"execute\":\"{command}\"}}"),
            ]);
            serde_json::from_str::<Value>(&text).unwrap()["return"].take()
        };
        let nodes = query("query-named-block-nodes");
        let keys = ["node-name", "drv", "file", "ro", "backing_file", "dirty-bitmaps"];
        let node = |node: &Value| keys.map(|key| node[key].to_string()).join(" ");
        let mut nodes: Vec<String> = nodes.as_array().unwrap().iter().map(node).collect();
        nodes.sort();
        vec![nodes.into(), query("query-jobs"), query("query-fdsets"), query("query-migrate")]
    }

    /// Asks the guest of a domain, which finds its memory as it left it.
    #[track_caller]
    pub fn ask_guest(&self, name: &str) -> GuestAnswer {
        counting_guest::ask_guest(&self.virsh(&["ttyconsole", name]))
    }

    /// The names of all domains, running or not.
    pub fn domains(&self) -> Vec<String> {
        let mut names: Vec<String> = self
            .virsh(&["list", "--all", "--name"])
            .split_whitespace()
            .map(str::to_owned)
            .collect();
        names.sort();
        names
    }

    /// What libvirt shows of a domain.
    pub fn shown(&self, name: &str) -> [String; 3] {
        ["domstate", "domblklist", "dumpxml"].map(|verb| self.virsh(&[verb, name]))
    }
}

/// Starts the daemon and reaps its QEMUs, which are orphans: libvirt waits until they are gone, and
/// not every init process reaps at once.
#[test]
#[expect(clippy::zombie_processes, reason = "the loop waits for all children")]
fn the_daemon_of_a_test_runs() {
    if std::env::var_os(REAPER).is_none() {
        return;
    }
    let own = rustix::process::getpid();
    rustix::process::set_child_subreaper(Some(own)).unwrap();
    let mut command = Command::new("unshare");
    if std::env::var("CONTAINER").is_ok_and(|it| !it.is_empty()) {
        command.args(["--pid", "--mount-proc", "--fork", "--kill-child"]);
    }
    let daemon = command.args(["--mount", "sh", "-ec", START]).spawn().unwrap();
    let daemon = rustix::process::Pid::from_child(&daemon);
    let ended = || rustix::process::wait(rustix::process::WaitOptions::empty());
    while let Ok(Some((pid, _))) = ended() {
        if pid == daemon {
            return;
        }
    }
}

impl Drop for OwnLibvirt {
    fn drop(&mut self) {
        for name in self.try_virsh(&["list", "--name"]).out.split_whitespace() {
            self.try_virsh(&["destroy", name]);
        }
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
    }
}
