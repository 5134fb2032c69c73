//! Guest epochs by the library, with a backup in this process: shared by `vpc-solo` and `vpc-size`.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use anyhow::{Context as _, Result, ensure};
use firn_cluster::Epoch;
use firn_epochs::backup::{BackupReceiver, RamFiles};
use firn_epochs::disks::EpochDisks;
use firn_epochs::endpoint::EpochStream;
use firn_epochs::guest::ProtectedGuest;
use firn_epochs::primary::{
    CutMeasurements, EndRequest, EpochOptions, ProtectionEvent, protect_vm,
};
use firn_epochs::standby::StandbyVm;
use firn_epochs::wire::{PrimaryHello, VERSION};
use firn_memory::Process;
use firn_vmm::QemuVm;
use serde_json::Value;

use crate::recorder::open_memory;

/// The measurements of an epoch.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EpochMeasurements {
    /// The measurements of its cut.
    pub cut: CutMeasurements,
    /// Pages that were sent, without pages whose content had not changed. `None` if the epoch was
    /// not sent by the end.
    pub sent: Option<u64>,
}

/// Attaches to the guest of a hypervisor.
pub fn attach_guest(monitor: &Path, pid: i32) -> Result<ProtectedGuest> {
    let mut vm = QemuVm::connect(monitor)?;
    let layout = vm.layout()?;
    let process = Arc::new(Process::open(pid)?);
    let memory = open_memory(&process, &layout)?;
    Ok(ProtectedGuest::attach(
        vm,
        process,
        memory,
        layout.aux,
        EpochDisks::default(),
        Box::new(()),
    )?)
}

/// The first message to a backup.
pub fn hello_for(guest: &ProtectedGuest) -> PrimaryHello {
    let regions = guest.memory().region_map().clone();
    let (disks, leased, member, meta) = (Vec::new(), false, None, Value::Null);
    PrimaryHello { version: VERSION, regions, disks, leased, member, meta }
}

/// Runs `primary` while a backup in this process receives what it sends.
pub fn with_backup<T>(primary: impl FnOnce(&EpochStream) -> Result<T>) -> Result<T> {
    let (ours, theirs) = EpochStream::connected_pair()?;
    thread::scope(|scope| {
        let backup = scope.spawn(|| -> Result<Epoch> {
            let (mut receiver, hello) = BackupReceiver::accept_hello(&theirs)?;
            let ram = RamFiles::create(&hello.regions)?;
            let mut standby = StandbyVm::new(hello.regions, ram);
            receiver.receive_epochs(&mut standby, &mut |_| (), &mut |_| true);
            Ok(standby.progress().committed)
        });
        let done = primary(&ours);
        ours.close();
        let committed = backup.join().map_err(|_| anyhow::anyhow!("the backup panicked"))?;
        let done = done?;
        ensure!(committed? > Epoch(0), "the backup has committed nothing");
        Ok(done)
    })
}

/// Protects a guest until it has had `cuts` cuts and one more, since the first cut is about the
/// seed. Then ends the protection.
///
/// # Errors
/// Also fails if pages are to be predicted, and the guest has a disk that prevents it.
pub fn run_epochs(
    mut guest: ProtectedGuest,
    options: EpochOptions,
    cuts: usize,
) -> Result<Vec<EpochMeasurements>> {
    let is_predicted = !options.predicts || guest.can_be_copied_ahead()?;
    ensure!(is_predicted, "the guest has a disk that is read past the page cache");
    let hello = hello_for(&guest);
    let ending = EndRequest::default();
    let all = Mutex::new(Vec::new());
    let on_event = |event: ProtectionEvent| {
        let mut all = all.lock().unwrap_or_else(PoisonError::into_inner);
        record_event(&mut all, event);
        if all.len() > cuts {
            ending.request_end();
        }
    };
    with_backup(|stream| {
        protect_vm(guest, stream, &hello, options, &ending, &on_event).context("epochs")
    })?;
    Ok(all.into_inner().unwrap_or_else(PoisonError::into_inner))
}

fn record_event(all: &mut Vec<EpochMeasurements>, event: ProtectionEvent) {
    match event {
        ProtectionEvent::Cut(cut) => all.push(EpochMeasurements { cut, sent: None }),
        ProtectionEvent::Sent(epoch, pages, _) => {
            let its = all.iter_mut().find(|numbers| numbers.cut.epoch == epoch);
            its.into_iter().for_each(|numbers| numbers.sent = Some(pages));
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sent_frames_belong_to_their_epoch() {
        let mut all = Vec::new();
        for epoch in [3, 4] {
            record_event(
                &mut all,
                ProtectionEvent::Cut(CutMeasurements {
                    epoch: Epoch(epoch),
                    ..CutMeasurements::default()
                }),
            );
        }
        record_event(&mut all, ProtectionEvent::Sent(Epoch(3), 70, 1 << 16));
        record_event(&mut all, ProtectionEvent::Sent(Epoch(1), 9, 1 << 10));
        assert_eq!(all.iter().map(|it| it.sent).collect::<Vec<_>>(), [Some(70), None]);
    }
}
