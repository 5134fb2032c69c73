//! The process of the cache's server, and requests to it that no reader makes.
//!
//! ```text
//!   client: connect fails --> firn-store serve DIR            waits until the server listens, then ends
//!                               '--> firn-store serve --foreground DIR       in a session of its own
//!                                      lock DIR/serve.lock --> DIR/serve.sock --> "ready"
//! ```
//!
//! If another server has the lock, this one ends, and the client connects to the other.

use std::fs::{File, OpenOptions};
use std::io::{self, BufRead as _, BufReader, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use firn_cache::{
    CacheConnection, CacheDir, CacheReply, CacheReport, CacheRequest, StoreLocation,
    store_environment,
};
use firn_supervisor::{Failure, FailureContext as _, FailureKind};
use rustix::fs::{FlockOperation, flock};
use tokio::net::UnixListener;

use super::find::CachedImage;
use super::prefetch::PrefetchQueue;
use super::registry::ObjectRegistry;
use super::room::{CacheRoom, clean_up};
use super::server::CacheServer;

/// How often what was written gets to the disk.
const SYNC_INTERVAL: Duration = Duration::from_secs(1);

/// The server ends after this time without a connection.
const IDLE_MAX: Duration = Duration::from_secs(60);

/// How long a server waits for the end of another one that does not listen: it may be syncing to a busy disk.
const LOCK_WAIT_MAX: Duration = Duration::from_secs(60);

/// What the server writes when it listens.
const READY: &str = "ready";

/// A longer log is begun anew.
const LOG_BYTES_MAX: u64 = 1 << 20;

/// The bounds of the cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CacheLimits {
    /// The maximum number of bytes that it keeps.
    pub bytes_max: u64,
}

impl CacheLimits {
    /// The environment variable with the maximum size: a number of bytes, or one with K, M, G or T.
    pub const VARIABLE: &str = "FIRN_STORE_CACHE_SIZE";

    const BYTES_MAX: u64 = 32 << 30;

    /// The limits that the environment names, or the usual ones.
    ///
    /// # Errors
    /// If the size is none.
    pub fn from_env() -> Result<Self, Failure> {
        let Some(text) = std::env::var_os(Self::VARIABLE).filter(|it| !it.is_empty()) else {
            return Ok(Self { bytes_max: Self::BYTES_MAX });
        };
        let bytes_max = text.to_str().and_then(parse_size).ok_or_else(|| {
            let text = format!("{} is no size: {}", Self::VARIABLE, text.to_string_lossy());
            Failure::new(FailureKind::Usage, text).with_hint("write it as 500M or 32G")
        })?;
        Ok(Self { bytes_max })
    }
}

/// A number of bytes, perhaps with a unit: powers of 1024.
fn parse_size(text: &str) -> Option<u64> {
    let digits = text.trim_end_matches(|it: char| it.is_ascii_alphabetic());
    let shift = match text[digits.len()..].to_ascii_uppercase().as_str() {
        "" => 0,
        "K" => 10,
        "M" => 20,
        "G" => 30,
        "T" => 40,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(1 << shift)
}

/// Starts a server, and waits until it or another one listens.
///
/// # Errors
/// If it does not start.
pub fn start_server(cache: &CacheDir) -> Result<(), Failure> {
    let starting = || format!("starting the server of the cache {}", cache.path().display());
    CacheLimits::from_env()?;
    cache.create().while_doing(starting())?;
    let log = open_log(cache).while_doing(starting())?;
    let mut command = Command::new("/proc/self/exe");
    command.args(["serve", "--foreground", "--"]).arg(cache.path()).current_dir(cache.path());
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log);
    let mut child = command.spawn().while_doing(starting())?;
    let mut line = String::new();
    if let Some(out) = child.stdout.take() {
        let _ = BufReader::new(out).read_line(&mut line);
    }
    match line.trim_end() {
        READY => Ok(()),
        // Another server has the lock.
        "" if child.wait().is_ok_and(|status| status.success()) => Ok(()),
        reason => {
            let text = if reason.is_empty() { "it has ended" } else { reason };
            let failure = Failure::new(FailureKind::Host, text).while_doing(starting());
            Err(failure.with_hint(format!("{} has its log", cache.log_file().display())))
        }
    }
}

fn open_log(cache: &CacheDir) -> io::Result<File> {
    let log = OpenOptions::new().append(true).create(true).mode(0o600).open(cache.log_file())?;
    if log.metadata()?.len() > LOG_BYTES_MAX {
        log.set_len(0)?;
    }
    Ok(log)
}

/// Is the server of a cache, in whose directory it works. Returns when nothing was requested for a
/// while, or another server has the cache.
///
/// # Errors
/// If it can't serve.
pub fn run_server(cache: &CacheDir, limits: CacheLimits) -> Result<(), Failure> {
    let serving = || format!("serving the cache {}", cache.path().display());
    // A signal to the group of the command that needed it does not end it.
    let _ = rustix::process::setsid();
    let mut options = OpenOptions::new();
    let options = options.write(true).create(true).truncate(false).mode(0o600);
    let lock = options.open(cache.lock_file()).while_doing(serving())?;
    if !take_lock(cache, &lock) {
        return Ok(());
    }
    clean_up(cache).while_doing(serving())?;
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.while_doing(serving())?.block_on(serve(cache, limits)).while_doing(serving())
}

/// Locks the cache. False if another server has it. One that was killed may have the lock for a moment
/// longer than its socket.
fn take_lock(cache: &CacheDir, lock: &File) -> bool {
    let begun = Instant::now();
    loop {
        if flock(lock, FlockOperation::NonBlockingLockExclusive).is_ok() {
            return true;
        }
        if CacheConnection::to_running(cache).is_ok() || begun.elapsed() > LOCK_WAIT_MAX {
            return false;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

async fn serve(cache: &CacheDir, limits: CacheLimits) -> io::Result<()> {
    let room = Arc::new(CacheRoom::new(cache.clone(), limits.bytes_max));
    let registry = ObjectRegistry::new(cache.clone(), room);
    let (prefetch, connections) = (Arc::new(PrefetchQueue::default()), Default::default());
    let server = Arc::new(CacheServer { registry, prefetch, connections });
    server.prefetch.start_workers();
    let _ = std::fs::remove_file(cache.socket());
    // By its name in this directory: a path to a socket must be short.
    let listener = UnixListener::bind("serve.sock")?;
    announce_ready();
    let mut ticks = tokio::time::interval(SYNC_INTERVAL);
    let mut used = Instant::now();
    while used.elapsed() < IDLE_MAX {
        tokio::select! {
            accepted = listener.accept() => {
                tokio::spawn(Arc::clone(&server).serve(accepted?.0));
                used = Instant::now();
            }
            _ = ticks.tick() => {
                if server.connections.load(Ordering::Relaxed) > 0 {
                    used = Instant::now();
                }
                let server = Arc::clone(&server);
                let _ = tokio::task::spawn_blocking(move || server.registry.sync()).await;
            }
        }
    }
    let _ = std::fs::remove_file(cache.socket());
    server.registry.sync();
    Ok(())
}

fn announce_ready() {
    let mut out = io::stdout().lock();
    let _ = writeln!(out, "{READY}").and_then(|()| out.flush());
}

/// Finds an image in a store, and has files of the cache made for it.
///
/// # Errors
/// If there is none, or the store can't be used.
pub fn find_image(cache: &CacheDir, at: &StoreLocation) -> Result<CachedImage, Failure> {
    let using = || format!("using the cache {}", cache.path().display());
    let (location, environment) = (at.to_string(), store_environment());
    let request = CacheRequest::Find { location, environment };
    let find = || CacheConnection::open(cache, true)?.request(&request);
    // A server that was killed may accept a connection for a moment longer.
    let reply = find().or_else(|_| {
        std::thread::sleep(Duration::from_millis(50));
        find()
    });
    match reply.while_doing(using())? {
        CacheReply::Found { image, objects } => Ok(CachedImage { path: image, objects }),
        CacheReply::Failed { message, failure } => {
            let failure = serde_json::from_value(failure);
            Err(failure.unwrap_or_else(|_| Failure::new(FailureKind::Other, message)))
        }
        _ => Err(Failure::new(FailureKind::Other, "an unexpected reply").while_doing(using())),
    }
}

/// Has the server forget all bytes of an image: they are wrong.
///
/// # Errors
/// If the server can't be reached.
pub fn forget_image(cache: &CacheDir, image: &CachedImage) -> Result<(), Failure> {
    let using = || format!("using the cache {}", cache.path().display());
    let mut connection = CacheConnection::open(cache, false).while_doing(using())?;
    for object in &image.objects {
        let (object, environment) = (object.clone(), store_environment());
        let requests = [CacheRequest::Open { object, environment }, CacheRequest::Forget];
        for request in requests {
            if let CacheReply::Failed { message, .. } =
                connection.request(&request).while_doing(using())?
            {
                return Err(Failure::new(FailureKind::Other, message).while_doing(using()));
            }
        }
    }
    Ok(())
}

/// The counts of the server of a cache. `None` if it does not run.
///
/// # Errors
/// If its reply is wrong.
pub fn query_report(cache: &CacheDir) -> Result<Option<CacheReport>, Failure> {
    let Ok(mut connection) = CacheConnection::to_running(cache) else { return Ok(None) };
    match connection.request(&CacheRequest::Report).while_doing("reading its counts")? {
        CacheReply::Report(report) => Ok(Some(report)),
        _ => Err(Failure::new(FailureKind::Other, "the server of the cache sent another reply")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_units() {
        assert_eq!(parse_size("32G"), Some(32 << 30));
        assert_eq!(parse_size("7"), Some(7));
        assert_eq!(parse_size("5m"), Some(5 << 20));
        for text in ["", "G", "1.5G", "-1", "1GB", "99999999T"] {
            assert_eq!(parse_size(text), None, "{text}");
        }
    }
}
