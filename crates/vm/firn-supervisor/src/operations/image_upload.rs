//! The upload of an image that was saved to a file, because it is to be in object storage.
//!
//! ```text
//!               image is whole        firn-store push          object is whole
//!   checkpoint  the VM runs        -> the VM runs           -> remove the file
//!   suspend     the VM is paused   -> the VM is paused      -> journal -> end the VM, remove the file
//! ```
//!
//! A checkpoint whose upload fails keeps its file, and the failure has the command that pushes it. Only
//! if it was to end with its command, and the command was killed, nothing is left of it. A suspend whose upload fails is undone: the VM continues, and the file is removed, because the disks
//! change from then on. If its QEMU has ended meanwhile, the file is all that is left of the VM, and
//! stays.

use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::devices::disk_snapshots::DiskSnapshots;
use crate::processes::identity::ProcessHandle;
use crate::processes::store_program::StoreProgram;
use crate::records::control_protocol::{OperationProgress, SaveRequest};
use crate::records::failure::{Failure, FailureContext as _, FailureKind};
use crate::records::journal::{Journal, JournalFile, VmPhase};
use crate::records::store_target::StoreTarget;

const RECORDING: &str = "writing the journal";

/// An upload.
pub(crate) struct ImageSender<'a> {
    pub(crate) journal: &'a JournalFile,
    pub(crate) hypervisor: &'a ProcessHandle,
    pub(crate) request: &'a SaveRequest,
    pub(crate) store: &'a StoreTarget,
    pub(crate) cancel: &'a AtomicBool,
    pub(crate) progress: &'a dyn Fn(OperationProgress),
}

impl ImageSender<'_> {
    /// Uploads a checkpoint, while the VM runs. Returns its facts with those of the upload.
    pub(crate) fn send_checkpoint(&self, mut facts: Value) -> Result<Value, Failure> {
        let location = &self.store.location;
        let pushed = self.push_image().map_err(|failure| self.end_checkpoint(failure));
        let result = pushed.as_ref().map_err(ToString::to_string);
        let change = |journal: &mut Journal| match result {
            Ok(_) => journal.record_success(format!("checkpoint {location} is whole")),
            Err(text) => journal.record_failure(text),
        };
        self.journal.update(change).while_doing(RECORDING)?;
        facts["upload"] = pushed?;
        firn_fault::pass_point("upload.recorded");
        remove_spooled(&self.request.image);
        facts["image"] = json!(location);
        Ok(facts)
    }

    /// The failure of a checkpoint that was not uploaded. Its file is removed if it was to end with its
    /// command.
    fn end_checkpoint(&self, failure: Failure) -> Failure {
        let is_cancelled = failure.kind == FailureKind::Interrupted;
        if is_cancelled && self.request.cancel_with_client && !self.has_vm_ended() {
            remove_spooled(&self.request.image);
            return failure.while_doing(format!("uploading the image to {}", self.store.location));
        }
        self.explain_failed_push(failure)
    }

    /// Uploads the image of a VM that is paused and is to end. If that fails, the VM is to continue, and
    /// its image is removed. Only if its QEMU has ended, the image stays: it has all that is left.
    pub(crate) fn send_suspended(&self) -> Result<Value, Failure> {
        let image = &self.request.image;
        match self.push_image() {
            Ok(facts) => {
                self.journal.update(set_uploaded).while_doing(RECORDING)?;
                firn_fault::pass_point("upload.recorded");
                remove_spooled(image);
                Ok(facts)
            }
            Err(failure) if self.has_vm_ended() => Err(self.explain_failed_push(failure)),
            Err(failure) => {
                remove_spooled(image);
                let location = &self.store.location;
                let what = format!("the image is not at {location}, and the VM continues");
                Err(failure.while_doing(what))
            }
        }
    }

    /// Pushes the image. Returns the facts of the upload.
    fn push_image(&self) -> Result<Value, Failure> {
        firn_fault::pass_point("upload.begin");
        let begun = Instant::now();
        let credentials = Some(&self.store.credentials);
        let program = StoreProgram { credentials, cancel: self.cancel };
        let (image, location) = (self.request.image.as_os_str(), self.store.location.as_ref());
        let args = ["push".as_ref(), "--".as_ref(), image, location];
        let pushed = program.run(args, &mut |now| (self.progress)(now.clone()))?;
        firn_fault::pass_point("upload.pushed");
        let bytes = pushed["files"][0]["file_bytes"].as_u64();
        let ms = (begun.elapsed().as_secs_f64() * 1e6).round() / 1e3;
        Ok(json!({ "bytes": bytes, "ms": ms }))
    }

    /// The failure of an upload whose file remains. If the VM has ended, that is not the reason that the
    /// user gets: the user has to learn of the file.
    fn explain_failed_push(&self, failure: Failure) -> Failure {
        let (image, location) = (&self.request.image, &self.store.location);
        let push = format!("firn image push {} {location}", image.display());
        let cause = failure.hint.as_ref().map_or(String::new(), |cause| format!("{cause}; then: "));
        let hint = format!("{cause}`{push}` pushes it; the file stays until you remove it");
        let kind = if self.has_vm_ended() { FailureKind::Other } else { failure.kind };
        let failure = Failure { kind, hint: None, ..failure };
        failure.while_doing(describe_unsent(image, location)).with_hint(hint)
    }

    fn has_vm_ended(&self) -> bool {
        self.hypervisor.wait_gone(Duration::ZERO).unwrap_or(false)
    }
}

fn set_uploaded(journal: &mut Journal) {
    if let VmPhase::Saving { upload: Some(upload), .. } = &mut journal.phase {
        upload.is_complete = true;
    }
}

/// What the journal and a failure report of a checkpoint that is not in its store.
pub(crate) fn describe_unsent(image: &Path, location: &str) -> String {
    format!("the checkpoint is in {}, and not at {location}", image.display())
}

/// Removes the file of an image that is in its store, or that is not needed, and its directory, which
/// was made for it.
pub(crate) fn remove_spooled(image: &Path) {
    match std::fs::remove_file(image) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            tracing::warn!("{} stays: {error}", image.display());
        }
        _ => {}
    }
    remove_spool_directory(image);
}

/// Removes the directory that was made for an image, if it is empty.
pub(crate) fn remove_spool_directory(image: &Path) {
    let _ = image.parent().map(std::fs::remove_dir);
}

/// Refuses to make files for disks that only an image in object storage needs: the record of disk
/// layers would find no image, and they would be merged or removed.
pub(crate) fn refuse_stored_disks(
    request: &SaveRequest,
    cutting: &DiskSnapshots<'_>,
) -> Result<(), Failure> {
    if request.store.is_none() || !cutting.makes_snapshots() {
        return Ok(());
    }
    let text = "snapshots of the VM's disks stay on this host, where no image would need them";
    Err(Failure::new(FailureKind::Refused, text).with_hint(
        "save the image to a file, push it (firn image push), and keep the file; or name the disks only: \
         --disks reference",
    ))
}
