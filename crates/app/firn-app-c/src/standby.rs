//! A warm standby, for C.

use std::ffi::{CString, c_char, c_int};
use std::ptr::null;

use firn_app::{BackupServerOptions, WarmStandby};

use crate::options::{SizePrefixedStruct, fsync_policy, read_identity, read_struct};
use crate::{FirnApp, FirnAppFailure, clamp_to_int, read_string, run_for_c, session_from_pointer};

/// `firn_app_standby`.
#[derive(Debug)]
pub struct FirnAppStandby {
    standby: WarmStandby,
    address: CString,
}

/// `firn_app_standby_options`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct FirnAppStandbyOptions {
    struct_size: usize,
    listen: *const c_char,
    directory: *const c_char,
    certificate: *const c_char,
    key: *const c_char,
    authority: *const c_char,
    sessions: *const c_char,
    fsync_ms: c_int,
}

// SAFETY: as required: numbers and pointers.
unsafe impl SizePrefixedStruct for FirnAppStandbyOptions {}

/// # Safety
///
/// The strings of the options are as [`read_string`] needs them.
unsafe fn start_standby(given: &FirnAppStandbyOptions) -> Result<FirnAppStandby, FirnAppFailure> {
    // SAFETY: the caller's promise, here and below.
    let text = |pointer| unsafe { read_string(pointer) };
    let invalid = |what| move || FirnAppFailure::invalid_argument(what);
    // SAFETY: as above.
    let identity = unsafe { read_identity([given.certificate, given.key, given.authority]) }?;
    let listen = text(given.listen)?.ok_or_else(invalid("no listen"))?;
    let directory = text(given.directory)?.ok_or_else(invalid("no directory"))?;
    let mut options = BackupServerOptions::new(listen, identity, directory);
    if let Some(table) = text(given.sessions)? {
        options = options.sessions(table);
    }
    let standby = WarmStandby::start(options.fsync(fsync_policy(given.fsync_ms)))?;
    let address = CString::new(standby.address().to_string()).unwrap_or_default();
    Ok(FirnAppStandby { standby, address })
}

/// See the header.
///
/// # Safety
///
/// `given` is null or valid, its strings too; `to` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn firn_app_standby_start(
    given: *const FirnAppStandbyOptions,
    to: *mut *mut FirnAppStandby,
) -> c_int {
    clamp_to_int(run_for_c(|| {
        // SAFETY: the caller's promise, here and below.
        let given = unsafe { read_struct(given, "firn_app_standby_options") }?;
        // SAFETY: as above.
        let to = unsafe { to.as_mut() }.ok_or_else(|| {
            FirnAppFailure::invalid_argument("the pointer for the standby is null")
        })?;
        // SAFETY: as above.
        *to = Box::into_raw(Box::new(unsafe { start_standby(&given) }?));
        Ok(0)
    }))
}

/// See the header.
///
/// # Safety
///
/// `standby` is null or a standby.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn firn_app_standby_address(standby: *const FirnAppStandby) -> *const c_char {
    // SAFETY: the caller's promise.
    unsafe { standby.as_ref() }.map_or(null(), |standby| standby.address.as_ptr())
}

/// See the header.
///
/// # Safety
///
/// `standby` is null or a standby that is not used any more; `app` is a session that no other code
/// uses at the moment, and no thread uses its areas.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn firn_app_standby_take_over(
    standby: *mut FirnAppStandby,
    app: *mut FirnApp,
) -> i64 {
    run_for_c(|| {
        if standby.is_null() {
            return Err(FirnAppFailure::invalid_argument("no standby"));
        }
        // SAFETY: `firn_app_standby_start` made it, and the caller passes it here once.
        let standby = unsafe { Box::from_raw(standby) };
        // SAFETY: the caller's promise.
        let app = unsafe { session_from_pointer(app) }?;
        Ok(standby.standby.take_over(&mut app.session)? as i64)
    })
}

/// See the header.
///
/// # Safety
///
/// `standby` is null or a standby that is not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn firn_app_standby_stop(standby: *mut FirnAppStandby) {
    if !standby.is_null() {
        // SAFETY: `firn_app_standby_start` made it, and the caller passes it here once.
        let standby = unsafe { Box::from_raw(standby) };
        run_for_c(|| {
            drop(standby);
            Ok(0)
        });
    }
}
