//! Why a VM can't be saved, whichever strategy is chosen.

use crate::records::control_protocol::SaveChoices;
use crate::records::failure::{Failure, FailureKind};
use crate::records::journal::{HypervisorRecord, Journal};

/// Refuses a VM with disks that images can't contain yet.
pub(crate) fn refuse_served_disks(hypervisor_record: &HypervisorRecord) -> Result<(), Failure> {
    let Some(disk) = hypervisor_record.served.first() else { return Ok(()) };
    let text = format!(
        "the disk {} is served by Firn (firn=on), and images can't keep such disks",
        disk.id
    );
    let failure = Failure::new(FailureKind::Refused, text);
    Err(failure.with_hint("start the VM without firn=on to save it, or protect it instead"))
}

/// Refuses a VM whose output is blocked by filters: a restored VM has none, and would send.
pub(crate) fn refuse_filtered_output(journal: &Journal) -> Result<(), Failure> {
    if !journal.shut || journal.filters.is_empty() {
        return Ok(());
    }
    let text =
        "the VM's output is blocked, because its standby may run, and a restored VM would send";
    let failure = Failure::new(FailureKind::Refused, text);
    Err(failure.with_hint("`firn release` releases the output, if the standby never runs the VM"))
}

/// Refuses a VM whose state QEMU can't save.
pub(crate) fn refuse_blocked(blockers: Vec<String>) -> Result<(), Failure> {
    if blockers.is_empty() {
        return Ok(());
    }
    let mut failure = Failure::new(FailureKind::Refused, "QEMU can't save the state of this VM");
    failure.chain.extend(blockers);
    Err(failure.with_hint("start the VM without the device or CPU feature named here"))
}

/// Refuses to write a flat copy of RAM, which is not encrypted, beside a sealed image.
pub(crate) fn refuse_clear_reference(choices: &SaveChoices) -> Result<(), Failure> {
    let (Some(path), Some(_)) = (&choices.reference, &choices.seal) else { return Ok(()) };
    let path = path.display();
    let text = format!("the image is to be sealed, and the copy of RAM {path} is not encrypted");
    Err(Failure::new(FailureKind::Usage, text)
        .with_hint("use --reference with an image that is not sealed"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use firn_image::{ImageKey, ImageSeal};

    #[test]
    fn no_copy_of_ram_is_written_in_clear_beside_a_sealed_image() {
        let seal = ImageSeal { key: ImageKey::from_bytes([7; 32]), wraps: Vec::new() };
        let choices = |seal: Option<&ImageSeal>, reference: Option<&str>| SaveChoices {
            seal: seal.cloned(),
            reference: reference.map(Into::into),
            ..SaveChoices::default()
        };
        assert!(refuse_clear_reference(&choices(Some(&seal), None)).is_ok());
        assert!(refuse_clear_reference(&choices(None, Some("/a.ram"))).is_ok());
        let failure = refuse_clear_reference(&choices(Some(&seal), Some("/a.ram"))).unwrap_err();
        assert!(failure.to_string().contains("/a.ram"), "{failure}");
    }
}
