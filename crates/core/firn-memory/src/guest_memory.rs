//! Guest RAM through the files that back it: read pages, find the backed ones, punch holes.
//!
//! ```text
//!   RAM pages   0 .............. 524287 | 524288 ....        firn_types::RegionMap
//!   regions     |------- ram ---------|  |-- ram2 --|
//!   RAM files   [ data | hole | data  ]  [ data ... ]        tmpfs or memfd, shared with the hypervisor
//!   mappings    hva 0x7f1c40000000 ...   hva 0x7f1d...       in the hypervisor: where the guest's accesses go
//! ```
//!
//! Pages are copied by `pread(2)`: it reads holes as zeros without filling them, causes no page
//! fault in Firn, and fails if the file ends early. A page that is known to be backed can be copied
//! through a mapping instead, in half the time (1.2 against 2.6 us for 8 KiB that no cache holds):
//! [`GuestMemory::open_window`], for a save.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use firn_types::{HostVirt, PAGE_SIZE, Page, RamRegion, RegionMap};

use crate::process::Process;

mod backing;
mod error;
mod huge_pages;
mod large_pages;
mod source;
mod users;
mod window;

use backing::RegionBacking;
pub use error::MemoryError;
pub use huge_pages::HUGE_PAGE_BYTES;
pub use users::RamUser;
use window::RamWindow;

/// The address of a region in the hypervisor's address space.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegionLocation {
    /// The region, as in the map.
    pub region: RamRegion,
    /// Its first byte in the hypervisor; page-aligned.
    pub hva: HostVirt,
}

/// All RAM of a guest, through the files that back it.
#[derive(Debug)]
pub struct GuestMemory {
    process: Arc<Process>,
    map: RegionMap,
    /// One per region of the map, in its order.
    backings: Vec<RegionBacking>,
    window: OnceLock<RamWindow>,
}

impl GuestMemory {
    /// Finds and opens the file behind each region.
    ///
    /// # Errors
    /// If a region is not mapped where its location says, or not as shared memory in tmpfs, a memfd
    /// or huge pages of 2 MiB.
    pub fn open(
        process: Arc<Process>,
        map: RegionMap,
        locations: &[RegionLocation],
    ) -> Result<Self, MemoryError> {
        let memory = Self::open_any(process, map, locations)?;
        match memory.backings.iter().find(|backing| !backing.is_shared()) {
            Some(private) => Err(MemoryError::Private { id: private.region_id().to_owned() }),
            None => Ok(memory),
        }
    }

    /// As [`Self::open`], but accepts private anonymous memory too (QEMU's default). Private memory
    /// can only be traced for writes ([`crate::TraceMode::Writes`], [`crate::PageScan`]), and costs
    /// more to read.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_any(
        process: Arc<Process>,
        map: RegionMap,
        locations: &[RegionLocation],
    ) -> Result<Self, MemoryError> {
        let mappings = process.read_mappings()?;
        if let Some(stray) =
            locations.iter().find(|location| !map.regions().contains(&location.region))
        {
            return Err(MemoryError::Unlocated(stray.region.id.clone()));
        }
        let backings = map
            .regions()
            .iter()
            .map(|region| {
                let location = locations.iter().find(|location| location.region == *region);
                let location = location.ok_or_else(|| MemoryError::Unlocated(region.id.clone()))?;
                RegionBacking::from_mappings(&process, &mappings, location)
            })
            .collect::<Result<_, _>>()?;
        Ok(Self { process, map, backings, window: OnceLock::new() })
    }

    /// Whether all of RAM lies in files that Firn has opened too.
    pub fn is_shared(&self) -> bool {
        self.backings.iter().all(RegionBacking::is_shared)
    }

    /// Whether some of RAM lies in files that Firn has opened too, and some does not.
    pub fn is_partly_shared(&self) -> bool {
        !self.is_shared() && self.backings.iter().any(RegionBacking::is_shared)
    }

    /// Whether RAM is a private mapping of a template ([`crate::template`]).
    pub fn has_template(&self) -> bool {
        self.backings.iter().any(RegionBacking::is_template)
    }

    /// The pages of a clone that are in its hypervisor's page tables: pages of the template that
    /// have been mapped, and its own. None without a template.
    ///
    /// # Errors
    /// If the kernel refuses the query, which it has no reason to.
    pub fn mapped_template_runs(&self) -> Result<Vec<Range<Page>>, MemoryError> {
        let mut runs = Vec::new();
        for backing in &self.backings {
            backing.append_mapped_template_runs(&mut runs)?;
        }
        Ok(runs)
    }

    /// The regions, and their guest-physical addresses.
    pub fn region_map(&self) -> &RegionMap {
        &self.map
    }

    /// The hypervisor.
    pub fn process(&self) -> &Arc<Process> {
        &self.process
    }

    /// The address of a page in the hypervisor; `None` for a page between regions.
    pub fn hva_of(&self, page: Page) -> Option<HostVirt> {
        self.backing_of(page).map(|backing| backing.hva_of(page))
    }

    /// The page at an address of the hypervisor; `None` if it is not guest RAM.
    pub fn page_of_hva(&self, hva: HostVirt) -> Option<Page> {
        self.backings.iter().find_map(|backing| backing.page_at(hva))
    }

    /// Copies whole pages from the running guest. Pages that were never backed, and pages between
    /// regions, read as zeros, and stay unbacked.
    ///
    /// A page that the guest writes during the copy is copied as a mixture of old and new bytes:
    /// protect it first where that matters.
    ///
    /// # Errors
    /// If the RAM file ends before the range does.
    ///
    /// # Panics
    /// In debug builds, if `out` is not a whole number of pages.
    pub fn read_pages(&self, first: Page, out: &mut [u8]) -> Result<(), MemoryError> {
        debug_assert!(out.len() % PAGE_SIZE == 0, "{} bytes are not pages", out.len());
        let pages = out.len() / PAGE_SIZE;
        let end = Page(first.0.saturating_add(pages as u32));
        let mut at = first;
        for (index, backing) in self.backings.iter().enumerate() {
            let Some(part) = backing.overlap_with(&(at..end)) else { continue };
            let from = Page::count_in(&(first..part.start)) * PAGE_SIZE;
            let to = from + Page::count_in(&part) * PAGE_SIZE;
            out[Page::count_in(&(first..at)) * PAGE_SIZE..from].fill(0);
            self.read_part(index, &part, &mut out[from..to])?;
            at = part.end;
        }
        out[Page::count_in(&(first..at)) * PAGE_SIZE..].fill(0);
        Ok(())
    }

    /// Copies pages of one region.
    fn read_part(
        &self,
        index: usize,
        part: &Range<Page>,
        out: &mut [u8],
    ) -> Result<(), MemoryError> {
        let backing = &self.backings[index];
        if self.window.get().is_some_and(|window| window.copy_pages(index, backing, part, out)) {
            return Ok(());
        }
        backing.read_pages(part, out)
    }

    /// Maps all of RAM in Firn. From now on [`Self::read_pages`] copies the pages that are backed
    /// at this moment through that mapping, in half the time. Costs 2 MiB of page tables per GiB
    /// that is read.
    ///
    /// Private memory is not mapped. For a save only: if the hypervisor gives a page back and Firn
    /// reads it afterwards, the RAM file gets a page of zeros there, which a restore must not have.
    /// And a hypervisor that truncates its RAM file kills Firn by SIGBUS.
    ///
    /// # Errors
    /// If there is no room for the mapping.
    pub fn open_window(&self) -> Result<(), MemoryError> {
        if self.window.get().is_some() {
            return Ok(());
        }
        let window = RamWindow::open(&self.backings, &self.backed_runs()?, self.map.total_pages());
        let window =
            window.map_err(|error| MemoryError::from_io("mapping", &self.all_pages(), error))?;
        // If another thread has just opened one, that one serves as well.
        let _ = self.window.set(window);
        Ok(())
    }

    /// Other processes that map the guest's RAM files: back ends of its devices (vhost-user). No
    /// page-fault handler of the hypervisor sees what they write. Firn itself does not count, nor
    /// do processes that Firn may not inspect.
    ///
    /// # Errors
    /// If the RAM files cannot be inspected.
    pub fn other_users(&self) -> Result<Vec<RamUser>, MemoryError> {
        let files = self.backings.iter().filter_map(|backing| backing.file_id().transpose());
        let files = files.collect::<Result<Vec<_>, _>>()?;
        let is_ours = |pid: i32| pid == self.process.pid() || pid == std::process::id() as i32;
        let others = users::list_processes().filter(|&pid| !files.is_empty() && !is_ours(pid));
        Ok(others.filter_map(|pid| users::RamUser::from_pid(pid, &files)).collect())
    }

    /// Whether any page of the range is backed by memory.
    ///
    /// # Errors
    /// If the kernel refuses the query, which it has no reason to.
    pub fn is_backed(&self, range: Range<Page>) -> Result<bool, MemoryError> {
        for backing in &self.backings {
            let Some(part) = backing.overlap_with(&range) else { continue };
            if backing.first_run(&part)?.is_some() {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// The pages that are backed by memory, in runs, in order. All others are zeros: never written,
    /// or given back.
    ///
    /// # Errors
    /// If the kernel refuses the query, which it has no reason to.
    pub fn backed_runs(&self) -> Result<Vec<Range<Page>>, MemoryError> {
        self.backed_runs_in(self.all_pages())
    }

    /// The pages of a range that are backed by memory, in runs, in order.
    ///
    /// # Errors
    /// If the kernel refuses the query, which it has no reason to.
    pub fn backed_runs_in(&self, range: Range<Page>) -> Result<Vec<Range<Page>>, MemoryError> {
        let mut runs = Vec::new();
        for backing in &self.backings {
            if let Some(part) = backing.overlap_with(&range) {
                backing.append_backed_runs(part, &mut runs)?;
            }
        }
        Ok(runs)
    }

    /// Whether the hypervisor has given none of these pages back.
    ///
    /// ```text
    ///   shared    every page is backed                     the caller knows that all were, and that a
    ///                                                      page that is touched again is reported
    ///                                                      ([`crate::PageFaults::report_holes`])
    ///   private   every page is still write-protected      the caller has protected all of them
    ///   private, in huge pages: every page is backed       as for shared memory
    /// ```
    ///
    /// Of shared huge pages the kernel does not report holes: only [`Self::file_bytes`] shows that
    /// there are more of them.
    ///
    /// A page of a file that is being given back at this moment does not count as backed: the query
    /// waits for the end of that. A page of private memory loses its protection together with its
    /// contents, also if the guest has touched it again.
    ///
    /// # Errors
    /// If the kernel refuses the query, which it has no reason to.
    pub fn has_kept(&self, range: Range<Page>) -> Result<bool, MemoryError> {
        for backing in &self.backings {
            let Some(part) = backing.overlap_with(&range) else { continue };
            if !backing.has_kept(&part)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The bytes that the RAM files occupy. The sum is smaller after the hypervisor has given pages
    /// back, and greater after the guest has touched new ones. Private memory does not count.
    ///
    /// # Errors
    /// If the kernel refuses the query, which it has no reason to.
    pub fn file_bytes(&self) -> Result<u64, MemoryError> {
        let files = self.backings.iter().filter_map(|backing| backing.file_bytes().transpose());
        let files: BTreeMap<_, _> = files.collect::<Result<_, _>>()?;
        Ok(files.values().sum())
    }

    /// Whether the kernel may keep shared memory in pages larger than a page table's. If one page of
    /// such a large page is given back, its bytes may become zeros while it stays backed.
    pub fn may_be_in_large_pages(&self) -> bool {
        let devices = self.backings.iter().filter_map(|backing| backing.file_id().ok().flatten());
        let devices: Vec<_> = devices.map(|(device, _)| device).collect();
        !devices.is_empty() && large_pages::may_be_used(&self.process, &devices)
    }

    /// Gives the memory of these pages back to the host: they are zeros afterwards, in the
    /// hypervisor too.
    ///
    /// # Errors
    /// If the RAM file is sealed, if Firn may not write it, or if there is none (private memory).
    pub fn punch_out(&self, range: Range<Page>) -> Result<(), MemoryError> {
        for backing in &self.backings {
            let Some(part) = backing.overlap_with(&range) else { continue };
            if let Some(window) = self.window.get() {
                window.forget_pages(part.clone());
            }
            backing.punch_out(&part)?;
        }
        Ok(())
    }

    /// The parts of a range that are RAM, each in one region, with their addresses in the
    /// hypervisor.
    pub(crate) fn locate_parts(
        &self,
        range: Range<Page>,
    ) -> impl Iterator<Item = (Range<Page>, HostVirt)> + '_ {
        self.backings.iter().filter_map(move |backing| {
            let part = backing.overlap_with(&range)?;
            let hva = backing.hva_of(part.start);
            Some((part, hva))
        })
    }

    /// All pages, including those between regions.
    pub fn all_pages(&self) -> Range<Page> {
        Page(0)..Page(self.map.total_pages())
    }

    /// Checks that the hypervisor still maps these pages where it did, from the same files.
    ///
    /// # Errors
    /// If not, or if they are private memory.
    pub(crate) fn check_shared(&self, range: &Range<Page>) -> Result<(), MemoryError> {
        let mappings = self.process.read_mappings()?;
        let mut touched =
            self.backings.iter().filter(|backing| backing.overlap_with(range).is_some());
        touched.try_for_each(|backing| backing.check_shared(&self.process, &mappings))
    }

    fn backing_of(&self, page: Page) -> Option<&RegionBacking> {
        self.backings.iter().find(|backing| backing.pages().contains(&page))
    }
}
