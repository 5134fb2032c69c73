//! Values for unit tests.

use std::path::PathBuf;

use firn_types::{HostVirt, RegionMap, ThreadId};

use crate::processes::identity::ProcessIdentity;
use crate::records::journal::HypervisorRecord;
use crate::records::meta::ImageMeta;

/// A hypervisor with one region of 1 MiB, run by this process.
pub fn hypervisor_record(launched: bool) -> HypervisorRecord {
    HypervisorRecord {
        process: ProcessIdentity::from_pid(std::process::id() as i32).unwrap(),
        qmp: PathBuf::from("/run/firn/web/qmp.sock").into(),
        launched,
        map: RegionMap::lay_out([("ram", 1 << 20)]).unwrap(),
        locations: vec![("ram".into(), HostVirt(0x7f00_0000_0000))],
        vcpus: vec![ThreadId(1)],
        meta: ImageMeta::default(),
        since: 0,
        access_bits: None,
        calls: None,
        cards: Vec::new(),
        served: Vec::new(),
        followed: false,
    }
}
