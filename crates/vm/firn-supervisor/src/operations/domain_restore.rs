//! A restore into libvirt: the domain that libvirt is to create from an image.
//!
//! ```text
//!   image: XML of the domain --> name, UUID, disks, shared RAM, -incoming defer --> libvirt --> paused QEMU
//!          its definition    --> name, UUID, disks -------------------------------> libvirt, once the guest runs
//! ```
//!
//! From then on the restore is that of a QEMU which Firn started: memory is registered or filled, and
//! device state is loaded over the monitor, which is libvirt's.

use firn_image::Image;
use firn_libvirt::{DiskReplacement, DomainAddress, DomainChanges, DomainIdentity};
use firn_vmm::AuxRam;
use firn_vmm::command_line::{CommandOverrides, DriveFile};

use crate::hypervisor::relocation::random_uuid;
use crate::hypervisor::{qemu, restored_domain};
use crate::processes::identity::{ProcessHandle, ProcessIdentity};
use crate::processes::ownership::QemuOwnership;
use crate::records::failure::{Failure, FailureContext, FailureKind, image_failure};
use crate::records::journal::{Journal, JournalFile};
use crate::records::meta::ImageMeta;
use crate::records::restored_domain::{LibvirtTarget, RestoredDomain};

/// The length of a password that Firn makes: VNC compares no more.
const PASSWORD_CHARS: usize = 8;

/// The domain that libvirt has created, and what is different in it.
pub(crate) struct CreatedDomain {
    pub(crate) domain: RestoredDomain,
    pub(crate) identity: ProcessIdentity,
    pub(crate) handle: ProcessHandle,
    /// QEMU's command line.
    pub(crate) args: Vec<String>,
    pub(crate) notes: Vec<String>,
}

/// Has libvirt create the domain of an image, paused. `files` replace its disks. Of the `overrides`
/// only the disks whose files the user has moved, and the generation ID, concern a domain.
pub(crate) fn create_domain(
    journal: &JournalFile,
    meta: &ImageMeta,
    target: &LibvirtTarget,
    files: &[DriveFile],
    overrides: &CommandOverrides,
) -> Result<CreatedDomain, Failure> {
    let saved = meta.domain_xml.as_deref().ok_or_else(no_domain)?;
    let (old, identity) = choose_identity(saved, target)?;
    let mut changes = replace_disks(files, &overrides.disks);
    changes.locate_network_disks(saved).map_err(xml_failure)?;
    changes.identity = identity;
    changes.generation_id = (!overrides.same_identity).then(random_uuid).transpose()?;
    let notes = protect_consoles(meta, &mut changes)?;
    let DomainIdentity { name, uuid } = changes.identity.clone().unwrap_or(old);
    let address = DomainAddress { daemon: target.daemon.clone(), uuid, domain: name };
    restored_domain::refuse_used_name(&address)?;
    let mark = random_uuid()?;
    let xml = changes.apply_to_domain(saved, &mark).map_err(xml_failure)?;
    let definition = meta.domain_definition.as_deref();
    let definition = definition.map(|it| changes.apply_to_definition(it)).transpose();
    let definition = definition.map_err(xml_failure)?;
    let domain = RestoredDomain { address, mark, definition };
    let recorded = domain.clone();
    let change = |journal: &mut Journal| journal.domain = Some(recorded);
    journal.update(change).while_doing("writing the journal")?;
    let pid = restored_domain::create_domain(&domain, &xml)?;
    let found = identify_qemu(pid).inspect_err(|_| restored_domain::log_end(&domain));
    let (identity, handle, args) = found?;
    Ok(CreatedDomain { domain, identity, handle, args, notes })
}

fn no_domain() -> Failure {
    let text = "the image is not of a domain of libvirt";
    let hint = "`firn restore` without --libvirt starts its VM";
    Failure::new(FailureKind::Usage, text).with_hint(hint)
}

fn xml_failure(error: firn_libvirt::DefinitionError) -> Failure {
    Failure::from_error(FailureKind::Refused, &error).with_hint(
        "`firn restore` without --libvirt starts the VM; `firn image inspect --json IMAGE` shows the XML",
    )
}

/// The identity of the domain that was saved, and another one if the user chose another name.
fn choose_identity(
    saved: &str,
    target: &LibvirtTarget,
) -> Result<(DomainIdentity, Option<DomainIdentity>), Failure> {
    let old = DomainIdentity::of_xml(saved).map_err(xml_failure)?;
    let other = target.name.clone().filter(|name| *name != old.name);
    let identity = |name| Ok::<_, Failure>(DomainIdentity { name, uuid: random_uuid()? });
    Ok((old, other.map(identity).transpose()?))
}

/// The disks of the XML that get other files. The image names a disk that has moved by its new name.
fn replace_disks(files: &[DriveFile], moved: &[(String, String)]) -> DomainChanges {
    let in_xml = |named: &String| {
        let (old, _) = moved.iter().find(|(_, new)| new == named)?;
        Some(old.clone())
    };
    let disk = |file: &DriveFile| DiskReplacement {
        named: in_xml(&file.named).unwrap_or_else(|| file.named.clone()),
        file: file.file.clone(),
        format: Some(file.format.clone()),
    };
    let is_other = |(_, new): &&(String, String)| !files.iter().any(|file| file.named == *new);
    let other = |(old, new): &(String, String)| DiskReplacement {
        named: old.clone(),
        file: new.clone(),
        format: None,
    };
    DomainChanges {
        disks: files.iter().map(disk).collect(),
        moved: moved.iter().filter(is_other).map(other).collect(),
        ..DomainChanges::default()
    }
}

/// Gives consoles a password that had one: libvirt's XML in the image has none.
fn protect_consoles(meta: &ImageMeta, changes: &mut DomainChanges) -> Result<Vec<String>, Failure> {
    let words = || meta.qemu.user_args.iter().zip(meta.qemu.user_args.iter().skip(1));
    let has_password = words().any(|(option, value)| match option.as_str() {
        "-vnc" => value.contains("password=on") || value.contains("password-secret"),
        "-spice" => !value.contains("disable-ticketing=on"),
        _ => false,
    });
    if !has_password {
        return Ok(Vec::new());
    }
    changes.console_password = Some(random_uuid()?.chars().take(PASSWORD_CHARS).collect());
    Ok(vec!["the consoles have a new password, which `virsh dumpxml --security-info` shows: the image holds no passwords".to_owned()])
}

fn identify_qemu(pid: i32) -> Result<(ProcessIdentity, ProcessHandle, Vec<String>), Failure> {
    let gone = || Failure::new(FailureKind::Ended, "QEMU has ended");
    let identity = ProcessIdentity::from_pid(pid).map_err(|_| gone())?;
    let handle = identity.open_handle().while_doing("opening QEMU's process")?.ok_or_else(gone)?;
    handle.keep_ownership(QemuOwnership::take_process(&identity)?);
    let (args, _) = qemu::command_line(pid).while_doing("reading QEMU's command line")?;
    Ok((identity, handle, args))
}

/// Refuses an image without the firmware that this QEMU uses when the VM is reset: a QEMU that waits
/// for a migration has none of its own. Versions of Firn before `restore --libvirt` made such images.
pub(crate) fn check_firmware(aux: &[AuxRam], image: &Image) -> Result<(), Failure> {
    let saved = image.aux_list().map_err(|error| image_failure(&error))?;
    let is_saved = |block: &AuxRam| saved.iter().any(|it| it.id == block.id);
    match aux.iter().find(|block| block.is_firmware() && !is_saved(block)) {
        None => Ok(()),
        Some(_) => {
            let text = "the image has no firmware, so the domain could not be reset";
            let hint = "`firn restore` without --libvirt starts the VM; a checkpoint of a domain contains it now";
            Err(Failure::new(FailureKind::Refused, text).with_hint(hint))
        }
    }
}

/// Defines the domain, if it was persistent, and records that the restore is complete as far as
/// libvirt is concerned. Returns a note if libvirt refuses.
pub(crate) fn finish_domain(journal: &JournalFile) -> Result<Option<String>, Failure> {
    let Some(domain) = journal.current_journal().domain else { return Ok(None) };
    let refused = restored_domain::define_domain(&domain).err().map(|failure| {
        tracing::warn!("{failure}");
        format!("libvirt forgets the domain when it ends, because it is not defined: {failure}")
    });
    journal.update(|journal| journal.domain = None).while_doing("writing the journal")?;
    Ok(refused)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::records::meta::QemuFacts;

    fn file(named: &str) -> DriveFile {
        DriveFile { named: named.into(), file: format!("{named}.o"), format: "qcow2".into() }
    }

    #[test]
    fn a_disk_that_has_moved_is_found_in_the_xml_by_its_old_name() {
        let moved = [("/a".to_owned(), "/b".to_owned()), ("/c".to_owned(), "/d".to_owned())];
        let changes = replace_disks(&[file("/b"), file("/e")], &moved);
        let names = |all: &[DiskReplacement]| {
            all.iter().map(|it| format!("{} {}", it.named, it.file)).collect::<Vec<_>>()
        };
        assert_eq!(names(&changes.disks), ["/a /b.o", "/e /e.o"]);
        assert_eq!(names(&changes.moved), ["/c /d"]);
    }

    #[test]
    fn only_a_console_that_had_a_password_gets_one() {
        let protected = |line: &str| {
            let user_args = line.split(' ').map(str::to_owned).collect();
            let qemu = QemuFacts { user_args, ..QemuFacts::default() };
            let meta = ImageMeta { qemu, ..ImageMeta::default() };
            let mut changes = DomainChanges::default();
            let notes = protect_consoles(&meta, &mut changes).unwrap();
            assert_eq!(notes.is_empty(), changes.console_password.is_none());
            changes.console_password.is_some_and(|it| it.len() == PASSWORD_CHARS)
        };
        assert!(protected("qemu -vnc 127.0.0.1:0,password=on -S"));
        assert!(protected("qemu -spice port=5900,addr=127.0.0.1"));
        assert!(!protected("qemu -vnc 127.0.0.1:0"));
        assert!(!protected("qemu -spice port=5900,disable-ticketing=on"));
        assert!(!protected("qemu -display none"));
    }
}
