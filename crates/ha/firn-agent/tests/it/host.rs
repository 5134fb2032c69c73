//! Hosts: an agent each, in a runtime of its own, so that it can be killed; and VMs that are only
//! sockets.

use std::fs;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use firn_agent::vms::OnReady;
use firn_agent::{AgentConfig, DetectorTiming, LocalVms, PreparedAgent};
use firn_control::api::{AgentStatus, PeerView, ProtectVmRequest};
use firn_control::{AgentPaths, HostHealth, HostName, client};
use firn_supervisor::{
    Failure, FailureKind, OnProgress, ProtectRequest, RuntimeDir, SupervisorRequest, VmName,
    VmStatus,
};
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa,
    KeyPair,
};
use serde_json::{Value, json};
use tokio::runtime::Runtime;

/// How long anything may take on a busy host.
pub const PATIENCE: Duration = Duration::from_secs(60);

pub fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < PATIENCE, "{what}: not within {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

pub fn name(name: &str) -> HostName {
    HostName::new(name).unwrap()
}

/// The authority that issues certificates.
pub struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Authority {
    pub fn new() -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.distinguished_name.push(DnType::CommonName, format!("authority {number}"));
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    pub fn pem(&self) -> String {
        self.0.pem()
    }

    /// A certificate for these names and its key, both in PEM format.
    pub fn issue(
        &self,
        names: &[&str],
        change: impl FnOnce(&mut CertificateParams),
    ) -> [String; 2] {
        let names: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
        let mut params = CertificateParams::new(names).unwrap();
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        change(&mut params);
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.0).unwrap();
        [certificate.pem(), key.serialize_pem()]
    }
}

/// A free address.
pub fn free_address() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}

/// A VM whose supervisor connects only when the test allows it.
pub const LATE: &str = "late";

/// VMs that are sockets: a test gets, of each, the end that the supervisor would have.
struct Fake(Sender<UnixStream>);

impl LocalVms for Fake {
    fn list_vms(&self) -> Result<Vec<VmStatus>, Failure> {
        Ok(vec![self.vm_status(&VmName::new("web").unwrap())?])
    }

    fn vm_status(&self, vm: &VmName) -> Result<VmStatus, Failure> {
        let mut status = json!({ "name": vm, "state": "running", "launched": true, "memory_bytes": 0,
            "vcpus": 1, "qemu": "", "accel": "tcg", "since": 0, "recoveries": 0 });
        if vm.as_str() == "kept" {
            status["standby"] =
                json!({ "complete": 5, "committed": 4, "ended": "its host is gone" });
        }
        Ok(serde_json::from_value(status).unwrap())
    }

    fn protect_vm(
        &self,
        vm: &VmName,
        how: ProtectRequest,
        _: OnProgress<'_>,
    ) -> Result<Value, Failure> {
        let address = how.to.to_string();
        let path = Path::new(address.strip_prefix("unix:").unwrap());
        if vm.as_str() == LATE {
            let base = path.ancestors().nth(3).unwrap();
            fs::write(base.join("asked"), "").unwrap();
            eventually("it is let go", || base.join("go").exists());
        }
        let near = UnixStream::connect(path).unwrap();
        self.0.send(near).unwrap();
        Ok(json!({}))
    }

    fn ask_supervisor(&self, vm: &VmName, _: &SupervisorRequest) -> Result<Value, Failure> {
        let text = format!("VM {vm} has no supervisor to be asked");
        Err(Failure::new(FailureKind::NoSuchVm, text))
    }

    fn start_standby(&self, vm: &VmName, _: &Path, _: OnReady) -> Result<UnixStream, Failure> {
        if vm.as_str() == "refused" {
            return Err(Failure::new(FailureKind::Busy, "there is a VM called that already"));
        }
        let (near, end) = UnixStream::pair().unwrap();
        self.0.send(end).unwrap();
        Ok(near)
    }

    fn fail_over_vm(&self, vm: &VmName, _: u32) -> Result<Value, Failure> {
        panic!("{vm} is not to be run");
    }

    fn release_vm(&self, vm: &VmName) -> Result<(), Failure> {
        panic!("{vm} is not to be released");
    }

    fn resume_output(&self, vm: &VmName) -> Result<(), Failure> {
        panic!("{vm} is not to go on");
    }

    fn fence_vm(&self, vm: &VmName, _: String) -> Result<(), Failure> {
        panic!("{vm} is not to be ended");
    }

    fn grant_lease(&self, vm: &VmName, _: Option<(u32, Duration)>) {
        panic!("{vm} has no lease");
    }

    fn stop_standby(&self, vm: &VmName) -> Result<(), Failure> {
        panic!("{vm} is not to be stopped");
    }
}

/// A host with an agent.
pub struct Host {
    pub dir: tempfile::TempDir,
    pub base: RuntimeDir,
    pub listen: SocketAddr,
    ends: Receiver<UnixStream>,
    runtime: Option<Runtime>,
}

impl Host {
    /// Starts a host with these peers.
    pub fn start(
        authority: &Authority,
        who: &str,
        listen: SocketAddr,
        peers: &[(&str, SocketAddr)],
        times: DetectorTiming,
    ) -> Self {
        let identity = authority.issue(&[who], |_| ());
        Self::with_identity(&authority.pem(), identity, who, listen, peers, times)
    }

    /// Starts a host that shows this certificate.
    pub fn with_identity(
        authority: &str,
        identity: [String; 2],
        who: &str,
        listen: SocketAddr,
        peers: &[(&str, SocketAddr)],
        times: DetectorTiming,
    ) -> Self {
        let dir = tempfile::Builder::new().prefix("firn-agent-").tempdir().unwrap();
        let file = write_config(dir.path(), authority, identity, who, listen, peers);
        Self::with_config(dir, AgentConfig::load(&file).unwrap(), times).unwrap()
    }

    /// Starts a host with more in its configuration.
    pub fn start_with(
        authority: &Authority,
        who: &str,
        listen: SocketAddr,
        peers: &[(&str, SocketAddr)],
        more: &str,
    ) -> Self {
        let dir = tempfile::Builder::new().prefix("firn-agent-").tempdir().unwrap();
        let identity = authority.issue(&[who], |_| ());
        let file = write_config(dir.path(), &authority.pem(), identity, who, listen, peers);
        let text = fs::read_to_string(&file).unwrap();
        fs::write(&file, text + more).unwrap();
        Self::with_config(dir, AgentConfig::load(&file).unwrap(), DetectorTiming::default())
            .unwrap()
    }

    /// Starts a host with this configuration.
    pub fn with_config(
        dir: tempfile::TempDir,
        config: AgentConfig,
        times: DetectorTiming,
    ) -> Result<Self, Failure> {
        let (send, ends) = channel();
        Self::with_vms(dir, config, times, Arc::new(Fake(send)), ends)
    }

    /// Starts a host with these VMs.
    pub fn with_vms(
        dir: tempfile::TempDir,
        config: AgentConfig,
        times: DetectorTiming,
        vms: Arc<dyn LocalVms>,
        ends: Receiver<UnixStream>,
    ) -> Result<Self, Failure> {
        let base = RuntimeDir::from_path(dir.path().join("run"));
        let runtime = Runtime::new().unwrap();
        let ready = PreparedAgent::new(config, AgentPaths::new(base.clone()), vms, times);
        let ready = runtime.block_on(ready)?;
        let listen = ready.agent().listen.unwrap();
        runtime.spawn(ready.serve_forever());
        Ok(Self { dir, base, listen, ends, runtime: Some(runtime) })
    }

    /// Ends it as SIGKILL would: all of its sockets are closed, and nothing is sent.
    pub fn kill(&mut self) {
        self.runtime.take().unwrap().shutdown_background();
    }

    /// Starts it again with its old address, as soon as its old resources are free.
    pub fn start_again(&mut self, file: &Path, vms: &Arc<dyn LocalVms>) {
        eventually("it begins again", || {
            let (config, place) =
                (AgentConfig::load(file).unwrap(), AgentPaths::new(self.base.clone()));
            let runtime = Runtime::new().unwrap();
            let ready =
                PreparedAgent::new(config, place, Arc::clone(vms), DetectorTiming::default());
            let begun =
                runtime.block_on(ready).map(|ready| runtime.spawn(ready.serve_forever())).is_ok();
            self.runtime = begun.then_some(runtime);
            begun
        });
    }

    /// Whether a supervisor waits for permission to connect.
    pub fn has_a_late_one(&self) -> bool {
        self.base.path().join("asked").exists()
    }

    /// Lets the waiting supervisors connect.
    pub fn let_late_ones_go(&self) {
        fs::write(self.base.path().join("go"), "").unwrap();
    }

    pub fn cluster(&self) -> AgentStatus {
        client::read_status(&self.base).unwrap()
    }

    pub fn peer(&self, who: &str) -> PeerView {
        self.cluster().peers.into_iter().find(|peer| peer.name == name(who)).unwrap()
    }

    pub fn refused(&self, reason: &str) -> u64 {
        self.cluster().refused.get(reason).copied().unwrap_or_default()
    }

    /// The end of a stream that a VM of this host has.
    pub fn end(&self) -> UnixStream {
        self.ends.recv_timeout(PATIENCE).unwrap()
    }

    pub fn protect(&self, vm: &str, backup: &str) -> Result<Value, Failure> {
        let (vm, backup) = (VmName::new(vm).unwrap(), name(backup));
        let wanted = ProtectVmRequest { vm, backup, interval_ms: 100, predicts: true };
        client::protect_vm(&self.base, &wanted, &mut |_| ())
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// Writes a configuration with its files.
pub fn write_config(
    dir: &Path,
    authority: &str,
    [certificate, key]: [String; 2],
    who: &str,
    listen: SocketAddr,
    peers: &[(&str, SocketAddr)],
) -> PathBuf {
    for (file, text) in [("ca.pem", authority), ("cert.pem", &certificate), ("key.pem", &key)] {
        fs::write(dir.join(file), text).unwrap();
    }
    fs::set_permissions(dir.join("key.pem"), fs::Permissions::from_mode(0o600)).unwrap();
    let peers: String =
        peers.iter().map(|(name, address)| format!("{name} = \"{address}\"\n")).collect();
    let text = format!(
        "name = \"{who}\"\nlisten = \"{listen}\"\ncertificate = \"cert.pem\"\nkey = \"key.pem\"\n\
         authority = \"ca.pem\"\nruntime-dir = \"run\"\n[peers]\n{peers}"
    );
    let file = dir.join("agent.toml");
    fs::write(&file, text).unwrap();
    file
}

/// Two hosts, `a` and `b`, that know each other.
pub fn pair() -> [Host; 2] {
    let authority = Authority::new();
    let [at_a, at_b] = [free_address(), free_address()];
    let a = Host::start(&authority, "a", at_a, &[("b", at_b)], DetectorTiming::default());
    let b = Host::start(&authority, "b", at_b, &[("a", at_a)], DetectorTiming::default());
    for (host, peer) in [(&a, "b"), (&b, "a")] {
        eventually("each is there", || host.peer(peer).health == HostHealth::Alive);
    }
    [a, b]
}

/// A VM of `a` that is protected by `b`: the supervisors' ends of the stream, the primary's first.
pub fn protected(a: &Host, b: &Host) -> [UnixStream; 2] {
    a.protect("web", "b").unwrap();
    let ends = [a.end(), b.end()];
    for end in &ends {
        end.set_read_timeout(Some(PATIENCE)).unwrap();
        end.set_write_timeout(Some(PATIENCE)).unwrap();
    }
    ends
}
