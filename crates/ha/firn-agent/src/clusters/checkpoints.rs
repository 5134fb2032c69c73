//! Global checkpoints of a cluster, one after another: the shell around the initiator of
//! `firn-cluster` (`cut`).
//!
//! ```text
//!   every interval,     Mark ---> all VMs        each marks the end of its current epoch
//!   or on request            <--- their epochs   when they are committed
//!                       record: renamed          from here on, a failover runs this checkpoint
//!                       Globally ---> all VMs    they release the output that waits for it,
//!                                                the backups fold
//! ```
//!
//! A VM that does not answer is asked again with the next checkpoint. Until all answer, there is no
//! new checkpoint, and the VMs' output to the outside is buffered.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use firn_cluster::cut::{
    CheckpointInitiator, GlobalCheckpoint, InitiatorAction, MarkAnswer, RequestTiming,
};
use firn_cluster::{Generation, RequestNumber, VmId};
use firn_control::StoredCluster;
use firn_supervisor::{
    Failure, FailureContext as _, FailureKind, MemberRequest, SupervisorRequest,
};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval};

use super::checkpoint_task::{CheckpointReplySender, CheckpointTask};
use super::cluster_store::ClusterStore;
use super::remote_vm::{ASK_WAIT, RemoteVm};
use crate::agent::Agent;

/// In tests: how much later each VM is asked than the one before.
const TEST_DELAY: Duration = Duration::from_millis(800);

/// Starts the task that makes global checkpoints of a cluster.
pub(super) fn spawn_checkpoints(
    agent: &Arc<Agent>,
    records: ClusterStore,
    record: StoredCluster,
) -> CheckpointTask {
    let (orders, ordered) = mpsc::channel(4);
    let trouble = Arc::default();
    let cuts = CheckpointLoop::new(agent, records, record, Arc::clone(&trouble));
    CheckpointTask { task: tokio::spawn(cuts.run(ordered)), orders, trouble }
}

struct CheckpointLoop {
    records: ClusterStore,
    record: StoredCluster,
    vms: BTreeMap<VmId, RemoteVm>,
    initiator: CheckpointInitiator,
    /// A checkpoint that all VMs have marked, but that could not be written.
    pending: Option<GlobalCheckpoint>,
    began: Instant,
    trouble: Arc<Mutex<Option<String>>>,
}

impl CheckpointLoop {
    fn new(
        agent: &Arc<Agent>,
        records: ClusterStore,
        record: StoredCluster,
        trouble: Arc<Mutex<Option<String>>>,
    ) -> Self {
        let vms: BTreeMap<VmId, RemoteVm> =
            record.numbered_vms().map(|(vm, placed)| (vm, RemoteVm::new(agent, placed))).collect();
        let every = Duration::from_millis(record.interval_ms);
        let timing =
            RequestTiming { cut_interval: every, retry_after: ASK_WAIT, give_up_after: ASK_WAIT };
        let number = record.checkpoint.as_ref().map_or(0, |checkpoint| checkpoint.number);
        let timeline = (record.generation, 0);
        let initiator =
            CheckpointInitiator::new(timeline, record.term, number, vms.keys().copied(), timing);
        let (pending, began) = (None, Instant::now());
        Self { records, record, vms, initiator, pending, began, trouble }
    }

    async fn run(mut self, mut orders: mpsc::Receiver<CheckpointReplySender>) {
        let mut every = interval(Duration::from_millis(self.record.interval_ms));
        every.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let order = tokio::select! {
                _ = every.tick() => None,
                order = orders.recv() => match order {
                    Some(order) => Some(order),
                    None => return,
                },
            };
            let made = self.make_checkpoint().await;
            self.record_failure(made.as_ref().err());
            // The client may have disconnected.
            order.into_iter().for_each(|order| drop(order.send(made.clone())));
        }
    }

    fn record_failure(&self, failure: Option<&Failure>) {
        let text = failure.map(ToString::to_string);
        let mut trouble = self.trouble.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(text) = text.as_ref().filter(|text| trouble.as_ref() != Some(text)) {
            tracing::warn!("cluster {}: no global checkpoint: {text}", self.record.name);
        }
        *trouble = text;
    }

    async fn make_checkpoint(&mut self) -> Result<GlobalCheckpoint, Failure> {
        if let Some(checkpoint) = self.pending.take() {
            self.put_on_record(checkpoint).await?;
        }
        for action in self.initiator.begin_request(self.began.elapsed()) {
            let InitiatorAction::Ask { generation, request, .. } = action else { continue };
            let mut checkpoint = None;
            for answer in self.request_marks(generation, request).await {
                if let Some(InitiatorAction::Record(all)) = self.initiator.record_answer(&answer?) {
                    checkpoint = Some(all);
                }
            }
            if let Some(checkpoint) = checkpoint {
                return self.put_on_record(checkpoint).await;
            }
        }
        let text = "not all VMs have a mark yet: some have no committed copy";
        Err(Failure::new(FailureKind::Busy, text))
    }

    async fn request_marks(
        &mut self,
        generation: Generation,
        number: RequestNumber,
    ) -> Vec<Result<MarkAnswer, Failure>> {
        let request = |_| SupervisorRequest::Member(MemberRequest::Mark { generation, number });
        let answers = self.ask_all(request).await;
        let read = |value| serde_json::from_value(value).while_doing("reading a mark");
        answers.into_iter().map(|answer| answer.and_then(read)).collect()
    }

    async fn put_on_record(
        &mut self,
        checkpoint: GlobalCheckpoint,
    ) -> Result<GlobalCheckpoint, Failure> {
        let record = StoredCluster { checkpoint: Some(checkpoint.clone()), ..self.record.clone() };
        if let Err(failure) = self.records.store_cluster(&record) {
            self.pending = Some(checkpoint);
            return Err(failure);
        }
        self.record = record;
        self.initiator.confirm_recorded();
        let generation = checkpoint.generation;
        let marks = checkpoint.marks.clone();
        let request = |vm| {
            let epoch = marks.get(&vm).copied().unwrap_or_default();
            SupervisorRequest::Member(MemberRequest::Globally { generation, epoch })
        };
        // A VM that does not receive this receives the next one.
        for failure in self.ask_all(request).await.into_iter().filter_map(Result::err) {
            tracing::debug!("cluster {}: {failure}", self.record.name);
        }
        Ok(checkpoint)
    }

    /// Asks all VMs at once.
    async fn ask_all(
        &mut self,
        request: impl Fn(VmId) -> SupervisorRequest,
    ) -> Vec<Result<serde_json::Value, Failure>> {
        let mut asked = JoinSet::new();
        for (vm, mut connection) in std::mem::take(&mut self.vms) {
            let request = request(vm);
            asked.spawn(async move {
                // For tests in which a request has to reach some VMs late.
                if firn_fault::pass_io_point("cluster.ask").is_err() {
                    tokio::time::sleep(TEST_DELAY * u32::from(vm.0)).await;
                }
                let reply = connection.ask_supervisor(request, ASK_WAIT).await;
                (vm, connection, reply)
            });
        }
        let mut answers = Vec::new();
        while let Some(reply) = asked.join_next().await {
            match reply {
                Ok((vm, connection, answer)) => {
                    self.vms.insert(vm, connection);
                    answers.push(answer);
                }
                Err(error) => answers.push(Err(error).while_doing("asking a VM")),
            }
        }
        answers
    }
}
