//! Hostile files at every argument that takes a path: one error before anything is done, no wait, and no file replaced that
//! is not a regular one. Control characters of names and of images do not reach a terminal.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt as _;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, symlink};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use firn_image::{BlockOrganization, Geometry, ImageDraft, ImageSections, ImageWriter};
use firn_types::{RegionMap, is_shown};
use rustix::fs::{CWD, Mode, mkfifoat};
use serde_json::json;

use crate::path_table::{ARGUMENTS, PathArgument, Role};
use crate::session::{Answer, Session, eventually};

const PATIENCE: Duration = Duration::from_secs(120);

/// What a terminal would obey: the line is erased, then another one is shown.
const ESCAPES: &str = "\u{1b}[2K\r\u{9b}1mok\u{202e}\u{7f}";

/// An image without memory, whose strings are hostile, and a flat copy of its memory.
fn write_image(path: &Path) {
    let geometry = Geometry::new(16);
    let draft = ImageDraft::whole_image(geometry, BlockOrganization::Access);
    let regions = RegionMap::lay_out([(format!("ram{ESCAPES}").as_str(), 16 * 4096)]).unwrap();
    let hostile = |text: &str| format!("{text}{ESCAPES}\nQEMU: forged");
    let meta = json!({
        "version": 1, "name": hostile("web"), "created": 0, "firn": hostile("0.1"), "machine": hostile("pc"),
        "qemu": {
            "version": hostile("7.2"), "accel": "tcg", "user_args": ["qemu", hostile("-x")], "args": [],
            "directory": hostile("/tmp"),
        },
        "memory_bytes": 65536, "vcpus": 1,
    });
    let sections = ImageSections { meta, regions, ..ImageSections::default() };
    ImageWriter::create(path, &draft).unwrap().finish(sections).unwrap();
}

/// A session with the good files that command lines of the table name.
fn session() -> Session {
    let session = Session::new();
    write_image(&session.path("good.firn"));
    std::fs::write(session.path("good.ram"), vec![0; 16 * 4096]).unwrap();
    std::fs::write(session.path("good.json"), "{}").unwrap();
    session
}

/// Runs a command line of the table with a path, and ends it when it hangs.
fn run(session: &Session, argument: &PathArgument, path: &[u8]) -> Answer {
    let mut command = session.command(&[]);
    for word in argument.command.split(' ') {
        let parts: Vec<&[u8]> = word.split('@').map(str::as_bytes).collect();
        command.arg(OsString::from_vec(parts.join(path)));
    }
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let what = format!("firn {} with {:?}", argument.command, OsString::from_vec(path.to_vec()));
    eventually(&what, PATIENCE, || child.try_wait().unwrap().is_some());
    Answer::of(child.wait_with_output().unwrap())
}

/// Files that are no regular ones, by name.
fn hostile_files(session: &Session) -> (Vec<&'static str>, UnixListener) {
    mkfifoat(CWD, session.path("fifo"), Mode::RUSR | Mode::WUSR).unwrap();
    let socket = UnixListener::bind(session.path("socket")).unwrap();
    std::fs::create_dir(session.path("directory")).unwrap();
    symlink("/dev/full", session.path("device")).unwrap();
    symlink("/dev/null", session.path("null")).unwrap();
    symlink("fifo", session.path("link")).unwrap();
    (vec!["fifo", "socket", "directory", "device", "null", "link"], socket)
}

/// What is in the session's directory: names, and which files they are.
fn contents(session: &Session) -> Vec<(PathBuf, u64, bool)> {
    let entries = std::fs::read_dir(session.path("")).unwrap();
    let which = |path: PathBuf| {
        let found = std::fs::symlink_metadata(&path).unwrap();
        (path, found.ino(), found.file_type().is_fifo())
    };
    let mut all: Vec<_> = entries.map(|entry| which(entry.unwrap().path())).collect();
    all.retain(|(path, ..)| !path.ends_with("run"));
    all.sort_unstable();
    all
}

/// One error, with nothing in it that a terminal obeys.
#[track_caller]
fn assert_one_error(answer: &Answer, what: &str, codes: &[i32]) {
    assert!(codes.contains(&answer.code), "{what}: exit {}: {}", answer.code, answer.err);
    let errors = answer.err.lines().filter(|line| line.starts_with("firn: ")).count();
    let of_clap = answer.err.lines().filter(|line| line.starts_with("error: ")).count();
    assert_eq!(errors + of_clap, 1, "{what}: {}", answer.err);
    assert_shown(&answer.err, what);
    assert_eq!(answer.out, "", "{what}");
}

#[track_caller]
fn assert_shown(text: &str, what: &str) {
    assert!(text.chars().all(|it| is_shown(it) || it == '\n'), "{what}: {text:?}");
}

#[test]
fn files_of_other_kinds_are_refused_by_every_argument() {
    let session = session();
    let (names, _socket) = hostile_files(&session);
    let before = contents(&session);
    for argument in ARGUMENTS {
        for &name in &names {
            let is_fit = match argument.role {
                Role::Directory => name == "directory",
                Role::Input | Role::Output | Role::Socket | Role::Program => false,
            };
            if is_fit {
                continue;
            }
            let codes: &[i32] = match argument.role {
                Role::Output | Role::Directory => &[2],
                Role::Input => &[2, 6],
                Role::Socket => &[1, 2, 3],
                Role::Program => &[1, 2, 5, 6, 7, 8],
            };
            let answer = run(&session, argument, name.as_bytes());
            assert_one_error(&answer, &format!("{} with a {name}", argument.name), codes);
            assert_eq!(contents(&session), before, "{} with a {name}", argument.name);
        }
    }
    assert_eq!(session.ls(), []);
}

#[test]
fn names_that_no_text_is_and_names_that_a_terminal_obeys() {
    let session = session();
    let names = [&b"not-utf-8-\xff\xfe"[..], ESCAPES.as_bytes(), b"line\nfirn: forged"];
    for argument in ARGUMENTS {
        for name in names {
            let what = format!("{} with {:?}", argument.name, String::from_utf8_lossy(name));
            let answer = run(&session, argument, name);
            if answer.code == 0 {
                assert_eq!(argument.role, Role::Output, "{what}");
                assert_shown(&answer.out, &what);
                assert_eq!(answer.out.lines().count(), 1, "{what}: {}", answer.out);
                std::fs::remove_file(session.path("").join(OsString::from_vec(name.to_vec())))
                    .unwrap();
                continue;
            }
            let codes: &[i32] = match argument.role {
                Role::Output if argument.command.starts_with("image") => &[5, 6],
                Role::Program => &[1, 2, 5, 6, 7, 8],
                _ => &[1, 2, 3, 6],
            };
            assert_one_error(&answer, &what, codes);
        }
    }
    assert_eq!(session.files("new"), [""; 0]);
}

#[test]
fn a_path_that_is_not_utf_8_works_or_is_named() {
    let session = session();
    let name = OsString::from_vec(b"\xff.firn".to_vec());
    std::fs::copy(session.path("good.firn"), session.path("").join(&name)).unwrap();
    for verb in ["inspect", "verify", "chain"] {
        for options in [&["image", verb][..], &["--json", "image", verb]] {
            let output = session.command(options).arg(&name).output().unwrap();
            let answer = Answer::of(output).succeeds();
            assert!(verb == "inspect" || answer.out.contains("\u{fffd}.firn"), "{}", answer.out);
        }
    }
    for options in [&["image", "merge"][..], &["--json", "image", "merge"]] {
        Answer::of(session.command(options).arg(&name).output().unwrap()).succeeds();
    }
    let checkpoint = session.command(&["checkpoint", "web", "-o"]).arg(&name).output().unwrap();
    Answer::of(checkpoint).fails(2, "is not UTF-8");
    let restore = session.command(&["restore"]).arg(&name).output().unwrap();
    Answer::of(restore).fails(2, "is not UTF-8");
}

#[test]
fn strings_of_an_image_are_shown_and_not_obeyed() {
    let session = session();
    let inspected = session.firn(&["image", "inspect", "good.firn"]).succeeds();
    assert_shown(&inspected.out, "image inspect");
    assert!(
        inspected.out.contains("\\u{1b}[2K\\u{d}\\u{9b}1mok\\u{202e}\\u{7f}"),
        "{}",
        inspected.out
    );
    let lines = inspected.out.lines().filter(|line| line.starts_with("QEMU")).count();
    assert_eq!(lines, 1, "a string is no line of its own: {}", inspected.out);
    let json = session.firn(&["--json", "image", "inspect", "good.firn"]).succeeds();
    assert_shown(&json.out, "--json");
    let facts: serde_json::Value = serde_json::from_str(&json.out).unwrap();
    let name = facts["meta"]["name"].as_str().unwrap();
    assert_eq!(name, format!("web{ESCAPES}\nQEMU: forged"), "--json is exact");
    let restored = session.firn(&["restore", "good.firn"]);
    assert_ne!(restored.code, 0);
    assert_shown(&restored.err, "restore");
}

#[test]
fn outputs_replace_files_and_links_and_what_links_point_to_stays() {
    let session = session();
    std::fs::write(session.path("old"), "old").unwrap();
    symlink("old", session.path("link")).unwrap();
    let merge = |to: &str| session.firn(&["image", "merge", "good.firn", "-o", to]);
    merge("link").succeeds();
    assert_eq!(std::fs::read(session.path("old")).unwrap(), b"old");
    assert!(!session.path("link").is_symlink());
    merge("new").succeeds();
    merge("none/new").fails(2, "there is no directory none");
    merge("-").fails(2, "standard output");
}
