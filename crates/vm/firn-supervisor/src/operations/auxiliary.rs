//! The auxiliary blocks of an image: firmware, ACPI tables, video memory.

use firn_image::{AuxPiece, Image, ImageError};
use firn_memory::{Process, process_memory};
use firn_types::HostVirt;
use firn_vmm::{AuxRam, QemuVm};

use crate::records::failure::{Failure, FailureContext, FailureKind, image_failure};

/// Writes the auxiliary blocks of an image into a hypervisor that has not run yet, piece by piece,
/// so that no more than one piece is in memory at a time.
pub(crate) fn write_image_aux(
    vm: &mut QemuVm,
    process: &Process,
    image: &Image,
) -> Result<(), Failure> {
    if image.aux_list().map_err(|error| image_failure(&error))?.is_empty() {
        return Ok(());
    }
    let locations = vm.layout().while_doing("finding video memory")?.aux;
    let written = image.each_aux_piece(|piece: AuxPiece<'_>| {
        let of = |block: &&AuxRam| block.id == piece.id && block.bytes == piece.block_bytes;
        let Some(hva) = locations.iter().find(of).and_then(|block| block.hva) else {
            return Err(no_location(piece.id, piece.block_bytes).into());
        };
        if piece.bytes.is_empty() {
            return Ok(());
        }
        let at = HostVirt(hva.0 + piece.offset);
        let written = process_memory::write_memory(process, at, piece.bytes);
        Ok(written.while_doing(format!("writing {}", piece.id))?)
    });
    written.map_err(|AuxFailure(failure)| failure)
}

fn no_location(id: &str, bytes: u64) -> Failure {
    Failure::new(FailureKind::Other, format!("QEMU has no block of {bytes} bytes for {id}"))
}

/// The reason why auxiliary blocks were not written: an error of the image, or of a step.
struct AuxFailure(Failure);

impl From<ImageError> for AuxFailure {
    fn from(error: ImageError) -> Self {
        Self(image_failure(&error))
    }
}

impl From<Failure> for AuxFailure {
    fn from(failure: Failure) -> Self {
        Self(failure)
    }
}
