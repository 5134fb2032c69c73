//! The client side of a family: how `firn restore --count` starts the holder of a template.

use std::io::BufReader;
use std::os::unix::net::UnixStream;
use std::path::Path;

use firn_image::unlock_chain;
use firn_restore::FillChoices;
use firn_vmm::command_line::{self, CommandOverrides, HostEndpoint};

use crate::client;
use crate::operations::image_origin::{self, TrustChoices};
use crate::operations::restore;
use crate::processes::runtime::{self, RuntimeDir};
use crate::processes::spawn;
use crate::records::control_protocol;
use crate::records::failure::{self, Failure, FailureContext, FailureKind};
use crate::records::family::{FamilyRecord, TemplatePlan, holder_socket};

/// What the drivers of all balloons begin with.
const BALLOON: &str = "virtio-balloon";

/// A family that clones can join, at least as long as this value exists.
#[derive(Debug)]
pub struct NewFamily {
    record: FamilyRecord,
    _connection: UnixStream,
}

impl NewFamily {
    /// Starts the holder of a template of this image.
    ///
    /// # Errors
    /// If the image can't be opened, or the host lacks something.
    pub fn start(
        base: &RuntimeDir,
        image: &Path,
        learn: bool,
        fill: FillChoices,
    ) -> Result<Self, Failure> {
        const STARTING: &str = "starting the holder of a template";
        let families = base.families_dir();
        base.create_private()
            .and_then(|()| runtime::make_private(&families))
            .while_doing_as(FailureKind::Host, "creating the runtime directory")?;
        remove_dead_families(&families);
        let mut child = spawn::spawn_template_holder(base).while_doing(STARTING)?;
        let keys = unlock_chain(image).map_err(|error| failure::image_failure(&error))?;
        let plan = TemplatePlan { image: image.to_owned(), keys, families, learn, fill };
        if let Some(mut to) = child.stdin.take() {
            // A holder that ends before it has read the plan sends the reason in its reply.
            let _ = control_protocol::write_message(&mut to, &plan);
        }
        let died = || Failure::new(FailureKind::Interrupted, "the template's holder has ended");
        let from = child.stdout.take().ok_or_else(died)?;
        let reply = client::read_replies(&mut BufReader::new(from), &mut |_| ())?;
        let facts = reply.ok_or_else(died)??;
        let record: FamilyRecord = serde_json::from_value(facts).while_doing(STARTING)?;
        let _connection = UnixStream::connect(record.holder_socket()).map_err(|_| died())?;
        Ok(Self { record, _connection })
    }

    /// What the supervisor of a clone needs.
    pub fn record(&self) -> &FamilyRecord {
        &self.record
    }
}

/// Checks, before anything is started, whether clones of an image can run beside each other with
/// these changes to its command line.
///
/// # Errors
/// If two clones would listen on one port, the VM can't share memory, or the user does not trust the
/// image.
pub fn check_clones(image: &Path, clones: &[CommandOverrides], trust: bool) -> Result<(), Failure> {
    let (image, meta) = restore::open_image(image)?;
    let mut used: Vec<(HostEndpoint, usize)> = Vec::new();
    for (number, overrides) in clones.iter().enumerate() {
        let choices = TrustChoices { trust, overrides, libvirt: false };
        image_origin::check_origin(&image, &meta, &choices)?;
        let args = meta.clone().with_overrides(overrides)?.qemu.user_args;
        if let Some(word) = args.iter().find(|word| word.contains(BALLOON)) {
            let text = format!("a VM with a balloon can't share memory with its clones: {word}");
            let failure = Failure::new(FailureKind::Refused, text);
            return Err(failure.with_hint("restore it without --count"));
        }
        let plan = command_line::plan_command(&args).map_err(failure::command_line_failure)?;
        for endpoint in plan.network_endpoints().into_iter().filter(is_fixed) {
            match used.iter().find(|(other, _)| *other == endpoint) {
                Some((_, other)) => return Err(port_conflict(&endpoint, other + 1, number + 1)),
                None => used.push((endpoint, number)),
            }
        }
    }
    Ok(())
}

/// Whether an endpoint is the same for each QEMU that has this option: the kernel chooses port 0.
fn is_fixed(endpoint: &HostEndpoint) -> bool {
    !matches!(endpoint, HostEndpoint::Port { port: 0, .. })
}

fn port_conflict(endpoint: &HostEndpoint, first: usize, second: usize) -> Failure {
    let text = format!("the clones {first} and {second} would both listen on {endpoint}");
    Failure::new(FailureKind::Busy, text).with_hint(
        "give each clone a port of its own: --netdev 'ID=user,hostfwd=tcp::300{}-:22', where {} is the clone's number; or none: --netdev ID=user",
    )
}

/// Removes the directories of families whose holder was killed.
fn remove_dead_families(families: &Path) {
    for entry in std::fs::read_dir(families).into_iter().flatten().flatten() {
        let is_hidden = entry.file_name().to_string_lossy().starts_with('.');
        if !is_hidden && UnixStream::connect(holder_socket(&entry.path())).is_err() {
            // Another command may have removed it.
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}
