//! Options that come from C.

use std::ffi::{c_char, c_int};
use std::mem::MaybeUninit;
use std::time::Duration;

use firn_app::{
    AcknowledgePolicy, BackupTarget, Compression, FsyncPolicy, HostError, HostTracker, Precision,
    RequiredTargets, Session, SessionOptions, TlsIdentity, TrackerKind,
};

use crate::{EINVAL, ETRACKER, FirnAppFailure, describe_error, read_string};

/// `firn_app_target`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct FirnAppTarget {
    file: *const c_char,
    remote: *const c_char,
    certificate: *const c_char,
    key: *const c_char,
    authority: *const c_char,
    lag_max: u64,
    fsync_ms: c_int,
    compress: c_int,
}

/// `firn_app_options`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct FirnAppOptions {
    struct_size: usize,
    name: *const c_char,
    tracker: *const c_char,
    file: *const c_char,
    remote: *const c_char,
    certificate: *const c_char,
    key: *const c_char,
    authority: *const c_char,
    lag_max: u64,
    fsync_ms: c_int,
    compress: c_int,
    /// Not 0: the state that a backup has is discarded.
    discard: c_int,
    host_key: *const c_char,
    targets: *const FirnAppTarget,
    target_count: usize,
    target_size: usize,
    require: *const c_char,
    timeout_ms: u64,
    no_backup: c_int,
    /// Not 0: a handler of SIGSEGV that the application installs later calls the one that it
    /// replaces.
    later_handler: c_int,
}

/// Structures of C whose first member is their size in bytes, by which versions differ.
///
/// # Safety
///
/// `repr(C)`, the first member is a `usize`, and zeros are a valid value.
pub(crate) unsafe trait SizePrefixedStruct: Copy {}

// SAFETY: as required: numbers and pointers.
unsafe impl SizePrefixedStruct for FirnAppOptions {}

/// Copies a structure of C. A larger one, of a later version, is accepted if its further members
/// are zero: then it requests nothing that this version does not know.
///
/// # Safety
///
/// Null, or the address of a structure of the size that its first member has.
pub(crate) unsafe fn read_struct<T: SizePrefixedStruct>(
    given: *const T,
    name: &str,
) -> Result<T, FirnAppFailure> {
    if given.is_null() {
        return Err(FirnAppFailure(EINVAL, format!("no {name}")));
    }
    // SAFETY: the first member, as the caller promises.
    let size = unsafe { given.cast::<usize>().read() };
    let known = size_of::<T>();
    if size < known || size > 1 << 16 {
        let text = format!("{name}: struct_size is {size}: set it to sizeof({name}), here {known}");
        return Err(FirnAppFailure(EINVAL, text));
    }
    // SAFETY: the bytes after the known members belong to the structure.
    let rest = unsafe { std::slice::from_raw_parts(given.cast::<u8>().add(known), size - known) };
    if rest.iter().any(|byte| *byte != 0) {
        let text = format!("{name} has members that this version of libfirnapp does not know");
        return Err(FirnAppFailure(EINVAL, text));
    }
    let mut copy = MaybeUninit::<T>::uninit();
    // SAFETY: both have the known size; the copy is initialized by it.
    unsafe {
        given.cast::<u8>().copy_to_nonoverlapping(copy.as_mut_ptr().cast(), known);
        Ok(copy.assume_init())
    }
}

/// The interval between two fsyncs, as options have it.
pub(crate) fn fsync_policy(fsync_ms: c_int) -> FsyncPolicy {
    match u64::try_from(fsync_ms) {
        Ok(0) => FsyncPolicy::EveryCommit,
        Ok(ms) => FsyncPolicy::Interval(Duration::from_millis(ms)),
        Err(_) => FsyncPolicy::Never,
    }
}

/// The files of an identity.
///
/// # Safety
///
/// The strings are as [`read_string`] needs them.
pub(crate) unsafe fn read_identity(
    [certificate, key, authority]: [*const c_char; 3],
) -> Result<TlsIdentity, FirnAppFailure> {
    let path = |pointer, what| {
        // SAFETY: the caller's promise.
        let text = unsafe { read_string(pointer) }?;
        text.map(Into::into).ok_or_else(|| FirnAppFailure::invalid_argument(what))
    };
    Ok(TlsIdentity {
        certificate: path(certificate, "no certificate")?,
        key: path(key, "no key")?,
        authority: path(authority, "no authority")?,
    })
}

impl FirnAppTarget {
    /// The targets that it names: a log, a backup process, or both.
    ///
    /// # Safety
    ///
    /// Its strings are as [`read_string`] needs them.
    unsafe fn targets(&self) -> Result<Vec<BackupTarget>, FirnAppFailure> {
        let mut targets = Vec::new();
        // SAFETY: the caller's promise, here and below.
        if let Some(path) = unsafe { read_string(self.file) }? {
            targets.push(BackupTarget::file(path));
        }
        // SAFETY: as above.
        if let Some(address) = unsafe { read_string(self.remote) }? {
            // SAFETY: as above.
            let identity = unsafe { read_identity([self.certificate, self.key, self.authority]) }?;
            targets.push(BackupTarget::remote(address, identity));
        }
        Ok(targets.into_iter().map(|target| self.set_policies(target)).collect())
    }

    fn set_policies(&self, target: BackupTarget) -> BackupTarget {
        let acknowledge = match self.lag_max {
            0 => AcknowledgePolicy::Sync,
            lag_max => AcknowledgePolicy::Async { lag_max },
        };
        let compression = if self.compress != 0 { Compression::Lz4 } else { Compression::None };
        target.acknowledge(acknowledge).fsync(fsync_policy(self.fsync_ms)).compression(compression)
    }
}

impl FirnAppOptions {
    /// The target that the options themselves name.
    fn own_target(&self) -> FirnAppTarget {
        FirnAppTarget {
            file: self.file,
            remote: self.remote,
            certificate: self.certificate,
            key: self.key,
            authority: self.authority,
            lag_max: self.lag_max,
            fsync_ms: self.fsync_ms,
            compress: self.compress,
        }
    }

    /// All targets.
    ///
    /// # Safety
    ///
    /// The strings are as [`read_string`] needs them, and `targets` has `target_count` elements.
    unsafe fn targets(&self) -> Result<Vec<BackupTarget>, FirnAppFailure> {
        let more: &[FirnAppTarget] = match (self.target_count, self.targets.is_null()) {
            (0, _) => &[],
            (_, true) => {
                return Err(FirnAppFailure::invalid_argument(
                    "targets is null, and target_count is not 0",
                ));
            }
            _ if self.target_size != size_of::<FirnAppTarget>() => {
                return Err(FirnAppFailure::invalid_argument(
                    "target_size: set it to sizeof(firn_app_target)",
                ));
            }
            // SAFETY: the caller's promise.
            (count, false) => unsafe { std::slice::from_raw_parts(self.targets, count) },
        };
        // SAFETY: the caller's promise, here and below.
        let mut targets = unsafe { self.own_target().targets() }?;
        for target in more {
            // SAFETY: as above.
            let named = unsafe { target.targets() }?;
            if named.len() != 1 {
                return Err(FirnAppFailure::invalid_argument(
                    "a target has file or remote, and not both",
                ));
            }
            targets.extend(named);
        }
        match (targets.is_empty(), self.no_backup != 0) {
            (true, false) => Err(FirnAppFailure::invalid_argument(
                "no target: set file, remote or targets; no_backup = 1 keeps nothing, on purpose",
            )),
            (false, true) => {
                Err(FirnAppFailure::invalid_argument("no_backup is set, and there is a target"))
            }
            _ => Ok(targets),
        }
    }
}

/// # Safety
///
/// The strings of the options are as [`read_string`] needs them.
unsafe fn session_options(given: &FirnAppOptions) -> Result<SessionOptions, FirnAppFailure> {
    // SAFETY: the caller's promise, here and below.
    let text = |pointer| unsafe { read_string(pointer) };
    let mut options = SessionOptions::new(
        text(given.name)?.ok_or_else(|| FirnAppFailure::invalid_argument("no name"))?,
    );
    if let Some(name) = text(given.tracker)?.filter(|name| !is_host_tracker(name)) {
        let kind = name
            .parse::<TrackerKind>()
            .map_err(|error| FirnAppFailure(EINVAL, error.to_string()))?;
        options = options.tracker(kind);
    }
    if let Some(require) = text(given.require)? {
        let require = require.parse::<RequiredTargets>();
        options =
            options.require(require.map_err(|error| FirnAppFailure(EINVAL, error.to_string()))?);
    }
    if given.timeout_ms > 0 {
        options = options.backup_timeout(Duration::from_millis(given.timeout_ms));
    }
    // SAFETY: as above.
    let targets = unsafe { given.targets() }?;
    let options = targets.into_iter().fold(options, SessionOptions::backup);
    Ok(options.discard(given.discard != 0).later_handler(given.later_handler != 0))
}

/// # Safety
///
/// The strings of the options are as [`read_string`] needs them.
pub(crate) unsafe fn open_session(given: &FirnAppOptions) -> Result<Session, FirnAppFailure> {
    // SAFETY: the caller's promise, here and below.
    let options = unsafe { session_options(given) }?;
    // SAFETY: as above.
    let text = |pointer| unsafe { read_string(pointer) };
    let Some(tracker) = text(given.tracker)?.filter(|name| is_host_tracker(name)) else {
        return Ok(Session::open(options)?);
    };
    let name = text(given.name)?.unwrap_or_default();
    let key = text(given.host_key)?.ok_or_else(|| {
        let needs = "needs host_key: the key of this name in the policy of firn run --calls";
        FirnAppFailure(EINVAL, format!("{tracker} {needs}"))
    })?;
    let records_stores = tracker == TrackerKind::Stores.name();
    let host = HostTracker::open(name, key).and_then(|host| match records_stores {
        true => host.recording_stores(Precision::Words),
        false => Ok(host),
    });
    let host = host.map_err(|error| {
        let number = if matches!(error, HostError::Key(_)) { EINVAL } else { ETRACKER };
        FirnAppFailure(number, describe_error(&error))
    })?;
    Ok(Session::open_with(options, Box::new(host))?)
}

/// Whether this tracker is Firn's, below the guest.
fn is_host_tracker(name: &str) -> bool {
    [TrackerKind::Host, TrackerKind::Stores].iter().any(|kind| kind.name() == name)
}
