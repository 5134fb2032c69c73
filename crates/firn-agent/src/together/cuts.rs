//! Global checkpoints, one after another: the shell around the initiator of `firn-cluster` (`cut`).
//!
//! ```text
//!   every interval, or when asked:   Mark ---> all VMs                    each marks the end of the epoch that runs
//!                                       <--- their epochs                 when they are committed
//!                                    record: renamed into its place        from here on it is what a failover goes back to
//!                                    Globally ---> all VMs                 they let out what waits for it, backups fold
//! ```
//!
//! Whoever does not answer is asked again with the next one. Until all do, there is no new one: what VMs send outside waits.

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use firn_cluster::cut::{Action, Answer, GlobalCheckpoint, Initiator, Pace};
use firn_cluster::{Generation, RequestNumber, Vm};
use firn_supervisor::{Context as _, Failure, FailureKind, MemberRequest, Request};
use tokio::sync::{mpsc, oneshot};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{MissedTickBehavior, interval};

use super::far::{ASK_WAIT, Far};
use super::record::{Record, Records};
use crate::agent::Agent;

/// How much later the next VM is asked, in tests.
const LATE: Duration = Duration::from_millis(800);

/// Somebody wants one now.
type Order = oneshot::Sender<Result<GlobalCheckpoint, Failure>>;

/// Global checkpoints that are being made of a cluster, until this is dropped.
pub(super) struct Cutting {
    task: JoinHandle<()>,
    orders: mpsc::Sender<Order>,
    trouble: Arc<Mutex<Option<String>>>,
}

impl Cutting {
    pub(super) fn begin(agent: &Arc<Agent>, records: Records, record: Record) -> Self {
        let (orders, ordered) = mpsc::channel(4);
        let trouble = Arc::default();
        let cuts = Cuts::new(agent, records, record, Arc::clone(&trouble));
        Self { task: tokio::spawn(cuts.run(ordered)), orders, trouble }
    }

    /// Makes one now.
    pub(super) fn order(
        &self,
    ) -> impl Future<Output = Result<GlobalCheckpoint, Failure>> + Send + use<> {
        let orders = self.orders.clone();
        async move {
            let over =
                || Failure::new(FailureKind::Interrupted, "no more global checkpoints are made");
            let (tell, told) = oneshot::channel();
            orders.send(tell).await.map_err(|_| over())?;
            told.await.map_err(|_| over())?
        }
    }

    /// Why there was none the last time, if so.
    pub(super) fn trouble(&self) -> Option<String> {
        self.trouble.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Ends it: no record is written any more when this returns.
    pub(super) async fn end(mut self) {
        self.task.abort();
        // It was aborted.
        let _ = (&mut self.task).await;
    }
}

impl Drop for Cutting {
    fn drop(&mut self) {
        self.task.abort();
    }
}

struct Cuts {
    records: Records,
    record: Record,
    vms: BTreeMap<Vm, Far>,
    initiator: Initiator,
    /// One that all have answered, and that could not be written.
    pending: Option<GlobalCheckpoint>,
    began: Instant,
    trouble: Arc<Mutex<Option<String>>>,
}

impl Cuts {
    fn new(
        agent: &Arc<Agent>,
        records: Records,
        record: Record,
        trouble: Arc<Mutex<Option<String>>>,
    ) -> Self {
        let vms: BTreeMap<Vm, Far> =
            record.numbered().map(|(vm, placed)| (vm, Far::new(agent, placed))).collect();
        let every = Duration::from_millis(record.interval_ms);
        let pace = Pace { every, again_after: ASK_WAIT, give_up_after: ASK_WAIT };
        let number = record.checkpoint.as_ref().map_or(0, |checkpoint| checkpoint.number);
        let timeline = (record.generation, 0);
        let initiator = Initiator::new(timeline, record.term, number, vms.keys().copied(), pace);
        let (pending, began) = (None, Instant::now());
        Self { records, record, vms, initiator, pending, began, trouble }
    }

    async fn run(mut self, mut orders: mpsc::Receiver<Order>) {
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
            let made = self.cut().await;
            self.note(made.as_ref().err());
            // Whoever ordered it may have gone.
            order.into_iter().for_each(|order| drop(order.send(made.clone())));
        }
    }

    fn note(&self, failure: Option<&Failure>) {
        let text = failure.map(ToString::to_string);
        let mut trouble = self.trouble.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(text) = text.as_ref().filter(|text| trouble.as_ref() != Some(text)) {
            tracing::warn!("cluster {}: no global checkpoint: {text}", self.record.name);
        }
        *trouble = text;
    }

    async fn cut(&mut self) -> Result<GlobalCheckpoint, Failure> {
        if let Some(checkpoint) = self.pending.take() {
            self.put_on_record(checkpoint).await?;
        }
        for action in self.initiator.begin(self.began.elapsed()) {
            let Action::Ask { generation, request, .. } = action else { continue };
            let mut checkpoint = None;
            for answer in self.marks(generation, request).await {
                if let Some(Action::Record(all)) = self.initiator.answered(&answer?) {
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

    async fn marks(
        &mut self,
        generation: Generation,
        number: RequestNumber,
    ) -> Vec<Result<Answer, Failure>> {
        let request = |_| Request::Member(MemberRequest::Mark { generation, number });
        let answers = self.ask_all(request).await;
        let read = |value| serde_json::from_value(value).doing("reading a mark");
        answers.into_iter().map(|answer| answer.and_then(read)).collect()
    }

    async fn put_on_record(
        &mut self,
        checkpoint: GlobalCheckpoint,
    ) -> Result<GlobalCheckpoint, Failure> {
        let record = Record { checkpoint: Some(checkpoint.clone()), ..self.record.clone() };
        if let Err(failure) = self.records.store(&record) {
            self.pending = Some(checkpoint);
            return Err(failure);
        }
        self.record = record;
        self.initiator.recorded();
        let generation = checkpoint.generation;
        let marks = checkpoint.marks.clone();
        let request = |vm| {
            let epoch = marks.get(&vm).copied().unwrap_or_default();
            Request::Member(MemberRequest::Globally { generation, epoch })
        };
        // Who does not hear of it hears of the next.
        for failure in self.ask_all(request).await.into_iter().filter_map(Result::err) {
            tracing::debug!("cluster {}: {failure}", self.record.name);
        }
        Ok(checkpoint)
    }

    /// Asks all VMs at once.
    async fn ask_all(
        &mut self,
        request: impl Fn(Vm) -> Request,
    ) -> Vec<Result<serde_json::Value, Failure>> {
        let mut asked = JoinSet::new();
        for (vm, mut far) in std::mem::take(&mut self.vms) {
            let request = request(vm);
            asked.spawn(async move {
                // For tests that want a request to be late at some of them.
                if firn_fault::io("cluster.ask").is_err() {
                    tokio::time::sleep(LATE * u32::from(vm.0)).await;
                }
                let told = far.ask(request, ASK_WAIT).await;
                (vm, far, told)
            });
        }
        let mut answers = Vec::new();
        while let Some(told) = asked.join_next().await {
            match told {
                Ok((vm, far, told)) => {
                    self.vms.insert(vm, far);
                    answers.push(told);
                }
                Err(error) => answers.push(Err(error).doing("asking a VM")),
            }
        }
        answers
    }
}
