//! The record of a cluster, and its rules. Any peer with a certificate may have written it, so it
//! is checked when it is written and when it is read: no host obeys a record that breaks the rules.

use std::collections::{BTreeMap, BTreeSet};

use firn_cluster::failover::FailoverRecord;
use firn_cluster::{HostId, VmId};
use serde::{Deserialize, Serialize};

use crate::MembershipError;
use crate::types::is_plain;

/// Maximum size of a record, in bytes of JSON. A VM takes some hundred bytes.
pub const RECORD_BYTES_MAX: usize = 16 << 10;

/// What the hosts agree on about a cluster.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClusterRecord {
    /// Which hosts may run which VMs.
    pub register: FailoverRecord,
    /// The names of the VMs at their hosts.
    pub vms: BTreeMap<VmId, String>,
}

impl ClusterRecord {
    /// Encodes it as it is stored.
    ///
    /// # Errors
    /// If it is too long, or breaks the rules.
    pub fn to_json(&self) -> Result<Vec<u8>, MembershipError> {
        let json = serde_json::to_vec(self)
            .map_err(|error| MembershipError::Refused(error.to_string()))?;
        match json.len() {
            len if len > RECORD_BYTES_MAX => Err(MembershipError::Refused(format!(
                "the record of a cluster would have {len} bytes, of at most {RECORD_BYTES_MAX}: make smaller clusters"
            ))),
            _ => self.check_rules().map(|()| json),
        }
    }

    /// Decodes a stored record.
    ///
    /// # Errors
    /// If it is no record, or breaks the rules.
    pub fn from_json(json: &[u8]) -> Result<Self, MembershipError> {
        let record: Self = serde_json::from_slice(json)
            .map_err(|error| MembershipError::Refused(format!("this is no record: {error}")))?;
        record.check_rules().map(|()| record)
    }

    /// The record after the end of the cluster; see [`FailoverRecord::with_end`].
    pub fn to_ended(&self) -> Self {
        Self { register: self.register.with_end(), vms: BTreeMap::new() }
    }

    /// Every host that the register names.
    pub fn named_hosts(&self) -> BTreeSet<HostId> {
        let backups = self.register.placements.values().filter_map(|placement| placement.backup);
        let named = self.register.primaries().into_iter().chain(backups);
        named.chain(self.register.fence.iter().copied()).collect()
    }

    /// Checks the rules.
    ///
    /// # Errors
    /// The rule that it breaks.
    pub fn check_rules(&self) -> Result<(), MembershipError> {
        let FailoverRecord { placements, checkpoint, generation, layout, .. } = &self.register;
        let name = |vm: &VmId| self.vms.get(vm).is_some_and(|name| is_plain(name));
        let rules = [
            (placements.keys().all(name), "a VM in it has no name that a VM can have"),
            (self.vms.values().all(|name| is_plain(name)), "a name in it is none of a VM"),
            (placements.keys().eq(checkpoint.marks.keys()), "its checkpoint is of other VMs"),
            (self.register.is_separate(), "a host in it is both primary and backup"),
            (checkpoint.generation <= *generation, "its checkpoint is of a timeline to come"),
            (checkpoint.layout <= *layout, "its checkpoint is of a layout to come"),
        ];
        match rules.iter().find(|(holds, _)| !holds) {
            Some((_, why)) => {
                Err(MembershipError::Refused(format!("the record makes no sense: {why}")))
            }
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use firn_cluster::failover::VmPlacement;
    use firn_cluster::{Epoch, Generation};

    use super::*;

    fn record() -> ClusterRecord {
        let placement = VmPlacement { primary: HostId(1), backup: Some(HostId(2)) };
        let register = FailoverRecord::new(BTreeMap::from([(VmId(7), placement)]));
        ClusterRecord { register, vms: BTreeMap::from([(VmId(7), "web".to_owned())]) }
    }

    #[test]
    fn a_record_is_limited_and_decodes_to_itself() {
        let short = record();
        assert_eq!(ClusterRecord::from_json(&short.to_json().unwrap()).unwrap(), short);
        assert!(short.to_ended().to_json().is_ok());
        let vms = (0..400).map(|vm| (VmId(vm), "x".repeat(63))).collect();
        let long = ClusterRecord { vms, ..short };
        assert!(
            matches!(long.to_json(), Err(MembershipError::Refused(why)) if why.contains("smaller"))
        );
    }

    /// Records in a store that an earlier release has written are read, and its agents read what
    /// this one writes.
    #[test]
    fn the_stored_form_stays() {
        let alone = r#"{"register":{"version":4,"generation":1,"layout":3,"places":{"0":{"primary":5,"backup":6}},"fence":[2],"checkpoint":{"number":2,"generation":1,"layout":3,"request":{"term":0,"count":0},"marks":{"0":0}}},"vms":{"0":"web"}}"#;
        let cluster = r#"{"register":{"version":1,"generation":0,"layout":1,"places":{"0":{"primary":1,"backup":3},"1":{"primary":2,"backup":null}},"fence":[],"checkpoint":{"number":0,"generation":0,"layout":0,"request":{"term":0,"count":0},"marks":{"0":0,"1":0}}},"vms":{"0":"web","1":"db"}}"#;
        let ended = r#"{"register":{"version":5,"generation":2,"layout":4,"places":{},"fence":[2,5],"checkpoint":{"number":3,"generation":2,"layout":4,"request":{"term":0,"count":0},"marks":{}}},"vms":{}}"#;
        for stored in [alone, cluster, ended] {
            let record = ClusterRecord::from_json(stored.as_bytes()).unwrap();
            assert_eq!(String::from_utf8(record.to_json().unwrap()).unwrap(), stored);
        }
        let record = ClusterRecord::from_json(alone.as_bytes()).unwrap();
        assert_eq!(record.register.placements.len(), 1);
        assert!(record.register.is_protected() && !record.register.is_ended());
        assert_eq!(record.to_ended(), ClusterRecord::from_json(ended.as_bytes()).unwrap());
    }

    #[test]
    fn an_invalid_record_is_neither_encoded_nor_decoded() {
        type Change = fn(&mut ClusterRecord);
        let mistakes: [(Change, &str); 6] = [
            (|it| it.vms.clear(), "has no name"),
            (|it| drop(it.vms.insert(VmId(8), "a/b".to_owned())), "none of a VM"),
            (|it| it.register.checkpoint.marks.clear(), "of other VMs"),
            (|it| it.register.checkpoint.marks.extend([(VmId(8), Epoch(1))]), "of other VMs"),
            (|it| it.register.checkpoint.generation = Generation(1), "a timeline to come"),
            (
                |it| it.register.placements.get_mut(&VmId(7)).unwrap().primary = HostId(2),
                "both primary",
            ),
        ];
        for (change, why) in mistakes {
            let mut bad = record();
            change(&mut bad);
            let written = bad.to_json().unwrap_err().to_string();
            let read = ClusterRecord::from_json(&serde_json::to_vec(&bad).unwrap()).unwrap_err();
            assert!(written.contains(why) && read.to_string() == written, "{written}");
        }
        assert!(ClusterRecord::from_json(b"{}").unwrap_err().to_string().contains("no record"));
    }
}
