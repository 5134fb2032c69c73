//! Guest images: what `guests/build` makes.

use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};

use thiserror::Error;

/// Environment variable that names another `guests/build`.
pub const VARIABLE: &str = "FIRN_GUESTS_BUILD";

/// A guest image could not be had.
#[derive(Debug, Error)]
pub enum ImageError {
    /// The script that builds guests is not where it should be.
    #[error("{} is not there; set {VARIABLE} to the path of guests/build", .0.display())]
    NoScript(PathBuf),
    /// The script could not be started.
    #[error("cannot start {}", .0.display())]
    Start(PathBuf, #[source] io::Error),
    /// The script failed; it has said why on standard error.
    #[error("guests/build {guest} failed ({status})")]
    Build {
        /// Which guest.
        guest: String,
        /// How the script ended.
        status: String,
    },
    /// A file of the image is missing.
    #[error("the {guest} guest in {} has no {file}", directory.display())]
    Incomplete {
        /// Which guest.
        guest: String,
        /// Where it is.
        directory: PathBuf,
        /// What is missing.
        file: &'static str,
    },
    /// `qemu-img` could not make an overlay.
    #[error("qemu-img cannot make an overlay at {}: {reason}", at.display())]
    Overlay {
        /// Where it should have been.
        at: PathBuf,
        /// What it said.
        reason: String,
    },
}

/// The guests that were asked for.
static KNOWN: Mutex<Vec<GuestImage>> = Mutex::new(Vec::new());

/// A built guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GuestImage {
    /// Name of the guest: `small` or `full`.
    pub name: String,
    /// The kernel.
    pub kernel: PathBuf,
    /// The initramfs.
    pub initrd: PathBuf,
    /// The disk, of guests that have one: a qcow2 file that must not be written.
    pub disk: Option<PathBuf>,
}

impl GuestImage {
    /// The small guest: busybox, Redis, Firn's guest programs. Built if it is not cached: seconds.
    pub fn small() -> Result<Self, ImageError> {
        Self::named("small")
    }

    /// The full guest: PostgreSQL, nginx, a JVM, compilers. Built if it is not cached: minutes.
    pub fn full() -> Result<Self, ImageError> {
        Self::named("full")
    }

    /// The guest of that name. The script is asked once per process.
    pub fn named(guest: &str) -> Result<Self, ImageError> {
        let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(image) = known.iter().find(|image| image.name == guest) {
            return Ok(image.clone());
        }
        let image = Self::in_directory(guest, &build(guest)?)?;
        known.push(image.clone());
        Ok(image)
    }

    /// Those that this process has asked for.
    pub fn known() -> Vec<Self> {
        KNOWN.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn in_directory(guest: &str, directory: &Path) -> Result<Self, ImageError> {
        let file = |file: &'static str| {
            let path = directory.join(file);
            let missing = || ImageError::Incomplete {
                guest: guest.to_owned(),
                directory: directory.to_owned(),
                file,
            };
            if path.exists() { Ok(path) } else { Err(missing()) }
        };
        let (kernel, initrd) = (file("kernel")?, file("initrd")?);
        Ok(Self { name: guest.to_owned(), kernel, initrd, disk: file("disk.qcow2").ok() })
    }

    /// A disk of one's own, at `at`, on top of the guest's: empty at first, it takes what the guest writes.
    pub fn overlay(&self, at: &Path) -> Result<PathBuf, ImageError> {
        let problem = |reason: String| ImageError::Overlay { at: at.to_owned(), reason };
        let disk = self.disk.as_ref().ok_or_else(|| problem("the guest has no disk".to_owned()))?;
        let made = Command::new("qemu-img")
            .args(["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b"])
            .args([disk.as_path(), at])
            .output()
            .map_err(|error| problem(error.to_string()))?;
        if made.status.success() {
            return Ok(at.to_owned());
        }
        Err(problem(String::from_utf8_lossy(&made.stderr).trim().to_owned()))
    }
}

fn build(guest: &str) -> Result<PathBuf, ImageError> {
    let script = script();
    if !script.exists() {
        return Err(ImageError::NoScript(script));
    }
    let output = Command::new(&script)
        .arg(guest)
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .map_err(|error| ImageError::Start(script, error))?;
    if !output.status.success() {
        let status = output.status.to_string();
        return Err(ImageError::Build { guest: guest.to_owned(), status });
    }
    Ok(PathBuf::from(String::from_utf8_lossy(&output.stdout).trim()))
}

/// The script of the source tree this was compiled from, unless the environment names another.
fn script() -> PathBuf {
    std::env::var_os(VARIABLE).map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../guests/build"),
        PathBuf::from,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_incomplete_image_says_what_it_lacks() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("kernel"), "").unwrap();
        let error = GuestImage::in_directory("small", directory.path()).unwrap_err();
        assert!(error.to_string().ends_with("has no initrd"), "{error}");
        std::fs::write(directory.path().join("initrd"), "").unwrap();
        let image = GuestImage::in_directory("small", directory.path()).unwrap();
        assert_eq!(image.disk, None);
        assert!(image.overlay(Path::new("x")).is_err());
    }
}
