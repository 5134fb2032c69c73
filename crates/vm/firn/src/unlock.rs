//! `firn unlock`

use clap::Args as ClapArgs;
use firn_image::unlock_chain;
use firn_supervisor::{
    Failure, FailureKind, SupervisorRequest, VmName, query_status, send_request,
};
use serde_json::json;

use crate::image::open::open_failure;
use crate::output::FactPrinter;

/// Give a VM the key of the sealed image that it is being restored from.
///
/// A VM needs this only if its supervisor and both guards died while memory was still missing. Its
/// guest then waits as soon as it touches such memory, and `firn status` shows that the key of the
/// image is not here. No key is written to a file.
#[derive(Debug, ClapArgs)]
#[command(after_long_help = "Example:
  firn unlock web --identity me.age")]
pub struct UnlockArgs {
    /// The VM.
    name: VmName,
}

impl UnlockArgs {
    /// Runs the verb.
    pub fn run(&self, out: FactPrinter) -> Result<(), Failure> {
        let base = crate::hidden::runtime_dir()?;
        let status = query_status(&base, &base.vm_dir(&self.name))?;
        let image = status.image.ok_or_else(|| {
            let text = format!("{} is not being restored from an image", self.name);
            Failure::new(FailureKind::Refused, text)
        })?;
        let keys = unlock_chain(&image).map_err(|error| open_failure(&image, &error))?;
        let count = keys.len();
        let request = SupervisorRequest::AddKeys { keys };
        send_request(&base, &self.name, &request, &mut |_| ())
            .map_err(|failure| failure.while_doing(format!("can't unlock {}", self.name)))?;
        out.print_facts(&json!({ "image": image, "keys": count }), || {
            format!("{} has the keys of {count} files\n", self.name)
        })
    }
}
