//! The programs that a restore may start: an image names one, and an image may come from any
//! source.
//!
//! Three kinds of programs are allowed: a program of the system that has a name of QEMU and that
//! only root can change; programs that the host's administrator lists in `/etc/firn/qemu.allow`,
//! one path or pattern per line; and programs that the user lists in the environment variable
//! `FIRN_QEMU_ALLOW`, separated by colons. `firn restore --qemu PATH` starts that program, without
//! these checks.
//!
//! In a pattern `*` stands for any characters except a slash, `?` for one such character.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::records::failure::{Failure, FailureContext, FailureKind};

/// The administrator's list.
const POLICY: &str = "/etc/firn/qemu.allow";

/// The user's list.
const VARIABLE: &str = "FIRN_QEMU_ALLOW";

/// The directories in which systems have QEMU.
const SYSTEM: &[&str] = &[
    "/usr/bin/*",
    "/usr/libexec/*",
    "/usr/lib/qemu*/*",
    "/usr/local/bin/*",
    "/usr/local/libexec/*",
    "/opt/*/bin/*",
];

/// The names of QEMU.
const NAMES: &[&str] = &["qemu-system-*", "qemu-kvm*", "kvm"];

/// The path of the program that a command line names, if it may be started. A relative path starts
/// in `directory`.
pub(crate) fn allowed_program(program: &str, directory: &Path) -> Result<PathBuf, Failure> {
    let (path, resolved) = resolve_program(program, directory)?;
    let listed = read_allow_lists()?
        .iter()
        .any(|pattern| matches_pattern(pattern, &path) || matches_pattern(pattern, &resolved));
    match listed || is_qemu_of_system(&resolved).while_doing("checking the program of the image")? {
        true => Ok(path),
        false => Err(refuse_program(&path, &resolved)),
    }
}

/// The path of a program that the user chooses.
pub(crate) fn chosen_program(program: &str, directory: &Path) -> Result<PathBuf, Failure> {
    resolve_program(program, directory).map(|(path, _)| path)
}

/// The path of a program as it is named, and without links.
fn resolve_program(program: &str, directory: &Path) -> Result<(PathBuf, PathBuf), Failure> {
    let finding = || format!("finding {}", program.escape_debug());
    let path = match program.contains('/') {
        true => directory.join(program),
        false => firn_vmm::find_program(program).while_doing(finding())?,
    };
    let resolved = path.canonicalize().while_doing(finding())?;
    Ok((path, resolved))
}

fn refuse_program(path: &Path, resolved: &Path) -> Failure {
    let shown = |path: &Path| path.to_string_lossy().escape_debug().to_string();
    let link = match path == resolved {
        true => String::new(),
        false => format!(", which is {}", shown(resolved)),
    };
    let text = format!(
        "the image's command line starts {}{link}, which is no QEMU that this host allows",
        shown(path)
    );
    let hint = format!(
        "--qemu PATH starts another program; {POLICY} lists programs that may be started beside the system's QEMU, one path or pattern per line"
    );
    Failure::new(FailureKind::Refused, text).with_hint(hint)
}

fn is_qemu_of_system(program: &Path) -> io::Result<bool> {
    let name = program.file_name().unwrap_or_default();
    let is_called_so = NAMES.iter().any(|pattern| matches_pattern(pattern, Path::new(name)));
    if !is_called_so || !SYSTEM.iter().any(|pattern| matches_pattern(pattern, program)) {
        return Ok(false);
    }
    let directory = program.parent().unwrap_or(Path::new("/"));
    Ok(is_roots(program, 0o022)? && is_roots(directory, 0o002)?)
}

/// Whether a file belongs to root, and the classes in `writers` can't write to it.
fn is_roots(path: &Path, writers: u32) -> io::Result<bool> {
    let metadata = path.metadata()?;
    Ok(metadata.uid() == 0 && metadata.mode() & writers == 0)
}

/// The patterns of the administrator and of the user.
fn read_allow_lists() -> Result<Vec<String>, Failure> {
    let own = std::env::var(VARIABLE).unwrap_or_default();
    let own = own.split(':').filter(|pattern| !pattern.is_empty()).map(str::to_owned);
    Ok(read_policy(Path::new(POLICY))?.into_iter().chain(own).collect())
}

fn read_policy(path: &Path) -> Result<Vec<String>, Failure> {
    let reading = format!("reading {}", path.display());
    let text = match fs::read_to_string(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        read => read.while_doing_as(FailureKind::Host, &*reading)?,
    };
    if !is_roots(path, 0o022).while_doing(reading)? {
        let text = format!("users other than root can write to {}", path.display());
        let hint = format!("chown root {0} && chmod go-w {0}", path.display());
        return Err(Failure::new(FailureKind::Host, text).with_hint(hint));
    }
    let lines = text.lines().map(str::trim);
    Ok(lines.filter(|line| !line.is_empty() && !line.starts_with('#')).map(str::to_owned).collect())
}

fn matches_pattern(pattern: &str, path: &Path) -> bool {
    path.to_str().is_some_and(|path| fits_pattern(pattern.as_bytes(), path.as_bytes()))
}

fn fits_pattern(pattern: &[u8], text: &[u8]) -> bool {
    match (pattern, text) {
        ([b'*', rest @ ..], _) => {
            let end = text.iter().position(|&byte| byte == b'/').unwrap_or(text.len());
            (0..=end).any(|len| fits_pattern(rest, &text[len..]))
        }
        ([b'?', rest @ ..], [byte, others @ ..]) => *byte != b'/' && fits_pattern(rest, others),
        ([wanted, rest @ ..], [byte, others @ ..]) => wanted == byte && fits_pattern(rest, others),
        ([], []) => true,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_within_a_name() {
        let fits = |pattern: &str, path: &str| matches_pattern(pattern, Path::new(path));
        assert!(fits("/opt/*/bin/qemu-system-*", "/opt/qemu10/bin/qemu-system-x86_64"));
        assert!(!fits("/opt/*/bin/*", "/opt/a/b/bin/qemu"));
        assert!(fits("/a/b?", "/a/bc") && !fits("/a/b?", "/a/b/") && !fits("/a", "/ab"));
        assert!(fits("kvm", "kvm") && fits("qemu-kvm*", "qemu-kvm") && !fits("kvm", "kvm2"));
    }

    #[test]
    fn a_shell_is_no_qemu_under_any_name() {
        let dir = tempfile::tempdir().unwrap();
        let link = dir.path().join("qemu-system-x86_64");
        std::os::unix::fs::symlink("/bin/sh", &link).unwrap();
        for program in ["/bin/sh", "sh", link.to_str().unwrap(), "./qemu-system-x86_64"] {
            let failure = allowed_program(program, dir.path()).unwrap_err();
            assert_eq!(failure.kind, FailureKind::Refused, "{failure}");
            assert!(failure.hint.unwrap().contains("--qemu"));
        }
        assert_eq!(chosen_program("/bin/sh", dir.path()).unwrap(), Path::new("/bin/sh"));
        assert!(chosen_program("/no/such\u{1b}[2J", dir.path()).is_err());
    }

    #[test]
    fn a_copy_is_no_qemu_of_the_system() {
        let dir = tempfile::tempdir().unwrap();
        let copy = dir.path().join("qemu-system-x86_64");
        fs::write(&copy, "").unwrap();
        assert!(!is_qemu_of_system(&copy).unwrap());
    }

    #[test]
    fn a_list_that_others_can_write_is_refused() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let list = dir.path().join("qemu.allow");
        assert_eq!(read_policy(&list).unwrap(), Vec::<String>::new());
        fs::write(&list, "# ours\n\n /opt/q/*\n").unwrap();
        fs::set_permissions(&list, fs::Permissions::from_mode(0o666)).unwrap();
        assert_eq!(read_policy(&list).unwrap_err().kind, FailureKind::Host);
        fs::set_permissions(&list, fs::Permissions::from_mode(0o644)).unwrap();
        if rustix::process::geteuid().is_root() {
            assert_eq!(read_policy(&list).unwrap(), ["/opt/q/*"]);
        }
    }
}
