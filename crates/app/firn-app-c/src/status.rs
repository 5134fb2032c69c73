//! Status of a session's targets, for C.

use std::ffi::{CString, c_char, c_int};
use std::ptr::null;
use std::time::UNIX_EPOCH;

use firn_app::{BackupStatus, TargetCondition};

use crate::{FirnApp, FirnAppFailure, clamp_to_int, run_for_c, session_from_pointer};

/// `firn_app_target_status`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct FirnAppTargetStatus {
    target: *const c_char,
    condition: c_int,
    since: i64,
    acknowledged: u64,
    commits_behind: u64,
    bytes_behind: u64,
    state_transfers: u64,
    last_error: *const c_char,
}

/// See the header.
///
/// # Safety
///
/// `app` is a session that no other code uses at the moment; `targets` has room for `count`, or
/// `count` is 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn firn_app_status(
    app: *mut FirnApp,
    targets: *mut FirnAppTargetStatus,
    size: usize,
    count: usize,
) -> c_int {
    clamp_to_int(run_for_c(|| {
        // SAFETY: the caller's promise.
        let app = unsafe { session_from_pointer(app) }?;
        if targets.is_null() && count > 0 {
            return Err(FirnAppFailure::invalid_argument("the pointer for the status is null"));
        }
        if size != size_of::<FirnAppTargetStatus>() {
            let why = "size: give sizeof(firn_app_target_status)";
            return Err(FirnAppFailure::invalid_argument(why));
        }
        let status = app.session.backup_status()?;
        app.texts.clear();
        for (at, target) in status.iter().take(count).enumerate() {
            let converted = convert_status(target, &mut app.texts);
            // SAFETY: `at` is below `count`, for which there is room.
            unsafe { targets.add(at).write(converted) };
        }
        Ok(status.len() as i64)
    }))
}

fn convert_status(status: &BackupStatus, texts: &mut Vec<CString>) -> FirnAppTargetStatus {
    let mut keep = |text: &str| {
        // The bytes of a CString stay where they are when the vector grows.
        texts.push(CString::new(text.replace('\0', " ")).unwrap_or_default());
        texts.last().map_or(null(), |text| text.as_ptr())
    };
    let since = status.since.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    FirnAppTargetStatus {
        target: keep(&status.target),
        condition: match status.condition {
            TargetCondition::Connected => 0,
            TargetCondition::CatchingUp => 1,
            TargetCondition::Lost => 2,
            TargetCondition::Superseded => 3,
        },
        since: since as i64,
        acknowledged: status.acknowledged,
        commits_behind: status.commits_behind,
        bytes_behind: status.bytes_behind,
        state_transfers: status.state_transfers,
        last_error: status.last_error.as_deref().map_or(null(), keep),
    }
}
