//! Three agents with membership, and a cluster of two VMs that are only the answers of their
//! supervisors: `web` at `a`, `db` at `b`, copies at `c`.

use std::collections::BTreeMap;
use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use firn_agent::vms::OnReady;
use firn_agent::{AgentConfig, DetectorTiming, LocalVms, membership};
use firn_cluster::cut::MarkAnswer;
use firn_cluster::member::ClusterMembership;
use firn_cluster::switch::MacAddress;
use firn_cluster::{Epoch, Generation};
use firn_control::api::{
    CLUSTERS, CreateCluster, ForgottenRecord, MembershipView, PlacementView, ProtectionOptions,
};
use firn_control::client::Method;
use firn_control::{ClusterState, HostHealth, StoredCluster, client};
use firn_supervisor::{
    CardStatus, FailoverRequest, Failure, FailureKind, MemberCard, MemberRequest, OnProgress,
    ProtectRequest, ProtectionStatus, RuntimeDir, SupervisorRequest, VmName, VmStatus,
};
use serde::Serialize;
use serde_json::{Value, json};

use crate::host::{Host, eventually, name};
use crate::membership::configured;

/// The VMs of one host.
struct Model {
    base: RuntimeDir,
    vms: Mutex<BTreeMap<VmName, Vm>>,
    /// Why VMs were ended here. The name of such a VM may be that of a standby a moment later.
    fenced: Mutex<BTreeMap<VmName, String>>,
}

#[derive(Default)]
struct Vm {
    /// `running`, `protected`, `standby` or `ended`.
    state: &'static str,
    lease: Option<u32>,
    /// Its output is buffered, whatever its lease allows.
    is_held: bool,
    /// Generations whose lease it was granted.
    granted: Vec<u32>,
    member: Option<ClusterMembership>,
    epoch: u64,
    /// The generation and the epoch that it continued from.
    went_on: Option<(Generation, Epoch)>,
    /// Its standby is lost, which its supervisor notices when it has to release it.
    hears_late: bool,
    /// Its standby is not complete until this is set back; it is being seeded.
    is_slow: bool,
    is_seeded: bool,
    /// The stream of its epochs.
    stream: Option<UnixStream>,
}

impl Vm {
    /// The process at the other end of its stream may be gone.
    fn look(&mut self) {
        let gone = self.stream.as_ref().is_some_and(|stream| {
            stream.set_nonblocking(true).unwrap();
            matches!(std::io::Read::read(&mut &*stream, &mut [0]), Ok(0))
        });
        if gone {
            self.stream = None;
            if self.state == "protected" {
                (self.state, self.is_held) = ("running", true);
            }
        }
    }

    fn member(&mut self, request: &MemberRequest) -> Result<Value, Failure> {
        let no = || Failure::new(FailureKind::Refused, "no");
        let of = self.member.clone();
        match request {
            MemberRequest::Card => unreachable!(),
            MemberRequest::Join(of) if self.state == "running" && !self.is_held => {
                self.member = Some(of.clone());
                Ok(Value::Null)
            }
            MemberRequest::Mark { generation, number } if self.state == "protected" => {
                let of = of.filter(|of| of.generation == *generation).ok_or_else(no)?;
                self.epoch += 1;
                let marks = vec![(of.own, Epoch(self.epoch))];
                let (generation, request) = (*generation, *number);
                let answer = MarkAnswer { generation, layout: of.layout, request, marks };
                Ok(serde_json::to_value(answer).unwrap())
            }
            MemberRequest::Globally { .. } => Ok(Value::Null),
            MemberRequest::Leave if !self.is_held => {
                self.member = None;
                Ok(Value::Null)
            }
            _ => Err(no()),
        }
    }

    fn fail_over(&mut self, how: FailoverRequest) -> Value {
        assert_eq!(self.state, "standby");
        assert!(how.lease.is_some());
        assert_eq!(self.granted.last(), how.lease.as_ref(), "its lease is not held");
        (self.state, self.lease, self.stream) = ("running", how.lease, None);
        self.went_on = how.member.map(|to| (to.generation, to.epoch));
        json!({})
    }

    fn release_member(&mut self) -> Result<Value, Failure> {
        if std::mem::take(&mut self.hears_late) {
            (self.state, self.is_held, self.stream) = ("running", true, None);
            return Err(Failure::new(FailureKind::Lost, "the connection to the backup ended"));
        }
        self.released();
        Ok(Value::Null)
    }

    fn released(&mut self) {
        assert!(matches!(self.state, "running" | "protected"), "{}", self.state);
        (self.state, self.lease, self.is_held, self.stream) = ("running", None, false, None);
    }
}

fn vm(name: &str) -> VmName {
    VmName::new(name).unwrap()
}

impl Model {
    fn all(&self) -> MutexGuard<'_, BTreeMap<VmName, Vm>> {
        let mut all = self.vms.lock().unwrap();
        all.values_mut().for_each(Vm::look);
        all
    }

    /// Calls a function with one of its VMs, which must exist.
    fn with<T>(&self, vm: &VmName, work: impl FnOnce(&mut Vm) -> T) -> T {
        work(self.all().get_mut(vm).unwrap())
    }

    fn is(&self, name: &str, state: &str) -> bool {
        self.all().get(&vm(name)).is_some_and(|it| it.state == state)
    }

    fn add(&self, name: &VmName, it: Vm) {
        let path = self.base.vm_dir(name).path().to_owned();
        DirBuilder::new().recursive(true).mode(0o700).create(path).unwrap();
        self.all().insert(name.clone(), it);
    }
}

impl Model {
    /// State that was only in memory is lost.
    fn lose_power(&self) {
        for name in std::mem::take(&mut *self.all()).into_keys() {
            let _ = std::fs::remove_dir_all(self.base.vm_dir(&name).path());
        }
    }
}

impl LocalVms for Model {
    fn list_vms(&self) -> Result<Vec<VmStatus>, Failure> {
        let names: Vec<VmName> = self.all().keys().cloned().collect();
        names.iter().map(|it| self.vm_status(it)).collect()
    }

    fn vm_status(&self, name: &VmName) -> Result<VmStatus, Failure> {
        let all = self.all();
        let none = || Failure::new(FailureKind::NoSuchVm, "no such VM");
        let it = all.get(name).ok_or_else(none)?;
        let mut status = json!({ "name": name, "state": it.state, "launched": true, "memory_bytes": 0,
            "vcpus": 1, "qemu": "", "accel": "tcg", "since": 0, "recoveries": 0, "lease": it.lease });
        let mut card = serde_json::to_value(CardStatus::default()).unwrap();
        card["open"] = (!it.is_held).into();
        status["network"] = json!([card]);
        if it.state == "standby" {
            let ended = it.stream.is_none().then_some("it has ended");
            status["standby"] =
                json!({ "complete": 999, "committed": 999, "member": true, "ended": ended });
        }
        if it.state == "protected" {
            status["protection"] = serde_json::to_value(ProtectionStatus::default()).unwrap();
        }
        Ok(serde_json::from_value(status).unwrap())
    }

    fn protect_vm(
        &self,
        name: &VmName,
        how: ProtectRequest,
        _: OnProgress<'_>,
    ) -> Result<Value, Failure> {
        let address = how.to.to_string();
        let near = UnixStream::connect(address.strip_prefix("unix:").unwrap()).unwrap();
        while self.with(name, |it| {
            it.is_seeded = it.is_slow;
            it.is_slow
        }) {
            std::thread::sleep(Duration::from_millis(10));
        }
        self.with(name, |it| {
            assert!(it.state == "running" && !it.is_held && it.member.is_some());
            assert!(how.lease.is_some() && it.granted.last() == how.lease.as_ref());
            (it.state, it.lease, it.is_held) = ("protected", how.lease, true);
            it.stream = Some(near);
        });
        Ok(json!({}))
    }

    fn ask_supervisor(&self, name: &VmName, request: &SupervisorRequest) -> Result<Value, Failure> {
        if !self.all().contains_key(name) {
            return Err(Failure::new(FailureKind::NoSuchVm, "no such VM"));
        }
        self.with(name, |it| match request {
            SupervisorRequest::Member(MemberRequest::Card) => {
                let mac = MacAddress([2, 0, 0, 0, 0, name.as_str().as_bytes()[0]]);
                Ok(serde_json::to_value(MemberCard { mac, is_settled: true }).unwrap())
            }
            SupervisorRequest::Member(request) => it.member(request),
            SupervisorRequest::Failover(how) => Ok(it.fail_over(*how)),
            SupervisorRequest::ReleaseMember => it.release_member(),
            other => unreachable!("{other:?}"),
        })
    }

    fn start_standby(
        &self,
        name: &VmName,
        _: &Path,
        ready: OnReady,
    ) -> Result<UnixStream, Failure> {
        let (near, end) = UnixStream::pair().unwrap();
        let is_free = self.all().get(name).is_none_or(|it| it.state == "ended");
        assert!(is_free, "there is one already");
        self.add(name, Vm { state: "standby", stream: Some(end), ..Vm::default() });
        ready(Ok(json!({})));
        Ok(near)
    }

    fn fail_over_vm(&self, name: &VmName, _: u32) -> Result<Value, Failure> {
        panic!("{name} does not run alone");
    }

    fn release_vm(&self, name: &VmName) -> Result<(), Failure> {
        self.with(name, Vm::released);
        Ok(())
    }

    fn resume_output(&self, name: &VmName) -> Result<(), Failure> {
        self.with(name, |it| {
            assert_eq!(it.state, "running");
            it.is_held = false;
        });
        Ok(())
    }

    fn fence_vm(&self, name: &VmName, why: String) -> Result<(), Failure> {
        self.with(name, |it| (it.state, it.stream) = ("ended", None));
        self.fenced.lock().unwrap().insert(name.clone(), why);
        Ok(())
    }

    fn grant_lease(&self, name: &VmName, lease: Option<(u32, Duration)>) {
        let Some((generation, _)) = lease else { return };
        if let Some(it) = self.all().get_mut(name) {
            if it.granted.last() != Some(&generation) {
                it.granted.push(generation);
            }
        }
    }

    fn stop_standby(&self, name: &VmName) -> Result<(), Failure> {
        assert!(self.is(name.as_str(), "standby"));
        self.all().remove(name);
        std::fs::remove_dir_all(self.base.vm_dir(name).path()).unwrap();
        Ok(())
    }
}

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
            let model = Arc::new(Model { base, vms: Mutex::default(), fenced: Mutex::default() });
            let (_send, ends) = channel();
            let vms = Arc::clone(&model) as Arc<dyn LocalVms>;
            hosts.push(Host::with_vms(dir, config, DetectorTiming::default(), vms, ends).unwrap());
            models.push(model);
            files.push(file);
        }
        let hosts = Self { hosts, models, files };
        hosts.boot();
        hosts.all_agree();
        hosts
    }

    /// Starts the agent of a host again. Its VMs are as they were.
    fn restart(&mut self, host: usize) {
        let vms = Arc::clone(&self.models[host]) as Arc<dyn LocalVms>;
        self.hosts[host].start_again(&self.files[host], &vms);
    }

    fn ask(&self, host: usize, verb: &str) -> Result<StoredCluster, Failure> {
        let how = ProtectionOptions { interval_ms: 100, predicts: true, cluster: None };
        let how = (verb == "protect").then_some(&how);
        asked(&self.hosts[host], &format!("{CLUSTERS}/shop/{verb}"), how)
    }

    fn forget(&self, host: usize) -> Result<ForgottenRecord, Failure> {
        let path = format!("{CLUSTERS}/shop/forget");
        client::send_cluster_request(&self.hosts[host].base, Method::POST, &path, None::<&()>)
    }

    fn boot(&self) {
        for (host, it) in [(0, "web"), (1, "db")] {
            self.models[host].add(&vm(it), Vm { state: "running", ..Vm::default() });
        }
    }

    fn all_agree(&self) {
        for host in &self.hosts {
            eventually("all are there", || {
                host.cluster().peers.iter().all(|peer| peer.health == HostHealth::Alive)
            });
        }
        eventually("somebody leads", || view(&self.hosts[0]).leader.is_some());
    }

    /// By `c`.
    fn protect(&self) {
        let vms = vec![(vm("web"), Some(name("a"))), (vm("db"), Some(name("b")))];
        let create = CreateCluster { name: vm("shop"), vms };
        asked(&self.hosts[2], CLUSTERS, Some(&create)).unwrap();
        let record = self.ask(2, "protect").unwrap();
        assert!(record.state == ClusterState::Protected && record.checkpoint.is_some());
        assert_eq!(placements(&self.hosts[2]), [["a", "c"], ["b", "c"]]);
        assert!(self.models[0].is("web", "protected") && self.models[1].is("db", "protected"));
    }

    /// Both run at `c`, in another generation, from one global checkpoint; VMs that ran elsewhere
    /// are ended.
    fn both_run_at_c(&self) {
        let c = &self.models[2];
        let runs = |it| c.is(it, "running") || c.is(it, "protected");
        eventually("both run at c", || runs("web") && runs("db"));
        eventually("that is known", || self.kept().state == ClusterState::FailedOver);
        let checkpoint = self.kept().checkpoint.unwrap();
        for (number, it) in ["web", "db"].into_iter().enumerate() {
            let number = firn_cluster::VmId(number as u16);
            let (generation, epoch) = c.with(&vm(it), |it| {
                assert_eq!((it.lease, it.granted.last()), (Some(1), Some(&1)));
                it.went_on.unwrap()
            });
            assert_eq!(epoch, checkpoint.marks[&number]);
            assert!(generation > checkpoint.generation);
        }
        eventually("hosts agree", || {
            placements(&self.hosts[2]).iter().all(|place| place[0] == "c")
        });
    }

    /// The stored cluster of `c`.
    fn kept(&self) -> StoredCluster {
        let all: Vec<StoredCluster> =
            client::send_cluster_request(&self.hosts[2].base, Method::GET, CLUSTERS, None::<&()>)
                .unwrap();
        all.into_iter().find(|it| it.name == vm("shop")).unwrap()
    }

    fn is_ended(&self, host: usize, name: &str) {
        let why = || self.models[host].fenced.lock().unwrap().get(&vm(name)).cloned();
        eventually("it is ended", || why().is_some());
        assert!(why().unwrap().contains("its cluster shop"), "{why:?}", why = why());
    }
}

fn asked(host: &Host, path: &str, body: Option<&impl Serialize>) -> Result<StoredCluster, Failure> {
    client::send_cluster_request(&host.base, Method::POST, path, body)
}

fn view(host: &Host) -> MembershipView {
    client::read_records(&host.base).unwrap()
}

/// The names of primary and backup of each VM in the record.
fn placements(host: &Host) -> Vec<Vec<String>> {
    let name = |it: &str| it.split(' ').next().unwrap_or_default().to_owned();
    let of = |vm: &PlacementView| {
        [name(&vm.primary)].into_iter().chain(vm.backup.as_deref().map(name)).collect()
    };
    view(host).clusters.first().map(|it| it.vms.iter().map(of).collect()).unwrap_or_default()
}

#[test]
fn all_vms_of_a_cluster_continue_when_one_host_dies_and_are_protected_again() {
    let mut hosts = Hosts::start();
    hosts.protect();
    hosts.hosts[0].kill();
    hosts.both_run_at_c();
    hosts.is_ended(1, "db");
    // By a host that has no stored cluster, and without a person. The failover names that host
    // before it has copies.
    let c = &hosts.models[2];
    eventually("both are protected", || c.is("web", "protected") && c.is("db", "protected"));
    eventually("hosts agree", || placements(&hosts.hosts[1]) == [["c", "b"], ["c", "b"]]);
    let again = hosts.ask(1, "protect").unwrap_err();
    assert!(again.to_string().contains("protected already"), "{again}");
    assert!(c.is("web", "protected") && c.is("db", "protected"));
    assert_eq!(c.with(&vm("web"), |it| it.granted.clone()), [1], "nothing was rolled back");
}

#[test]
fn a_vm_that_dies_takes_its_cluster_back_though_all_agents_live() {
    let hosts = Hosts::start();
    hosts.protect();
    hosts.models[1].with(&vm("db"), |db| (db.state, db.stream) = ("ended", None));
    hosts.both_run_at_c();
    hosts.is_ended(0, "web");
}

/// Its successor has none of the buffered output: the copies are all that is left.
#[test]
fn a_vm_whose_supervisor_dies_takes_its_cluster_back() {
    let hosts = Hosts::start();
    hosts.protect();
    hosts.models[0].with(&vm("web"), |web| {
        (web.state, web.member, web.stream) = ("running", None, None);
    });
    hosts.both_run_at_c();
    hosts.is_ended(0, "web");
    hosts.is_ended(1, "db");
}

#[test]
fn vms_without_their_standbys_continue() {
    let mut hosts = Hosts::start();
    hosts.protect();
    hosts.hosts[2].kill();
    for (host, it) in [(0, "web"), (1, "db")] {
        eventually("it is heard", || hosts.models[host].with(&vm(it), |it| !it.is_held));
        let granted = hosts.models[host].with(&vm(it), |it| (it.lease, it.granted.clone()));
        assert_eq!(granted, (Some(0), vec![0]), "nothing was rolled back");
    }
    assert_eq!(placements(&hosts.hosts[0]), [["a"], ["b"]]);
}

/// An agent holds no copies: a restarted one adopts those of its predecessor.
#[test]
fn a_host_that_dies_while_the_agent_of_the_copies_is_started_again_is_no_loss() {
    let mut hosts = Hosts::start();
    hosts.protect();
    hosts.hosts[2].kill();
    hosts.hosts[0].kill();
    eventually("the copies get nothing", || {
        let c = &hosts.models[2];
        c.all().values().all(|it| it.stream.is_none())
    });
    hosts.restart(2);
    hosts.both_run_at_c();
    hosts.is_ended(1, "db");
}

/// If all VMs still run, there is no failover because of it.
#[test]
fn vms_continue_when_the_backups_agent_restarts_and_are_protected_again() {
    let mut hosts = Hosts::start();
    hosts.protect();
    hosts.hosts[2].kill();
    hosts.restart(2);
    let protected =
        || hosts.models[0].is("web", "protected") && hosts.models[1].is("db", "protected");
    eventually("they are protected by c", || {
        protected() && placements(&hosts.hosts[2]) == [["a", "c"], ["b", "c"]]
    });
    let granted = hosts.models[0].with(&vm("web"), |it| (it.lease, it.granted.clone()));
    assert_eq!(granted, (Some(0), vec![0]), "nothing was rolled back");
}

#[test]
fn a_failover_by_hand_is_agreed_on() {
    let hosts = Hosts::start();
    hosts.protect();
    assert_eq!(hosts.ask(2, "failover").unwrap().state, ClusterState::FailedOver);
    hosts.both_run_at_c();
    hosts.is_ended(0, "web");
    hosts.is_ended(1, "db");
}

#[test]
fn a_cluster_that_is_released_is_none_and_may_be_one_again() {
    let hosts = Hosts::start();
    hosts.protect();
    hosts.ask(2, "release").unwrap();
    for host in &hosts.hosts {
        eventually("it is no cluster", || placements(host).is_empty());
    }
    for (host, it) in [(0, "web"), (1, "db")] {
        let now = hosts.models[host].with(&vm(it), |it| (it.state, it.lease, it.is_held));
        assert_eq!(now, ("running", None, false));
    }
    let refused = hosts.ask(2, "failover").unwrap_err();
    assert!(refused.to_string().contains("can't be run here"), "{refused}");
    hosts.ask(2, "protect").unwrap();
    assert_eq!(placements(&hosts.hosts[2]), [["a", "c"], ["b", "c"]]);
}

/// The others do not fail over without it.
#[test]
fn a_vm_that_learns_late_of_its_lost_standby_is_released() {
    let hosts = Hosts::start();
    hosts.protect();
    hosts.models[1].with(&vm("db"), |it| it.hears_late = true);
    hosts.ask(2, "release").unwrap();
    for (host, it) in [(0, "web"), (1, "db")] {
        let now = hosts.models[host].with(&vm(it), |it| (it.state, it.is_held));
        assert_eq!(now, ("running", false));
    }
}

#[test]
fn a_vm_that_its_user_ends_ends_its_cluster() {
    let hosts = Hosts::start();
    hosts.protect();
    hosts.models[0].all().remove(&vm("web"));
    let b = &hosts.models[1];
    eventually("the other goes on", || b.with(&vm("db"), |db| db.lease.is_none() && !db.is_held));
    eventually("no copies are left", || hosts.models[2].all().is_empty());
    assert_eq!(hosts.kept().state, ClusterState::Made);
    assert!(b.is("db", "running"));
}

/// Seeding copies may take an hour: the failover of another cluster does not wait for that.
#[test]
fn a_cluster_fails_over_while_another_is_seeded() {
    let mut hosts = Hosts::start();
    hosts.protect();
    let b = Arc::clone(&hosts.models[1]);
    b.add(&vm("till"), Vm { state: "running", is_slow: true, ..Vm::default() });
    let create = CreateCluster { name: vm("zoo"), vms: vec![(vm("till"), Some(name("b")))] };
    asked(&hosts.hosts[2], CLUSTERS, Some(&create)).unwrap();
    let base = hosts.hosts[2].base.clone();
    let seeding = std::thread::spawn(move || {
        let how = ProtectionOptions { interval_ms: 100, predicts: true, cluster: None };
        let path = format!("{CLUSTERS}/zoo/protect");
        client::send_cluster_request::<StoredCluster>(&base, Method::POST, &path, Some(&how))
    });
    eventually("the other is being seeded", || b.with(&vm("till"), |it| it.is_seeded));
    hosts.hosts[0].kill();
    hosts.both_run_at_c();
    assert!(!seeding.is_finished() && b.with(&vm("till"), |it| it.is_seeded));
    b.with(&vm("till"), |it| it.is_slow = false);
    seeding.join().unwrap().unwrap();
    assert!(b.is("till", "protected"));
}

/// A power failure of all hosts: each agent is another host then, and no VM of the record exists.
#[test]
fn a_name_is_free_again_after_a_power_cut() {
    let mut hosts = Hosts::start();
    hosts.protect();
    let refused = hosts.forget(1).unwrap_err();
    assert_eq!(refused.kind, FailureKind::Refused, "{refused}");
    (0..3).for_each(|host| hosts.hosts[host].kill());
    hosts.models.iter().for_each(|model| model.lose_power());
    (0..3).for_each(|host| hosts.restart(host));
    hosts.boot();
    hosts.all_agree();
    let hint = hosts.ask(2, "protect").unwrap_err().hint.unwrap();
    assert!(hint.contains("`firn cluster forget`"), "{hint}");
    let mut forgotten = None;
    eventually("leases are over", || {
        forgotten = hosts.forget(0).ok();
        forgotten.is_some()
    });
    let ForgottenRecord { vms, hosts: rests, .. } = forgotten.unwrap();
    assert_eq!((vms, rests.len()), (vec!["web".to_owned(), "db".to_owned()], 3));
    assert!(rests.values().all(|why| why.contains("none of the VMs")), "{rests:?}");
    assert_eq!(hosts.forget(0).unwrap_err().kind, FailureKind::NoSuchVm);
    hosts.ask(2, "protect").unwrap();
    assert_eq!(placements(&hosts.hosts[2]), [["a", "c"], ["b", "c"]]);
    let refused = hosts.forget(0).unwrap_err();
    assert_eq!(refused.kind, FailureKind::Refused, "{refused}");
}

#[test]
fn one_of_a_cluster_is_not_protected_alone() {
    let hosts = Hosts::start();
    hosts.protect();
    let refused = hosts.hosts[0].protect("web", "b").unwrap_err();
    assert!(refused.to_string().contains("belongs to cluster shop"), "{refused}");
    // Nor a VM whose record would be that of the cluster.
    hosts.models[0].add(&vm("shop"), Vm { state: "running", ..Vm::default() });
    let refused = hosts.hosts[0].protect("shop", "b").unwrap_err();
    assert_eq!(refused.kind, FailureKind::Busy);
    assert!(refused.to_string().contains("a record of a cluster shop of other VMs"), "{refused}");
    assert_eq!(placements(&hosts.hosts[2]), [["a", "c"], ["b", "c"]]);
}
