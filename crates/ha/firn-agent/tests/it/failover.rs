//! Three agents with membership, and VMs that are only the answers of their supervisors: which host
//! runs `web`, and with which lease.

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use firn_agent::vms::OnReady;
use firn_agent::{AgentConfig, DetectorTiming, LocalVms, membership};
use firn_control::api::{
    CLUSTERS, FailoverVmRequest, ForgottenRecord, MembershipView, PlacementView,
};
use firn_control::client::Method;
use firn_control::{HostHealth, client};
use firn_supervisor::{
    Failure, FailureKind, OnProgress, ProtectRequest, RuntimeDir, VmName, VmStatus,
};
use serde_json::{Value, json};

use crate::host::{Host, PATIENCE, eventually, name};
use crate::membership::configured;

/// `web` at one host.
struct Model {
    base: RuntimeDir,
    web: Mutex<Web>,
}

#[derive(Default)]
struct Web {
    /// `running`, `protected`, `standby`, `ended`; `None` if it does not exist.
    state: Option<&'static str>,
    lease: Option<u32>,
    /// Its output is buffered, whatever its lease allows.
    is_held: bool,
    /// Generations whose lease it was granted.
    granted: Vec<u32>,
    why: String,
    /// The stream of its epochs.
    stream: Option<UnixStream>,
}

impl Model {
    fn web(&self) -> MutexGuard<'_, Web> {
        self.web.lock().unwrap()
    }

    fn is(&self, state: &str) -> bool {
        let mut web = self.web();
        // The process at the other end of the stream may be gone.
        let gone = web.stream.as_ref().is_some_and(|stream| {
            stream.set_nonblocking(true).unwrap();
            matches!(std::io::Read::read(&mut &*stream, &mut [0]), Ok(0))
        });
        if gone {
            web.stream = None;
            if web.state == Some("protected") {
                (web.state, web.is_held) = (Some("running"), true);
            }
        }
        web.state == Some(state)
    }
}

impl LocalVms for Model {
    fn list_vms(&self) -> Result<Vec<VmStatus>, Failure> {
        Ok(self.vm_status(&VmName::new("web").unwrap()).into_iter().collect())
    }

    fn vm_status(&self, vm: &VmName) -> Result<VmStatus, Failure> {
        self.is("");
        let web = self.web();
        let none = || Failure::new(FailureKind::NoSuchVm, "no such VM");
        let state = web.state.filter(|_| vm.as_str() == "web").ok_or_else(none)?;
        let mut status = json!({ "name": vm, "state": state, "launched": true, "memory_bytes": 0,
            "vcpus": 1, "qemu": "", "accel": "tcg", "since": 0, "recoveries": 0, "lease": web.lease });
        let mut card = serde_json::to_value(firn_supervisor::CardStatus::default()).unwrap();
        card["open"] = (!web.is_held).into();
        status["network"] = json!([card]);
        if state == "standby" {
            let ended = web.stream.is_none().then_some("it has ended");
            status["standby"] = json!({ "complete": 5, "committed": 4, "ended": ended });
        }
        if state == "protected" {
            let mut now =
                serde_json::to_value(firn_supervisor::ProtectionStatus::default()).unwrap();
            now["committed"] = 4.into();
            status["protection"] = now;
        }
        Ok(serde_json::from_value(status).unwrap())
    }

    fn protect_vm(
        &self,
        _: &VmName,
        how: ProtectRequest,
        _: OnProgress<'_>,
    ) -> Result<Value, Failure> {
        let address = how.to.to_string();
        let near = UnixStream::connect(address.strip_prefix("unix:").unwrap()).unwrap();
        let mut web = self.web();
        assert!(web.state == Some("running") && !web.is_held);
        assert!(web.granted.last() == how.lease.as_ref(), "its lease is not held");
        (web.state, web.lease, web.stream) = (Some("protected"), how.lease, Some(near));
        Ok(json!({}))
    }

    fn ask_supervisor(
        &self,
        vm: &VmName,
        request: &firn_supervisor::SupervisorRequest,
    ) -> Result<Value, Failure> {
        let text = format!("{vm} belongs to no cluster: {request:?}");
        Err(Failure::new(FailureKind::Refused, text))
    }

    fn start_standby(&self, vm: &VmName, _: &Path, ready: OnReady) -> Result<UnixStream, Failure> {
        let (near, end) = UnixStream::pair().unwrap();
        std::fs::create_dir_all(self.base.vm_dir(vm).path()).unwrap();
        let mut web = self.web();
        // As a supervisor does where the old VM has not ended yet.
        if let Some(state @ ("running" | "hung" | "protected")) = web.state {
            return Err(Failure::new(FailureKind::Refused, format!("{vm} is {state} here")));
        }
        assert!(matches!(web.state, None | Some("ended")), "{:?} is there", web.state);
        *web = Web { state: Some("standby"), stream: Some(end), ..Web::default() };
        drop(web);
        ready(Ok(json!({})));
        Ok(near)
    }

    fn fail_over_vm(&self, _: &VmName, generation: u32) -> Result<Value, Failure> {
        let mut web = self.web();
        assert_eq!(web.state, Some("standby"));
        assert_eq!(web.granted.last(), Some(&generation), "its lease is not held");
        (web.state, web.lease, web.stream) = (Some("running"), Some(generation), None);
        Ok(json!({ "epoch": 4 }))
    }

    fn release_vm(&self, _: &VmName) -> Result<(), Failure> {
        let mut web = self.web();
        (web.state, web.lease, web.stream) = (Some("running"), None, None);
        Ok(())
    }

    fn resume_output(&self, _: &VmName) -> Result<(), Failure> {
        let mut web = self.web();
        assert_eq!(web.state, Some("running"));
        web.is_held = false;
        Ok(())
    }

    fn fence_vm(&self, _: &VmName, why: String) -> Result<(), Failure> {
        let mut web = self.web();
        (web.state, web.why, web.stream) = (Some("ended"), why, None);
        Ok(())
    }

    fn grant_lease(&self, _: &VmName, lease: Option<(u32, Duration)>) {
        let mut web = self.web();
        match lease {
            Some((generation, _)) if web.granted.last() == Some(&generation) => {}
            Some((generation, _)) => web.granted.push(generation),
            None => {}
        }
    }

    fn stop_standby(&self, _: &VmName) -> Result<(), Failure> {
        let mut web = self.web();
        assert_eq!(web.state, Some("standby"));
        *web = Web::default();
        Ok(())
    }
}

/// Three hosts; `web` runs at `a`.
struct Hosts {
    hosts: Vec<Host>,
    models: Vec<Arc<Model>>,
    files: Vec<PathBuf>,
}

impl Hosts {
    fn start() -> Self {
        let (mut hosts, mut models, mut files) = (Vec::new(), Vec::new(), Vec::new());
        for (dir, file) in configured() {
            let config = AgentConfig::load(&file).unwrap();
            membership::bootstrap_server(&config).unwrap();
            let base = RuntimeDir::from_path(dir.path().join("run"));
            let model = Arc::new(Model { base, web: Mutex::default() });
            let (_send, ends) = channel();
            let vms = Arc::clone(&model) as Arc<dyn LocalVms>;
            hosts.push(Host::with_vms(dir, config, DetectorTiming::default(), vms, ends).unwrap());
            models.push(model);
            files.push(file);
        }
        models[0].web().state = Some("running");
        for peer in ["b", "c"] {
            eventually("all are there", || hosts[0].peer(peer).health == HostHealth::Alive);
        }
        Self { hosts, models, files }
    }

    fn protect(&self) {
        eventually("somebody leads", || view(&self.hosts[0]).leader.is_some());
        let protected = self.hosts[0].protect("web", "b");
        protected.unwrap();
        assert_eq!(place(&self.hosts[0]), ["a", "b"]);
    }

    /// A user requests that `b` runs it, and may declare a host dead.
    fn fail_over(&self, dead: Option<&str>) -> Result<Value, Failure> {
        let vm = VmName::new("web").unwrap();
        let wanted = FailoverVmRequest { vm, dead: dead.map(name) };
        client::fail_over_vm(&self.hosts[1].base, &wanted)
    }

    fn is_at(&self, host: usize, state: &str) -> bool {
        self.models[host].is(state)
    }
}

fn view(host: &Host) -> MembershipView {
    client::read_records(&host.base).unwrap()
}

/// The names of primary and backup in the record.
fn place(host: &Host) -> Vec<String> {
    let view = view(host);
    let vm = view.clusters.first().and_then(|cluster| cluster.vms.first());
    let name = |it: &str| it.split(' ').next().unwrap_or_default().to_owned();
    let of = |vm: &PlacementView| {
        let backup = vm.backup.as_deref().map(name).into_iter();
        [name(&vm.primary)].into_iter().chain(backup).collect()
    };
    vm.map(of).unwrap_or_default()
}

#[test]
fn a_vm_whose_host_dies_runs_at_its_backup_and_is_protected_by_the_third() {
    let mut hosts = Hosts::start();
    hosts.protect();
    assert!(hosts.is_at(0, "protected") && hosts.is_at(1, "standby"));
    hosts.hosts[0].kill();
    eventually("it runs at b", || hosts.is_at(1, "running") || hosts.is_at(1, "protected"));
    assert_eq!(hosts.models[1].web().lease, Some(1));
    eventually("it is protected by c", || hosts.is_at(2, "standby") && hosts.is_at(1, "protected"));
    eventually("that is agreed on", || place(&hosts.hosts[1]) == ["b", "c"]);
    assert_eq!(hosts.models[1].web().granted, [1]);
}

#[test]
fn a_vm_that_dies_runs_at_its_backup_though_its_agent_lives() {
    let hosts = Hosts::start();
    hosts.protect();
    let mut web = hosts.models[0].web();
    (web.state, web.stream) = (Some("ended"), None);
    drop(web);
    eventually("it runs at b", || hosts.is_at(1, "running") || hosts.is_at(1, "protected"));
    assert_eq!(hosts.models[1].web().lease, Some(1));
}

#[test]
fn a_vm_without_its_backup_continues_and_is_protected_by_the_third_host() {
    let mut hosts = Hosts::start();
    hosts.protect();
    hosts.hosts[1].kill();
    eventually("it is protected by c", || hosts.is_at(2, "standby") && hosts.is_at(0, "protected"));
    eventually("that is agreed on", || place(&hosts.hosts[0]) == ["a", "c"]);
    let web = hosts.models[0].web();
    assert!(web.lease == Some(0) && web.granted == [0] && !web.is_held, "nothing was rolled back");
}

/// A VM that its user releases or ends has no record any more; and may begin again, in another
/// generation.
#[test]
fn a_vm_that_is_released_is_no_cluster_and_may_be_one_again() {
    let hosts = Hosts::start();
    hosts.protect();
    hosts.models[0].release_vm(&VmName::new("web").unwrap()).unwrap();
    eventually("it is no cluster", || place(&hosts.hosts[0]).is_empty());
    assert!(hosts.is_at(0, "running"));
    // Its standby agreed never to run it, and is replaced.
    *hosts.models[1].web() = Web::default();
    hosts.hosts[0].protect("web", "b").unwrap();
    assert_eq!(place(&hosts.hosts[0]), ["a", "b"]);
    assert_eq!(hosts.models[0].web().lease, Some(2));
}

/// No host runs a VM that its user has stopped: the record ends, and so does the standby.
#[test]
fn a_vm_that_is_stopped_leaves_no_record_and_no_standby() {
    let hosts = Hosts::start();
    hosts.protect();
    *hosts.models[0].web() = Web::default();
    eventually("it is no cluster", || place(&hosts.hosts[0]).is_empty());
    eventually("the standby is gone", || hosts.models[1].web().state.is_none());
    let refused = hosts.fail_over(None).unwrap_err();
    assert_eq!(refused.kind, FailureKind::NoSuchVm);
}

/// A failover by a user follows the record: a primary that holds its lease keeps its VM, unless its
/// host is declared dead by its name.
#[test]
fn a_manual_failover_obeys_the_record() {
    let hosts = Hosts::start();
    hosts.protect();
    let refused = hosts.fail_over(None).unwrap_err();
    assert!(refused.to_string().contains("host a holds the lease"), "{refused}");
    assert_eq!(refused.kind, FailureKind::Refused);
    let refused = hosts.fail_over(Some("c")).unwrap_err();
    assert!(refused.to_string().contains("runs at host a"), "{refused}");
    assert!(hosts.is_at(0, "protected") && hosts.is_at(1, "standby"));
    assert_eq!(place(&hosts.hosts[0]), ["a", "b"]);
    let facts = hosts.fail_over(Some("a")).unwrap();
    assert_eq!((&facts["generation"], &facts["epoch"]), (&1.into(), &4.into()), "{facts}");
    assert_eq!(hosts.models[1].web().lease, Some(1));
    eventually("the old one is ended", || hosts.is_at(0, "ended") || hosts.is_at(0, "standby"));
    eventually("a host protects it", || place(&hosts.hosts[1]).len() == 2);
    assert_eq!(place(&hosts.hosts[1])[0], "b");
}

/// A hypervisor that does not answer: its host stops to request the lease, and ends the VM once it
/// runs elsewhere.
#[test]
fn a_vm_that_hangs_runs_at_its_backup_though_its_agent_lives() {
    let hosts = Hosts::start();
    hosts.protect();
    let mut web = hosts.models[0].web();
    (web.state, web.stream, web.is_held) = (Some("hung"), None, true);
    drop(web);
    eventually("it runs at b", || hosts.is_at(1, "running") || hosts.is_at(1, "protected"));
    assert_eq!(hosts.models[1].web().lease, Some(1));
    eventually("the old one is ended", || hosts.is_at(0, "ended") || hosts.is_at(0, "standby"));
}

/// `a` and `b` are lost together; `b` returns with nothing.
#[test]
fn a_vm_that_is_lost_with_its_backup_is_forgotten_by_command_and_its_name_is_free() {
    let mut hosts = Hosts::start();
    hosts.protect();
    let forget = |host: &Host| {
        let path = format!("{CLUSTERS}/web/forget");
        client::send_cluster_request::<ForgottenRecord>(
            &host.base,
            Method::POST,
            &path,
            None::<&()>,
        )
    };
    let refused = forget(&hosts.hosts[2]).unwrap_err();
    assert_eq!(refused.kind, FailureKind::Refused, "{refused}");
    for host in [0, 1] {
        hosts.hosts[host].kill();
        *hosts.models[host].web() = Web::default();
    }
    let vms = Arc::clone(&hosts.models[1]) as Arc<dyn LocalVms>;
    hosts.hosts[1].start_again(&hosts.files[1], &vms);
    hosts.models[2].web().state = Some("running");
    let c = &hosts.hosts[2];
    eventually("b is back", || c.peer("b").health == HostHealth::Alive && view(c).leader.is_some());
    let refused = c.protect("web", "b").unwrap_err();
    assert!(refused.to_string().contains("runs at host a"), "{refused}");
    let hint = refused.hint.unwrap();
    assert!(hint.contains("`firn cluster forget web`"), "{hint}");
    let mut forgotten = forget(c);
    let start = Instant::now();
    while let Err(refused) = &forgotten {
        // A is lost, and the leases are over.
        assert!(start.elapsed() < PATIENCE, "{refused}");
        thread::sleep(Duration::from_millis(50));
        forgotten = forget(c);
    }
    let ForgottenRecord { vms, hosts: rests, .. } = forgotten.unwrap();
    assert_eq!(vms, ["web"]);
    let why = |host: &str| rests.iter().find(|(it, _)| it.starts_with(host)).unwrap().1;
    assert!(why("a ").contains("does not answer") && why("a ").contains("s old"), "{rests:?}");
    assert!(why("b ").contains("none of the VMs"), "{rests:?}");
    c.protect("web", "b").unwrap();
    assert_eq!(place(c), ["c", "b"]);
}

/// Another host has the name.
#[test]
fn a_vm_of_the_same_name_elsewhere_is_refused() {
    let hosts = Hosts::start();
    hosts.protect();
    hosts.models[2].web().state = Some("running");
    let refused = hosts.hosts[2].protect("web", "b").unwrap_err();
    assert_eq!(refused.kind, FailureKind::Busy);
    assert!(refused.to_string().contains("runs at host a"), "{refused}");
    let advice = hosts.hosts[2].cluster();
    assert!(advice.vms.iter().any(|vm| vm.host == name("c")));
}
