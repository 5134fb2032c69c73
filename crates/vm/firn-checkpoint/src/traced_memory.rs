//! Traced guest RAM: attaches to a hypervisor and traces its guest's RAM, and detaches again
//! whatever happens.

use std::ops::Range;
use std::sync::Arc;

use firn_memory::{
    PageFaultError, PageFaults, Process, TraceMode as TraceFor, Tracee, drop_page_tables,
};
use firn_types::{Block, PAGE_SIZE, Page, ThreadId};

use crate::context::SaveContext;
use crate::discards::DiscardCheck;
use crate::error::SaveError;
use crate::lane::LaneAttributor;
use crate::options::{SaveOptions, SaveStrategy};
use crate::pipeline::PipelineIntake;
use crate::trace::{FaultLog, SaveTrace, TraceHandler};
use crate::worker::KernelWorkers;
use crate::written::ProtectRounds;

/// Pages per protecting call: a fraction of a millisecond, so that no fault waits for long.
const PROTECT_PAGES: u32 = (16 << 20) / PAGE_SIZE as u32;
/// Pages per unmapping call: about a millisecond, for which one idle thread of the hypervisor is
/// stopped.
const DROP_PAGES: u32 = (64 << 20) / PAGE_SIZE as u32;

/// Traced guest RAM.
pub(crate) struct TracedMemory {
    pub(crate) trace: Arc<SaveTrace>,
    handler: TraceHandler,
    process: Arc<Process>,
    vcpus: Vec<ThreadId>,
}

impl TracedMemory {
    /// Creates the descriptor in the hypervisor, starts answering faults, registers all RAM.
    pub(crate) fn attach_to_hypervisor(
        context: &SaveContext<'_>,
        options: &SaveOptions,
        vcpus: Vec<ThreadId>,
        lanes: LaneAttributor,
        workers: KernelWorkers,
        discards: Option<Arc<DiscardCheck>>,
        intake: PipelineIntake,
    ) -> Result<Self, SaveError> {
        let mut faults = {
            let mut tracee = Tracee::seize(&context.process, &vcpus)?;
            PageFaults::create(
                &mut tracee,
                Arc::clone(&context.memory),
                traced_accesses(options.strategy),
            )?
        };
        if !context.memory.is_shared() && !faults.features().write_protect_unpopulated {
            faults.close(&mut Tracee::seize(&context.process, &vcpus)?)?;
            return Err(SaveError::PrivateUnpopulated);
        }
        if discards.as_ref().is_some_and(|discards| discards.needs_hole_faults()) {
            faults.report_holes();
        }
        firn_fault::pass_point("save.attached");
        let turns = Arc::clone(intake.duty_cycle());
        let memory = Arc::clone(&context.memory);
        let trace = Arc::new(SaveTrace::new(memory, faults, options.block_size, discards, turns));
        let handler = TraceHandler::start_thread(Arc::clone(&trace), lanes, workers, intake);
        let traced = Self { trace, handler, process: Arc::clone(&context.process), vcpus };
        if let Err(error) = traced.trace.faults.register_all() {
            drop(traced.detach_from_hypervisor());
            return Err(error.into());
        }
        firn_fault::pass_point("save.registered");
        Ok(traced)
    }

    /// Write-protects all RAM while the guest runs.
    pub(crate) fn protect_all(&self) -> Result<(), PageFaultError> {
        for chunk in self.ram_chunks(PROTECT_PAGES) {
            self.trace.faults.protect_pages(chunk)?;
            self.trace.duty_cycle().pause_if_due();
        }
        firn_fault::pass_point("save.protected");
        Ok(())
    }

    /// Protects again the pages that the guest has written since, until few are left. The pause
    /// should follow at once. Returns the number of rounds.
    pub(crate) fn protect_written(&self) -> Result<u32, PageFaultError> {
        let mut rounds = ProtectRounds::new();
        while rounds.needs_another(self.trace.lock_written().len()) {
            let runs = self.trace.lock_written().drain();
            self.protect_runs(&runs)?;
        }
        firn_fault::pass_point("save.rounds");
        Ok(rounds.rounds_done())
    }

    fn ram_chunks(&self, pages: u32) -> impl Iterator<Item = Range<Page>> + '_ {
        let map = self.trace.memory.region_map();
        map.regions().iter().flat_map(move |region| chunks_of(region.page_range(), pages))
    }

    /// Huge pages are protected as a whole: protecting more than was written changes nothing.
    fn protect_runs(&self, runs: &[Range<Page>]) -> Result<(), PageFaultError> {
        let whole = |run: &Range<Page>| self.trace.memory.with_whole_huge_pages(run.clone());
        runs.iter().try_for_each(|run| self.trace.faults.protect_pages(whole(run)))
    }

    /// With the vCPUs stopped: protects the remaining pages and makes the cut. Returns the number
    /// of pages protected.
    pub(crate) fn make_cut(&self) -> Result<u64, SaveError> {
        let mut written = self.trace.lock_written();
        let runs = written.drain();
        self.protect_runs(&runs)?;
        self.trace.begin_tracing();
        Ok(runs.iter().map(|run| Page::count_in(run) as u64).sum())
    }

    /// Drops the page-table entries of all RAM while the guest runs, so that reads fault as well.
    /// Data stays in the RAM file: the mapping is shared.
    pub(crate) fn drop_mappings(&self) -> Result<(), SaveError> {
        let mut tracee = Tracee::seize(&self.process, &self.vcpus)?;
        for chunk in self.ram_chunks(DROP_PAGES) {
            drop_page_tables(&mut tracee, &self.trace.memory, chunk)?;
        }
        Ok(())
    }

    /// Counts blocks as saved that need no copy: they had no backing, so they were zeros at the
    /// cut. Blocks that the fault handler has claimed in the meantime are left to it.
    pub(crate) fn mark_unbacked_saved(&self, unbacked: &[Block]) {
        unbacked.iter().for_each(|&block| self.trace.ledger.mark_empty(block));
    }

    /// Detaches from the hypervisor: nothing is protected, no thread waits, no descriptor stays
    /// behind.
    pub(crate) fn detach_from_hypervisor(self) -> Result<FaultLog, SaveError> {
        self.trace.begin_release();
        let pause = || {
            self.trace.duty_cycle().pause_if_due();
        };
        let unregistered = self.trace.faults.unregister_by_pieces(&pause);
        let counts = self.handler.join_thread();
        let touches = std::mem::take(&mut *self.trace.lock_touches());
        if let Some(trace) = Arc::into_inner(self.trace) {
            trace.faults.close(&mut Tracee::seize(&self.process, &self.vcpus)?)?;
        }
        unregistered?;
        Ok(FaultLog { touches, counts: counts? })
    }
}

/// The kind of accesses that must be traced.
fn traced_accesses(strategy: SaveStrategy) -> TraceFor {
    match strategy {
        SaveStrategy::Trace => TraceFor::Save,
        SaveStrategy::Cow | SaveStrategy::PreCopy | SaveStrategy::Stop => TraceFor::Writes,
    }
}

fn chunks_of(range: Range<Page>, pages: u32) -> impl Iterator<Item = Range<Page>> {
    let starts = (range.start.0..range.end.0).step_by(pages as usize);
    starts.map(move |start| Page(start)..Page((start + pages).min(range.end.0)))
}
