//! Cut: the pause in which device state is saved and the contents of memory are fixed.

use std::io;
use std::time::{Duration, Instant};

use firn_image::AuxBlock;
use firn_types::ThreadId;

use crate::auxiliary::AuxCopies;
use crate::context::SaveContext;
use crate::error::SaveError;
use crate::options::SaveOptions;
use crate::reference;
use crate::report::{PauseReport, to_ms};

/// Steps of the caller around the pause, so that a successor knows whether to continue the VM.
pub trait SaveSteps {
    /// The VM is about to be stopped by this save.
    fn about_to_stop(&self) -> io::Result<()>;
    /// The VM runs again.
    fn record_resume(&self) -> io::Result<()>;
    /// Whether the save is to end without an image. It is called repeatedly; once it is `true` it
    /// stays so.
    fn is_cancelled(&self) -> bool {
        false
    }
}

/// The caller has no steps around the pause.
pub struct WithoutSaveSteps;

impl SaveSteps for WithoutSaveSteps {
    fn about_to_stop(&self) -> io::Result<()> {
        Ok(())
    }

    fn record_resume(&self) -> io::Result<()> {
        Ok(())
    }
}

/// How the VM is paused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PauseMethod {
    /// The hypervisor stops and starts the VM by itself.
    ToHold,
    /// Commands stop and start it.
    ToStop,
    /// The user has stopped the VM.
    Stopped,
}

/// A pause that is prepared, so that the preparation does not delay the pause after the last round,
/// when the guest would write more.
pub(crate) struct PreparedPause {
    method: PauseMethod,
    aux: AuxCopies,
}

impl PreparedPause {
    /// Copies video memory ahead, gives the hypervisor the descriptor for its device state, and
    /// reports to the caller that a pause is coming. In a `short` pause the hypervisor may wait for
    /// this save.
    pub(crate) fn prepare_pause(
        context: &mut SaveContext<'_>,
        short: bool,
    ) -> Result<Self, SaveError> {
        let was_running = context.vm.status()?.running;
        // Disks are cut by commands, and a hypervisor that waits does not read any.
        let method = match was_running {
            true if short && context.drives.is_empty() => PauseMethod::ToHold,
            true => PauseMethod::ToStop,
            false => PauseMethod::Stopped,
        };
        let aux = match was_running {
            true => {
                let vcpus: Vec<ThreadId> =
                    context.vm.vcpus()?.iter().map(|vcpu| vcpu.tid).collect();
                AuxCopies::copied_ahead(&context.process, context.aux, &vcpus)
            }
            false => AuxCopies::copied_late(&context.process, context.aux),
        };
        match Self::announce_pause(context, method) {
            Ok(()) => Ok(Self { method, aux }),
            Err(error) => {
                aux.close();
                Err(error)
            }
        }
    }

    fn announce_pause(context: &mut SaveContext<'_>, method: PauseMethod) -> Result<(), SaveError> {
        match method {
            PauseMethod::ToHold => context.vm.prepare_pause()?,
            PauseMethod::ToStop | PauseMethod::Stopped => context.vm.prepare_save()?,
        }
        if method != PauseMethod::Stopped {
            context.drives.flush_files();
        }
        context.steps.about_to_stop().map_err(SaveError::Step)
    }
}

/// The state that was saved during the pause.
pub(crate) struct CutState {
    pub(crate) device_state: Vec<u8>,
    pub(crate) aux: Vec<AuxBlock>,
    pub(crate) pause: PauseReport,
    /// When the hypervisor started the VM, since 1970, if it may have saved devices after memory
    /// was fixed. No device may have written to memory in between.
    pub(crate) untouched_until: Option<Duration>,
}

impl CutState {
    /// Stops the VM, saves its device state, fixes its memory by `fix`, continues it.
    ///
    /// `fix` returns how many pages it protected. A VM that its user had stopped already stays
    /// stopped. When anything fails the VM continues all the same.
    pub(crate) fn make_cut(
        context: &mut SaveContext<'_>,
        options: &SaveOptions,
        ready: PreparedPause,
        fix: &mut dyn FnMut() -> Result<u64, SaveError>,
    ) -> Result<Self, SaveError> {
        let PreparedPause { method, mut aux } = ready;
        let cut = Self::pause_by(context, options, method, &mut aux, fix);
        aux.close();
        let cut = cut?;
        context.vm.limit_copies(&context.drives.copies, options.bandwidth)?;
        context.vm.finish_save()?;
        context.steps.record_resume().map_err(SaveError::Step)?;
        Ok(cut)
    }

    fn pause_by(
        context: &mut SaveContext<'_>,
        options: &SaveOptions,
        method: PauseMethod,
        aux: &mut AuxCopies,
        fix: &mut dyn FnMut() -> Result<u64, SaveError>,
    ) -> Result<Self, SaveError> {
        let held = match method {
            PauseMethod::ToHold => Self::pause_by_hypervisor(context, options, aux, fix)?,
            PauseMethod::ToStop | PauseMethod::Stopped => None,
        };
        match held {
            Some(cut) => Ok(cut),
            None => Self::pause_by_commands(context, options, method, aux, fix),
        }
    }

    /// The hypervisor stops and starts the VM, and waits in between. `None` if it can't.
    fn pause_by_hypervisor(
        context: &mut SaveContext<'_>,
        options: &SaveOptions,
        aux: &mut AuxCopies,
        fix: &mut dyn FnMut() -> Result<u64, SaveError>,
    ) -> Result<Option<Self>, SaveError> {
        let SaveContext { vm, memory, .. } = context;
        let started = Instant::now();
        let Some(held) = vm.begin_pause()? else { return Ok(None) };
        let mut pause = PauseReport::default();
        firn_fault::pass_point("save.stopped");
        let aux = fix_memory(&mut pause, aux, fix)?;
        reference::write_reference(memory, options.reference.as_deref())?;
        firn_fault::pass_point("save.reprotected");
        let cont_started = Instant::now();
        let released = held.resume_vm()?;
        pause.cont_ms = to_ms(cont_started.elapsed());
        pause.device_state_ms = released.took.map(to_ms).unwrap_or_default();
        pause.downtime_ms = to_ms(released.paused_for.unwrap_or(started.elapsed()));
        let untouched_until = Some(released.resumed_at);
        Ok(Some(Self { device_state: released.device_state, aux, pause, untouched_until }))
    }

    /// Commands stop and start the VM.
    fn pause_by_commands(
        context: &mut SaveContext<'_>,
        options: &SaveOptions,
        method: PauseMethod,
        aux: &mut AuxCopies,
        fix: &mut dyn FnMut() -> Result<u64, SaveError>,
    ) -> Result<Self, SaveError> {
        let started = Instant::now();
        let cut = Self::save_stopped(context, options, aux, fix);
        let cont_started = Instant::now();
        let go_on = method != PauseMethod::Stopped && !(options.leave_stopped && cut.is_ok());
        let continued = if go_on { context.vm.cont() } else { Ok(()) };
        let mut cut = cut?;
        continued?;
        cut.pause.cont_ms = to_ms(cont_started.elapsed());
        cut.pause.downtime_ms = to_ms(context.vm.last_pause().unwrap_or(started.elapsed()));
        Ok(cut)
    }

    fn save_stopped(
        context: &mut SaveContext<'_>,
        options: &SaveOptions,
        aux: &mut AuxCopies,
        fix: &mut dyn FnMut() -> Result<u64, SaveError>,
    ) -> Result<Self, SaveError> {
        let mut pause = PauseReport::default();
        let (device_state, took) = time_step(|| Ok(context.vm.stop_and_cut(&context.drives)?))?;
        pause.device_state_ms = took;
        ((), pause.clone_ms) = time_step(|| Ok(context.drives.make_snapshots()?))?;
        firn_fault::pass_point("save.drives-cut");
        firn_fault::pass_point("save.stopped");
        let aux = fix_memory(&mut pause, aux, fix)?;
        reference::write_reference(&context.memory, options.reference.as_deref())?;
        firn_fault::pass_point("save.reprotected");
        Ok(Self { device_state, aux, pause, untouched_until: None })
    }
}

/// Completes the copies of the auxiliary blocks, and fixes guest RAM.
fn fix_memory(
    pause: &mut PauseReport,
    aux: &mut AuxCopies,
    fix: &mut dyn FnMut() -> Result<u64, SaveError>,
) -> Result<Vec<AuxBlock>, SaveError> {
    let (aux, took) = time_step(|| aux.complete())?;
    pause.aux_ms = took;
    firn_fault::pass_point("save.device-state");
    (pause.protected_pages, pause.protect_ms) = time_step(fix)?;
    Ok(aux)
}

fn time_step<T>(run: impl FnOnce() -> Result<T, SaveError>) -> Result<(T, f64), SaveError> {
    let started = Instant::now();
    let result = run()?;
    Ok((result, to_ms(started.elapsed())))
}
