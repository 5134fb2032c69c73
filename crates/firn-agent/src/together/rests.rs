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
pub(super) struct Named {
    /// Its name and number, as `a (1)`.
    pub(super) host: String,
    pub(super) has_lease: bool,
    pub(super) seen: Seen,
}

/// The evidence that this host's agent has about another host.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Seen {
    /// It does not answer. The seconds since its last answer.
    Lost(Option<f64>),
    /// It is no peer of this host.
    NoPeer,
    /// It answers, but does not list its VMs.
    Silent,
    /// It answers, and has these VMs of the record, each with its state.
    Has(Vec<(String, String)>),
}

impl Named {
    /// Returns why nothing of the record runs on this host, or can be run there.
    ///
    /// # Errors
    /// Why something may run there, and a hint.
    pub(super) fn is_gone(&self) -> Result<&'static str, (String, String)> {
        let host = &self.host;
        if self.has_lease {
            let hint = "a host that is gone loses it within seconds: ask again".to_owned();
            return Err((format!("host {host} holds a lease, or may believe so"), hint));
        }
        match &self.seen {
            Seen::Silent => {
                let hint = format!("ask again, or see the log of the agent of host {host}");
                Err((format!("host {host} is there, and does not list its VMs"), hint))
            }
            Seen::Has(vms) => match vms.first() {
                Some((vm, state)) => {
                    let hint = format!(
                        "there, `firn failover {vm}` runs a standby, `firn release {vm}` and `firn stop {vm}` end that"
                    );
                    Err((format!("host {host} has {vm}, which is {state}"), hint))
                }
                None => Ok("has none of the VMs, and no lease"),
            },
            Seen::Lost(_) => Ok("does not answer, and has no lease"),
            Seen::NoPeer => Ok("is no peer of this host, and has no lease"),
        }
    }

    /// The same with the time of the last answer, for users.
    ///
    /// # Errors
    /// As for [`Self::absence_reason`].
    pub(super) fn describe(&self) -> Result<String, (String, String)> {
        let why = self.is_gone()?;
        Ok(match &self.seen {
            Seen::Lost(Some(seconds)) => format!("{why}; its last answer is {seconds:.0} s old"),
            Seen::Lost(None) => format!("{why}; it has not answered since this agent was started"),
            _ => why.to_owned(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(has_lease: bool, seen: Seen) -> Named {
        Named { host: "a (1)".to_owned(), has_lease, seen }
    }

    fn has(state: &str) -> Seen {
        Seen::Has(vec![("web".to_owned(), state.to_owned())])
    }

    #[test]
    fn a_host_that_holds_a_lease_is_not_gone_whatever_is_seen() {
        for seen in [Seen::Lost(Some(60.0)), Seen::Lost(None), Seen::NoPeer, Seen::Has(vec![])] {
            let (why, hint) = named(true, seen.clone()).describe().unwrap_err();
            assert!(why.contains("a (1) holds a lease") && hint.contains("again"), "{why}: {hint}");
            assert!(named(false, seen).describe().is_ok());
        }
    }

    #[test]
    fn a_host_that_is_there_must_say_that_it_has_none_of_the_vms() {
        let (why, _) = named(false, Seen::Silent).describe().unwrap_err();
        assert!(why.contains("does not list its VMs"), "{why}");
        for state in ["protected", "standby"] {
            let (why, hint) = named(false, has(state)).describe().unwrap_err();
            assert!(why.contains("has web") && why.contains(state), "{why}");
            assert!(hint.contains("`firn stop web`"), "{hint}");
        }
        let rests = named(false, Seen::Has(vec![])).describe().unwrap();
        assert_eq!(rests, "has none of the VMs, and no lease");
    }

    #[test]
    fn the_time_since_its_last_answer_is_named() {
        let rests = named(false, Seen::Lost(Some(35.2))).describe().unwrap();
        assert!(rests.contains("35 s old"), "{rests}");
        let rests = named(false, Seen::Lost(None)).describe().unwrap();
        assert!(rests.contains("since this agent was started"), "{rests}");
    }
}
