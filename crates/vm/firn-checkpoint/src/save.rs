//! A save from beginning to end.
//!
//! ```text
//!   create image file -> attach, register -> write-protect all of RAM                guest runs
//!                     -> make ready for the pause -> rounds: protect what was written
//!                     -> stop, device state, protect what was written last, cont     guest is paused (see `cut`)
//!                     -> drop page-table entries                                     guest runs, first touches fault
//!                     -> sweep until every block is copied -> unregister, close      guest runs without faults
//!                     -> sections, index, footer, fsync, rename
//! ```
//!
//! If the guest gave memory back that was not copied yet, there is no image
//! ([`SaveError::Discarded`]), and the caller may try again.
//!
//! Whatever fails, the range is unregistered (which resumes every waiting thread), the descriptor
//! in the hypervisor is closed, a VM that was stopped here continues, and the unfinished image file
//! is removed.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use firn_image::{BlockOrganization, Geometry, ImageDraft, ImageError, ImageSections, ImageWriter};
use firn_memory::scheduling;
use firn_types::{BandwidthLimit, Block, GuestPhys, ThreadId};
use firn_vmm::CopyError;

use crate::context::{CopiedMemory, DescribeVm, SaveContext, SavedState};
use crate::cut::{CutState, PreparedPause};
use crate::discards::DiscardCheck;
use crate::error::SaveError;
use crate::lane::LaneAttributor;
use crate::options::{SaveOptions, SaveStrategy};
use crate::order::{self, SweepOrder, ThrottledReader};
use crate::pipeline::{ImagePipeline, PipelineIntake, PipelineLimits};
use crate::pre_copy::{PreCopy, TrackedImage, is_stored_in_parent};
use crate::report::{SaveProgress, SaveReport, to_ms};
use crate::spaces;
use crate::stop_and_copy::StopCopy;
use crate::sweep::{BackgroundSweep, WatchPeriod};
use crate::sweep_throttle::{SweepDeadline, SweepThrottle};
use crate::trace::FaultLog;
use crate::traced_memory::TracedMemory;
use crate::worker::KernelWorkers;

/// Saves a VM to an image at `out`. The result of `describe` is stored unchanged.
pub fn save_vm(
    context: &mut SaveContext<'_>,
    out: &Path,
    describe: &DescribeVm<'_>,
    options: &SaveOptions,
    progress: &dyn Fn(SaveProgress),
) -> Result<SaveReport, SaveError> {
    firn_fault::pass_point("save.begin");
    let started = Instant::now();
    if options.leave_stopped && options.strategy != SaveStrategy::Stop {
        return Err(SaveError::Options("a VM can be left stopped only by the strategy `stop`"));
    }
    if options.first_spaces > 0 && options.strategy != SaveStrategy::Cow {
        return Err(SaveError::Options(
            "address spaces can be copied first only with the strategy `cow`",
        ));
    }
    let writer = create_writer(context, out, options)?;
    let identity = writer.identity();
    let limits =
        PipelineLimits { compressors: options.compressors, buffer_bytes: options.buffer_bytes_max };
    let (pipeline, intake) =
        ImagePipeline::start_threads(writer, options.codec, context.parent.clone(), limits);
    let copied = MemoryCopy { context: &mut *context, options, intake: &intake, progress, started }
        .copy_memory();
    drop(intake);
    let report = finish_image(context, pipeline.finish_image(), copied, describe);
    if let (Ok(_), Some(tracker)) = (&report, &mut context.tracker) {
        tracker.accept_image(TrackedImage::new(identity, context.seal));
    }
    Ok(SaveReport { total_ms: to_ms(started.elapsed()), ..report? })
}

fn finish_image(
    context: &mut SaveContext<'_>,
    writer: Result<ImageWriter, ImageError>,
    copied: Result<CopiedMemory, SaveError>,
    describe: &DescribeVm<'_>,
) -> Result<SaveReport, SaveError> {
    // An image that can't be written makes everything after it fail as well: its error is the
    // cause, so it is returned.
    let writer = writer?;
    let mut copied = copied?;
    if context.steps.is_cancelled() {
        return Err(SaveError::Cancelled);
    }
    finish_copies(context)?;
    firn_fault::pass_point("save.sections");
    let state = SavedState {
        found_late: copied.report.found_late,
        regions: context.memory.region_map(),
        device_state: &copied.cut.device_state,
    };
    let meta = describe(&state).map_err(SaveError::Step)?;
    let summary = writer.finish(image_sections(context, meta, &mut copied))?;
    firn_fault::pass_point("save.finished");
    let (image_bytes, blocks_inherited) = (summary.file_bytes, summary.inherited_blocks);
    Ok(SaveReport { image_bytes, blocks_inherited, ..copied.report })
}

/// The image is complete only when the copies of its disks are.
fn finish_copies(context: &mut SaveContext<'_>) -> Result<(), SaveError> {
    let SaveContext { vm, drives, steps, .. } = context;
    if drives.copies.is_empty() {
        return Ok(());
    }
    firn_fault::pass_point("copies.begun");
    let finished = vm.finish_copies(&drives.copies, &|| steps.is_cancelled());
    firn_fault::pass_point("copies.finished");
    finished.map_err(|error| match error {
        CopyError::Cancelled => SaveError::Cancelled,
        error => SaveError::CopyDisks(error),
    })
}

fn create_writer(
    context: &SaveContext<'_>,
    out: &Path,
    options: &SaveOptions,
) -> Result<ImageWriter, SaveError> {
    let draft = ImageDraft {
        parent: context.parent.as_deref(),
        seal: context.seal,
        allows_again: options.strategy == SaveStrategy::PreCopy || stores_again(context, options),
        ..ImageDraft::whole_image(image_geometry(context, options), BlockOrganization::Access)
    };
    Ok(ImageWriter::create(out, &draft)?)
}

/// Whether blocks that the guest touches after the sweep are stored a second time ([`crate::trace`]).
fn stores_again(context: &SaveContext<'_>, options: &SaveOptions) -> bool {
    let is_watched = options.strategy == SaveStrategy::Trace && context.used.is_none();
    is_watched && context.parent.is_none()
}

fn image_geometry(context: &SaveContext<'_>, options: &SaveOptions) -> Geometry {
    Geometry {
        block_size: options.block_size,
        locality_block_bytes: options.locality_block_bytes,
        total_pages: context.memory.region_map().total_pages(),
    }
}

fn image_sections(
    context: &SaveContext<'_>,
    meta: serde_json::Value,
    copied: &mut CopiedMemory,
) -> ImageSections {
    ImageSections {
        meta,
        regions: context.memory.region_map().clone(),
        device_state: std::mem::take(&mut copied.cut.device_state),
        aux_blocks: std::mem::take(&mut copied.cut.aux),
        working_set: std::mem::take(&mut copied.working_set),
        page_table_roots: std::mem::take(&mut copied.roots),
    }
}

/// The part of a save in which guest memory is being copied.
struct MemoryCopy<'c, 'a> {
    context: &'c mut SaveContext<'a>,
    options: &'c SaveOptions,
    intake: &'c PipelineIntake,
    progress: &'c dyn Fn(SaveProgress),
    started: Instant,
}

impl MemoryCopy<'_, '_> {
    fn copy_memory(mut self) -> Result<CopiedMemory, SaveError> {
        let vcpus: Vec<ThreadId> = self.context.vm.vcpus()?.iter().map(|vcpu| vcpu.tid).collect();
        self.intake.duty_cycle().watch_vcpus(self.context.process.pid(), &vcpus);
        if self.options.strategy == SaveStrategy::PreCopy {
            let Self { context, options, intake, progress, started } = self;
            let has_holes = false;
            return PreCopy { context, options, intake, progress, started, has_holes }.run_save();
        }
        match self.options.strategy {
            SaveStrategy::Stop => {
                self.context.memory.open_window()?;
                self.stop_and_copy()
            }
            _ => self.copy_traced(),
        }
    }

    /// Copy-on-access, or copy-on-write.
    fn copy_traced(&mut self) -> Result<CopiedMemory, SaveError> {
        let memory = Arc::clone(&self.context.memory);
        let discards = DiscardCheck::for_vm(self.context.vm, &memory)?;
        if discards.is_none() {
            // A mapping of Firn's would fill the holes that the guest makes.
            memory.open_window()?;
        }
        if let Some(other) = self.context.memory.other_users()?.first() {
            return Err(SaveError::Foreign(other.to_string()));
        }
        let first = spaces::used_last(self.context.vm, self.options.first_spaces)?;
        let vcpus = self.context.vm.vcpus()?;
        let tids: Vec<ThreadId> = vcpus.iter().map(|vcpu| vcpu.tid).collect();
        let threads = vcpus.iter().map(|vcpu| (vcpu.tid, vcpu.id));
        let workers = KernelWorkers::for_vcpus(self.context.process.pid(), threads.clone());
        let lanes = LaneAttributor::new(threads, self.context.process.list_threads()?);
        let intake = self.intake.clone();
        let traced = TracedMemory::attach_to_hypervisor(
            self.context,
            self.options,
            tids,
            lanes,
            workers,
            discards.clone(),
            intake,
        )?;
        let copied = self.copy_after_attach(&traced, &first);
        let log = traced.detach_from_hypervisor();
        firn_fault::pass_point("save.detached");
        // The fault handler may have lost a block after the end of the sweep.
        discards.map_or(Ok(()), |discards| discards.check_none_lost())?;
        let (mut copied, FaultLog { touches, counts }) = (copied?, log?);
        copied.report.faults = counts;
        copied.report.blocks_touched = touches.len();
        if self.context.used.is_none() {
            copied.working_set = touches.into_blocks();
        }
        Ok(copied)
    }

    /// Copies what the address spaces in `first` have written before anything else.
    fn copy_after_attach(
        &mut self,
        traced: &TracedMemory,
        first: &[GuestPhys],
    ) -> Result<CopiedMemory, SaveError> {
        traced.protect_all()?;
        if let Some(discards) = &traced.trace.discards {
            discards.record_backed()?;
        }
        let ready = PreparedPause::prepare_pause(self.context, true)?;
        let rounds = traced.protect_written()?;
        let arm_ms = to_ms(self.started.elapsed());
        let cut = CutState::make_cut(self.context, self.options, ready, &mut || traced.make_cut())?;
        firn_fault::pass_point("save.resumed");
        traced.trace.end_pause();
        if stores_again(self.context, self.options) {
            traced.trace.permit_repeats();
        }
        if cut.untouched_until.is_some_and(|resumed| traced.trace.was_written_before(resumed)) {
            return Err(SaveError::DeviceWroteInPause);
        }
        let watch = self.watch_period(traced.trace.now());
        if self.options.strategy == SaveStrategy::Trace {
            traced.drop_mappings()?;
        }
        firn_fault::pass_point("save.tracing");
        scheduling::set_background();
        let (roots, order, working_set) = self.plan_sweep(first, traced)?;
        traced.mark_unbacked_saved(&order.unbacked);
        let throttle = SweepThrottle::new(self.options.throttle);
        let (intake, progress, steps) = (self.intake, self.progress, self.context.steps);
        let (released_blocks, reported) = (0, Duration::ZERO);
        let trace = &traced.trace;
        let now = trace.now();
        let bandwidth = BandwidthLimit::new(self.options.bandwidth, now, intake.written_at_most());
        let deadline = self.options.finish_within;
        let deadline = deadline.map(|within| SweepDeadline { within, begun: now });
        let mut sweep = BackgroundSweep {
            trace,
            intake,
            throttle,
            bandwidth,
            deadline,
            progress,
            steps,
            watch,
            released_blocks,
            copied_at: Duration::ZERO,
            reported,
        };
        let watched = sweep.run_sweep(order.blocks, order.release_count)?;
        let (blocks_let_go, copied_ms) = (sweep.released_blocks, to_ms(sweep.copied_at));
        firn_fault::pass_point("save.swept");
        let found_late =
            traced.trace.lock_touches().late_share(watched).filter(|_| self.is_watched());
        let facts = self.base_report(&cut);
        let report = SaveReport { rounds, arm_ms, copied_ms, found_late, blocks_let_go, ..facts };
        Ok(CopiedMemory { cut, working_set, roots, report })
    }

    /// Whether the guest's touches show its working set: only [`SaveStrategy::Trace`] sees what it
    /// reads.
    fn is_watched(&self) -> bool {
        self.options.strategy == SaveStrategy::Trace && self.context.used.is_none()
    }

    /// The period for which the guest is watched from now on.
    fn watch_period(&self, now: Duration) -> WatchPeriod {
        let (is_at_least, at_most) = match self.is_watched() {
            true => (self.options.watch, self.options.watch_max),
            false => Default::default(),
        };
        WatchPeriod { until: now + is_at_least, at_most_until: now + at_most }
    }

    /// The roots of the guest's page tables, the order of the sweep that they give, and the working
    /// set as far as it is known.
    fn plan_sweep(
        &mut self,
        first: &[GuestPhys],
        traced: &TracedMemory,
    ) -> Result<(Vec<GuestPhys>, SweepOrder, Vec<Block>), SaveError> {
        let memory =
            &ThrottledReader { memory: &self.context.memory, duty_cycle: self.intake.duty_cycle() };
        let spaces = order::find_address_spaces(self.context.vm, memory)?;
        let mut order = order::plan_blocks(memory, &spaces, self.options.block_size)?;
        let size = self.options.block_size;
        let may_hold = |block| {
            let discards = traced.trace.discards.as_ref();
            discards.is_some_and(|discards| discards.may_hold(size.pages_of(block)))
        };
        order.add_unbacked(|block| {
            is_stored_in_parent(self.context.parent.as_deref(), block) || may_hold(block)
        });
        let used = self.context.used.as_deref().unwrap_or_default();
        let working_set = order.bring_forward(used, self.options.block_size);
        let written = spaces.written_pages(memory, first);
        let first = order.bring_forward(&written, self.options.block_size).len();
        // A block alone can't be released from a huge page.
        order.release_count = if memory.memory.has_huge_pages() { 0 } else { first };
        Ok((spaces.roots, order, working_set))
    }

    /// Stops the VM, copies everything, continues the VM.
    fn stop_and_copy(&mut self) -> Result<CopiedMemory, SaveError> {
        let memory = Arc::clone(&self.context.memory);
        let resting = ThrottledReader { memory: &memory, duty_cycle: self.intake.duty_cycle() };
        let spaces = order::find_address_spaces(self.context.vm, &resting)?;
        let Self { options, intake, progress, .. } = *self;
        let used = self.context.used.take().unwrap_or_default();
        let parent = self.context.parent.clone();
        let stopped =
            StopCopy { memory: &memory, spaces: &spaces, used, parent, options, intake, progress };
        let ready = PreparedPause::prepare_pause(self.context, false)?;
        let mut working_set = Vec::new();
        let cut = CutState::make_cut(self.context, options, ready, &mut || {
            working_set = intake.duty_cycle().without_pauses(|| stopped.copy_all())?;
            Ok(0)
        })?;
        let report = self.base_report(&cut);
        let roots = spaces.roots;
        Ok(CopiedMemory { cut, working_set, roots, report })
    }

    fn base_report(&self, cut: &CutState) -> SaveReport {
        let blocks_total =
            self.options.block_size.blocks_in(self.context.memory.region_map().total_pages());
        SaveReport { pause: cut.pause, blocks_total, ..SaveReport::default() }
    }
}
