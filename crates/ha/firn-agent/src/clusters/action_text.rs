//! The actions of the reconcile loop as sentences, for the log. Pure.

use std::collections::BTreeMap;
use std::fmt::Display;

use firn_cluster::HostId;
use firn_cluster::failover::reconcile::ReconcileAction;

/// What this host is about to do. `names` are the names of hosts.
pub(super) fn describe_action<V: Display>(
    action: &ReconcileAction<V>,
    names: &BTreeMap<HostId, String>,
) -> String {
    let host = |host: &HostId| match names.get(host) {
        Some(name) => format!("host {name} ({})", host.0),
        None => format!("host number {}", host.0),
    };
    match action {
        ReconcileAction::Nothing => "there is nothing to do".to_owned(),
        ReconcileAction::RecordBackup(Some(backup)) => {
            format!("the record is to name {} as the backup", host(backup))
        }
        ReconcileAction::RecordBackup(None) => "the record is to name no backup".to_owned(),
        ReconcileAction::ReleaseOutput(vms) => {
            format!("the buffered output of {} is to be released", join_names(vms.iter()))
        }
        ReconcileAction::Protect => "another host is to protect it".to_owned(),
        ReconcileAction::EndRecord => "its record is to end".to_owned(),
        ReconcileAction::YieldLease => "this host requests its lease no more".to_owned(),
        ReconcileAction::Adopt(before) => {
            format!("this agent manages what the agent of {} did", host(before))
        }
        ReconcileAction::AdoptCopies(before) => {
            format!("this agent has the copies that the agent of {} had", host(before))
        }
        ReconcileAction::Fence(vm) => format!("{vm} is to end here, because it runs elsewhere"),
        ReconcileAction::Detach(vm) => format!("{vm} is to continue by itself"),
        ReconcileAction::DropCopies => "its copies here are of no use, and are dropped".to_owned(),
    }
}

fn join_names(names: impl Iterator<Item = impl Display>) -> String {
    names.map(|name| name.to_string()).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_action_is_a_sentence() {
        let names = BTreeMap::from([(HostId(2), "b".to_owned())]);
        let actions: [ReconcileAction<&str>; 13] = [
            ReconcileAction::Nothing,
            ReconcileAction::RecordBackup(Some(HostId(2))),
            ReconcileAction::RecordBackup(Some(HostId(7))),
            ReconcileAction::RecordBackup(None),
            ReconcileAction::ReleaseOutput(["web", "db"].into()),
            ReconcileAction::Protect,
            ReconcileAction::EndRecord,
            ReconcileAction::YieldLease,
            ReconcileAction::Adopt(HostId(2)),
            ReconcileAction::AdoptCopies(HostId(2)),
            ReconcileAction::Fence("web"),
            ReconcileAction::Detach("web"),
            ReconcileAction::DropCopies,
        ];
        let texts = actions.map(|action| describe_action(&action, &names));
        assert_eq!(texts[1], "the record is to name host b (2) as the backup");
        assert_eq!(texts[2], "the record is to name host number 7 as the backup");
        assert_eq!(texts[4], "the buffered output of db, web is to be released");
        for text in texts {
            assert!(!text.contains(['{', '}', '"', '[', '_']) && text.contains(' '), "{text}");
        }
    }
}
