//! Decides whether a user may end a record, from evidence about each host that it names. Pure.
//!
//! ```text
//!   lease        the host                           the record may be ended
//!   not expired  any                                no: the host may send
//!   expired      has not answered for long          yes
//!   expired      answers, has none of the VMs       yes: its VMs ended with an earlier start of it
//!   expired      answers, has one of the VMs        no: it runs, or is a standby that may be run
//!   expired      answers, does not list its VMs     no
//! ```

/// A host that a record names, with the evidence about it.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct RecordedHost {
    /// Its name and number, as `a (1)`.
    pub(super) host: String,
    pub(super) has_lease: bool,
    pub(super) seen: HostEvidence,
}

/// The evidence that this host's agent has about another host.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum HostEvidence {
    /// It does not answer. The seconds since its last answer.
    Lost(Option<f64>),
    /// It is no peer of this host.
    NoPeer,
    /// It answers, but does not list its VMs.
    Silent,
    /// It answers, and has these VMs of the record, each with its state.
    Has(Vec<(String, String)>),
}

impl RecordedHost {
    /// Returns why nothing of the record runs on this host, or can be run there.
    ///
    /// # Errors
    /// Why something may run there, and a hint.
    pub(super) fn absence_reason(&self) -> Result<&'static str, (String, String)> {
        let host = &self.host;
        if self.has_lease {
            let hint = "a host that is gone loses it within seconds: ask again".to_owned();
            return Err((format!("host {host} holds a lease, or may believe so"), hint));
        }
        match &self.seen {
            HostEvidence::Silent => {
                let hint = format!("ask again, or see the log of the agent of host {host}");
                Err((format!("host {host} is there, and does not list its VMs"), hint))
            }
            HostEvidence::Has(vms) => match vms.first() {
                Some((vm, state)) => {
                    let hint = format!(
                        "there, `firn failover {vm}` runs a standby, `firn release {vm}` and `firn stop {vm}` end that"
                    );
                    Err((format!("host {host} has {vm}, which is {state}"), hint))
                }
                None => Ok("has none of the VMs, and no lease"),
            },
            HostEvidence::Lost(_) => Ok("does not answer, and has no lease"),
            HostEvidence::NoPeer => Ok("is no peer of this host, and has no lease"),
        }
    }

    /// The same with the time of the last answer, for users.
    ///
    /// # Errors
    /// As for [`Self::absence_reason`].
    pub(super) fn describe_absence(&self) -> Result<String, (String, String)> {
        let why = self.absence_reason()?;
        Ok(match &self.seen {
            HostEvidence::Lost(Some(seconds)) => {
                format!("{why}; its last answer is {seconds:.0} s old")
            }
            HostEvidence::Lost(None) => {
                format!("{why}; it has not answered since this agent was started")
            }
            _ => why.to_owned(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(has_lease: bool, seen: HostEvidence) -> RecordedHost {
        RecordedHost { host: "a (1)".to_owned(), has_lease, seen }
    }

    fn has(state: &str) -> HostEvidence {
        HostEvidence::Has(vec![("web".to_owned(), state.to_owned())])
    }

    #[test]
    fn a_host_with_a_valid_lease_is_never_gone() {
        for seen in [
            HostEvidence::Lost(Some(60.0)),
            HostEvidence::Lost(None),
            HostEvidence::NoPeer,
            HostEvidence::Has(vec![]),
        ] {
            let (why, hint) = named(true, seen.clone()).describe_absence().unwrap_err();
            assert!(why.contains("a (1) holds a lease") && hint.contains("again"), "{why}: {hint}");
            assert!(named(false, seen).describe_absence().is_ok());
        }
    }

    #[test]
    fn a_host_that_is_there_must_say_that_it_has_none_of_the_vms() {
        let (why, _) = named(false, HostEvidence::Silent).describe_absence().unwrap_err();
        assert!(why.contains("does not list its VMs"), "{why}");
        for state in ["protected", "standby"] {
            let (why, hint) = named(false, has(state)).describe_absence().unwrap_err();
            assert!(why.contains("has web") && why.contains(state), "{why}");
            assert!(hint.contains("`firn stop web`"), "{hint}");
        }
        let rests = named(false, HostEvidence::Has(vec![])).describe_absence().unwrap();
        assert_eq!(rests, "has none of the VMs, and no lease");
    }

    #[test]
    fn the_time_since_its_last_answer_is_named() {
        let rests = named(false, HostEvidence::Lost(Some(35.2))).describe_absence().unwrap();
        assert!(rests.contains("35 s old"), "{rests}");
        let rests = named(false, HostEvidence::Lost(None)).describe_absence().unwrap();
        assert!(rests.contains("since this agent was started"), "{rests}");
    }
}
