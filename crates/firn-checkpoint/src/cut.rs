//! The cut: the pause in which device state is saved and what memory was is fixed.

use std::io;
use std::time::Instant;

use firn_image::AuxBlock;
use firn_memory::process_memory;
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
pub(crate) struct Ready {
    was_running: bool,
}

impl Ready {
    /// Gives the hypervisor the file for its device state, and tells the caller that a pause is coming.
    pub(crate) fn make(context: &mut SaveContext<'_>) -> Result<Self, SaveError> {
        context.vm.prepare_save()?;
        let was_running = context.vm.status()?.running;
        context.steps.about_to_stop().map_err(SaveError::Step)?;
        Ok(Self { was_running })
    }
}

/// What was taken during the pause.
pub(crate) struct Cut {
    pub(crate) device_state: Vec<u8>,
    pub(crate) aux: Vec<AuxBlock>,
    pub(crate) pause: Pause,
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
        fix: impl FnOnce() -> Result<u64, SaveError>,
    ) -> Result<Self, SaveError> {
        let started = Instant::now();
        let cut = Self::stopped(context, options, fix);
        let cont_started = Instant::now();
        let go_on = ready.was_running && !(options.leave_stopped && cut.is_ok());
        let continued = if go_on { context.vm.cont() } else { Ok(()) };
        let mut cut = cut?;
        continued?;
        cut.pause.cont_ms = ms(cont_started.elapsed());
        cut.pause.downtime_ms = ms(started.elapsed());
        context.vm.finish_save()?;
        context.steps.resumed().map_err(SaveError::Step)?;
        Ok(cut)
    }

    fn stopped(
        context: &mut SaveContext<'_>,
        options: &SaveOptions,
        fix: impl FnOnce() -> Result<u64, SaveError>,
    ) -> Result<Self, SaveError> {
        let mut pause = Pause::default();
        let (device_state, took) = timed(|| Ok(context.vm.cut(&context.drives)?))?;
        pause.device_state_ms = took;
        ((), pause.clone_ms) = timed(|| Ok(context.drives.clone_files()?))?;
        firn_fault::point("save.drives-cut");
        firn_fault::point("save.stopped");
        let (aux, took) = timed(|| read_all_aux(context))?;
        pause.aux_ms = took;
        firn_fault::point("save.device-state");
        (pause.protected_pages, pause.protect_ms) = timed(fix)?;
        reference::take(&context.memory, options.reference.as_deref())?;
        firn_fault::point("save.reprotected");
        Ok(Self { device_state, aux, pause })
    }
}

fn timed<T>(run: impl FnOnce() -> Result<T, SaveError>) -> Result<(T, f64), SaveError> {
    let started = Instant::now();
    let result = run()?;
    Ok((result, ms(started.elapsed())))
}

fn read_all_aux(context: &SaveContext<'_>) -> Result<Vec<AuxBlock>, SaveError> {
    context.aux.iter().filter(|aux| !aux.rom).map(|aux| read_aux(context, aux)).collect()
}

/// Copies a small RAM block that device state does not carry and the hypervisor does not rebuild (video memory).
fn read_aux(context: &SaveContext<'_>, aux: &AuxRam) -> Result<AuxBlock, SaveError> {
    let hva = aux.hva.ok_or(SaveError::Options(
        "a RAM block beside guest RAM is mapped nowhere; remove the device",
    ))?;
    let mut bytes = vec![0; aux.bytes as usize];
    process_memory::read(&context.process, hva, &mut bytes)?;
    Ok(AuxBlock { id: aux.id.clone(), bytes })
}
