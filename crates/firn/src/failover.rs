//! `firn failover`

use clap::Args as ClapArgs;
use firn_supervisor::{FailoverRequest, Failure, Request, VmName, ask};

use crate::output::Output;

/// Run a standby's VM, whose primary is lost.
///
/// It goes on from its newest committed epoch, the last but one that arrived. Make sure first that the VM runs nowhere else:
/// nobody looks after that for you. Where hosts agree who may run what (`firn cluster status`), this is done without you.
///
/// Example:
///   firn failover web
#[derive(Debug, ClapArgs)]
#[command(verbatim_doc_comment)]
pub struct Args {
    /// The standby.
    name: VmName,
}

impl Args {
    /// Runs the verb.
    pub fn run(&self, out: Output) -> Result<(), Failure> {
        let base = crate::hidden::runtime_dir()?;
        let facts =
            ask(&base, &self.name, &Request::Failover(FailoverRequest::default()), &mut |_| ())
                .map_err(|failure| failure.while_doing(format!("can't run {}", self.name)))?;
        out.facts(&facts, || self.describe(&facts))
    }

    fn describe(&self, facts: &serde_json::Value) -> String {
        match facts["took_ms"].as_f64() {
            Some(ms) => {
                let epoch = &facts["epoch"];
                format!("{} runs from the end of epoch {epoch}, after {ms:.1} ms\n", self.name)
            }
            // A successor has finished what a dead supervisor began.
            None => format!("{} runs\n", self.name),
        }
    }
}
