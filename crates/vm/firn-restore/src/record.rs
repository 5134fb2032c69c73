//! Run record: the events of one restore.
//!
//! Figures about restores (time to responsiveness, prefetched and demanded pages, reads from
//! storage) are computed from this record, not measured beside it. It is a serde value with a
//! version; times are microseconds since the user requested the restore. Its size is bounded: past
//! [`FAULTS_MAX`] faults and [`READS_MAX`] reads, events are only counted.

use std::time::Duration;

use firn_types::{Page, ThreadId, VcpuId};
use serde::{Deserialize, Serialize};

use crate::inbox::PendingFault;
use crate::options::RestoreMode;
use crate::server::{ReadReason, RestoreCounts};

/// The version of [`RunRecord`] that this crate writes.
pub const RUN_RECORD_VERSION: u32 = 1;

/// Maximum number of faults recorded one by one.
pub const FAULTS_MAX: usize = 1 << 18;

/// Maximum number of reads recorded one by one.
pub const READS_MAX: usize = 1 << 17;

/// Capacity for faults and reads that is allocated in advance, so that few faults wait for memory.
const RESERVED: usize = 1 << 14;

/// For how long after they began to run vCPUs count as new.
const NEW_GUEST_TIME: Duration = Duration::from_secs(1);

/// The record of one restore.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunRecord {
    /// [`RUN_RECORD_VERSION`].
    pub version: u32,
    /// The order in which memory was restored.
    pub mode: RestoreMode,
    /// Pages of RAM.
    pub ram_pages: u32,
    /// Pages that the image stores; all others are zeros.
    pub stored_pages: u32,
    /// The threads that run vCPUs.
    pub vcpus: Vec<VcpuThread>,
    /// When everything to be read before the guest runs was installed.
    pub prefilled_us: Option<u64>,
    /// When the vCPUs began to run.
    #[serde(default)]
    pub resumed_us: Option<u64>,
    /// When all memory was present.
    pub finished_us: Option<u64>,
    /// When this record was made. It does not describe later events.
    #[serde(default)]
    pub recorded_us: u64,
    /// The storage latency, if reads have shown that it is high.
    #[serde(default)]
    pub way_us: Option<u64>,
    /// Pages installed because the guest was expected to touch them: runs in the order of
    /// addresses, each as its first page and its length.
    #[serde(default)]
    pub prefetched: Vec<(u32, u32)>,
    /// Sums.
    pub counts: RunCounts,
    /// Each page fault, in the order in which they were answered.
    pub faults: Vec<FaultRecord>,
    /// Faults that are only counted.
    pub faults_left_out: u64,
    /// Each read from storage, in the order in which they ended.
    pub reads: Vec<ReadRecord>,
    /// Reads that are only counted.
    pub reads_left_out: u64,
}

/// A thread of the hypervisor that runs a vCPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VcpuThread {
    /// Its id.
    pub tid: ThreadId,
    /// The vCPU.
    pub vcpu: VcpuId,
}

/// How a page fault was answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AnswerKind {
    /// With zeros.
    Zero,
    /// The page was installed before the handler processed the fault.
    Late,
    /// From bytes in memory.
    Memory,
    /// From the page cache.
    PageCache,
    /// After waiting for storage.
    Storage,
}

/// One page fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FaultRecord {
    /// When the fault was read.
    pub t_us: u64,
    /// The page.
    pub page: Page,
    /// The thread that waited: of the hypervisor, or of the kernel (KVM's asynchronous page
    /// faults).
    pub tid: ThreadId,
    /// The time until the answer, in microseconds. During a storage outage it may exceed the 71.6
    /// minutes of 32 bits.
    pub wait_us: u64,
    /// How the fault was answered.
    pub answered: AnswerKind,
}

impl FaultRecord {
    pub(crate) fn new(fault: PendingFault, now: Duration, answered: AnswerKind) -> Self {
        let PendingFault { page, tid, since, .. } = fault;
        let wait_us = micros(now.saturating_sub(since));
        Self { t_us: micros(since), page, tid, wait_us, answered }
    }

    /// When the fault was answered, in microseconds.
    pub fn answered_us(&self) -> u64 {
        self.t_us.saturating_add(self.wait_us)
    }

    pub(crate) fn answered_at(&self) -> Duration {
        Duration::from_micros(self.answered_us())
    }
}

/// Why a unit was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RecordedReason {
    /// The guest waited for it.
    Demand,
    /// It was prefetched.
    Ahead,
    /// Background fill.
    Fill,
}

/// One read from storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReadRecord {
    /// When it began.
    pub t_us: u64,
    /// Offset in the image, in bytes.
    pub offset: u64,
    /// Number of bytes.
    pub len: u32,
    /// Duration, in microseconds.
    pub us: u64,
    /// Why it was read.
    pub why: RecordedReason,
}

impl ReadRecord {
    /// When it ended, in microseconds.
    pub fn ended_us(&self) -> u64 {
        self.t_us.saturating_add(self.us)
    }
}

/// Sums over a restore. Each page is counted once, when it is installed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunCounts {
    /// Page faults.
    pub faults: u64,
    /// Of these, on pages that hold zeros.
    pub zero_faults: u64,
    /// Of these, on pages that were installed before the handler processed the fault.
    pub late_faults: u64,
    /// Of these, on a unit that was being read already.
    pub joined_faults: u64,
    /// Locality blocks (in a lazy restore: memory blocks) read because of a fault.
    pub demand_units: u64,
    /// Of these, read from storage; the others were in the page cache.
    pub demand_reads: u64,
    /// Those prefetched because the guest was expected to touch them.
    pub ahead_units: u64,
    /// Those read in the background.
    pub fill_units: u64,
    /// Pages that the guest waited for.
    pub on_demand_pages: u64,
    /// Other pages of the same locality blocks.
    pub beside_pages: u64,
    /// Pages prefetched because the guest was expected to touch them, also before the hypervisor
    /// ran.
    pub ahead_pages: u64,
    /// Pages installed in the background.
    pub fill_pages: u64,
    /// Pages the guest gave back before they were installed.
    pub removed_pages: u64,
    /// Whether prefetching ended because the guest used other pages than predicted.
    #[serde(default)]
    pub diverged: bool,
    /// Pages read without the guest waiting for them, but not by the background fill. Only if use
    /// was counted.
    pub prefetched_pages: Option<u64>,
    /// Of these, touched by the guest later: avoided faults. Only if use was counted.
    pub prefetched_used_pages: Option<u64>,
}

impl RunCounts {
    pub(crate) fn new(counts: &RestoreCounts, account_use: bool) -> Self {
        Self {
            faults: counts.faults,
            zero_faults: counts.zero_faults,
            late_faults: counts.late_faults,
            joined_faults: counts.joined_faults,
            demand_units: counts.demand_units,
            demand_reads: counts.demand_reads,
            ahead_units: counts.ahead_units,
            fill_units: counts.fill_units,
            on_demand_pages: counts.on_demand_pages,
            beside_pages: counts.beside_pages,
            ahead_pages: counts.ahead_pages,
            fill_pages: counts.fill_pages,
            removed_pages: counts.removed_pages,
            diverged: counts.diverged,
            prefetched_pages: account_use.then_some(counts.prefetched_pages),
            prefetched_used_pages: account_use.then_some(counts.prefetched_used_pages),
        }
    }

    /// Share of prefetched pages that the guest used; only if use was counted.
    pub fn prefetched_used(&self) -> Option<f64> {
        let (used, all) = (self.prefetched_used_pages?, self.prefetched_pages?);
        (all > 0).then(|| used as f64 / all as f64)
    }
}

impl From<ReadReason> for RecordedReason {
    fn from(why: ReadReason) -> Self {
        match why {
            ReadReason::Demand => Self::Demand,
            ReadReason::Ahead => Self::Ahead,
            ReadReason::Fill => Self::Fill,
        }
    }
}

/// Collects the events of a restore.
#[derive(Debug)]
pub(crate) struct RunRecorder {
    faults: Vec<FaultRecord>,
    faults_left_out: u64,
    reads: Vec<ReadRecord>,
    reads_left_out: u64,
    waiting: Vec<PendingFault>,
    vcpus: Vec<ThreadId>,
    waited: Duration,
    prefilled: Option<Duration>,
    resumed: Option<Duration>,
    finished: Option<Duration>,
}

impl RunRecorder {
    /// A recorder for a VM with these vCPU threads.
    pub(crate) fn new(vcpus: Vec<ThreadId>) -> Self {
        Self {
            vcpus,
            waited: Duration::ZERO,
            faults: Vec::with_capacity(RESERVED),
            faults_left_out: 0,
            reads: Vec::with_capacity(RESERVED),
            reads_left_out: 0,
            waiting: Vec::with_capacity(64),
            prefilled: None,
            resumed: None,
            finished: None,
        }
    }

    /// A fault was answered.
    pub(crate) fn record_fault(&mut self, fault: FaultRecord) {
        if self.vcpus.contains(&fault.tid) {
            self.waited += Duration::from_micros(fault.wait_us);
        }
        match self.faults.len() < FAULTS_MAX {
            true => self.faults.push(fault),
            false => self.faults_left_out += 1,
        }
    }

    /// The answer to a fault waits for storage.
    pub(crate) fn record_waiting(&mut self, fault: PendingFault) {
        self.waiting.push(fault);
    }

    /// Records the waiting faults whose pages are settled now (`is_settled`) as answered.
    pub(crate) fn record_settled(&mut self, now: Duration, is_settled: impl Fn(Page) -> bool) {
        let mut at = 0;
        while at < self.waiting.len() {
            if is_settled(self.waiting[at].page) {
                let fault = self.waiting.swap_remove(at);
                self.record_fault(FaultRecord::new(fault, now, AnswerKind::Storage));
            } else {
                at += 1;
            }
        }
    }

    /// The time that vCPUs have waited for pages that they have by now, summed over them.
    pub(crate) fn total_wait(&self) -> Duration {
        self.waited
    }

    pub(crate) fn has_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// A read from storage has ended.
    pub(crate) fn record_read(
        &mut self,
        began: Duration,
        now: Duration,
        extent: (u64, u32),
        why: ReadReason,
    ) {
        if self.reads.len() >= READS_MAX {
            self.reads_left_out += 1;
            return;
        }
        let us = micros(now.saturating_sub(began));
        let (offset, len) = extent;
        self.reads.push(ReadRecord { t_us: micros(began), offset, len, us, why: why.into() });
    }

    pub(crate) fn record_prefill(&mut self, now: Duration) {
        self.prefilled = Some(now);
    }

    pub(crate) fn record_resume(&mut self, now: Duration) {
        self.resumed = Some(now);
    }

    /// Whether the vCPUs have only just begun to run.
    pub(crate) fn is_new(&self, now: Duration) -> bool {
        self.resumed.is_some_and(|resumed| now.saturating_sub(resumed) < NEW_GUEST_TIME)
    }

    pub(crate) fn record_finish(&mut self, now: Duration) {
        self.finished = Some(now);
    }

    /// The record until now. `about` has all fields that are not collected here.
    ///
    /// Each thread takes the time before it waits for the lock, so events may be collected in
    /// another order than that of their times.
    pub(crate) fn make_record(&self, about: RunRecord) -> RunRecord {
        let (mut faults, mut reads) = (self.faults.clone(), self.reads.clone());
        faults.sort_by_key(FaultRecord::answered_us);
        reads.sort_by_key(ReadRecord::ended_us);
        RunRecord {
            prefilled_us: self.prefilled.map(micros),
            resumed_us: self.resumed.map(micros),
            finished_us: self.finished.map(micros),
            faults,
            faults_left_out: self.faults_left_out,
            reads,
            reads_left_out: self.reads_left_out,
            ..about
        }
    }
}

fn micros(time: Duration) -> u64 {
    time.as_micros() as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use firn_memory::FaultKind;

    const MS: Duration = Duration::from_millis(1);

    fn fault(page: u32, tid: i32, since: Duration) -> PendingFault {
        PendingFault { page: Page(page), tid: ThreadId(tid), kind: FaultKind::Missing, since }
    }

    #[test]
    fn a_fault_that_waits_for_storage_is_recorded_when_its_page_is_there() {
        let mut recorder = RunRecorder::new(vec![ThreadId(2)]);
        recorder.record_waiting(fault(7, 1, MS));
        recorder.record_waiting(fault(9, 2, 2 * MS));
        recorder.record_settled(5 * MS, |page| page == Page(9));
        let expected = FaultRecord {
            t_us: 2000,
            page: Page(9),
            tid: ThreadId(2),
            wait_us: 3000,
            answered: AnswerKind::Storage,
        };
        assert_eq!(recorder.faults, [expected]);
        assert!(recorder.has_waiting());
        assert_eq!(recorder.total_wait(), 3 * MS);
    }

    /// An outage of storage may last for hours: 32 bits of microseconds end after 71.6 minutes.
    #[test]
    fn waits_and_reads_of_hours_are_recorded() {
        const HOUR: Duration = Duration::from_secs(3600);
        let late = FaultRecord::new(fault(1, 2, MS), 2 * HOUR + MS, AnswerKind::Storage);
        assert_eq!((late.wait_us, late.answered_us()), (7_200_000_000, 7_200_001_000));
        let mut recorder = RunRecorder::new(vec![ThreadId(2)]);
        recorder.record_read(MS, 3 * HOUR + MS, (4096, 8192), ReadReason::Demand);
        assert_eq!(recorder.reads[0].us, 10_800_000_000);
        recorder.record_fault(late);
        assert_eq!(recorder.total_wait(), 2 * HOUR);
        let json = serde_json::to_value(recorder.reads[0]).unwrap();
        assert_eq!(json["us"], 10_800_000_000_u64);
        assert_eq!(serde_json::from_value::<ReadRecord>(json).unwrap(), recorder.reads[0]);
    }

    #[test]
    fn events_are_sorted_by_their_end() {
        let mut recorder = RunRecorder::new(vec![ThreadId(2)]);
        for (began, ended) in [(5, 9), (1, 3), (2, 8)] {
            recorder.record_read(began * MS, ended * MS, (4096, 8192), ReadReason::Ahead);
            let answered = AnswerKind::Memory;
            recorder.record_fault(FaultRecord::new(fault(0, 2, began * MS), ended * MS, answered));
        }
        let record = recorder.make_record(empty_record());
        let ends: Vec<u64> = record.reads.iter().map(ReadRecord::ended_us).collect();
        assert_eq!(ends, [3000, 8000, 9000]);
        let answers: Vec<u64> = record.faults.iter().map(FaultRecord::answered_us).collect();
        assert_eq!(answers, [3000, 8000, 9000]);
    }

    fn empty_record() -> RunRecord {
        let json = serde_json::json!({
            "version": RUN_RECORD_VERSION, "mode": "auto", "ram_pages": 0, "stored_pages": 0,
            "vcpus": [], "prefilled_us": null, "finished_us": null, "counts": RunCounts::default(),
            "faults": [], "faults_left_out": 0, "reads": [], "reads_left_out": 0,
        });
        serde_json::from_value(json).unwrap()
    }

    #[test]
    fn memory_is_bounded() {
        let mut recorder = RunRecorder::new(vec![ThreadId(2)]);
        for _ in 0..FAULTS_MAX + 3 {
            recorder.record_fault(FaultRecord::new(fault(0, 0, MS), MS, AnswerKind::Zero));
        }
        assert_eq!((recorder.faults.len(), recorder.faults_left_out), (FAULTS_MAX, 3));
    }
}
