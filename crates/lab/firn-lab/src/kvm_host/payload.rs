//! Payload of a first-level guest: a tar with files, the libraries of its programs, and a script
//! `run`.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use super::error::KvmHostError;
use crate::guest::GuestImage;

/// Size of the disk that holds the tar, in bytes, the same in every run: a saved guest knows the
/// size of its disks.
pub(super) const DISK_BYTES: u64 = 1 << 30;

/// Replaces `guests/build` in the first-level guest: prints the directory of the second-level
/// guest.
const GUESTS_BUILD: &str = "#!/bin/sh\necho \"/tmp/work/$1\"\n";
/// Emulated XSAVE does not work in one level more, so the second-level guest has none.
const QEMU: &str = "#!/bin/sh\nexec qemu-system-x86_64 \"$@\" -cpu host,-xsave\n";

/// Files and a command.
#[derive(Clone, Debug, Default)]
pub struct GuestPayload {
    files: Vec<(String, PathBuf)>,
    programs: Vec<(String, PathBuf)>,
    script: String,
}

/// A packed payload.
#[derive(Debug)]
pub(super) struct PayloadTar {
    pub(super) file: PathBuf,
    pub(super) bytes: u64,
}

impl GuestPayload {
    /// A payload with this shell script, which runs in the directory that holds the payload's
    /// files.
    pub fn new(script: &str) -> Self {
        Self { script: script.to_owned(), ..Self::default() }
    }

    /// Adds a file or a directory.
    pub fn add_file(mut self, name: &str, path: impl Into<PathBuf>) -> Self {
        self.files.push((name.to_owned(), path.into()));
        self
    }

    /// Adds a program of this host, without its debug information, and the libraries it loads.
    pub fn add_program(mut self, name: &str, path: impl Into<PathBuf>) -> Self {
        self.programs.push((name.to_owned(), path.into()));
        self
    }

    /// Adds the small guest. The lab inside finds it, and runs it under KVM.
    pub fn add_small_guest(self, small: &GuestImage) -> Self {
        self.add_file("small/kernel", &small.kernel).add_file("small/initrd", &small.initrd)
    }

    /// Writes the tar.
    pub(super) fn write_tar(&self, tar: &Path) -> Result<PayloadTar, KvmHostError> {
        let stage = tar.with_extension("stage");
        self.stage_files(&stage)?;
        let mut command = Command::new("tar");
        command.args(["--create", "--dereference", "--file"]).arg(tar).arg("--directory");
        run_helper(command.arg(&stage).arg("."))?;
        let operation = || format!("write {}", tar.display());
        let file = fs::File::options()
            .append(true)
            .open(tar)
            .map_err(KvmHostError::file_error(operation()))?;
        let bytes = file.metadata().map_err(KvmHostError::file_error(operation()))?.len();
        file.set_len(DISK_BYTES.max(bytes)).map_err(KvmHostError::file_error(operation()))?;
        Ok(PayloadTar { file: tar.to_owned(), bytes })
    }

    fn stage_files(&self, stage: &Path) -> Result<(), KvmHostError> {
        for (name, path) in &self.files {
            link_original(path, &stage.join(name))?;
        }
        let library = stage.join("lib");
        for (name, path) in &self.programs {
            strip_program(path, &create_parent(&stage.join(name))?)?;
            for needed in list_libraries(path)? {
                let at = library.join(needed.file_name().unwrap_or_default());
                if !at.exists() {
                    link_original(&needed, &at)?;
                }
            }
        }
        write_script(&stage.join("guests-build"), GUESTS_BUILD)?;
        write_script(&stage.join("qemu"), QEMU)?;
        write_script(&stage.join("run"), &self.run_script())
    }

    fn run_script(&self) -> String {
        let variables = "FIRN_ACCEL=kvm FIRN_QEMU=$PWD/qemu FIRN_GUESTS_BUILD=$PWD/guests-build FIRN_LAB_DIR=/tmp";
        format!("#!/bin/sh\nexport {variables}\n{}\n", self.script)
    }
}

fn write_script(path: &Path, text: &str) -> Result<(), KvmHostError> {
    let operation = || format!("write {}", path.display());
    fs::write(create_parent(path)?, text).map_err(KvmHostError::file_error(operation()))?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o755))
        .map_err(KvmHostError::file_error(operation()))
}

/// Creates the directory of a path, and returns the path.
fn create_parent(path: &Path) -> Result<PathBuf, KvmHostError> {
    if let Some(directory) = path.parent() {
        let operation = format!("make {}", directory.display());
        fs::create_dir_all(directory).map_err(KvmHostError::file_error(operation))?;
    }
    Ok(path.to_owned())
}

fn link_original(original: &Path, at: &Path) -> Result<(), KvmHostError> {
    let at = create_parent(at)?;
    let operation = format!("bring {} into the first-level guest", original.display());
    let link = original.canonicalize().and_then(|original| symlink(original, at));
    link.map_err(KvmHostError::file_error(operation))
}

fn strip_program(program: &Path, to: &Path) -> Result<(), KvmHostError> {
    run_helper(Command::new("strip").arg("-o").args([to, program])).map(drop)
}

/// The libraries that a program loads, and the loader.
fn list_libraries(program: &Path) -> Result<Vec<PathBuf>, KvmHostError> {
    let output = run_helper(Command::new("ldd").arg(program))?;
    let words = output.split_whitespace().filter(|word| word.starts_with('/'));
    Ok(words.map(PathBuf::from).collect())
}

/// Runs a helper program; returns its standard output.
fn run_helper(command: &mut Command) -> Result<String, KvmHostError> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command.output().map_err(KvmHostError::file_error(format!("run {program}")))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    Err(KvmHostError::Program { program, said })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packs_programs_with_their_libraries() {
        let directory = tempfile::tempdir().unwrap();
        let tar = directory.path().join("payload.tar");
        let payload = GuestPayload::new("./sh -c true")
            .add_program("sh", "/bin/sh")
            .add_file("etc/name", "/etc/hostname");
        let packed = payload.write_tar(&tar).unwrap();
        assert!(packed.bytes > 0 && packed.bytes < DISK_BYTES);
        let names = run_helper(Command::new("tar").arg("-tf").arg(&tar)).unwrap();
        for name in ["./run", "./sh", "./etc/name", "./lib/libc.so.6", "./lib/ld-linux-x86-64.so.2"]
        {
            assert!(names.lines().any(|line| line == name), "{name} is not in {names}");
        }
    }

    #[test]
    fn a_missing_file_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let payload = GuestPayload::new("true").add_file("name", "/no/such/file");
        let error = payload.write_tar(&directory.path().join("payload.tar")).unwrap_err();
        assert!(error.to_string().contains("/no/such/file"), "{error}");
    }
}
