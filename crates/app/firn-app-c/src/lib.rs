//! libfirnapp: [`firn_app`] for C. The header `include/firnapp.h` documents every function; this
//! file only translates.
//!
//! # Unsafe code
//!
//! Pointers come from C: every function here that has a pointer argument is unsafe, and its
//! contract is the header's. Null pointers and strings that are not UTF-8 are refused. A panic does
//! not cross into C: it becomes `FIRN_APP_EINTERNAL`.

mod options;
mod standby;
mod status;

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::{NonNull, null};

use firn_app::{Area, AreaId, Error, Session};

pub use options::{FirnAppOptions, FirnAppTarget};
pub use standby::{
    FirnAppStandby, FirnAppStandbyOptions, firn_app_standby_address, firn_app_standby_start,
    firn_app_standby_stop, firn_app_standby_take_over,
};
pub use status::{FirnAppTargetStatus, firn_app_status};

use options::{open_session, read_struct};

const EINVAL: i64 = -1;
const ESTATE: i64 = -2;
const ETRACKER: i64 = -3;
const EBACKUP: i64 = -4;
const ESYSTEM: i64 = -5;
const EINTERNAL: i64 = -6;
const EFORKED: i64 = -7;

/// A session, and the areas that it allocated.
#[derive(Debug)]
pub struct FirnApp {
    session: Session,
    areas: Vec<Area>,
    tracker: CString,
    /// The strings of the last status.
    texts: Vec<CString>,
}

/// `firn_app_change`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct FirnAppChange {
    area: u32,
    offset: usize,
    length: usize,
}

thread_local! {
    static LAST_ERROR: RefCell<CString> = RefCell::default();
}

/// An error: its number for C, and its message.
struct FirnAppFailure(i64, String);

impl FirnAppFailure {
    fn invalid_argument(what: &str) -> Self {
        Self(EINVAL, what.to_owned())
    }
}

impl From<Error> for FirnAppFailure {
    fn from(error: Error) -> Self {
        let number = match error {
            Error::State { .. } => ESTATE,
            Error::Unavailable { .. } | Error::Foreign { .. } | Error::HandlerReplaced { .. } => {
                ETRACKER
            }
            Error::Backup(_) => EBACKUP,
            Error::System { .. } => ESYSTEM,
            Error::Forked { .. } => EFORKED,
            _ => EINVAL,
        };
        Self(number, describe_error(&error))
    }
}

/// The message of an error and of all its causes.
fn describe_error(error: &dyn std::error::Error) -> String {
    let mut words = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        words = format!("{words}: {error}");
        cause = error.source();
    }
    words
}

/// Runs `work` for C: stores the message of an error, and returns a result or the number of the
/// error.
fn run_for_c(work: impl FnOnce() -> Result<i64, FirnAppFailure>) -> i64 {
    let result = catch_unwind(AssertUnwindSafe(work));
    let FirnAppFailure(number, words) = match result {
        Ok(Ok(number)) => return number,
        Ok(Err(failure)) => failure,
        Err(_) => FirnAppFailure(EINTERNAL, "a defect of the library".to_owned()),
    };
    let words = CString::new(words.replace('\0', " ")).unwrap_or_default();
    LAST_ERROR.with(|last| *last.borrow_mut() = words);
    number
}

fn clamp_to_int(number: i64) -> c_int {
    c_int::try_from(number).unwrap_or(c_int::MAX)
}

/// A string from C; `None` for null.
///
/// # Safety
///
/// Null, or a string that ends with a zero and lives as long as `'a`.
unsafe fn read_string<'a>(pointer: *const c_char) -> Result<Option<&'a str>, FirnAppFailure> {
    if pointer.is_null() {
        return Ok(None);
    }
    // SAFETY: not null, and as the caller promises.
    let text = unsafe { CStr::from_ptr(pointer) };
    text.to_str().map(Some).map_err(|_| FirnAppFailure::invalid_argument("a string is not UTF-8"))
}

/// # Safety
///
/// Null, or a session that `firn_app_open` returned, and that no other code closes or uses at the
/// moment.
unsafe fn session_from_pointer<'a>(
    pointer: *mut FirnApp,
) -> Result<&'a mut FirnApp, FirnAppFailure> {
    // SAFETY: as the caller promises.
    unsafe { pointer.as_mut() }.ok_or_else(|| FirnAppFailure::invalid_argument("no session"))
}

/// See the header.
///
/// # Safety
///
/// `given` is null or valid, its strings too; `to` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn firn_app_open(
    given: *const FirnAppOptions,
    to: *mut *mut FirnApp,
) -> c_int {
    clamp_to_int(run_for_c(|| {
        // SAFETY: the caller's promise.
        let given: FirnAppOptions = unsafe { read_struct(given, "firn_app_options") }?;
        // SAFETY: the caller's promise.
        let to = unsafe { to.as_mut() }.ok_or_else(|| {
            FirnAppFailure::invalid_argument("the pointer for the session is null")
        })?;
        // SAFETY: the caller's promise.
        let session = unsafe { open_session(&given) }?;
        let tracker = CString::new(session.tracker_kind().name()).unwrap_or_default();
        *to = Box::into_raw(Box::new(FirnApp {
            session,
            areas: Vec::new(),
            tracker,
            texts: Vec::new(),
        }));
        Ok(0)
    }))
}

/// See the header.
///
/// # Safety
///
/// `app` is a session that no other code uses at the moment, `name` a string; `start` is null or
/// can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn firn_app_allocate(
    app: *mut FirnApp,
    name: *const c_char,
    length: usize,
    start: *mut *mut c_void,
) -> c_int {
    clamp_to_int(run_for_c(|| {
        // SAFETY: the caller's promise, here and below.
        let app = unsafe { session_from_pointer(app) }?;
        // SAFETY: as above.
        let name = unsafe { read_string(name) }?
            .ok_or_else(|| FirnAppFailure::invalid_argument("no name"))?;
        // SAFETY: as above.
        let start = unsafe { start.as_mut() }
            .ok_or_else(|| FirnAppFailure::invalid_argument("the pointer for the start is null"))?;
        let area = app.session.allocate(name, length)?;
        *start = area.as_ptr().cast();
        let number = i64::from(area.id().index());
        app.areas.push(area);
        Ok(number)
    }))
}

/// See the header.
///
/// # Safety
///
/// `app` is a session that no other code uses at the moment, `name` a string; the memory is as
/// `Session::register` needs it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn firn_app_register(
    app: *mut FirnApp,
    name: *const c_char,
    start: *mut c_void,
    length: usize,
) -> c_int {
    clamp_to_int(run_for_c(|| {
        // SAFETY: the caller's promise, here and below.
        let app = unsafe { session_from_pointer(app) }?;
        // SAFETY: as above.
        let name = unsafe { read_string(name) }?
            .ok_or_else(|| FirnAppFailure::invalid_argument("no name"))?;
        let start = NonNull::new(start.cast())
            .ok_or_else(|| FirnAppFailure::invalid_argument("no memory"))?;
        // SAFETY: as above.
        let area = unsafe { app.session.register(name, start, length) }?;
        Ok(i64::from(area.index()))
    }))
}

/// See the header.
///
/// # Safety
///
/// `app` is a session that no other code uses at the moment, and no thread uses an area that the
/// library allocated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn firn_app_forget_area(app: *mut FirnApp, area: c_int) -> c_int {
    clamp_to_int(run_for_c(|| {
        // SAFETY: the caller's promise.
        let app = unsafe { session_from_pointer(app) }?;
        let number = u32::try_from(area).ok();
        let find = |(id, _): (AreaId, &str)| (Some(id.index()) == number).then_some(id);
        let id = app.session.areas().find_map(find).ok_or_else(|| {
            FirnAppFailure::invalid_argument(&format!("the session has no area {area}"))
        })?;
        app.session.forget_area(id)?;
        app.areas.retain(|area| area.id() != id);
        Ok(0)
    }))
}

/// See the header.
///
/// # Safety
///
/// `app` is a session that no other code uses at the moment.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn firn_app_recover(app: *mut FirnApp) -> i64 {
    // SAFETY: the caller's promise.
    run_for_c(|| Ok(unsafe { session_from_pointer(app) }?.session.recover()? as i64))
}

/// See the header.
///
/// # Safety
///
/// `app` is a session that no other code uses at the moment.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn firn_app_begin(app: *mut FirnApp) -> c_int {
    clamp_to_int(run_for_c(|| {
        // SAFETY: the caller's promise.
        unsafe { session_from_pointer(app) }?.session.begin()?.detach();
        Ok(0)
    }))
}

/// See the header.
///
/// # Safety
///
/// `app` is a session that no other code uses at the moment, and no thread writes its areas.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn firn_app_commit(app: *mut FirnApp) -> i64 {
    run_for_c(|| {
        // SAFETY: the caller's promise.
        let app = unsafe { session_from_pointer(app) }?;
        Ok(app.session.open_transaction()?.commit()? as i64)
    })
}

/// See the header.
///
/// # Safety
///
/// `app` is a session that no other code uses at the moment, and no thread uses its areas.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn firn_app_abort(app: *mut FirnApp) -> c_int {
    clamp_to_int(run_for_c(|| {
        // SAFETY: the caller's promise.
        unsafe { session_from_pointer(app) }?.session.open_transaction()?.abort()?;
        Ok(0)
    }))
}

/// See the header.
///
/// # Safety
///
/// `app` is a session that no other code changes at the moment; `changes` has room for `count`, or
/// `count` is 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn firn_app_changes(
    app: *mut FirnApp,
    changes: *mut FirnAppChange,
    count: usize,
) -> i64 {
    run_for_c(|| {
        // SAFETY: the caller's promise.
        let session = &unsafe { session_from_pointer(app) }?.session;
        if changes.is_null() && count > 0 {
            return Err(FirnAppFailure::invalid_argument("the pointer for the changes is null"));
        }
        for (at, change) in session.changes().iter().take(count).enumerate() {
            let (offset, length) = (change.bytes.start, change.bytes.len());
            let area = change.area.index();
            // SAFETY: `at` is below `count`, for which there is room.
            unsafe { changes.add(at).write(FirnAppChange { area, offset, length }) };
        }
        Ok(session.changes().len() as i64)
    })
}

/// See the header.
///
/// # Safety
///
/// `app` is a session that no other code uses at the moment.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn firn_app_flush(app: *mut FirnApp) -> c_int {
    clamp_to_int(run_for_c(|| {
        // SAFETY: the caller's promise.
        unsafe { session_from_pointer(app) }?.session.flush_backups()?;
        Ok(0)
    }))
}

/// See the header.
///
/// # Safety
///
/// `app` is null or a session that no other code changes at the moment.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn firn_app_acknowledged(app: *const FirnApp) -> u64 {
    // SAFETY: the caller's promise.
    unsafe { app.as_ref() }.map_or(0, |app| app.session.acknowledged_sequence())
}

/// See the header.
///
/// # Safety
///
/// `app` is null or a session.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn firn_app_tracker(app: *const FirnApp) -> *const c_char {
    // SAFETY: the caller's promise.
    unsafe { app.as_ref() }.map_or(null(), |app| app.tracker.as_ptr())
}

/// See the header.
///
/// # Safety
///
/// `app` is null or a session that is not used any more, and no thread uses its areas.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn firn_app_close(app: *mut FirnApp) {
    if !app.is_null() {
        // SAFETY: `firn_app_open` made it with `Box::into_raw`, and the caller passes it here once.
        let app = unsafe { Box::from_raw(app) };
        run_for_c(|| {
            let mut app = app;
            // A transaction may be open. An abort that fails leaves nothing else to do.
            if let Ok(transaction) = app.session.open_transaction() {
                drop(transaction);
            }
            Ok(0)
        });
    }
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn firn_app_error() -> *const c_char {
    LAST_ERROR.with(|last| last.borrow().as_ptr())
}
