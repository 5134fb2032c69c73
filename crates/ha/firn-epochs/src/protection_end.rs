//! Protection end: how a VM's protection ended at its primary. It is the last message of the
//! stream.

use std::fmt;

use serde::{Deserialize, Serialize};

/// How a VM's protection ended at its primary, and why.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "how", content = "why", rename_all = "kebab-case")]
pub enum ProtectionEnd {
    /// The user stopped the VM.
    Stopped,
    /// The user released the VM, which continues alone.
    Released,
    /// The guest shut down, or the hypervisor was asked to quit.
    ShutDown,
    /// The guest panicked, and the hypervisor ended with it. The user decides: a failover goes back
    /// to an epoch before the panic.
    Panicked,
    /// The VM continues at the primary, which sends no more epochs; with the reason.
    Unprotected(String),
    /// The hypervisor has ended, or does not answer; with the reason.
    Lost(String),
}

impl ProtectionEnd {
    /// Whether the user or the guest intended the end, so that the standby has no purpose any more.
    pub fn is_intended(&self) -> bool {
        matches!(self, Self::Stopped | Self::Released | Self::ShutDown)
    }

    /// Whether the VM was lost: only then a failover is advised.
    pub fn is_loss(&self) -> bool {
        matches!(self, Self::Lost(_))
    }

    /// A short name for a table.
    pub fn short_name(&self) -> &'static str {
        match self {
            Self::Stopped => "stopped",
            Self::Released => "released",
            Self::ShutDown => "shut down",
            Self::Panicked => "panicked",
            Self::Unprotected(_) => "unprotected",
            Self::Lost(_) => "lost",
        }
    }
}

impl fmt::Display for ProtectionEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Stopped => f.write_str("its user stopped the VM"),
            Self::Released => f.write_str("its primary has released it, and continues alone"),
            Self::ShutDown => f.write_str("the guest shut down"),
            Self::Panicked => f.write_str("the guest panicked"),
            Self::Unprotected(why) => {
                write!(f, "the VM runs on at its primary without protection: {why}")
            }
            Self::Lost(why) => write!(f, "the VM is lost at its primary: {why}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_loss_advises_a_failover_and_only_a_wanted_end_removes_a_standby() {
        let lost = ProtectionEnd::Lost("killed by signal 9".into());
        assert!(lost.is_loss() && !lost.is_intended());
        for end in [ProtectionEnd::Stopped, ProtectionEnd::Released, ProtectionEnd::ShutDown] {
            assert!(end.is_intended() && !end.is_loss(), "{end}");
        }
        for end in [ProtectionEnd::Panicked, ProtectionEnd::Unprotected("x".into())] {
            assert!(!end.is_intended() && !end.is_loss(), "{end}");
        }
    }

    #[test]
    fn it_is_json_and_back() {
        let lost = ProtectionEnd::Lost("x".into());
        let json = serde_json::to_string(&lost).unwrap();
        assert_eq!(json, r#"{"how":"lost","why":"x"}"#);
        assert_eq!(serde_json::from_str::<ProtectionEnd>(&json).unwrap(), lost);
        let stopped = serde_json::to_string(&ProtectionEnd::Stopped).unwrap();
        assert_eq!(stopped, r#"{"how":"stopped"}"#);
    }
}
