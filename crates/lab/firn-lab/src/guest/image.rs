//! Guest images, which `guests/build` creates.

use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};

use thiserror::Error;

/// Environment variable that names another `guests/build`.
pub const VARIABLE: &str = "FIRN_GUESTS_BUILD";

/// A guest image is not available.
#[derive(Debug, Error)]
pub enum ImageError {
    /// The script that builds guests does not exist at its path.
    #[error("{} does not exist; set {VARIABLE} to the path of guests/build", .0.display())]
    NoScript(PathBuf),
    /// The script could not be started.
    #[error("cannot start {}", .0.display())]
    Start(PathBuf, #[source] io::Error),
    /// The script failed; it has printed the reason to standard error.
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
        /// Its directory.
        directory: PathBuf,
        /// The missing file.
        file: &'static str,
    },
    /// `qemu-img` could not create an overlay.
    #[error("qemu-img cannot create an overlay at {}: {reason}", at.display())]
    Overlay {
        /// Path of the overlay.
        at: PathBuf,
        /// The error of `qemu-img`.
        reason: String,
    },
}

/// The guests that this process has requested.
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
    /// The small guest: busybox, Redis, Firn's guest programs. If it is not cached, building it
    /// takes seconds.
    pub fn small() -> Result<Self, ImageError> {
        Self::find_guest("small")
    }

    /// The full guest: PostgreSQL, nginx, a JVM, compilers. If it is not cached, building it takes
    /// minutes.
    pub fn full() -> Result<Self, ImageError> {
        Self::find_guest("full")
    }

    /// The guest of that name. The script runs once per process and guest.
    pub fn find_guest(guest: &str) -> Result<Self, ImageError> {
        let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(image) = known.iter().find(|image| image.name == guest) {
            return Ok(image.clone());
        }
        let image = Self::in_directory(guest, &run_build_script(guest)?)?;
        known.push(image.clone());
        Ok(image)
    }

    /// The guests that this process has requested.
    pub fn requested_guests() -> Vec<Self> {
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

    /// Creates an overlay of the guest's disk at `at`: empty at first, it receives the guest's
    /// writes.
    pub fn create_overlay(&self, at: &Path) -> Result<PathBuf, ImageError> {
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

fn run_build_script(guest: &str) -> Result<PathBuf, ImageError> {
    let script = build_script_path();
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
fn build_script_path() -> PathBuf {
    std::env::var_os(VARIABLE).map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../guests/build"),
        PathBuf::from,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_incomplete_image_names_the_missing_files() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("kernel"), "").unwrap();
        let error = GuestImage::in_directory("small", directory.path()).unwrap_err();
        assert!(error.to_string().ends_with("has no initrd"), "{error}");
        std::fs::write(directory.path().join("initrd"), "").unwrap();
        let image = GuestImage::in_directory("small", directory.path()).unwrap();
        assert_eq!(image.disk, None);
        assert!(image.create_overlay(Path::new("x")).is_err());
    }
}
