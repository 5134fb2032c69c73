//! Protection by the kernel, on two levels. A scan visits each page-table entry of what it scans.
//! So of large areas only the *busy* parts are protected asynchronously, and scanned at each commit.
//! The others, the *quiet* parts, are protected synchronously: the first write of a page waits for
//! a thread of the library ([`QuietWrites`]), which costs nothing where nothing is written.
//!
//! ```text
//!   span  | page |  part, busy  |  part, quiet  |  part, quiet  |  part, busy  | page |
//!           asynchronous             synchronous                   asynchronous
//! ```
//!
//! A scan skips what is synchronous. A part changes its level only in a commit, when no thread
//! writes. The first and the last page of memory that the application has already belong to no part:
//! they may have data beside an area, which is written at any time.
//!
//! A process that may not let system calls wait has only the first level
//! ([`ProtectionLevels::restriction`]).

use std::ops::Range;

use rustix::io::Errno;

use super::followed::FollowedSpans;
use super::interface::WrittenRuns;
use super::parts::{AreaParts, PartMoves, PartSettings};
use crate::error::Error;
use crate::span::{PAGE, PageSpan};
use crate::sys::fork::OwnerProcess;
use crate::sys::pagemap::{ScanCriterion, SelfPagemap};
use crate::sys::quiet_writes::{QuietRuns, QuietWrites};
use crate::sys::uffd::Uffd;

/// See the module documentation.
#[derive(Debug)]
pub(super) struct ProtectionLevels {
    uffd: Uffd,
    pagemap: SelfPagemap,
    quiet: Option<QuietWrites>,
    /// What was written of parts that became busy since the last commit.
    pending: WrittenRuns,
    restriction: Option<String>,
    parts: AreaParts,
    settings: PartSettings,
    followed: FollowedSpans,
    /// Pages that nothing protects.
    unprotected: Vec<PageSpan>,
    owner: OwnerProcess,
}

impl ProtectionLevels {
    pub(super) fn open(
        settings: PartSettings,
        owner: OwnerProcess,
        pagemap: SelfPagemap,
    ) -> Result<Self, Errno> {
        Ok(Self {
            uffd: Uffd::asynchronous()?,
            pagemap,
            pending: WrittenRuns::default(),
            quiet: None,
            restriction: None,
            parts: AreaParts::new(settings),
            settings,
            followed: FollowedSpans::new(settings.pages * PAGE),
            unprotected: Vec::new(),
            owner,
        })
    }

    pub(super) fn followed(&self) -> &FollowedSpans {
        &self.followed
    }

    /// Why commits cost by the size of large areas.
    pub(super) fn restriction(&self) -> Option<&str> {
        self.restriction.as_deref()
    }

    /// The count of writes that waited.
    pub(super) fn waited(&self) -> u64 {
        self.quiet.as_ref().map_or(0, QuietWrites::waited)
    }

    /// Begins to follow a span. `is_own`: the library allocated it. `compares`: the session compares
    /// what is found.
    pub(super) fn watch_span(
        &mut self,
        span: PageSpan,
        is_own: bool,
        compares: bool,
    ) -> Result<(), Error> {
        self.wake_parts_of(span)?;
        self.protect_busy(span)?;
        self.followed.add_span(span, is_own);
        self.parts.set_busy(self.followed.parts_of(span));
        if self.followed.page_count() > self.settings.scanned_max && self.restriction.is_none() {
            self.start_thread(compares);
        }
        Ok(())
    }

    fn start_thread(&mut self, compares: bool) {
        if self.quiet.is_some() {
            return;
        }
        match QuietWrites::start(self.owner, self.settings.pages * PAGE, compares) {
            Ok(quiet) => self.quiet = Some(quiet),
            Err(error) => self.restriction = Some(describe_restriction(&error)),
        }
    }

    pub(super) fn forget_span(&mut self, span: PageSpan) -> Result<(), Error> {
        self.wake_parts_of(span)?;
        let unregistered = self.uffd.unregister_span(span);
        unregistered.map_err(Error::system("taking an area out of userfaultfd"))?;
        self.followed.remove_span(span);
        self.unprotected.retain(|page| !page.overlaps(span));
        for part in self.followed.parts_of(span) {
            if self.followed.pieces_of(part..part + 1).is_empty() {
                self.parts.remove_parts(part..part + 1);
            }
        }
        Ok(())
    }

    /// Protects a span on the first level.
    fn protect_busy(&self, span: PageSpan) -> Result<(), Error> {
        self.uffd
            .register_span(span)
            .map_err(Error::system("registering an area with userfaultfd"))?;
        self.uffd.write_protect(span).map_err(Error::system("write-protecting an area"))
    }

    /// Ends what [`ProtectionLevels::watch_span`] began, if it failed.
    pub(super) fn give_up(&self, span: PageSpan) {
        let _ = self.uffd.unregister_span(span);
    }

    /// Protects all pages, or none. All parts are busy afterwards.
    pub(super) fn protect_all(&self) -> Result<(), Error> {
        self.followed.all().iter().try_for_each(|span| self.protect_busy(*span))
    }

    pub(super) fn unprotect_all(&mut self) -> Result<(), Error> {
        for span in self.followed.all().to_vec() {
            let parts = self.followed.parts_of(span);
            for part in self.parts.quiet_among(parts.clone()) {
                self.release_quiet(part)?;
            }
            self.parts.set_busy(parts);
            let unregistered = self.uffd.unregister_span(span);
            unregistered.map_err(Error::system("taking an area out of userfaultfd"))?;
        }
        self.unprotected.clear();
        Ok(())
    }

    /// Protects a page that was not protected.
    pub(super) fn protect_page(&mut self, page: PageSpan) -> Result<(), Error> {
        self.unprotected.retain(|other| *other != page);
        match self.quiet_writes_of(page) {
            None => self.protect_busy(page),
            Some(quiet) => {
                quiet.follow_span(page).map_err(Error::system("write-protecting a page"))
            }
        }
    }

    /// Ends the protection of a page.
    pub(super) fn unprotect_page(&mut self, page: PageSpan) -> Result<(), Error> {
        self.unprotected.push(page);
        let unregistered = match self.quiet_writes_of(page) {
            None => self.uffd.unregister_span(page),
            Some(quiet) => quiet.release_span(page),
        };
        unregistered.map_err(Error::system("taking a page out of userfaultfd"))?;
        self.set_ahead()
    }

    /// The second level, if the page belongs to it.
    fn quiet_writes_of(&self, page: PageSpan) -> Option<&QuietWrites> {
        let quiet = self.quiet.as_ref()?;
        let part = self.followed.part_of(page.start());
        let is_piece =
            || self.followed.pieces_of(part..part + 1).iter().any(|piece| piece.overlaps(page));
        (self.parts.is_quiet(part) && is_piece()).then_some(quiet)
    }

    /// Whether a commit has to scan a span.
    fn has_busy_pages(&self, span: PageSpan) -> bool {
        let parts = self.followed.parts_of(span);
        self.followed.without_shared_pages(span) != Some(span)
            || self.parts.quiet_among(parts.clone()) != [parts]
    }

    /// Makes the parts busy whose pieces change when a span is added or removed.
    fn wake_parts_of(&mut self, span: PageSpan) -> Result<(), Error> {
        let touched = self.followed.parts_of(span);
        let parts = self.parts.quiet_among(touched.start.saturating_sub(1)..touched.end + 1);
        if parts.is_empty() {
            return Ok(());
        }
        let mut pending = WrittenRuns::default();
        let taken = self.collect_quiet(&mut pending);
        self.pending = pending;
        taken?;
        parts.into_iter().try_for_each(|run| self.make_busy(run))?;
        self.set_ahead()
    }

    fn set_ahead(&self) -> Result<(), Error> {
        let Some(quiet) = &self.quiet else { return Ok(()) };
        let pieces: Vec<_> =
            self.parts.quiet_runs().flat_map(|run| self.followed.pieces_of(run)).collect();
        quiet.set_ahead(&pieces).map_err(Error::system("write-protecting a page"))
    }

    fn release_quiet(&self, parts: Range<usize>) -> Result<(), Error> {
        let Some(quiet) = &self.quiet else { return Ok(()) };
        let pieces = self.followed.pieces_of(parts);
        let released = pieces.iter().try_for_each(|piece| quiet.release_span(*piece));
        released.map_err(Error::system("taking a part out of userfaultfd"))
    }

    fn make_busy(&mut self, parts: Range<usize>) -> Result<(), Error> {
        self.release_quiet(parts.clone())?;
        for piece in self.followed.pieces_of(parts.clone()) {
            let mut spans = piece.without_spans(&self.unprotected).into_iter();
            spans.try_for_each(|span| self.protect_busy(span))?;
        }
        self.parts.set_busy(parts);
        Ok(())
    }

    /// Makes parts quiet. If the kernel refuses, they remain as they are, and so do all others.
    fn make_quiet(&mut self, parts: Range<usize>) -> Result<(), Error> {
        let Some(quiet) = &self.quiet else { return Ok(()) };
        for piece in self.followed.pieces_of(parts.clone()) {
            let released = self.uffd.unregister_span(piece);
            released.map_err(Error::system("taking a part out of userfaultfd"))?;
            let mut spans = piece.without_spans(&self.unprotected).into_iter();
            let Err(error) = spans.try_for_each(|span| quiet.follow_span(span)) else { continue };
            self.restriction = Some(describe_restriction(&error.into()));
            self.parts.set_quiet(parts.clone());
            return self.make_busy(parts);
        }
        self.parts.set_quiet(parts);
        Ok(())
    }

    /// Adds what was written of busy parts, and protects it again.
    pub(super) fn collect_busy(&mut self, found: &mut WrittenRuns) -> Result<(), Error> {
        for number in 0..self.followed.all().len() {
            let span = self.followed.all()[number];
            if !self.has_busy_pages(span) {
                continue;
            }
            let scanned = self.pagemap.scan_span(span, ScanCriterion::WrittenAndRearm, found);
            scanned.map_err(Error::system("scanning for written pages"))?;
        }
        for &(start, len) in found.runs() {
            for part in self.followed.parts_of(PageSpan::covering_range(start..start + len)) {
                self.parts.record_writes(part, 0);
            }
        }
        Ok(())
    }

    /// Adds what was written of quiet parts, and protects it again.
    pub(super) fn collect_quiet(&mut self, found: &mut WrittenRuns) -> Result<(), Error> {
        found.append(&mut self.pending);
        let Some(quiet) = &self.quiet else { return Ok(()) };
        let QuietRuns::Runs(runs) = quiet.take_runs() else { return self.scan_quiet(found) };
        for run in runs {
            let part = self.followed.part_of(run.start());
            self.parts.record_writes(part, 1);
            found.push_run(run.start(), run.byte_count());
            if quiet.protect_again(run).is_ok() {
                continue;
            }
            // Some of it is not protected, or not followed any more.
            for span in self.protected_spans(part..part + 1) {
                let again = span.common_pages(run).map_or(Ok(()), |it| quiet.protect_again(it));
                again.map_err(Error::system("write-protecting pages"))?;
            }
        }
        Ok(())
    }

    /// What is protected of the quiet parts among some parts.
    fn protected_spans(&self, parts: Range<usize>) -> Vec<PageSpan> {
        let pieces =
            self.parts.quiet_among(parts).into_iter().flat_map(|run| self.followed.pieces_of(run));
        pieces.flat_map(|piece| piece.without_spans(&self.unprotected)).collect()
    }

    /// The same if the log was full.
    fn scan_quiet(&mut self, found: &mut WrittenRuns) -> Result<(), Error> {
        let Some(quiet) = &self.quiet else { return Ok(()) };
        let spans = self
            .followed
            .all()
            .iter()
            .flat_map(|span| self.protected_spans(self.followed.parts_of(*span)));
        let spans: Vec<_> = spans.collect();
        let mut written = WrittenRuns::default();
        for span in spans {
            let scanned = self.pagemap.scan_span(span, ScanCriterion::Written, &mut written);
            scanned.map_err(Error::system("scanning for written pages"))?;
            // All of it: a page that the kernel has not made yet may be writable, too.
            let protected = quiet.protect_again(span);
            protected.map_err(Error::system("write-protecting a part"))?;
        }
        for &(start, len) in written.runs() {
            for page in (start..start + len).step_by(PAGE) {
                self.parts.record_writes(self.followed.part_of(page), 1);
            }
        }
        found.append(&mut written);
        Ok(())
    }

    /// Counts the end of a transaction: parts become busy or quiet.
    pub(super) fn end_transaction(&mut self) -> Result<(), Error> {
        let may_rest = self.quiet.is_some()
            && self.restriction.is_none()
            && self.followed.page_count() > self.settings.scanned_max;
        let moves = self.parts.end_transaction(may_rest);
        if moves == PartMoves::default() {
            return Ok(());
        }
        moves.to_busy.into_iter().try_for_each(|run| self.make_busy(run))?;
        moves.to_quiet.into_iter().try_for_each(|run| self.make_quiet(run))?;
        self.set_ahead()
    }
}

fn describe_restriction(error: &std::io::Error) -> String {
    format!(
        "a commit costs by the size of the areas, because userfaultfd(2) may not let system calls \
         wait here ({error}): give the process CAP_SYS_PTRACE or access to /dev/userfaultfd, or set \
         vm.unprivileged_userfaultfd=1"
    )
}

impl Drop for ProtectionLevels {
    fn drop(&mut self) {
        // A child's descriptor is its parent's: the parent's pages are registered with it.
        if self.owner.is_this_process() {
            // Closing the descriptors, which comes next, unregisters as well.
            let _ = self.unprotect_all();
        }
    }
}
