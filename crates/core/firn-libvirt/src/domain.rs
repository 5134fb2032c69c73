//! Domains: their names, numbers and XML, their start and their end.

use std::time::Duration;

use crate::address::{DaemonAddress, DomainAddress};
use crate::connection::LibvirtConnection;
use crate::error::LibvirtError;
use crate::message;
use crate::xdr::{Uuid, XdrReader, XdrWriter};

/// No flags: the XML of the running domain, without passwords.
const PLAIN: u32 = 0;
/// The flag for the XML that the next start of a domain uses, without passwords.
const INACTIVE: u32 = 2;
/// The flag for a domain whose vCPUs do not run yet.
const START_PAUSED: u32 = 1;

/// A domain, as libvirt's calls name it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Domain {
    /// Its name.
    pub name: String,
    pub(crate) uuid: Uuid,
    /// Its number while it runs, -1 otherwise.
    pub(crate) id: i32,
}

impl Domain {
    pub(crate) fn encode(&self) -> XdrWriter {
        XdrWriter::default().string(&self.name).uuid(&self.uuid).signed(self.id)
    }

    pub(crate) fn decode(reader: &mut XdrReader<'_>) -> Result<Self, LibvirtError> {
        let (name, uuid, id) = (reader.string()?, reader.uuid()?, reader.signed()?);
        Ok(Self { name, uuid, id })
    }

    /// Its UUID, in the usual form.
    pub fn uuid_text(&self) -> String {
        let hex: String = self.uuid.iter().map(|byte| format!("{byte:02x}")).collect();
        let part = |from: usize, to: usize| hex.get(from..to).unwrap_or_default().to_owned();
        [part(0, 8), part(8, 12), part(12, 16), part(16, 20), part(20, 32)].join("-")
    }

    /// Whether it runs, or is paused.
    pub fn is_active(&self) -> bool {
        self.id != -1
    }

    pub(crate) fn check_running(self) -> Result<Self, LibvirtError> {
        match self.is_active() {
            false => Err(LibvirtError::NotRunning { name: self.name }),
            true => Ok(self),
        }
    }
}

fn parse_uuid(text: &str) -> Option<Uuid> {
    let digits: String = text.chars().filter(|it| *it != '-').collect();
    if digits.len() != 32 || !digits.is_ascii() {
        return None;
    }
    let byte = |at: usize| u8::from_str_radix(digits.get(2 * at..2 * at + 2)?, 16).ok();
    let bytes: Option<Vec<u8>> = (0..16).map(byte).collect();
    bytes?.try_into().ok()
}

/// Finds a running domain by its name or its UUID, as `virsh` does.
///
/// # Errors
/// If libvirt does not have it, or if it does not run.
pub fn find_domain(
    daemon: &DaemonAddress,
    wanted: &str,
    timeout: Duration,
) -> Result<DomainAddress, LibvirtError> {
    let mut connection = LibvirtConnection::connect(daemon, timeout)?;
    let by_name = connection.find_by_name(wanted);
    let domain = match (by_name, parse_uuid(wanted)) {
        (Err(error), Some(uuid)) if error.is_no_domain() => connection.find_by_uuid(&uuid)?,
        (found, _) => found?,
    };
    let domain = domain.check_running()?;
    let uuid = domain.uuid_text();
    Ok(DomainAddress { daemon: daemon.clone(), uuid, domain: domain.name })
}

impl LibvirtConnection {
    /// The domain of this name, running or not; `None` if there is none.
    ///
    /// # Errors
    /// If the daemon does not answer.
    pub fn domain_named(&mut self, name: &str) -> Result<Option<Domain>, LibvirtError> {
        found_or_none(self.find_by_name(name))
    }

    /// The domain with this UUID, running or not; `None` if there is none.
    ///
    /// # Errors
    /// If the daemon does not answer.
    pub fn domain_with_uuid(&mut self, uuid: &str) -> Result<Option<Domain>, LibvirtError> {
        let bad = LibvirtError::Message { what: "the UUID of the domain is wrong" };
        found_or_none(self.find_by_uuid(&parse_uuid(uuid).ok_or(bad)?))
    }

    fn find_by_name(&mut self, name: &str) -> Result<Domain, LibvirtError> {
        self.call(message::FIND_BY_NAME, XdrWriter::default().string(name), Domain::decode)
    }

    fn find_by_uuid(&mut self, uuid: &Uuid) -> Result<Domain, LibvirtError> {
        self.call(message::FIND_BY_UUID, XdrWriter::default().uuid(uuid), Domain::decode)
    }

    /// The running domain at an address.
    ///
    /// # Errors
    /// If it is gone, or does not run.
    pub fn domain_at(&mut self, address: &DomainAddress) -> Result<Domain, LibvirtError> {
        let bad = LibvirtError::Message { what: "the UUID of the domain is wrong" };
        let uuid = parse_uuid(&address.uuid).ok_or(bad)?;
        self.find_by_uuid(&uuid)?.check_running()
    }

    /// The XML of a running domain: what it has now, without passwords.
    ///
    /// # Errors
    /// If the daemon refuses, as to a user who may only read.
    pub fn domain_xml(&mut self, domain: &Domain) -> Result<String, LibvirtError> {
        self.call(message::GET_XML, domain.encode().number(PLAIN), |reader| reader.string())
    }

    /// The definition of a persistent domain, which its next start uses; `None` if libvirt forgets
    /// the domain when it ends.
    ///
    /// # Errors
    /// If the daemon refuses.
    pub fn domain_definition(&mut self, domain: &Domain) -> Result<Option<String>, LibvirtError> {
        match self.call(message::IS_PERSISTENT, domain.encode(), |reader| reader.signed())? {
            0 => Ok(None),
            _ => {
                let arguments = domain.encode().number(INACTIVE);
                self.call(message::GET_XML, arguments, |reader| reader.string()).map(Some)
            }
        }
    }

    /// Starts a domain from its XML, paused. A definition that it has remains.
    ///
    /// # Errors
    /// If libvirt refuses the XML, or if QEMU does not start.
    pub fn create_paused(&mut self, xml: &str) -> Result<Domain, LibvirtError> {
        let arguments = XdrWriter::default().string(xml).number(START_PAUSED);
        self.call(message::CREATE, arguments, Domain::decode)
    }

    /// Defines a domain: makes it persistent, or replaces its definition.
    ///
    /// # Errors
    /// If libvirt refuses the XML.
    pub fn define_domain(&mut self, xml: &str) -> Result<Domain, LibvirtError> {
        self.call(message::DEFINE, XdrWriter::default().string(xml), Domain::decode)
    }

    /// Starts the vCPUs.
    ///
    /// # Errors
    /// If the domain has ended.
    pub fn resume_domain(&mut self, domain: &Domain) -> Result<(), LibvirtError> {
        self.call(message::RESUME, domain.encode(), |_| Ok(()))
    }

    /// Ends a domain at once.
    ///
    /// # Errors
    /// If it has ended already.
    pub fn destroy_domain(&mut self, domain: &Domain) -> Result<(), LibvirtError> {
        self.call(message::DESTROY, domain.encode(), |_| Ok(()))
    }
}

fn found_or_none(found: Result<Domain, LibvirtError>) -> Result<Option<Domain>, LibvirtError> {
    match found {
        Ok(domain) => Ok(Some(domain)),
        Err(error) if error.is_no_domain() => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uuid_is_read_and_written() {
        let text = "ac507469-c5ad-4a95-800f-16d52a0f4813";
        let uuid = parse_uuid(text).unwrap();
        assert_eq!(Domain { name: String::new(), uuid, id: 1 }.uuid_text(), text);
        for bad in ["", "web", "ac507469", "zc507469-c5ad-4a95-800f-16d52a0f4813"] {
            assert_eq!(parse_uuid(bad), None, "{bad}");
        }
    }

    #[test]
    fn a_domain_that_does_not_run_is_named() {
        let domain = Domain { name: "web".into(), uuid: [0; 16], id: -1 };
        assert_eq!(domain.check_running().unwrap_err().to_string(), "domain web does not run");
    }
}
