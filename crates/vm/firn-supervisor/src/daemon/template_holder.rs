//! The holder of a template: a process that exists once for a family, while its clones are being
//! restored.
//!
//! A sealed file can be written through an older mapping only. So one process maps the template
//! before it seals it, and the supervisors of all clones write pages through that mapping; see
//! [`firn_memory::template`]. The holder itself fills the template in the background.
//!
//! ```text
//!   firn restore --count 3 -- plan --> make, seal the template -> listen -> fill ... until no connection is left
//!                          <- reply -------------------------------'
//! ```
//!
//! A holder that is killed takes nothing with it but the possibility to share more pages: the files
//! live as long as a QEMU maps them, and each supervisor installs what is missing for its own VM.

use std::fs::File;
use std::io::{self, BufReader};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use firn_image::key_ring;
use firn_memory::template::{HeldTemplate, TemplateWriter};
use firn_restore::{RestoreMode, RestoreOptions, TemplateFill};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde_json::json;

use crate::client::StartReplyWriter;
use crate::daemon::control_server;
use crate::daemon::supervisor_process::to_background;
use crate::operations::learned_blocks::LearnedBlocksFile;
use crate::operations::restore;
use crate::processes::descriptors;
use crate::processes::runtime;
use crate::processes::spawn;
use crate::records::control_protocol::{self, LINE_BYTES_MAX, SupervisorReply};
use crate::records::failure::{Failure, FailureContext, FailureKind};
use crate::records::family::{
    FamilyRecord, TemplateDescription, TemplatePlan, description_file, holder_socket,
};
use crate::records::image_ids::ImageIds;

/// The regions that one message with descriptors can carry, beside the holder's memory and the bits
/// of filled pages.
const REGIONS_MAX: usize = 60;

/// The time without any connection after which the holder ends: for its first connection, and after
/// its last.
const FIRST_WAIT: Duration = Duration::from_secs(30);
const LINGER: Duration = Duration::from_secs(2);

/// The interval between two checks of that time.
const CHECK_INTERVAL: Duration = Duration::from_millis(500);

/// Runs the holder of a template: it reads its plan from standard input and replies on standard
/// output.
pub fn run_template_holder() -> io::Result<()> {
    spawn::detach_session();
    firn_memory::heap::return_large_blocks_when_freed();
    let mut replies = StartReplyWriter::new(io::stdout());
    match read_plan().and_then(|plan| TemplateHolder::create(&plan)) {
        Ok(holder) => {
            let facts = json!(holder.record);
            firn_fault::pass_point("template.listening");
            replies.send_reply(&SupervisorReply::Done { facts });
            to_background()?;
            holder.serve_until_unused()
        }
        Err(failure) => {
            replies.send_reply(&SupervisorReply::Failed(failure));
            Ok(())
        }
    }
}

fn read_plan() -> Result<TemplatePlan, Failure> {
    let line = control_protocol::read_line(&mut BufReader::new(io::stdin()), LINE_BYTES_MAX)?;
    let none = || Failure::new(FailureKind::Usage, "there is no plan on standard input");
    Ok(control_protocol::decode_message(&line.ok_or_else(none)?)?)
}

/// A template that is handed out.
struct TemplateHolder {
    record: FamilyRecord,
    listener: UnixListener,
    /// What each supervisor gets.
    descriptors: Vec<File>,
    _template: HeldTemplate,
    _fill: TemplateFill,
}

impl TemplateHolder {
    fn create(plan: &TemplatePlan) -> Result<Self, Failure> {
        const CREATING: &str = "making the template of the family";
        key_ring().add_keys(&plan.keys);
        let (image, _) = restore::open_image(&plan.image)?;
        let ids = ImageIds::from_image(&image);
        ids.check_keys(&plan.image, &plan.keys)?;
        let map = image.regions();
        if map.regions().len() > REGIONS_MAX {
            let text = format!("the VM has more than {REGIONS_MAX} regions of RAM");
            return Err(Failure::new(FailureKind::Refused, text).while_doing(CREATING));
        }
        let template =
            HeldTemplate::create(map.regions()).while_doing_as(FailureKind::Host, CREATING)?;
        firn_fault::pass_point("template.sealed");
        let descriptors = template.clone_descriptors().while_doing(CREATING)?;
        let copies = template.clone_descriptors().while_doing(CREATING)?;
        let addresses = template.addresses();
        let writer = TemplateWriter::new(map, &addresses, copies, None);
        let incomplete = || Failure::new(FailureKind::Other, "a region has no template");
        let writer = Arc::new(writer.ok_or_else(incomplete)?);
        let learning = LearnedBlocksFile::for_image(&image, RestoreMode::Auto);
        let learned = learning.filter(|_| plan.learn).map(|it| it.request_expected_blocks(&image));
        let options = RestoreOptions {
            fill: restore::choose_fill(plan.fill.when, &image),
            bandwidth: plan.fill.bandwidth,
            is_in_store: image.is_in_store(),
            also_expected: learned.unwrap_or_default(),
            ..RestoreOptions::new(RestoreMode::Auto)
        };
        let description = TemplateDescription { ids, addresses };
        let (directory, listener) =
            create_directory(&plan.families, &description).while_doing(CREATING)?;
        let id = directory.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let record = FamilyRecord { id, image: plan.image.clone(), directory };
        let fill = TemplateFill::start(Arc::clone(&image), &options, writer);
        Ok(Self { record, listener, descriptors, _template: template, _fill: fill })
    }

    /// Hands out the template, until no supervisor needs it any more.
    fn serve_until_unused(self) -> io::Result<()> {
        self.listener.set_nonblocking(true)?;
        let (mut connections, mut used_at) = (Vec::new(), Instant::now());
        let mut limit = FIRST_WAIT;
        while used_at.elapsed() < limit {
            self.wait_for_change(&connections)?;
            while let Ok((connection, _)) = self.listener.accept() {
                // A supervisor that ends meanwhile needs nothing.
                if descriptors::send_files(&connection, &self.descriptors).is_ok() {
                    connections.push(connection);
                }
            }
            connections.retain(is_open);
            if !connections.is_empty() {
                (used_at, limit) = (Instant::now(), LINGER);
            }
        }
        std::fs::remove_dir_all(&self.record.directory)
    }

    fn wait_for_change(&self, connections: &[UnixStream]) -> io::Result<()> {
        let mut polled = vec![PollFd::new(&self.listener, PollFlags::IN)];
        polled.extend(connections.iter().map(|it| PollFd::new(it, PollFlags::RDHUP)));
        match poll(&mut polled, Timespec::try_from(CHECK_INTERVAL).ok().as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }
}

/// Whether the other end of a connection is open.
fn is_open(connection: &UnixStream) -> bool {
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    let mut polled = [PollFd::new(connection, PollFlags::RDHUP)];
    matches!(poll(&mut polled, Some(&now)), Ok(0))
}

/// Creates the directory of a new family. It has its name only when its socket accepts connections.
fn create_directory(
    families: &Path,
    description: &TemplateDescription,
) -> io::Result<(PathBuf, UnixListener)> {
    let id = std::process::id();
    let since = crate::records::journal::unix_seconds();
    let (new, directory) =
        (families.join(format!(".{since:x}-{id}")), families.join(format!("{since:x}-{id}")));
    runtime::make_private(&new).map_err(io::Error::other)?;
    firn_files::replace_private(&description_file(&new), &serde_json::to_vec(description)?)?;
    let listener = control_server::bind_private(&holder_socket(&new))?;
    std::fs::rename(&new, &directory)?;
    Ok((directory, listener))
}
