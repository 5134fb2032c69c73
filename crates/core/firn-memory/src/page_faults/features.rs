//! The features of the kernel's userfaultfd, and those that each trace mode needs.

use firn_types::PAGE_SIZE;
use rustix::io::Errno;

use super::error::PageFaultError;
use crate::sys::uffd::{AddressSpan, Uffd, flag};

/// The purpose for which guest memory is traced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TraceMode {
    /// Pages are missing until they are installed.
    Restore,
    /// Pages are present; Firn sees touches and writes.
    Save,
    /// Pages are present; Firn sees writes. The only mode for private memory.
    Writes,
    /// Pages are present; the kernel remembers writes, and no thread waits. [`crate::PageScan`]
    /// uses it.
    Scan,
}

/// The optional features of the kernel, beyond those that Firn needs everywhere.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KernelFeatures {
    /// In anonymous memory, pages that are not mapped can be write-protected too (Linux 6.4).
    pub write_protect_unpopulated: bool,
    /// Writes can be remembered instead of reported (Linux 6.7).
    pub write_protect_async: bool,
    /// A minor fault can be answered with a page that stays write-protected (Linux 6.4).
    pub resume_protected: bool,
    /// Page tables can be scanned by `PAGEMAP_SCAN` (Linux 6.7).
    pub pagemap_scan: bool,
}

/// The features that a trace mode may ask for, by the names of the header.
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

/// The bit that the kernel adds to the features of a descriptor after the handshake
/// (`fs/userfaultfd.c`).
const INITIALIZED: u64 = 1 << 31;

/// A valid address at which nothing is registered.
const ANYWHERE: u64 = 1 << 40;

impl TraceMode {
    const ALL: [Self; 4] = [Self::Restore, Self::Save, Self::Writes, Self::Scan];

    /// The features its descriptor asks for. No two modes ask for the same set, so that the set
    /// identifies the mode of a descriptor.
    pub(super) fn required_features(self) -> u64 {
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

    /// The features that it asks for if the kernel has them.
    fn optional_features(self) -> u64 {
        match self {
            Self::Writes => flag::FEATURE_WP_UNPOPULATED,
            Self::Restore | Self::Save | Self::Scan => 0,
        }
    }

    /// The modes in which it registers memory.
    pub(super) fn register_mode(self) -> u64 {
        match self {
            Self::Restore => flag::REGISTER_MISSING,
            Self::Save => flag::REGISTER_MINOR | flag::REGISTER_WP,
            Self::Writes | Self::Scan => flag::REGISTER_WP,
        }
    }

    /// The mode whose descriptor has these features; `None` if the descriptor is not one of Firn's.
    pub(super) fn of_features(features: u64) -> Option<Self> {
        let features = features & !INITIALIZED;
        Self::ALL
            .into_iter()
            .find(|trace| trace.required_features() == features & !trace.optional_features())
    }
}

impl KernelFeatures {
    /// Queries the running kernel.
    ///
    /// # Errors
    /// If it lacks a feature that every trace mode needs.
    pub fn of_kernel() -> Result<Self, PageFaultError> {
        let ProbedFeatures { features: known, resume_protected } =
            probe_kernel().map_err(|source| PageFaultError::Unavailable { source })?;
        let missing = missing_names(
            TraceMode::Restore.required_features() | TraceMode::Save.required_features(),
            known,
        );
        if !missing.is_empty() {
            return Err(PageFaultError::Features { missing });
        }
        Ok(Self {
            write_protect_unpopulated: known & flag::FEATURE_WP_UNPOPULATED != 0,
            write_protect_async: known & flag::FEATURE_WP_ASYNC != 0,
            resume_protected,
            // Linux 6.7 brought both.
            pagemap_scan: known & flag::FEATURE_WP_ASYNC != 0,
        })
    }
}

/// What a kernel reports about its userfaultfd.
struct ProbedFeatures {
    features: u64,
    resume_protected: bool,
}

/// Queries the kernel, through a descriptor of Firn's own that never has memory registered.
fn probe_kernel() -> Result<ProbedFeatures, Errno> {
    let uffd = crate::sys::uffd::own_for_probing()?;
    let features = uffd.negotiate_api(0)?;
    // No feature bit reports this mode. A kernel with it answers that nothing is registered there
    // (ENOENT), a kernel without it answers EINVAL.
    let answer = uffd
        .map_existing(AddressSpan { start: ANYWHERE, len: PAGE_SIZE as u64 }, flag::CONTINUE_WP);
    Ok(ProbedFeatures { features, resume_protected: answer == Err(Errno::NOENT) })
}

/// The names of the wanted features that the kernel lacks.
fn missing_names(wanted: u64, known: u64) -> Vec<&'static str> {
    let lacks = |bit: u64| wanted & bit != 0 && known & bit == 0;
    NAMED.iter().filter(|(bit, _)| lacks(*bit)).map(|(_, name)| *name).collect()
}

/// Does the handshake of a new descriptor.
pub(super) fn negotiate_features(
    uffd: &Uffd,
    trace: TraceMode,
    features: KernelFeatures,
) -> Result<(), PageFaultError> {
    let welcome = if features.write_protect_unpopulated { trace.optional_features() } else { 0 };
    uffd.negotiate_api(trace.required_features() | welcome).map(drop).map_err(|source| match source
    {
        Errno::INVAL => {
            let known = probe_kernel().map_or(0, |known| known.features);
            PageFaultError::Features { missing: missing_names(trace.required_features(), known) }
        }
        source => PageFaultError::Unavailable { source },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_features_of_a_descriptor_are_read() {
        for trace in TraceMode::ALL {
            assert_eq!(
                TraceMode::of_features(trace.required_features() | INITIALIZED),
                Some(trace)
            );
            let all = trace.required_features() | trace.optional_features();
            assert_eq!(TraceMode::of_features(all | INITIALIZED), Some(trace));
        }
        assert_eq!(TraceMode::of_features(0), None);
        assert_eq!(TraceMode::of_features(INITIALIZED | flag::FEATURE_WP), None);
    }

    #[test]
    fn a_missing_feature_is_named() {
        let known = TraceMode::Save.required_features() & !flag::FEATURE_MINOR_SHMEM;
        assert_eq!(
            missing_names(TraceMode::Save.required_features(), known),
            ["UFFD_FEATURE_MINOR_SHMEM"]
        );
    }
}
