//! Domains: their names, numbers and XML.

use std::time::Duration;

use crate::address::{DaemonAddress, DomainAddress};
use crate::connection::LibvirtConnection;
use crate::error::LibvirtError;
use crate::message;
use crate::xdr::{Uuid, XdrReader, XdrWriter};

/// No flags: the XML of the running domain, without passwords.
const PLAIN: u32 = 0;

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

    pub(crate) fn check_running(self) -> Result<Self, LibvirtError> {
        match self.id {
            -1 => Err(LibvirtError::NotRunning { name: self.name }),
            _ => Ok(self),
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
