//! The cut: the pause in which device state is saved and what memory was is fixed.

use std::io;
use std::time::{Duration, Instant};

use firn_image::AuxBlock;
use firn_memory::{Process, process_memory};
use firn_vmm::AuxRam;

use crate::options::SaveOptions;
use crate::reference;
use crate::report::{Pause, ms};
use crate::save::{SaveContext, SaveError};

/// What a caller wants told around the pause, so that a successor knows whether to let the VM go on.
pub trait Steps {
    /// The VM is about to be stopped by this save.
    fn about_to_stop(&self) -> io::Result<()>;
    /// The VM runs again.
    fn resumed(&self) -> io::Result<()>;
    /// Whether the save is to end without an image. Asked again and again; once it is `true` it stays so.
    fn cancelled(&self) -> bool {
        false
    }
}

/// Nobody wants to be told.
pub struct NoSteps;

impl Steps for NoSteps {
    fn about_to_stop(&self) -> io::Result<()> {
        Ok(())
    }

    fn resumed(&self) -> io::Result<()> {
        Ok(())
    }
}

/// What is done ahead of the pause, so that nothing is written by the guest between the last round and the pause for
/// want of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ready {
    /// The hypervisor is to stop and start the VM by itself.
    ToHold,
    /// It is told to stop it, and to start it.
    ToStop,
    /// Its user has stopped the VM.
    Stopped,
}

impl Ready {
    /// Gives the hypervisor what it saves device state to, and tells the caller that a pause is coming. In a `short` one the
    /// hypervisor may wait for this save.
    pub(crate) fn make(context: &mut SaveContext<'_>, short: bool) -> Result<Self, SaveError> {
        let was_running = context.vm.status()?.running;
        // Disks are cut by commands, and a hypervisor that waits reads none.
        let ready = match was_running {
            true if short && context.drives.is_empty() => Self::ToHold,
            true => Self::ToStop,
            false => Self::Stopped,
        };
        match ready {
            Self::ToHold => context.vm.prepare_hold()?,
            Self::ToStop | Self::Stopped => context.vm.prepare_save()?,
        }
        if was_running {
            context.drives.flush_files();
        }
        context.steps.about_to_stop().map_err(SaveError::Step)?;
        Ok(ready)
    }
}

/// What was taken during the pause.
pub(crate) struct Cut {
    pub(crate) device_state: Vec<u8>,
    pub(crate) aux: Vec<AuxBlock>,
    pub(crate) pause: Pause,
    /// When the hypervisor started the VM, since 1970, if devices may have been saved after memory was fixed. Nothing may have
    /// touched memory in between.
    pub(crate) untouched_until: Option<Duration>,
}

impl Cut {
    /// Stops the VM, saves its device state, fixes its memory by `fix`, lets it go on.
    ///
    /// `fix` returns how many pages it protected. A VM that its user had stopped already stays stopped. When anything
    /// fails the VM goes on all the same.
    pub(crate) fn make(
        context: &mut SaveContext<'_>,
        options: &SaveOptions,
        ready: Ready,
        fix: &mut dyn FnMut() -> Result<u64, SaveError>,
    ) -> Result<Self, SaveError> {
        let held = match ready {
            Ready::ToHold => Self::held(context, options, fix)?,
            Ready::ToStop | Ready::Stopped => None,
        };
        let cut = match held {
            Some(cut) => cut,
            None => Self::by_hand(context, options, ready, fix)?,
        };
        context.vm.lift_copy_limits(&context.drives.copies)?;
        context.vm.finish_save()?;
        context.steps.resumed().map_err(SaveError::Step)?;
        Ok(cut)
    }

    /// The hypervisor stops and starts the VM, and waits meanwhile. `None` if it can't.
    fn held(
        context: &mut SaveContext<'_>,
        options: &SaveOptions,
        fix: &mut dyn FnMut() -> Result<u64, SaveError>,
    ) -> Result<Option<Self>, SaveError> {
        let SaveContext { vm, process, memory, aux, .. } = context;
        let started = Instant::now();
        let Some(held) = vm.hold()? else { return Ok(None) };
        let mut pause = Pause::default();
        firn_fault::point("save.stopped");
        let aux = fixed(&mut pause, || read_all_aux(process, aux), fix)?;
        reference::take(memory, options.reference.as_deref())?;
        firn_fault::point("save.reprotected");
        let cont_started = Instant::now();
        let released = held.release()?;
        pause.cont_ms = ms(cont_started.elapsed());
        pause.device_state_ms = released.took.map(ms).unwrap_or_default();
        pause.downtime_ms = ms(released.still.unwrap_or(started.elapsed()));
        let untouched_until = Some(released.at);
        Ok(Some(Self { device_state: released.device_state, aux, pause, untouched_until }))
    }

    /// The VM is stopped and started by commands.
    fn by_hand(
        context: &mut SaveContext<'_>,
        options: &SaveOptions,
        ready: Ready,
        fix: &mut dyn FnMut() -> Result<u64, SaveError>,
    ) -> Result<Self, SaveError> {
        let started = Instant::now();
        let cut = Self::stopped(context, options, fix);
        let cont_started = Instant::now();
        let go_on = ready != Ready::Stopped && !(options.leave_stopped && cut.is_ok());
        let continued = if go_on { context.vm.cont() } else { Ok(()) };
        let mut cut = cut?;
        continued?;
        cut.pause.cont_ms = ms(cont_started.elapsed());
        cut.pause.downtime_ms = ms(context.vm.stood_still().unwrap_or(started.elapsed()));
        Ok(cut)
    }

    fn stopped(
        context: &mut SaveContext<'_>,
        options: &SaveOptions,
        fix: &mut dyn FnMut() -> Result<u64, SaveError>,
    ) -> Result<Self, SaveError> {
        let mut pause = Pause::default();
        let (device_state, took) = timed(|| Ok(context.vm.cut(&context.drives)?))?;
        pause.device_state_ms = took;
        ((), pause.clone_ms) = timed(|| Ok(context.drives.clone_files()?))?;
        firn_fault::point("save.drives-cut");
        firn_fault::point("save.stopped");
        let aux = fixed(&mut pause, || read_all_aux(&context.process, context.aux), fix)?;
        reference::take(&context.memory, options.reference.as_deref())?;
        firn_fault::point("save.reprotected");
        Ok(Self { device_state, aux, pause, untouched_until: None })
    }
}

/// Takes the small RAM blocks, and fixes guest RAM.
fn fixed(
    pause: &mut Pause,
    aux: impl FnOnce() -> Result<Vec<AuxBlock>, SaveError>,
    fix: &mut dyn FnMut() -> Result<u64, SaveError>,
) -> Result<Vec<AuxBlock>, SaveError> {
    let (aux, took) = timed(aux)?;
    pause.aux_ms = took;
    firn_fault::point("save.device-state");
    (pause.protected_pages, pause.protect_ms) = timed(fix)?;
    Ok(aux)
}

fn timed<T>(run: impl FnOnce() -> Result<T, SaveError>) -> Result<(T, f64), SaveError> {
    let started = Instant::now();
    let result = run()?;
    Ok((result, ms(started.elapsed())))
}

fn read_all_aux(process: &Process, aux: &[AuxRam]) -> Result<Vec<AuxBlock>, SaveError> {
    aux.iter().filter(|aux| !aux.rom).map(|aux| read_aux(process, aux)).collect()
}

/// Copies a small RAM block that device state does not carry and the hypervisor does not rebuild (video memory).
fn read_aux(process: &Process, aux: &AuxRam) -> Result<AuxBlock, SaveError> {
    let hva = aux.hva.ok_or(SaveError::Options(
        "a RAM block beside guest RAM is mapped nowhere; remove the device",
    ))?;
    let mut bytes = vec![0; aux.bytes as usize];
    process_memory::read(process, hva, &mut bytes)?;
    Ok(AuxBlock { id: aux.id.clone(), bytes })
}
