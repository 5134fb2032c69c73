//! Cold files: evicts single files from the page cache.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use rustix::fs::{Advice, fadvise};

use super::profile::{ThrottleError, io_error_at};

/// How often eviction of just the files is tried, and the pause after each time. A process that ends
/// may have reads in flight at a throttled disk, which takes seconds.
const ATTEMPTS_MAX: u32 = 100;
const PAUSE: Duration = Duration::from_millis(50);

/// Evicts files from the page cache, so that the next read of them is disk I/O.
///
/// Tries to evict just these files first. Only where pages remain, it drops all clean caches of the
/// machine, which takes root and slows down every other process.
///
/// # Errors
/// If a file stays cached: an experiment on it would measure memory.
pub fn make_cold<'a>(files: impl IntoIterator<Item = &'a Path>) -> Result<(), ThrottleError> {
    for path in files {
        evict_patiently(path)?;
        if cached_pages(path)? > 0 {
            drop_all_caches();
            evict_patiently(path)?;
        }
        match cached_pages(path)? {
            0 => (),
            pages => return Err(ThrottleError::Cached { path: path.to_owned(), pages }),
        }
    }
    Ok(())
}

/// Evicts a file repeatedly, because another process may still use one of its pages for a moment.
fn evict_patiently(path: &Path) -> Result<(), ThrottleError> {
    for _ in 0..ATTEMPTS_MAX {
        evict_file(path)?;
        if cached_pages(path)? == 0 {
            break;
        }
        std::thread::sleep(PAUSE);
    }
    Ok(())
}

fn evict_file(path: &Path) -> Result<(), ThrottleError> {
    let file = File::open(path).map_err(io_error_at(path))?;
    file.sync_all().map_err(io_error_at(path))?;
    fadvise(&file, 0, None, Advice::DontNeed).map_err(|errno| io_error_at(path)(errno.into()))
}

fn drop_all_caches() {
    // Without root it fails, and the caller checks what remains.
    let _ = fs::write("/proc/sys/vm/drop_caches", "1");
}

/// Number of a file's pages in the page cache, by util-linux's `fincore`; 0 where that program is
/// missing.
fn cached_pages(path: &Path) -> Result<u64, ThrottleError> {
    let output =
        Command::new("fincore").args(["--noheadings", "--output", "PAGES"]).arg(path).output();
    match output {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(0),
        Err(error) => Err(io_error_at("fincore")(error)),
        Ok(output) => {
            let text = String::from_utf8_lossy(&output.stdout);
            let unreadable =
                || io_error_at(path)(io::Error::other("fincore prints no number of pages"));
            text.trim().parse().map_err(|_| unreadable())
        }
    }
}

/// Reads a file once, so that reads that are not measured (a kernel, a program) come from memory.
pub fn warm_file(path: &Path) -> Result<(), ThrottleError> {
    let mut file = File::open(path).map_err(io_error_at(path))?;
    let mut buffer = vec![0; 1 << 20];
    while file.read(&mut buffer).map_err(io_error_at(path))? > 0 {}
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_cold_after_it_was_warm() {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let path = dir.path().join("file");
        fs::write(&path, vec![1; 1 << 20]).unwrap();
        warm_file(&path).unwrap();
        make_cold([path.as_path()]).unwrap();
        assert_eq!(cached_pages(&path).unwrap(), 0);
    }

    #[test]
    fn a_missing_file_is_named() {
        let error = make_cold([Path::new("/nowhere/at/all")]).unwrap_err();
        assert!(error.to_string().contains("/nowhere/at/all"));
    }
}
