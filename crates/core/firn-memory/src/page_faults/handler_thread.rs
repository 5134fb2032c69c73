//! Threads that answer page faults.

/// Runs the work of a thread that answers page faults; if it panics, ends the process at once. vCPUs
/// must never wait for a thread that is gone: the process that restarts this one takes the
/// descriptor back and resumes them.
pub fn abort_on_panic<T>(run: impl FnOnce() -> T) -> T {
    match std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)) {
        Ok(result) => result,
        Err(_) => std::process::abort(),
    }
}
