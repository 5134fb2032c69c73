//! Hostile files at every argument that takes a path: one error before anything is done, no wait, and no file replaced that
//! is not a regular one. Control characters of names and of images do not reach a terminal.

use std::ffi::OsString;
use std::fs::Permissions;
use std::os::unix::ffi::OsStringExt as _;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _, symlink};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use firn_image::{BlockOrganization, Geometry, ImageDraft, ImageSections, ImageWriter};
use firn_supervisor::{
    RuntimeDir, SaveChoices, SaveRequest, SupervisorRequest, VmName, send_request,
};
use firn_types::{RegionMap, is_shown};
use rustix::fs::{CWD, FileType, Mode, mkfifoat, mknodat};
use serde_json::json;

use crate::own_qemu::OwnQemu;
use crate::path_table::{ARGUMENTS, PathArgument, Role};
use crate::session::{Answer, Session, eventually};

const PATIENCE: Duration = Duration::from_secs(120);

/// What a terminal would obey: the line is erased, then another one is shown.
pub const ESCAPES: &str = "\u{1b}[2K\r\u{9b}1mok\u{202e}\u{7f}";

/// An image without memory, whose strings are hostile, and a flat copy of its memory.
pub fn write_image(path: &Path) {
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

/// A session with an image that has no VM.
fn plain_session() -> Session {
    let session = Session::new();
    write_image(&session.path("good.firn"));
    session
}

/// A QEMU without a guest, which only reads its disk.
const QEMU: &str = "qemu-system-x86_64 -M pc -m 8 -accel tcg,tb-size=8 -nodefaults -display none \
    -drive file=disk.raw,format=raw,if=none,id=d,readonly=on -device virtio-blk-pci,drive=d";

const POLICY: &str = "[applications.a]\nkey = \
    \"0000000000000000000000000000000000000000000000000000000000000001\"\npages = 4\n";

/// A session with all that command lines of the table name.
struct Bench {
    session: Session,
    /// The one to attach to.
    own: OwnQemu,
}

impl Bench {
    fn new() -> Self {
        let session = Session::new();
        let path = |name: &str| session.path(name);
        ["good.firn", "other.firn", "spare.firn"].iter().for_each(|name| write_image(&path(name)));
        std::fs::write(path("good.ram"), vec![0; 16 * 4096]).unwrap();
        firn_files::replace_private(&path("policy.toml"), POLICY.as_bytes()).unwrap();
        firn_files::replace_private(&path("key.hex"), "1f".repeat(32).as_bytes()).unwrap();
        for disk in ["disk.raw", "moved.raw"] {
            std::fs::write(path(disk), vec![0; 1 << 20]).unwrap();
            let file = std::fs::File::options().write(true).open(path(disk)).unwrap();
            file.set_modified(std::time::SystemTime::UNIX_EPOCH).unwrap();
        }
        let qemu = firn_lab::guest::default_program();
        let script = format!("#!/bin/sh\nexec {} \"$@\"\n", qemu.to_str().unwrap());
        std::fs::write(path("qemu"), script).unwrap();
        std::fs::set_permissions(path("qemu"), Permissions::from_mode(0o755)).unwrap();
        let own = OwnQemu::start(&session, &[]);
        let bench = Self { session, own };
        bench.has_live();
        bench.make_images();
        bench
    }

    /// Images of the VM `live`, and a run record.
    fn make_images(&self) {
        let firn = |line: &str| {
            self.session.firn(&line.split(' ').collect::<Vec<_>>()).succeeds();
        };
        firn("checkpoint live -o vm.firn");
        firn("checkpoint live -o child.firn --parent vm.firn");
        firn("restore vm.firn --name web --wait");
        let record = self.session.runtime_dir().join("web/restore.json");
        std::fs::copy(record, self.session.path("run.json")).unwrap();
        firn("stop web");
        let _ = std::fs::remove_file(self.session.path("vm.firn.learned"));
    }

    /// Runs the VM `live`, unless it does.
    fn has_live(&self) {
        if self.session.ls().is_empty() {
            let run = ["run", "live", "--quiet", "--"].into_iter().chain(QEMU.split_whitespace());
            self.session.firn(&run.collect::<Vec<_>>()).succeeds();
        }
    }

    /// Ends the VM that a command has started, and not the QEMU that it was attached to.
    fn end_web(&self) {
        if self.session.ls().iter().any(|(name, _)| name == "web") {
            let pid = self.session.status("web")["pid"].as_u64().unwrap();
            let verb = match pid == self.own.pid().parse::<u64>().unwrap() {
                true => "detach",
                false => "stop",
            };
            self.session.firn(&[verb, "web"]).succeeds();
        }
    }

    /// A command line of the table with a path.
    fn command(&self, argument: &PathArgument, path: &[u8]) -> Command {
        let line = argument.command.replace("QEMU", QEMU).replace("PID", &self.own.pid());
        let mut command = self.session.command(&[]);
        for word in line.split_whitespace() {
            let parts: Vec<&[u8]> = word.split('@').map(str::as_bytes).collect();
            command.arg(OsString::from_vec(parts.join(path)));
        }
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// Runs a command line of the table with a path, and fails if it hangs.
    fn run(&self, argument: &PathArgument, path: &[u8]) -> Answer {
        let mut child = self.command(argument, path).spawn().unwrap();
        let what = format!("firn {} with {:?}", argument.command, String::from_utf8_lossy(path));
        let since = Instant::now();
        while child.try_wait().unwrap().is_none() {
            if since.elapsed() > PATIENCE {
                child.kill().unwrap();
                unreachable!("{what} hangs");
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Answer::of(child.wait_with_output().unwrap())
    }
}

/// Files that are no regular ones, by name; and what keeps them there.
struct HostileFiles {
    names: Vec<&'static str>,
    block: Option<LoopDevice>,
    _socket: UnixListener,
}

impl HostileFiles {
    fn make(session: &Session) -> Self {
        mkfifoat(CWD, session.path("fifo"), Mode::RUSR | Mode::WUSR).unwrap();
        let socket = UnixListener::bind(session.path("socket")).unwrap();
        std::fs::create_dir(session.path("directory")).unwrap();
        symlink("/dev/full", session.path("device")).unwrap();
        symlink("/dev/null", session.path("null")).unwrap();
        symlink("fifo", session.path("link")).unwrap();
        let mut names = vec!["fifo", "socket", "directory", "device", "null", "link"];
        let null = std::fs::metadata("/dev/null").unwrap().rdev();
        match mknodat(CWD, session.path("node"), FileType::CharacterDevice, MODE, null) {
            Ok(()) => names.push("node"),
            Err(why) => {
                firn_skip::skip_test(format_args!("no device node can be made here: {why}"))
            }
        }
        let block = LoopDevice::attach(session).inspect_err(|why| {
            firn_skip::skip_test(format_args!("there is no block device to try: {why}"));
        });
        names.extend(block.as_ref().ok().map(|_| "block"));
        Self { names, block: block.ok(), _socket: socket }
    }
}

const MODE: Mode = Mode::RUSR.union(Mode::WUSR);

/// A block device, which is a node in the session's directory.
pub struct LoopDevice {
    device: String,
    file: PathBuf,
}

impl LoopDevice {
    fn attach(session: &Session) -> Result<Self, String> {
        Self::with_bytes(session, 1 << 20)
    }

    /// One of this size, all zeros, at `block` of the session.
    pub fn with_bytes(session: &Session, bytes: usize) -> Result<Self, String> {
        let file = session.path("loop.raw");
        std::fs::write(&file, vec![0; bytes]).unwrap();
        let made = Command::new("losetup").args(["--find", "--show"]).arg(&file).output();
        let made = made.map_err(|error| error.to_string())?;
        if !made.status.success() {
            return Err(String::from_utf8_lossy(&made.stderr).into_owned());
        }
        let device = String::from_utf8(made.stdout).unwrap().trim().to_owned();
        let number = std::fs::metadata(&device).unwrap().rdev();
        let made = Self { device, file };
        mknodat(CWD, session.path("block"), FileType::BlockDevice, MODE, number)
            .map_err(|why| why.to_string())?;
        std::fs::File::open(session.path("block")).map_err(|why| why.to_string())?;
        Ok(made)
    }

    /// Whether nothing was written to it.
    fn is_untouched(&self) -> bool {
        std::fs::read(&self.file).unwrap().iter().all(|&byte| byte == 0)
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = Command::new("losetup").args(["--detach", &self.device]).status();
    }
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

/// The codes with which an argument refuses a path.
fn codes_of(argument: &PathArgument) -> &'static [i32] {
    match argument.role {
        Role::Output | Role::Directory => &[2],
        Role::Input => &[2, 6],
        Role::Disk => &[2, 5],
        Role::Socket | Role::Listener => &[1, 2, 3],
        Role::Program => &[1, 2, 5, 7],
    }
}

/// Such an error is about the path, and about nothing that comes before.
#[test]
fn files_of_other_kinds_are_refused_by_every_argument() {
    let bench = Bench::new();
    let session = &bench.session;
    let hostile = HostileFiles::make(session);
    let before = contents(session);
    for argument in ARGUMENTS {
        for &name in &hostile.names {
            let is_fit = match argument.role {
                Role::Directory => name == "directory",
                Role::Disk => ["block", "node", "device", "null"].contains(&name),
                // It is one. `firn-epochs` tests how long one that is silent is waited for.
                Role::Socket => name == "socket" && argument.name == "protect to",
                _ => false,
            };
            if is_fit {
                continue;
            }
            let what = format!("{} with a {name}", argument.name);
            let answer = bench.run(argument, name.as_bytes());
            if argument.name == "doctor qemu" {
                assert!(answer.out.contains(&format!("  ./{name}: ")), "{}", answer.out);
                assert_eq!(answer.code, 7, "{what}");
                continue;
            }
            assert_one_error(&answer, &what, codes_of(argument));
            // `firn image rm` follows it.
            let named =
                answer.err.contains(name) || (name == "link" && answer.err.contains("fifo"));
            assert!(named, "{what}: {}", answer.err);
            assert_eq!(contents(session), before, "{what}");
        }
    }
    assert!(hostile.block.is_none_or(|block| block.is_untouched()));
    assert_eq!(session.ls(), [("live".to_owned(), "running".to_owned())]);
}

/// Else what refuses the others would prove nothing.
#[test]
fn files_that_fit_are_taken_by_every_argument() {
    let bench = Bench::new();
    std::fs::create_dir(bench.session.path("directory")).unwrap();
    for argument in ARGUMENTS {
        let Some(fit) = argument.fit.filter(|it| *it != "PLUGIN") else { continue };
        bench.has_live();
        let answer = bench.run(argument, fit.as_bytes());
        assert_eq!(answer.code, 0, "{} with {fit}: {}", argument.name, answer.err);
        bench.end_web();
        for new in bench.session.files("new") {
            std::fs::remove_file(bench.session.path(&new)).unwrap();
        }
    }
}

/// Files change after `firn` has checked them, so the supervisor refuses them as well.
#[test]
fn a_supervisor_checks_files_itself() {
    let bench = Bench::new();
    let session = &bench.session;
    let hostile = HostileFiles::make(session);
    let before = contents(session);
    let base = RuntimeDir::from_path(session.runtime_dir());
    let request = |image: &Path, choices: SaveChoices| {
        let (image, name) = (image.to_owned(), VmName::new("live").unwrap());
        let save = SaveRequest {
            image,
            choices,
            keys: Vec::new(),
            store: None,
            cancel_with_client: false,
        };
        let base = base.clone();
        let asked = std::thread::spawn(move || {
            send_request(&base, &name, &SupervisorRequest::Checkpoint(save), &mut |_| ())
        });
        eventually("an answer", PATIENCE, || asked.is_finished());
        asked.join().unwrap()
    };
    let new = session.path("new.firn");
    for name in &hostile.names {
        let path = session.path(name);
        let with = |change: fn(&mut SaveChoices, PathBuf)| {
            let mut choices = SaveChoices::default();
            change(&mut choices, path.clone());
            choices
        };
        let tried = [
            ("image", request(&path, SaveChoices::default())),
            ("parent", request(&new, with(|choices, path| choices.parent = Some(path)))),
            ("reference", request(&new, with(|choices, path| choices.reference = Some(path)))),
        ];
        for (what, answer) in tried {
            let failure = answer.expect_err(what);
            eprintln!("{what} {name}: {failure}");
            assert!(failure.to_string().contains(name), "{what} {name}: {failure}");
        }
        assert_eq!(contents(session), before, "{name}");
    }
    assert!(hostile.block.is_none_or(|block| block.is_untouched()));
    assert_eq!(session.ls(), [("live".to_owned(), "running".to_owned())]);
    assert_eq!(session.status("live")["recoveries"], 0, "no supervisor died of it");
}

#[test]
fn names_that_no_text_is_and_names_that_a_terminal_obeys() {
    let bench = Bench::new();
    let session = &bench.session;
    let names = [&b"not-utf-8-\xff\xfe"[..], ESCAPES.as_bytes(), b"line\nfirn: forged"];
    for argument in ARGUMENTS.iter().filter(|it| it.role != Role::Listener) {
        for name in names {
            let what = format!("{} with {:?}", argument.name, String::from_utf8_lossy(name));
            bench.has_live();
            let answer = bench.run(argument, name);
            assert_shown(&answer.out, &what);
            if answer.code == 0 {
                assert_eq!(argument.role, Role::Output, "{what}");
                let is_forged = answer.out.lines().any(|line| line.starts_with("firn: forged"));
                assert!(!is_forged, "{what}: {}", answer.out);
                std::fs::remove_file(session.path("").join(OsString::from_vec(name.to_vec())))
                    .unwrap();
                // A fork has started a clone.
                bench.end_web();
                continue;
            }
            if argument.name == "doctor qemu" && answer.code == 7 {
                continue;
            }
            let codes: &[i32] = match argument.role {
                Role::Output if argument.command.starts_with("image") => &[5, 6],
                Role::Program => &[1, 2, 5, 7],
                Role::Disk => &[2, 5, 8],
                _ => &[1, 2, 3, 6],
            };
            assert_one_error(&answer, &what, codes);
        }
    }
    for new in session.files("new") {
        std::fs::remove_file(session.path(&new)).unwrap();
    }
    assert_eq!(session.ls().len(), 1);
}

/// A relative path is one of the command's directory, not of its supervisor's.
#[test]
fn a_standby_listens_at_any_name_that_is_free() {
    let session = Session::new();
    for name in ["standby", ESCAPES, "line\nfirn: forged"] {
        let listen = format!("unix:{name}");
        let mut command = session.command(&["standby", "web", "--listen", &listen]);
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        eventually("it listens", PATIENCE, || session.path(name).exists());
        assert_shown(&session.firn(&["status", "web"]).succeeds().out, name);
        session.firn(&["stop", "web"]).succeeds();
        let answer = Answer::of(child.wait_with_output().unwrap());
        assert_one_error(&answer, name, &[8]);
        assert!(!session.path(name).exists());
    }
}

#[test]
fn a_path_that_is_not_utf_8_works_or_is_named() {
    let session = plain_session();
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
    let session = plain_session();
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
fn an_output_replaces_a_link_and_not_its_target() {
    let session = plain_session();
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
