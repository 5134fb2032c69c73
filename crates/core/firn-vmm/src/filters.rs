//! Filters of a network card: QEMU gives Firn every frame that the VM sends, and transmits only what
//! Firn gives back. They are added to a running VM and removed from it, so any back end will do that
//! QEMU itself passes frames to.
//!
//! ```text
//!                      netdev's list of filters, in the order in which the VM's frames pass them
//!   card --> firn-card0-captured: redirector, outdev --> firn-card0-released: redirector, indev --> netdev
//!                     |                                          ^
//!                     '--> socket, QEMU listens --> Firn --> socket, QEMU listens
//! ```
//!
//! `queue=rx` is the direction in which the back end receives, that is, in which the VM sends. Frames
//! in the other direction pass no filter of Firn's. QEMU walks through the list backwards for this
//! direction, so the filter that was added first is passed last.
//!
//! QEMU listens at sockets that Firn has made and handed over (`getfd`), because QEMU may run as
//! another user or see other directories. The connection ends with its process; the next one
//! connects by the socket's name. In between QEMU drops what the VM sends (`filter redirector send
//! failed` in its log), and transmits none of it.
//!
//! Source: QEMU net/filter.c, net/filter-mirror.c, chardev/char-socket.c (7.2 to 10).

use std::os::fd::BorrowedFd;

use serde::Deserialize;
use serde_json::{Value, json};

use crate::qmp::{QmpClient, QmpError};

/// The prefix of the names of all objects that this module adds.
const PREFIX: &str = "firn-card";

/// One of the two filters of a card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FilterSide {
    /// It gives Firn the frames that the VM sends.
    Captured,
    /// It transmits the frames that Firn gives back.
    Released,
}

impl FilterSide {
    /// A word for file names and QEMU's names.
    pub fn word(self) -> &'static str {
        match self {
            Self::Captured => "captured",
            Self::Released => "released",
        }
    }

    /// QEMU's name of the filter of the card with this number, and of its character device.
    pub fn object_id(self, number: u32) -> String {
        format!("{PREFIX}{number}-{}", self.word())
    }

    fn device_property(self) -> &'static str {
        match self {
            Self::Captured => "outdev",
            Self::Released => "indev",
        }
    }
}

#[derive(Debug, Deserialize)]
struct CharacterDevice {
    label: String,
}

/// Hands a listening socket over, for a filter that is added later.
pub(crate) fn add_socket(
    qmp: &mut QmpClient,
    (number, side): (u32, FilterSide),
    listener: BorrowedFd<'_>,
) -> Result<(), QmpError> {
    let id = side.object_id(number);
    qmp.send_fd(&id, listener)?;
    let address = json!({ "type": "fd", "data": { "str": id } });
    let socket = json!({ "addr": address, "server": true, "wait": false });
    let backend = json!({ "type": "socket", "data": socket });
    let added = qmp.execute("chardev-add", json!({ "id": id, "backend": backend }));
    if added.is_err() {
        // A descriptor that was not used stays open in QEMU. If this fails too, the first error says why.
        let _ = qmp.execute("closefd", json!({ "fdname": id }));
    }
    added.map(drop)
}

/// Adds a filter to a back end. QEMU refuses those whose frames it does not see.
pub(crate) fn add_filter(
    qmp: &mut QmpClient,
    netdev: &str,
    (number, side): (u32, FilterSide),
) -> Result<(), QmpError> {
    let id = side.object_id(number);
    let mut filter = json!({ "qom-type": "filter-redirector", "netdev": netdev, "queue": "rx" });
    filter[side.device_property()] = id.clone().into();
    filter["id"] = id.into();
    qmp.execute("object-add", filter).map(drop)
}

/// Removes a filter, if it is there.
pub(crate) fn remove_filter(
    qmp: &mut QmpClient,
    (number, side): (u32, FilterSide),
) -> Result<(), QmpError> {
    match has_filter(qmp, (number, side))? {
        true => qmp.execute("object-del", json!({ "id": side.object_id(number) })).map(drop),
        false => Ok(()),
    }
}

/// Removes the character device of a filter that was removed, if it is there.
pub(crate) fn remove_socket(
    qmp: &mut QmpClient,
    (number, side): (u32, FilterSide),
) -> Result<(), QmpError> {
    let id = side.object_id(number);
    let devices: Vec<CharacterDevice> = qmp.query("query-chardev")?;
    match devices.iter().any(|device| device.label == id) {
        true => qmp.execute("chardev-remove", json!({ "id": id })).map(drop),
        false => Ok(()),
    }
}

/// Whether a filter is there.
pub(crate) fn has_filter(
    qmp: &mut QmpClient,
    (number, side): (u32, FilterSide),
) -> Result<bool, QmpError> {
    let id = side.object_id(number);
    let objects = qmp.execute("qom-list", json!({ "path": "/objects" }))?;
    let objects = objects.as_array().ok_or_else(|| QmpError::unexpected("qom-list", "no list"))?;
    Ok(objects.iter().any(|object| object.get("name").and_then(Value::as_str) == Some(&id)))
}
