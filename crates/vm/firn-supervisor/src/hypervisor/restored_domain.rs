//! The domain that a restore creates in libvirt: its start, its end if the restore fails, and its
//! definition.
//!
//! ```text
//!   journal: domain, mark --> create, paused --> (memory, devices) --> resume --> define --> journal: no domain
//!                                  |                  |
//!                                  '---- a failure ---'--> destroy, if the XML has the mark
//! ```
//!
//! libvirt forgets a domain without definition when it is destroyed, and keeps the definition that a
//! domain had before. So a failed restore leaves nothing, and changes no definition.

use std::thread;
use std::time::{Duration, Instant};

use firn_libvirt::{Domain, DomainAddress, LibvirtConnection, LibvirtError, has_mark};

use crate::hypervisor::libvirt::{libvirt_failure, open_process};
use crate::hypervisor::qemu::ANSWER_WAIT;
use crate::records::failure::{Failure, FailureKind};
use crate::records::restored_domain::RestoredDomain;

/// The maximum time for the start of a domain. libvirt may examine QEMU before.
const START_WAIT: Duration = Duration::from_secs(180);

/// The time within which a domain appears whose creation a dead supervisor has requested.
pub(crate) const APPEAR_WAIT: Duration = Duration::from_secs(2);

/// The interval between attempts to find a domain.
const FIND_INTERVAL: Duration = Duration::from_millis(100);

/// Refuses a name or a UUID that another domain has. A domain that does not run and has both is the
/// one that was saved.
pub(crate) fn refuse_used_name(address: &DomainAddress) -> Result<(), Failure> {
    let DomainAddress { uuid, domain: name, .. } = address;
    let find = || {
        let mut connection = connect(address)?;
        Ok((connection.domain_named(name)?, connection.domain_with_uuid(uuid)?))
    };
    let (named, same_uuid) = find().map_err(libvirt_failure)?;
    let text = match (named, same_uuid) {
        (Some(domain), _) if domain.is_active() => format!("libvirt runs a domain {name} already"),
        (Some(domain), _) if domain.uuid_text() != *uuid => {
            format!("libvirt has another domain that is called {name}")
        }
        (_, Some(domain)) if domain.name != *name => {
            format!("libvirt has the image's domain under another name: {}", domain.name)
        }
        _ => return Ok(()),
    };
    let hint = "--name NAME gives the restored domain another name and UUID";
    Err(Failure::new(FailureKind::Busy, text).with_hint(hint))
}

/// Creates the domain, paused. Returns its process. After a failure there is no domain.
pub(crate) fn create_domain(domain: &RestoredDomain, xml: &str) -> Result<i32, Failure> {
    let create = || {
        let mut connection = LibvirtConnection::connect(&domain.address.daemon, START_WAIT)?;
        connection.create_paused(xml).map(drop)
    };
    let created = create().map_err(|error| start_failure(error, &domain.address.domain));
    firn_fault::pass_point("libvirt.created");
    created.and_then(|()| open_process(&domain.address)).inspect_err(|_| log_end(domain))
}

fn start_failure(error: LibvirtError, name: &str) -> Failure {
    let creating = format!("creating domain {name}");
    if !matches!(error, LibvirtError::Refused { .. }) {
        return libvirt_failure(error).while_doing(creating);
    }
    let hint = format!(
        "QEMU's own reason is in libvirt's log of the domain (/var/log/libvirt/qemu/{name}.log); `firn restore` without --libvirt needs no libvirt"
    );
    Failure::from_error(FailureKind::Refused, &error).while_doing(creating).with_hint(hint)
}

/// Ends the domain of a restore that failed, and logs if that is impossible.
pub(crate) fn log_end(domain: &RestoredDomain) {
    if let Err(failure) = end_domain(domain, Duration::ZERO) {
        tracing::warn!("domain {} is not ended: {failure}", domain.address.domain);
    }
}

/// Ends the domain of a restore that failed; never a domain that another program has started.
/// `wait` limits the time until a domain appears that is being created.
pub(crate) fn end_domain(domain: &RestoredDomain, wait: Duration) -> Result<(), Failure> {
    let deadline = Instant::now() + wait;
    let end = || {
        let mut connection = connect(&domain.address)?;
        loop {
            let found = connection.domain_with_uuid(&domain.address.uuid)?;
            match found.filter(Domain::is_active) {
                Some(found) => {
                    return match has_mark(&connection.domain_xml(&found)?, &domain.mark) {
                        true => connection.destroy_domain(&found),
                        false => Ok(()),
                    };
                }
                None if Instant::now() >= deadline => return Ok(()),
                None => thread::sleep(FIND_INTERVAL),
            }
        }
    };
    end().map_err(|error| libvirt_failure(error).while_doing("ending the restored domain"))
}

/// Starts the vCPUs of a domain whose state is complete.
pub(crate) fn resume_domain(address: &DomainAddress) -> Result<(), Failure> {
    let resume = || {
        let mut connection = connect(address)?;
        let domain = connection.domain_at(address)?;
        connection.resume_domain(&domain)
    };
    resume().map_err(|error| libvirt_failure(error).while_doing("starting the vCPUs"))
}

/// Defines a domain that was persistent when it was saved.
pub(crate) fn define_domain(domain: &RestoredDomain) -> Result<(), Failure> {
    let Some(definition) = &domain.definition else { return Ok(()) };
    let define = || connect(&domain.address)?.define_domain(definition).map(drop);
    define().map_err(|error| {
        let name = &domain.address.domain;
        libvirt_failure(error).while_doing(format!("defining domain {name}"))
    })
}

fn connect(address: &DomainAddress) -> Result<LibvirtConnection, LibvirtError> {
    LibvirtConnection::connect(&address.daemon, ANSWER_WAIT)
}
