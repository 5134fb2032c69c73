//! Traced guest RAM: attaches to a hypervisor and traces its guest's RAM, and detaches again
//! whatever happens.

use std::ops::Range;
use std::sync::Arc;

use firn_memory::{
    PageFaultError, PageFaults, Process, Trace as TraceFor, Tracee, drop_page_tables,
};
use firn_types::{Block, PAGE_SIZE, Page, Tid};

use crate::lane::Lanes;
use crate::options::{SaveOptions, Strategy};
use crate::pipeline::Intake;
use crate::save::{SaveContext, SaveError};
use crate::trace::{FaultLog, Handler, Trace};
use crate::worker::Workers;
use crate::written::Rounds;

/// Pages per protecting call: a fraction of a millisecond, so that no fault waits for long.
const PROTECT_PAGES: u32 = (16 << 20) / PAGE_SIZE as u32;
/// Pages per unmapping call: about a millisecond, for which one idle thread of the hypervisor is
/// stopped.
const DROP_PAGES: u32 = (64 << 20) / PAGE_SIZE as u32;

/// Traced guest RAM.
pub(crate) struct Armed {
    pub(crate) trace: Arc<Trace>,
    handler: Handler,
    process: Arc<Process>,
    vcpus: Vec<Tid>,
}

impl Armed {
    /// Creates the descriptor in the hypervisor, starts answering faults, registers all RAM.
    pub(crate) fn attach(
        context: &SaveContext<'_>,
        options: &SaveOptions,
        vcpus: Vec<Tid>,
        lanes: Lanes,
        workers: Workers,
        intake: Intake,
    ) -> Result<Self, SaveError> {
        let faults = {
            let mut tracee = Tracee::seize(&context.process, &vcpus)?;
            PageFaults::create(
                &mut tracee,
                Arc::clone(&context.memory),
                followed(options.strategy),
            )?
        };
        if !context.memory.is_shared() && !faults.features().write_protect_unpopulated {
            faults.close(&mut Tracee::seize(&context.process, &vcpus)?)?;
            return Err(SaveError::PrivateUnpopulated);
        }
        firn_fault::point("save.attached");
        let turns = Arc::clone(intake.turns());
        let memory = Arc::clone(&context.memory);
        let trace = Arc::new(Trace::new(memory, faults, options.block_size, turns));
        let handler = Handler::start(Arc::clone(&trace), lanes, workers, intake);
        let armed = Self { trace, handler, process: Arc::clone(&context.process), vcpus };
        if let Err(error) = armed.trace.faults.register() {
            drop(armed.disarm());
            return Err(error.into());
        }
        firn_fault::point("save.registered");
        Ok(armed)
    }

    /// Write-protects all RAM while the guest runs.
    pub(crate) fn arm(&self) -> Result<(), PageFaultError> {
        for chunk in self.chunks(PROTECT_PAGES) {
            self.trace.faults.protect(chunk)?;
            self.trace.turns().rest();
        }
        firn_fault::point("save.armed");
        Ok(())
    }

    /// Protects again the pages that the guest has written since, until few are left. The pause
    /// should follow at once. Returns the number of rounds.
    pub(crate) fn settle(&self) -> Result<u32, PageFaultError> {
        let mut rounds = Rounds::new();
        while rounds.another(self.trace.written().len()) {
            let runs = self.trace.written().drain();
            self.protect(&runs)?;
        }
        firn_fault::point("save.rounds");
        Ok(rounds.done())
    }

    fn chunks(&self, pages: u32) -> impl Iterator<Item = Range<Page>> + '_ {
        let map = self.trace.memory.map();
        map.regions().iter().flat_map(move |region| chunks_of(region.range(), pages))
    }

    fn protect(&self, runs: &[Range<Page>]) -> Result<(), PageFaultError> {
        runs.iter().try_for_each(|run| self.trace.faults.protect(run.clone()))
    }

    /// With the vCPUs stopped: protects the remaining pages and makes the cut. Returns the number
    /// of pages protected.
    pub(crate) fn cut(&self) -> Result<u64, SaveError> {
        let mut written = self.trace.written();
        let runs = written.drain();
        self.protect(&runs)?;
        self.trace.cut();
        Ok(runs.iter().map(|run| Page::count(run) as u64).sum())
    }

    /// Drops the page-table entries of all RAM while the guest runs, so that reads fault as well.
    /// Data stays in the RAM file: the mapping is shared.
    pub(crate) fn retrace(&self) -> Result<(), SaveError> {
        let mut tracee = Tracee::seize(&self.process, &self.vcpus)?;
        for chunk in self.chunks(DROP_PAGES) {
            drop_page_tables(&mut tracee, &self.trace.memory, chunk)?;
        }
        Ok(())
    }

    /// Counts blocks as saved that need no copy: they had no backing, so they were zeros at the
    /// cut. Blocks that the fault handler has claimed in the meantime are left to it.
    pub(crate) fn skip(&self, unbacked: &[Block]) {
        for &block in unbacked {
            if self.trace.ledger.try_claim(block) {
                self.trace.ledger.copied(block);
            }
        }
    }

    /// Detaches from the hypervisor: nothing is protected, no thread waits, no descriptor stays
    /// behind.
    pub(crate) fn disarm(self) -> Result<FaultLog, SaveError> {
        self.trace.let_go();
        let unregistered = self.trace.faults.unregister_by_pieces(&|| self.trace.turns().rest());
        let counts = self.handler.finish();
        let touches = std::mem::take(&mut *self.trace.touches());
        if let Some(trace) = Arc::into_inner(self.trace) {
            trace.faults.close(&mut Tracee::seize(&self.process, &self.vcpus)?)?;
        }
        unregistered?;
        Ok(FaultLog { touches, counts: counts? })
    }
}

/// The kind of accesses that must be traced.
fn followed(strategy: Strategy) -> TraceFor {
    match strategy {
        Strategy::Trace => TraceFor::Save,
        Strategy::Cow | Strategy::PreCopy | Strategy::Stop => TraceFor::Writes,
    }
}

fn chunks_of(range: Range<Page>, pages: u32) -> impl Iterator<Item = Range<Page>> {
    let starts = (range.start.0..range.end.0).step_by(pages as usize);
    starts.map(move |start| Page(start)..Page((start + pages).min(range.end.0)))
}
