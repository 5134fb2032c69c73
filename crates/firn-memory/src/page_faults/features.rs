//! What the kernel's userfaultfd can do, and what each kind of trace asks of it.

use firn_types::PAGE_SIZE;
use rustix::io::Errno;

use super::PageFaultError;
use crate::sys::uffd::{Span, Uffd, flag};

/// What guest memory is traced for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Trace {
    /// Pages are missing until they are installed.
    Restore,
    /// Pages are there; touches and writes are seen.
    Save,
    /// Pages are there; writes are seen. The one trace that private memory allows.
    Writes,
    /// Pages are there; writes are remembered, and nobody waits. What [`crate::PageScan`] uses.
    Scan,
}

/// What the kernel can do beyond what Firn needs everywhere.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features {
    /// Pages that are not mapped can be write-protected too in anonymous memory (Linux 6.4).
    pub write_protect_unpopulated: bool,
    /// Writes can be remembered instead of reported (Linux 6.7).
    pub write_protect_async: bool,
    /// A minor fault can be answered with a page that stays write-protected (Linux 6.4).
    pub resume_protected: bool,
    /// Page tables can be scanned by `PAGEMAP_SCAN` (Linux 6.7).
    pub pagemap_scan: bool,
}

/// Features that a trace may ask for, by the names of the header.
const NAMED: [(u64, &str); 8] = [
    (flag::FEATURE_WP, "UFFD_FEATURE_PAGEFAULT_FLAG_WP"),
    (flag::FEATURE_EVENT_REMOVE, "UFFD_FEATURE_EVENT_REMOVE"),
    (flag::FEATURE_MISSING_SHMEM, "UFFD_FEATURE_MISSING_SHMEM"),
    (flag::FEATURE_THREAD_ID, "UFFD_FEATURE_THREAD_ID"),
    (flag::FEATURE_MINOR_SHMEM, "UFFD_FEATURE_MINOR_SHMEM"),
    (flag::FEATURE_WP_SHMEM, "UFFD_FEATURE_WP_HUGETLBFS_SHMEM"),
    (flag::FEATURE_WP_UNPOPULATED, "UFFD_FEATURE_WP_UNPOPULATED"),
    (flag::FEATURE_WP_ASYNC, "UFFD_FEATURE_WP_ASYNC"),
];

/// The bit that the kernel adds to the features of a descriptor after the handshake (`fs/userfaultfd.c`).
const INITIALIZED: u64 = 1 << 31;

/// A valid address at which nothing is registered.
const ANYWHERE: u64 = 1 << 40;

impl Trace {
    const ALL: [Self; 4] = [Self::Restore, Self::Save, Self::Writes, Self::Scan];

    /// The features its descriptor asks for. No two traces ask for the same, so that these tell what a descriptor was
    /// made for.
    pub(super) fn features(self) -> u64 {
        let writes = flag::FEATURE_WP | flag::FEATURE_WP_SHMEM;
        let traced = writes | flag::FEATURE_THREAD_ID;
        let touches = traced | flag::FEATURE_MISSING_SHMEM | flag::FEATURE_MINOR_SHMEM;
        match self {
            Self::Restore => touches | flag::FEATURE_EVENT_REMOVE,
            Self::Save => touches,
            Self::Writes => traced,
            Self::Scan => writes | flag::FEATURE_WP_UNPOPULATED | flag::FEATURE_WP_ASYNC,
        }
    }

    /// Features that it asks for if the kernel knows them.
    fn welcome(self) -> u64 {
        match self {
            Self::Writes => flag::FEATURE_WP_UNPOPULATED,
            Self::Restore | Self::Save | Self::Scan => 0,
        }
    }

    /// The modes it registers.
    pub(super) fn mode(self) -> u64 {
        match self {
            Self::Restore => flag::REGISTER_MISSING,
            Self::Save => flag::REGISTER_MINOR | flag::REGISTER_WP,
            Self::Writes | Self::Scan => flag::REGISTER_WP,
        }
    }

    /// The trace whose descriptor has these features; `None` if it is not one of Firn's.
    pub(super) fn of_features(features: u64) -> Option<Self> {
        let features = features & !INITIALIZED;
        Self::ALL.into_iter().find(|trace| trace.features() == features & !trace.welcome())
    }
}

impl Features {
    /// Asks the running kernel.
    ///
    /// # Errors
    /// If it lacks what every trace needs.
    pub fn of_kernel() -> Result<Self, PageFaultError> {
        let Known { features: known, resume_protected } =
            probe().map_err(|source| PageFaultError::Unavailable { source })?;
        let missing = missing(Trace::Restore.features() | Trace::Save.features(), known);
        if !missing.is_empty() {
            return Err(PageFaultError::Features { missing });
        }
        Ok(Self {
            write_protect_unpopulated: known & flag::FEATURE_WP_UNPOPULATED != 0,
            write_protect_async: known & flag::FEATURE_WP_ASYNC != 0,
            resume_protected,
            // Both came together.
            pagemap_scan: known & flag::FEATURE_WP_ASYNC != 0,
        })
    }
}

/// What a kernel says of itself.
struct Known {
    features: u64,
    resume_protected: bool,
}

/// Asks the kernel, through a descriptor of Firn's own that never has anything registered.
fn probe() -> Result<Known, Errno> {
    let uffd = crate::sys::uffd::own_for_probing()?;
    let features = uffd.handshake(0)?;
    // No feature bit tells of this mode. A kernel that knows it says that nothing is registered there (ENOENT), one
    // that does not says EINVAL.
    let answer = uffd.resume(Span { start: ANYWHERE, len: PAGE_SIZE as u64 }, flag::CONTINUE_WP);
    Ok(Known { features, resume_protected: answer == Err(Errno::NOENT) })
}

/// The names of the features that are wanted but not known.
fn missing(wanted: u64, known: u64) -> Vec<&'static str> {
    let lacks = |bit: u64| wanted & bit != 0 && known & bit == 0;
    NAMED.iter().filter(|(bit, _)| lacks(*bit)).map(|(_, name)| *name).collect()
}

/// The handshake of a new descriptor.
pub(super) fn handshake(
    uffd: &Uffd,
    trace: Trace,
    features: Features,
) -> Result<(), PageFaultError> {
    let welcome = if features.write_protect_unpopulated { trace.welcome() } else { 0 };
    uffd.handshake(trace.features() | welcome).map(drop).map_err(|source| match source {
        Errno::INVAL => {
            let known = probe().map_or(0, |known| known.features);
            PageFaultError::Features { missing: missing(trace.features(), known) }
        }
        source => PageFaultError::Unavailable { source },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_descriptor_tells_what_it_was_made_for() {
        for trace in Trace::ALL {
            assert_eq!(Trace::of_features(trace.features() | INITIALIZED), Some(trace));
            let all = trace.features() | trace.welcome();
            assert_eq!(Trace::of_features(all | INITIALIZED), Some(trace));
        }
        assert_eq!(Trace::of_features(0), None);
        assert_eq!(Trace::of_features(INITIALIZED | flag::FEATURE_WP), None);
    }

    #[test]
    fn what_is_missing_is_named() {
        let known = Trace::Save.features() & !flag::FEATURE_MINOR_SHMEM;
        assert_eq!(missing(Trace::Save.features(), known), ["UFFD_FEATURE_MINOR_SHMEM"]);
    }
}
