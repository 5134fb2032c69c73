//! Sealed images: a guest that is saved shows nothing of its memory in any file, and is restored exactly by a user
//! who has the key, and by no other.

use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use age::secrecy::ExposeSecret as _;
use age::x25519::Identity;
use rustix::process::Signal;

use crate::fork::{PAGE, QUIET, page_with, read_ram, write_ram};
use crate::object_server::ObjectServer;
use crate::session::{Session, eventually, kill, signal, text};
use crate::tiny_guest::TinyGuest;
use crate::vm::Vm;

const PATIENCE: Duration = Duration::from_secs(120);

/// What the guest has in its memory, and no file may have: it begins each fourth page.
const PATTERN: &[u8] = b"FIRN-GUEST-SECRET-7f3a9c51e2";

/// What a command says that lacks a key.
const LOCKED: &str = "its key is not here";

/// A VM `web` that runs, with a known memory.
struct Subject {
    session: Session,
    memory: Vec<u8>,
    _guest: TinyGuest,
}

impl Subject {
    fn run() -> Self {
        let session = Session::new();
        let guest = TinyGuest::run(&session, &[]);
        let subject = Self { memory: known_memory(), _guest: guest, session };
        write_ram(subject.pid("web"), QUIET.start, &subject.memory);
        subject
    }

    fn pid(&self, name: &str) -> i64 {
        self.session.status(name)["pid"].as_i64().unwrap()
    }

    /// Makes a key of age: NAME.age has the identity. Returns its recipient.
    fn make_identity(&self, name: &str) -> String {
        let identity = Identity::generate();
        let secret = identity.to_string();
        let file = self.session.path(&format!("{name}.age"));
        firn_files::replace_private(&file, secret.expose_secret().as_bytes()).unwrap();
        identity.to_public().to_string()
    }

    fn save(&self, image: &str, how: &[&str]) {
        let save = ["checkpoint", "web", "-o", image, "--codec", "none"];
        self.session.firn(&[&save[..], how].concat()).succeeds();
    }

    fn stop(&self, name: &str) {
        self.session.firn(&["stop", name]).succeeds();
    }

    /// Restores an image as `web`, and checks all of its memory.
    #[track_caller]
    fn restores_exactly(&self, image: &str, how: &[&str]) {
        let restore = ["restore", image, "--name", "web", "--wait"];
        self.session.firn(&[&restore[..], how].concat()).succeeds();
        self.is_exact("web");
        self.stop("web");
    }

    #[track_caller]
    fn is_exact(&self, name: &str) {
        let found = read_ram(self.pid(name), QUIET.start, QUIET.len());
        let pages = (0..QUIET.len()).step_by(PAGE);
        let mut wrong = pages.filter(|&at| found[at..at + PAGE] != self.memory[at..at + PAGE]);
        assert_eq!(wrong.next(), None, "{name}: a page at this offset is wrong");
    }

    /// No file of the session has the pattern: images, partial images, caches, the runtime directory.
    #[track_caller]
    fn shows_nothing(&self) {
        let found = files_with_pattern(&self.session.path(""));
        assert_eq!(found, Vec::<PathBuf>::new());
    }
}

fn known_memory() -> Vec<u8> {
    let mut memory: Vec<u8> = QUIET.step_by(PAGE).flat_map(|at| page_with(at as u64)).collect();
    for page in memory.chunks_mut(4 * PAGE) {
        page[..PATTERN.len()].copy_from_slice(PATTERN);
    }
    memory
}

fn files_with_pattern(directory: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(directory).unwrap();
    let paths = entries.map(|entry| entry.unwrap().path());
    let has_pattern = |path: &Path| {
        let is_file = std::fs::symlink_metadata(path).is_ok_and(|it| it.is_file());
        // A file may end its life while it is read.
        let bytes = if is_file { std::fs::read(path).unwrap_or_default() } else { Vec::new() };
        bytes.windows(PATTERN.len()).any(|part| part == PATTERN)
    };
    let found = paths.flat_map(|path| match path.is_dir() && !path.is_symlink() {
        true => files_with_pattern(&path),
        false if has_pattern(&path) => vec![path],
        false => Vec::new(),
    });
    found.collect()
}

#[test]
fn only_its_recipient_restores_a_sealed_image_and_no_file_has_its_memory() {
    let subject = Subject::run();
    let (me, _) = (subject.make_identity("me"), subject.make_identity("other"));
    subject.save("clear.firn", &[]);
    let clear = files_with_pattern(&subject.session.path(""));
    assert_eq!(clear, [subject.session.path("clear.firn")], "the search finds what is there");
    std::fs::remove_file(&clear[0]).unwrap();
    subject.save("web.firn", &["--recipient", &me]);
    subject.shows_nothing();
    subject.stop("web");
    let session = &subject.session;
    let failed = session.firn(&["restore", "web.firn"]).fails(5, LOCKED);
    assert!(failed.err.contains(&me[..12]) && failed.err.contains("--identity"), "{}", failed.err);
    session.firn(&["restore", "web.firn", "--identity", "other.age"]).fails(5, LOCKED);
    for verb in ["inspect", "verify", "chain"] {
        session.firn(&["image", verb, "web.firn"]).fails(5, LOCKED);
        session.firn(&["image", verb, "web.firn", "--identity", "me.age"]).succeeds();
    }
    for mode in ["auto", "lazy", "locality", "working-set", "eager"] {
        subject.restores_exactly("web.firn", &["--identity", "me.age", "--mode", mode]);
    }
    let mut command = session.command(&["restore", "web.firn", "--wait"]);
    let output = command.env("FIRN_IDENTITY", session.path("me.age")).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    subject.is_exact("web");
    subject.shows_nothing();
    assert!(!session.path("web.firn.learned").exists(), "which memory it uses is not written");
}

#[test]
fn no_copy_of_ram_is_in_clear_beside_a_sealed_image() {
    let subject = Subject::run();
    let me = subject.make_identity("me");
    let session = &subject.session;
    let save =
        ["checkpoint", "web", "-o", "web.firn", "--recipient", &me, "--reference", "web.ram"];
    session.firn(&save).fails(2, "is not encrypted");
    subject.shows_nothing();
    assert!(!session.path("web.firn").exists());
}

#[test]
fn a_key_file_or_a_command_seals_and_opens() {
    let subject = Subject::run();
    let session = &subject.session;
    for (name, digit) in [("one.key", "1f"), ("two.key", "2e")] {
        firn_files::replace_private(&session.path(name), digit.repeat(32).as_bytes()).unwrap();
    }
    // It keeps the key in a file, and wraps it as the name of that file: as a server for keys does.
    let script = "#!/bin/sh\nif [ \"$1\" = wrap ]; then cat > kept.secret; printf kept.secret; \
                  else cat \"$(cat)\"; fi\n";
    std::fs::write(session.path("kms"), script).unwrap();
    let executable = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(session.path("kms"), executable).unwrap();
    subject.save("file.firn", &["--key-file", "one.key"]);
    subject.save("command.firn", &["--key-command", "./kms"]);
    let suspend = ["suspend", "web", "-o", "both.firn", "--key-file", "two.key"];
    session.firn(&[&suspend[..], &["--key-command", "./kms"]].concat()).succeeds();
    subject.shows_nothing();
    session.firn(&["restore", "file.firn", "--key-file", "two.key"]).fails(5, LOCKED);
    session.firn(&["restore", "file.firn", "--key-command", "./kms"]).fails(5, LOCKED);
    subject.restores_exactly("file.firn", &["--key-file", "one.key"]);
    subject.restores_exactly("both.firn", &["--key-file", "two.key"]);
    // The command has kept the last key: that of another image.
    session
        .firn(&["restore", "command.firn", "--key-command", "./kms"])
        .fails(5, "that of another image");
    subject.restores_exactly("both.firn", &["--key-command", "./kms"]);
    session
        .firn(&["restore", "both.firn", "--key-command", "echo denied-by-kms >&2; false"])
        .fails(5, "failed (exit status: 1): denied-by-kms");
}

#[test]
fn each_image_of_a_chain_has_a_key_of_its_own() {
    let mut subject = Subject::run();
    let (one, two) = (subject.make_identity("one"), subject.make_identity("two"));
    subject.save("base.firn", &["--recipient", &one]);
    subject.memory[5 * PAGE..5 * PAGE + 5].copy_from_slice(b"later");
    write_ram(subject.pid("web"), QUIET.start + 5 * PAGE, b"later");
    let session = &subject.session;
    let save = ["checkpoint", "web", "-o", "web.firn", "--parent", "base.firn"];
    session.firn(&save).fails(5, LOCKED);
    let with_key = [&save[..], &["--identity", "one.age"]].concat();
    session.firn(&with_key).fails(2, "it is sealed, and the image is not to be");
    session.firn(&[&with_key[..], &["--recipient", &two]].concat()).succeeds();
    subject.shows_nothing();
    subject.stop("web");
    session.firn(&["restore", "web.firn", "--identity", "two.age"]).fails(5, LOCKED);
    session.firn(&["restore", "web.firn", "--identity", "one.age"]).fails(5, LOCKED);
    let both = ["--identity", "one.age", "--identity", "two.age"];
    subject.restores_exactly("web.firn", &both);
    // Without its key, an image still protects those that it builds on.
    session.firn(&["image", "rm", "base.firn", "--identity", "one.age"]).fails(5, "builds on it");
    session.firn(&[&["image", "merge", "web.firn"][..], &both].concat()).succeeds();
    session.firn(&["image", "rm", "base.firn", "--identity", "one.age"]).succeeds();
    subject.restores_exactly("web.firn", &["--identity", "two.age"]);
    subject.shows_nothing();
}

#[test]
fn changed_and_exchanged_images_are_refused() {
    let subject = Subject::run();
    let me = subject.make_identity("me");
    subject.save("web.firn", &["--recipient", &me]);
    subject.save("other.firn", &["--recipient", &me]);
    subject.stop("web");
    let (session, key) = (&subject.session, ["--identity", "me.age"]);
    let good = std::fs::read(session.path("web.firn")).unwrap();
    let other = std::fs::read(session.path("other.firn")).unwrap();
    let try_with = |bytes: &[u8], code: i32| {
        std::fs::write(session.path("bad.firn"), bytes).unwrap();
        let verified = session.firn(&[&["image", "verify", "bad.firn"][..], &key].concat());
        assert_eq!(verified.code, code, "{}{}", verified.out, verified.err);
    };
    try_with(&good, 0);
    let len = good.len();
    for at in [9, 30, 5000, len / 2, len - 4000, len - 900, len - 20] {
        let mut bad = good.clone();
        bad[at] ^= 1;
        try_with(&bad, 6);
    }
    for len in [0, 4096, len / 2, len - 1] {
        try_with(&good[..len], 6);
    }
    // A memory block of the other image, in the same position.
    let mut mixed = good.clone();
    mixed[4096..4096 + 65536].copy_from_slice(&other[4096..4096 + 65536]);
    try_with(&mixed, 6);
    let restored =
        session.firn(&["restore", "bad.firn", "--identity", "me.age", "--mode", "eager"]);
    assert_eq!(restored.code, 6, "{}", restored.err);
}

/// A lazy restore whose filler waits, with the file that keeps it waiting.
fn begin_lazy_restore(subject: &mut Subject) -> PathBuf {
    let filling = subject.session.path("filling");
    subject.session.arm(Some(&format!("restore.fill@3=WAIT:{}", text(&filling))));
    let restore = ["restore", "web.firn", "--name", "web", "--mode", "lazy"];
    subject.session.firn(&[&restore[..], &["--identity", "me.age"]].concat()).succeeds();
    subject.session.arm(None);
    eventually("memory is being loaded", PATIENCE, || filling.exists());
    filling
}

fn processes(subject: &Subject) -> [i64; 3] {
    let status = subject.session.status("web");
    ["supervisor_pid", "guard_pid", "watcher_pid"].map(|key| status[key].as_i64().unwrap())
}

#[test]
fn a_supervisor_that_is_killed_has_a_successor_with_the_key() {
    let mut subject = Subject::run();
    let me = subject.make_identity("me");
    subject.save("web.firn", &["--recipient", &me]);
    subject.stop("web");
    let filling = begin_lazy_restore(&mut subject);
    // The guards alone have the key now.
    std::fs::remove_file(subject.session.path("me.age")).unwrap();
    subject.shows_nothing();
    let [supervisor, guard, _] = processes(&subject);
    kill(supervisor);
    kill(guard);
    eventually("a successor", PATIENCE, || subject.session.status("web")["recoveries"] == 1);
    subject.session.firn(&["status", "web", "--watch"]).succeeds();
    subject.is_exact("web");
    subject.shows_nothing();
    let _ = std::fs::remove_file(&filling);
}

/// The watcher leaves the guard a second. A command that comes meanwhile has no key.
#[test]
fn a_command_leaves_it_to_the_guards_to_start_a_supervisor() {
    let mut subject = Subject::run();
    let me = subject.make_identity("me");
    subject.save("web.firn", &["--recipient", &me]);
    subject.stop("web");
    let filling = begin_lazy_restore(&mut subject);
    let [supervisor, guard, _] = processes(&subject);
    signal(guard, Signal::STOP);
    kill(supervisor);
    eventually("a successor", PATIENCE, || subject.session.status("web")["recoveries"] == 1);
    kill(guard);
    subject.session.firn(&["status", "web", "--watch"]).succeeds();
    subject.is_exact("web");
    let _ = std::fs::remove_file(&filling);
}

#[test]
fn a_guest_whose_key_is_lost_waits_until_it_is_given_again() {
    let mut subject = Subject::run();
    let me = subject.make_identity("me");
    subject.save("web.firn", &["--recipient", &me]);
    subject.stop("web");
    let filling = begin_lazy_restore(&mut subject);
    let [supervisor, guard, watcher] = processes(&subject);
    // It would start other guards.
    signal(supervisor, Signal::STOP);
    [guard, watcher, supervisor].into_iter().for_each(kill);
    let _ = std::fs::remove_file(&filling);
    let session = &subject.session;
    eventually("the missing key is reported", PATIENCE, || {
        let status = session.status("web");
        status["progress"]["waiting"]["error"].as_str().is_some_and(|it| it.contains(LOCKED))
            || status["waiting"]["error"].as_str().is_some_and(|it| it.contains(LOCKED))
    });
    session.firn(&["unlock", "web"]).fails(5, LOCKED);
    std::fs::rename(session.path("web.firn"), session.path("away.firn")).unwrap();
    let missing = session.firn(&["unlock", "web", "--identity", "me.age"]);
    assert!(missing.code != 0 && missing.err.contains("web.firn"), "{}", missing.err);
    assert_eq!(missing.out, "");
    std::fs::rename(session.path("away.firn"), session.path("web.firn")).unwrap();
    session.firn(&["unlock", "web", "--identity", "me.age"]).succeeds();
    session.firn(&["status", "web", "--watch"]).succeeds();
    subject.is_exact("web");
    session.firn(&["unlock", "web", "--identity", "me.age"]).fails(5, "is not being restored");
}

#[test]
fn a_successor_accepts_no_other_image_in_place_of_its_own() {
    let mut subject = Subject::run();
    let (me, other) = (subject.make_identity("me"), subject.make_identity("other"));
    subject.save("web.firn", &["--recipient", &me]);
    subject.save("foreign.firn", &["--recipient", &other]);
    subject.save("clear.firn", &[]);
    subject.stop("web");
    let filling = begin_lazy_restore(&mut subject);
    let session = &subject.session;
    let rename = |from, to| std::fs::rename(session.path(from), session.path(to)).unwrap();
    rename("web.firn", "mine.firn");
    rename("foreign.firn", "web.firn");
    let [supervisor, guard, watcher] = processes(&subject);
    signal(supervisor, Signal::STOP);
    [guard, watcher, supervisor].into_iter().for_each(kill);
    let _ = std::fs::remove_file(&filling);
    const OTHER: &str = "is not the image it was when the restore began";
    eventually("a successor", PATIENCE, || session.status("web")["recoveries"] == 1);
    session.firn(&["unlock", "web", "--identity", "other.age"]).fails(5, OTHER);
    rename("clear.firn", "web.firn");
    session.firn(&["unlock", "web", "--identity", "me.age"]).fails(5, OTHER);
    rename("mine.firn", "web.firn");
    session.firn(&["unlock", "web", "--identity", "me.age"]).succeeds();
    session.firn(&["status", "web", "--watch"]).succeeds();
    subject.is_exact("web");
}

#[test]
fn clones_share_the_memory_of_a_sealed_image() {
    let subject = Subject::run();
    let me = subject.make_identity("me");
    subject.save("web.firn", &["--recipient", &me]);
    let session = &subject.session;
    session
        .firn(&[
            "fork",
            "web",
            "--count",
            "1",
            "--name",
            "twin",
            "-o",
            "fork.firn",
            "--wait",
            "--recipient",
            &me,
        ])
        .succeeds();
    subject.is_exact("twin");
    session.firn(&["image", "verify", "fork.firn", "--identity", "me.age"]).succeeds();
    subject.stop("web");
    let clones = ["restore", "web.firn", "--count", "2", "--wait"];
    session.firn(&clones).fails(5, LOCKED);
    session.firn(&[&clones[..], &["--identity", "me.age"]].concat()).succeeds();
    ["web-1", "web-2"].into_iter().for_each(|name| subject.is_exact(name));
    subject.shows_nothing();
}

#[test]
fn an_image_in_a_store_stays_sealed() {
    let subject = Subject::run();
    let (one, two) = (subject.make_identity("one"), subject.make_identity("two"));
    subject.save("base.firn", &["--recipient", &one]);
    let key = ["--identity", "one.age"];
    let session = &subject.session;
    let save =
        ["checkpoint", "web", "-o", "web.firn", "--parent", "base.firn", "--recipient", &two];
    session.firn(&[&save[..], &key].concat()).succeeds();
    subject.stop("web");
    let Some(server) = ObjectServer::start(session) else { return };
    // No key is needed to copy it, in both directions.
    server.firn(&["image", "push", "web.firn", "s3://vms/web.firn", "--chain"]).succeeds();
    assert_eq!(server.list(), ["base.firn", "web.firn"]);
    std::fs::create_dir(session.path("pulled")).unwrap();
    server.firn(&["image", "pull", "s3://vms/web.firn", "pulled/web.firn"]).succeeds();
    for name in ["web.firn", "base.firn"] {
        let pulled = std::fs::read(session.path("pulled").join(name)).unwrap();
        assert!(pulled == std::fs::read(session.path(name)).unwrap(), "{name}");
    }
    let damaged = std::fs::File::options().write(true).open(server.object("base.firn")).unwrap();
    let pull = ["image", "pull", "s3://vms/base.firn", "damaged.firn"];
    let byte = std::fs::read(server.object("base.firn")).unwrap()[9000];
    damaged.write_all_at(&[byte ^ 1], 9000).unwrap();
    let refused = server.firn(&pull);
    assert_eq!(refused.code, 6, "{}", refused.err);
    assert!(!session.path("damaged.firn").exists());
    damaged.write_all_at(&[byte], 9000).unwrap();
    let restore = ["restore", "s3://vms/web.firn", "--name", "web", "--wait"];
    server.firn(&restore).fails(5, LOCKED);
    let keys = ["--identity", "one.age", "--identity", "two.age"];
    server.firn(&[&restore[..], &keys].concat()).succeeds();
    subject.is_exact("web");
    subject.shows_nothing();
}

#[test]
fn a_series_seals_each_image() {
    let subject = Subject::run();
    let me = subject.make_identity("me");
    let session = &subject.session;
    let series = ["checkpoint", "web", "-o", "s.firn", "--every", "100ms", "--keep", "2"];
    session.firn(&[&series[..], &["--times", "4", "--recipient", &me]].concat()).succeeds();
    assert_eq!(session.files("s-"), ["s-000003.firn", "s-000004.firn"]);
    subject.stop("web");
    subject.restores_exactly("s-000004.firn", &["--identity", "me.age"]);
    subject.restores_exactly("s-000003.firn", &["--identity", "me.age"]);
}

#[test]
fn disks_in_clear_need_the_users_word() {
    let vm = Vm::with_base(true);
    vm.session.firn(&["restore", "base.firn", "--name", "web", "--wait"]).succeeds();
    firn_files::replace_private(&vm.session.path("k"), "1f".repeat(32).as_bytes()).unwrap();
    let save = ["checkpoint", "web", "-o", "web.firn", "--key-file", "k"];
    let refused = vm.session.firn(&save).fails(5, "would not be encrypted");
    assert!(refused.err.contains("--disks-in-clear"), "{}", refused.err);
    assert!(!vm.image("web.firn").exists());
    vm.session.firn(&[&save[..], &["--disks-in-clear"]].concat()).succeeds();
    vm.session.firn(&["image", "verify", "web.firn", "--key-file", "k"]).succeeds();
    vm.is_well();
}
