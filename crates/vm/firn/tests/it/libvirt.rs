//! Domains of a libvirt of the test's own: its files and its users are in a private mount namespace, its sockets in the
//! session's directory.

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use firn_skip::skip_test;
use serde_json::Value;

use crate::session::{Answer, Session, eventually, text};

/// How long libvirt may take to start, or QEMU to end, on a busy host. The first start examines QEMU.
const PATIENCE: Duration = Duration::from_secs(120);

/// Environment variable with the number of checkpoints of a long run.
const RUNS: &str = "FIRN_RUNS";

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
exec libvirtd -f /etc/libvirt/libvirtd.conf -p /run/libvirt/libvirtd.pid
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
struct OwnLibvirt {
    daemon: Child,
    dir: PathBuf,
}

impl OwnLibvirt {
    /// Starts one; `None` where that is impossible.
    fn start(session: &Session) -> Option<Self> {
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
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-ec", START]).env("D", &dir).env("CACHE", cache);
        command.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").stdin(Stdio::null());
        let log = std::fs::File::create(dir.join("out")).unwrap();
        let daemon = command.stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap();
        let libvirt = Self { daemon, dir };
        eventually("libvirt", PATIENCE, || libvirt.try_virsh(&["version"]).code == 0);
        Some(libvirt)
    }

    fn uri(&self) -> String {
        format!("qemu+unix:///system?socket={}", text(&self.dir.join("sock/libvirt-sock")))
    }

    fn try_virsh(&self, args: &[&str]) -> Answer {
        let mut command = Command::new("virsh");
        Answer::of(command.args(["-q", "-c", &self.uri()]).args(args).output().unwrap())
    }

    #[track_caller]
    fn virsh(&self, args: &[&str]) -> String {
        self.try_virsh(args).succeeds().out.trim().to_owned()
    }

    /// Starts a domain as a user has it: a qcow2 disk, private RAM, a balloon, QEMU's sandbox.
    fn start_domain(&self, name: &str) {
        self.define_domain(name);
        self.virsh(&["start", name]);
    }

    fn define_domain(&self, name: &str) {
        let disk = self.dir.join(format!("disks/{name}.qcow2"));
        let create = ["create", "-q", "-f", "qcow2", text(&disk), "64M"];
        assert!(Command::new("qemu-img").args(create).status().unwrap().success());
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
    fn monitor_state(&self, name: &str) -> Vec<Value> {
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

    /// What libvirt shows of a domain.
    fn shown(&self, name: &str) -> [String; 3] {
        ["domstate", "domblklist", "dumpxml"].map(|verb| self.virsh(&[verb, name]))
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

fn run_count(few: usize) -> usize {
    std::env::var(RUNS).ok().and_then(|runs| runs.parse().ok()).unwrap_or(few)
}

#[test]
fn a_domain_is_saved_while_it_runs_and_libvirt_notices_nothing() {
    let session = Session::new();
    let Some(libvirt) = OwnLibvirt::start(&session) else { return };
    libvirt.start_domain("web");
    let (shown, before) = (libvirt.shown("web"), libvirt.monitor_state("web"));
    let doctor = session.json(&["doctor", "--libvirt", "web", "--connect", &libvirt.uri()]);
    session.firn(&["attach", "--libvirt", "web", "--connect", &libvirt.uri()]).succeeds();
    assert_eq!(session.ls(), [("web".to_owned(), "running".to_owned())]);
    let status = session.status("web");
    assert_eq!(status["qmp"]["domain"], "web");
    assert_eq!(status["launched"], false);
    assert_eq!(session.json(&["doctor", "web"]), doctor);
    for run in 0..run_count(2) {
        let image = format!("full-{run}.firn");
        session.firn(&["checkpoint", "web", "-o", &image]).succeeds();
        assert_eq!(libvirt.shown("web"), shown, "after checkpoint {run}");
    }
    let mut parent = "full-0.firn".to_owned();
    for run in 0..run_count(2).div_ceil(2) {
        let image = format!("next-{run}.firn");
        session.firn(&["checkpoint", "web", "-o", &image, "--parent", &parent]).succeeds();
        assert_eq!(libvirt.shown("web"), shown, "after incremental checkpoint {run}");
        session.firn(&["image", "verify", &image]).succeeds();
        parent = image;
    }
    libvirt.virsh(&["reboot", "web"]);
    libvirt.virsh(&["suspend", "web"]);
    assert_eq!(session.status("web")["state"], "paused");
    libvirt.virsh(&["resume", "web"]);
    session.firn(&["detach", "web"]).succeeds();
    assert_eq!(libvirt.shown("web"), shown);
    assert_eq!(libvirt.monitor_state("web"), before);
    let inspected = session.json(&["image", "inspect", &parent]);
    let xml = inspected["meta"]["domain_xml"].as_str().unwrap();
    assert!(xml.contains("<name>web</name>"), "{xml}");
    session.firn(&["restore", &parent, "--name", "copy"]).succeeds();
    eventually("the restore", PATIENCE, || session.status("copy")["state"] == "running");
}

#[test]
fn a_domain_that_does_not_run_is_no_vm() {
    let session = Session::new();
    let Some(libvirt) = OwnLibvirt::start(&session) else { return };
    let uri = libvirt.uri();
    let attach = |name: &str, domain: &str| {
        session.firn(&["attach", name, "--libvirt", domain, "--connect", &uri])
    };
    attach("none", "none").fails(3, "no domain with matching name 'none'");
    libvirt.define_domain("web");
    attach("off", "web").fails(3, "domain web does not run");
    session
        .firn(&["doctor", "--libvirt", "web", "--connect", &uri])
        .fails(3, "domain web does not run");
    libvirt.virsh(&["start", "web"]);
    attach("first", "web").succeeds();
    attach("second", "web").fails(4, "is VM first already");
    session.firn(&["detach", "first"]).succeeds();
    attach("second", &libvirt.virsh(&["domuuid", "web"])).succeeds();
    libvirt.virsh(&["destroy", "web"]);
    eventually("the end", PATIENCE, || session.status("second")["state"] == "ended");
    attach("third", "web").fails(3, "domain web does not run");
}

#[test]
fn a_libvirt_that_is_not_there_is_named() {
    let session = Session::new();
    let attach = |uri: &str| session.firn(&["attach", "--libvirt", "web", "--connect", uri]);
    attach("xen:///").fails(2, "xen:/// is not a libvirt of this host");
    attach("qemu+unix:///system?socket=/nowhere").fails(7, "cannot connect to libvirt at /nowhere");
    session
        .firn(&["attach", "web", "--connect", "qemu:///system"])
        .fails(2, "were not provided: --libvirt");
    assert!(session.ls().is_empty());
}
