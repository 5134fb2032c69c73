//! The connection of a clone to the template of its family.
//!
//! ```text
//!   supervisor                                    holder
//!      template.json: addresses  <---------------- writes it before it listens
//!      connect to holder.sock    ----------------> accepts, keeps the connection open
//!      its memory, bits, memfds  <---------------- SCM_RIGHTS
//!      pwrite to the holder's memory ------------> the template, by the holder's mapping
//!      end of the connection     ----------------> the last one: the holder ends
//! ```

use std::fs::File;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use firn_image::Image;
use firn_memory::template::{self, TemplateWriter};
use firn_memory::{GuestMemory, PageFaults, Process, RegionLocation, Tracee};
use firn_types::{RegionMap, ThreadId};

use crate::processes::descriptors;
use crate::records::failure::{Failure, FailureContext, FailureKind};
use crate::records::family::{FamilyRecord, TemplateDescription};
use crate::records::image_ids::ImageIds;
use crate::records::journal::JournalFile;

/// The maximum size of a template's description.
const DESCRIPTION_BYTES_MAX: u64 = 64 << 10;

/// What an attempt to get the template was doing.
const CONNECTING: &str = "getting the template of the family from its holder";

/// What a failure to map the template was doing.
const MAPPING: &str = "mapping the template of the family";

/// A clone's template.
pub(crate) struct FamilyLink {
    template: Arc<TemplateWriter>,
    /// Its files, which QEMU inherits with the same numbers.
    files: Vec<File>,
}

impl FamilyLink {
    /// Gets the template of a family from its holder. `map` has the regions of the image with these
    /// numbers.
    pub(crate) fn connect(
        record: &FamilyRecord,
        map: &RegionMap,
        ids: &ImageIds,
    ) -> Result<Self, Failure> {
        let text = firn_files::read_text(&record.description_file(), DESCRIPTION_BYTES_MAX)
            .while_doing_as(FailureKind::Interrupted, CONNECTING)?;
        let TemplateDescription { ids: filled_from, addresses } =
            serde_json::from_str(&text).while_doing(CONNECTING)?;
        let differs = || Failure::new(FailureKind::Refused, "the template is of another image");
        if filled_from != *ids {
            return Err(differs().while_doing(CONNECTING));
        }
        let holder = UnixStream::connect(record.holder_socket())
            .while_doing_as(FailureKind::Interrupted, CONNECTING)?;
        let received = descriptors::receive_once(&holder)
            .while_doing_as(FailureKind::Interrupted, CONNECTING)?;
        let ended = || Failure::new(FailureKind::Interrupted, "the template's holder has ended");
        let received = received.ok_or_else(|| ended().while_doing(CONNECTING))?;
        let received = received.into_iter().map(File::from).collect();
        let template = TemplateWriter::new(map, &addresses, received, Some(holder.into()));
        let template = Arc::new(template.ok_or_else(differs)?);
        let files = template.clone_files().while_doing(CONNECTING)?;
        Ok(Self { template, files })
    }

    /// As [`Self::connect`] for an opened image, and records the family in the journal.
    pub(crate) fn join_family(
        record: &FamilyRecord,
        image: &Image,
        journal: &JournalFile,
    ) -> Result<Self, Failure> {
        let link = Self::connect(record, image.regions(), &ImageIds::from_image(image))?;
        journal
            .update(|journal| journal.family = Some(record.clone()))
            .while_doing("writing the journal")?;
        Ok(link)
    }

    /// The files of the template, for QEMU.
    pub(crate) fn files(&self) -> &[File] {
        &self.files
    }

    /// Maps the template in a QEMU over its RAM, without access.
    pub(crate) fn map_over_ram(
        &self,
        process: &Process,
        locations: &[RegionLocation],
        vcpus: &[ThreadId],
    ) -> Result<(), Failure> {
        let mut tracee =
            Tracee::seize(process, vcpus).while_doing_as(FailureKind::Host, MAPPING)?;
        let numbers = template::descriptor_numbers(&self.files);
        template::map_template(&mut tracee, locations, &numbers)
            .while_doing_as(FailureKind::Host, MAPPING)?;
        firn_fault::pass_point("restore.mapped");
        Ok(())
    }

    /// Registers the memory, and allows QEMU to access it from then on.
    pub(crate) fn share_memory(
        &self,
        faults: &mut PageFaults,
        memory: &GuestMemory,
        tracee: &mut Tracee<'_>,
    ) -> Result<(), Failure> {
        self.fill_through(faults);
        faults.register_all().while_doing_as(FailureKind::Host, MAPPING)?;
        template::allow_access(tracee, memory).while_doing_as(FailureKind::Host, MAPPING)
    }

    /// Has pages installed in the template from now on.
    pub(crate) fn fill_through(&self, faults: &mut PageFaults) {
        faults.share_template(Arc::clone(&self.template));
    }
}
