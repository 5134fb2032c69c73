//! Images in object storage: whole or not there, pulled exactly or not at all, whatever breaks.

use std::fs;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use firn_image::{
    BlockOrganization, Codec, CompressedBlock, Geometry, Image, ImageDraft, ImageSections,
    ImageWriter, LocalityBlockPacker, block_checksum, compress_block,
};
use firn_types::{Block, RegionMap};
use serde_json::json;

use crate::faults::base;
use crate::object_server::{ObjectServer, SECRET};
use crate::session::{Answer, Session, eventually, text};

const PATIENCE: Duration = Duration::from_secs(120);
const WEB: &str = "s3://vms/web.firn";

/// Writes an image without a VM: `mib` of memory that does not compress, on a parent or on none.
pub fn write_image(path: &Path, mib: u32, seed: u64, parent: Option<&Path>) {
    let geometry = Geometry::new(48 * 256);
    let parent = parent.map(|path| Image::open(path).unwrap());
    let draft = ImageDraft {
        parent: parent.as_ref(),
        ..ImageDraft::whole_image(geometry, BlockOrganization::Access)
    };
    let mut writer = ImageWriter::create(path, &draft).unwrap();
    let mut packer = LocalityBlockPacker::new(geometry);
    let size = geometry.block_size.byte_count();
    let word = |at: u64| block_checksum(&(seed ^ (at << 20)).to_le_bytes()).to_le_bytes();
    for block in 0..(mib << 20) / size as u32 {
        let first = u64::from(block) << 12;
        let bytes: Vec<u8> = (0..size as u64 / 8).flat_map(|at| word(first + at)).collect();
        if let CompressedBlock::Packed(packed) = compress_block(Codec::None, Block(block), &bytes)
            && let Some(full) = packer.push_block(packed)
        {
            writer.append(full).unwrap();
        }
    }
    if let Some(rest) = packer.take_filled() {
        writer.append(rest).unwrap();
    }
    let sections = ImageSections {
        meta: json!({ "version": 1, "name": "web" }),
        regions: RegionMap::lay_out([("ram", geometry.flat_bytes())]).unwrap(),
        ..ImageSections::default()
    };
    writer.finish(sections).unwrap();
}

pub fn session_with_image(mib: u32) -> Session {
    let session = Session::new();
    write_image(&session.path("web.firn"), mib, 1, None);
    session
}

#[track_caller]
pub fn is_same(a: &Path, b: &Path) {
    assert!(fs::read(a).unwrap() == fs::read(b).unwrap(), "{} {}", a.display(), b.display());
}

pub fn push(server: &ObjectServer<'_>) -> Answer {
    server.firn(&["image", "push", "web.firn", WEB])
}

pub fn pull(server: &ObjectServer<'_>) -> Answer {
    server.firn(&["image", "pull", WEB, "pulled.firn"])
}

/// A pull failed: nothing has the name of the image, and nothing else is left.
#[track_caller]
pub fn left_nothing(session: &Session) {
    assert_eq!(session.files("pulled"), Vec::<String>::new());
    assert_eq!(session.files(".pulled"), Vec::<String>::new());
}

#[test]
fn a_guest_runs_from_an_image_that_was_pushed_and_pulled() {
    let vm = base();
    let Some(server) = ObjectServer::start(&vm.session) else { return };
    let pushed = server.json(&["image", "push", "base.firn", "s3://vms/a/b/base.firn"]);
    assert_eq!(pushed["files"][0]["was_there"], false, "{pushed}");
    let listed = server.json(&["image", "ls", "s3://vms/a/b"]);
    assert_eq!((&listed[0]["vm"], &listed[1]), (&json!("web"), &json!(null)), "{listed}");
    assert_eq!(listed[0]["identity"], pushed["files"][0]["identity"]);
    server.firn(&["image", "pull", "s3://vms/a/b/base.firn", "pulled.firn"]).succeeds();
    is_same(&vm.image("base.firn"), &vm.image("pulled.firn"));
    vm.session.firn(&["restore", "pulled.firn", "--name", "web", "--wait"]).succeeds();
    vm.is_well();
    vm.session.firn(&["stop", "web", "--discard"]).succeeds();
}

#[test]
fn a_chain_has_its_parents_in_the_store() {
    let session = Session::new();
    let path = |name: &str| session.path(name);
    write_image(&path("base.firn"), 20, 1, None);
    write_image(&path("web-1.firn"), 2, 2, Some(&path("base.firn")));
    write_image(&path("web-2.firn"), 1, 3, Some(&path("web-1.firn")));
    let Some(server) = ObjectServer::start(&session) else { return };
    let alone = ["image", "push", "web-2.firn", "s3://vms/web-2.firn"];
    server.firn(&alone).fails(2, "not in the store");
    assert_eq!(server.list(), Vec::<String>::new());
    let files = server.json(&[&alone[..], &["--chain"]].concat())["files"].clone();
    let was_there = |files: &serde_json::Value| {
        let of = |file: &serde_json::Value| file["was_there"].as_bool().unwrap();
        files.as_array().unwrap().iter().map(of).collect::<Vec<_>>()
    };
    assert_eq!(was_there(&files), [false; 3], "{files}");
    assert_eq!(server.list(), ["base.firn", "web-1.firn", "web-2.firn"]);
    // Now the parents are there, so the image alone is enough.
    server.firn(&["image", "rm", "s3://vms/web-2.firn"]).succeeds();
    server.firn(&alone).succeeds();
    let again = server.json(&[&alone[..], &["--chain"]].concat())["files"].clone();
    assert_eq!(was_there(&again), [true; 3], "{again}");
    fs::create_dir(path("there")).unwrap();
    let pull = ["image", "pull", "s3://vms/web-2.firn", "there/web-2.firn"];
    let pulled = server.json(&pull)["files"].clone();
    assert_eq!(was_there(&pulled), [false; 3], "{pulled}");
    for name in ["base.firn", "web-1.firn", "web-2.firn"] {
        is_same(&path(name), &path("there").join(name));
    }
    session.firn(&["image", "verify", "there/web-2.firn"]).succeeds();
    let pulled = server.json(&pull)["files"].clone();
    assert_eq!(was_there(&pulled), [false, true, true], "{pulled}");
    // A parent that another image has as its parent stays.
    server.firn(&["image", "rm", "s3://vms/web-1.firn"]).fails(5, "web-2.firn builds on it");
    server.firn(&["image", "rm", "s3://vms/web-1.firn", "--force"]).succeeds();
    server.firn(&pull).fails(1, "there is no object s3://vms/web-1.firn");
}

#[test]
fn a_parent_that_is_another_image_is_not_used() {
    let session = Session::new();
    let path = |name: &str| session.path(name);
    write_image(&path("base.firn"), 1, 1, None);
    write_image(&path("web.firn"), 1, 2, Some(&path("base.firn")));
    write_image(&path("other.firn"), 1, 3, None);
    let Some(server) = ObjectServer::start(&session) else { return };
    server.firn(&["image", "push", "other.firn", "s3://vms/base.firn"]).succeeds();
    push(&server).fails(5, "is not the image that");
    let chain = ["image", "push", "web.firn", WEB, "--chain", "--force"];
    server.firn(&chain).fails(4, "s3://vms/base.firn exists already");
    assert_eq!(server.list(), ["base.firn"]);
    // The same on this host.
    server.firn(&["image", "rm", "s3://vms/base.firn"]).succeeds();
    server.firn(&["image", "push", "web.firn", WEB, "--chain"]).succeeds();
    fs::create_dir(path("there")).unwrap();
    fs::copy(path("other.firn"), path("there/base.firn")).unwrap();
    let pull = ["image", "pull", WEB, "there/web.firn"];
    server.firn(&pull).fails(5, "there/base.firn is not the image that");
    is_same(&path("other.firn"), &path("there/base.firn"));
    assert!(!path("there/web.firn").exists());
}

#[test]
fn an_image_is_replaced_on_purpose_only() {
    let session = session_with_image(9);
    write_image(&session.path("other.firn"), 10, 2, None);
    let Some(server) = ObjectServer::start(&session) else { return };
    push(&server).succeeds();
    let other = ["image", "push", "other.firn", WEB];
    server.firn(&other).fails(4, "exists already");
    is_same(&session.path("web.firn"), &server.object("web.firn"));
    server.firn(&[&other[..], &["--force"]].concat()).succeeds();
    is_same(&session.path("other.firn"), &server.object("web.firn"));
    assert_eq!(server.leftovers(), Vec::<String>::new());
}

/// The first has uploaded all its parts when the second one begins.
#[test]
fn of_two_pushes_to_one_name_one_succeeds() {
    let session = session_with_image(20);
    write_image(&session.path("other.firn"), 10, 2, None);
    let Some(server) = ObjectServer::start(&session) else { return };
    let flag = session.path("flag");
    let mut first = server.command(&["image", "push", "web.firn", WEB]);
    first.env("FIRN_FAULT", format!("store.complete=WAIT:{}", text(&flag)));
    let first = first.stderr(std::process::Stdio::piped()).spawn().unwrap();
    eventually("all parts are there", PATIENCE, || flag.exists());
    // The upload of a process that runs is not aborted.
    server.firn(&["image", "push", "other.firn", WEB]).succeeds();
    fs::remove_file(&flag).unwrap();
    Answer::of(first.wait_with_output().unwrap()).fails(4, "exists already");
    is_same(&session.path("other.firn"), &server.object("web.firn"));
    assert_eq!(server.leftovers(), Vec::<String>::new());
}

#[test]
fn killed_at_any_point_a_push_leaves_no_half_image() {
    let session = session_with_image(40);
    let Some(server) = ObjectServer::start(&session) else { return };
    let parts = (1..=6).map(|number| format!("store.part@{number}"));
    for point in ["store.begun", "store.complete"].map(str::to_owned).into_iter().chain(parts) {
        let killed = server.firn_with_fault(&point, &["image", "push", "web.firn", WEB]);
        killed.fails(1, "firn-store was ended by signal 9");
        assert_eq!(server.list(), Vec::<String>::new(), "{point}");
        assert!(!server.leftovers().is_empty(), "{point}");
    }
    // The next push removes what they left.
    push(&server).succeeds();
    assert_eq!(server.leftovers(), Vec::<String>::new());
    is_same(&session.path("web.firn"), &server.object("web.firn"));
    server.firn(&["image", "rm", WEB]).succeeds();
    // So does `rm`. An image whose push was killed after its last step is whole.
    server.firn_with_fault("store.part@2", &["image", "push", "web.firn", WEB]);
    let removed = server.json(&["image", "rm", WEB]);
    assert_eq!(removed[0], json!({ "location": WEB, "was_there": false, "aborted_uploads": 1 }));
    assert_eq!(server.leftovers(), Vec::<String>::new());
    server.firn_with_fault("store.completed", &["image", "push", "web.firn", WEB]);
    is_same(&session.path("web.firn"), &server.object("web.firn"));
    assert_eq!(server.json(&["image", "push", "web.firn", WEB])["files"][0]["was_there"], true);
}

/// How often random tests of a push cut it off.
pub fn push_kills() -> u32 {
    let count = std::env::var("FIRN_RUNS").ok().and_then(|runs| runs.parse().ok());
    count.unwrap_or(12).max(2)
}

/// SIGKILL at times that no fault point chooses.
#[test]
fn killed_at_random_times_a_push_leaves_no_half_image() {
    let session = session_with_image(40);
    let Some(server) = ObjectServer::start(&session) else { return };
    let begun = Instant::now();
    push(&server).succeeds();
    let whole = begun.elapsed();
    let count: u32 = push_kills();
    for step in 0..count {
        server.firn(&["image", "rm", WEB]).succeeds();
        let mut child = server.command(&["image", "push", "web.firn", WEB]).spawn().unwrap();
        std::thread::sleep(whole * step / (count - 1));
        let _ = child.kill();
        child.wait().unwrap();
        match server.list().as_slice() {
            [] => assert!(!server.object("web.firn").exists()),
            _ => is_same(&session.path("web.firn"), &server.object("web.firn")),
        }
        push(&server).succeeds();
        is_same(&session.path("web.firn"), &server.object("web.firn"));
    }
}

#[test]
fn a_store_that_dies_in_a_push_has_no_half_image() {
    let session = session_with_image(40);
    let Some(mut server) = ObjectServer::start(&session) else { return };
    let flag = session.path("flag");
    let mut pushing = server.command(&["image", "push", "web.firn", WEB]);
    pushing.env("FIRN_FAULT", format!("store.part@5=WAIT:{}", text(&flag)));
    let pushing = pushing.stderr(std::process::Stdio::piped()).spawn().unwrap();
    eventually("some parts are there", PATIENCE, || flag.exists());
    server.kill();
    fs::remove_file(&flag).unwrap();
    let answer = Answer::of(pushing.wait_with_output().unwrap());
    answer.fails(1, "Connection refused");
    server.restart();
    assert_eq!(server.list(), Vec::<String>::new());
    push(&server).succeeds();
    is_same(&session.path("web.firn"), &server.object("web.firn"));
    assert_eq!(server.leftovers(), Vec::<String>::new());
}

#[test]
fn a_store_that_comes_back_is_waited_for() {
    let session = session_with_image(40);
    let Some(mut server) = ObjectServer::start(&session) else { return };
    push(&server).succeeds();
    server.kill();
    let pulling = server.command(&["image", "pull", WEB, "pulled.firn"]).spawn().unwrap();
    std::thread::sleep(Duration::from_secs(2));
    server.restart();
    Answer::of(pulling.wait_with_output().unwrap()).succeeds();
    is_same(&session.path("web.firn"), &session.path("pulled.firn"));
}

#[test]
fn a_store_that_is_away_is_an_error_after_bounded_time() {
    let session = session_with_image(1);
    let Some(mut server) = ObjectServer::start(&session) else { return };
    server.kill();
    let begun = Instant::now();
    let answer = pull(&server).fails(1, "Connection refused");
    assert!(answer.err.contains("try: run the command again"), "{}", answer.err);
    assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", begun.elapsed());
    left_nothing(&session);
}

#[test]
fn wrong_bytes_in_the_store_are_never_pulled() {
    let session = session_with_image(1);
    let Some(server) = ObjectServer::start(&session) else { return };
    push(&server).succeeds();
    let object =
        fs::File::options().read(true).write(true).open(server.object("web.firn")).unwrap();
    let len = object.metadata().unwrap().len();
    // In each part of the file: header, memory, sections, footer.
    let ends = [0, 100, 4095, len - 1, len - 500, len - 1023, len - 1100];
    for at in ends.into_iter().chain((1..24).map(|number| number * (len / 24))) {
        let mut byte = [0];
        object.read_exact_at(&mut byte, at).unwrap();
        object.write_all_at(&[!byte[0]], at).unwrap();
        let answer = pull(&server);
        assert_eq!(answer.code, 6, "byte {at} of {len}: {}{}", answer.out, answer.err);
        left_nothing(&session);
        object.write_all_at(&byte, at).unwrap();
    }
    pull(&server).succeeds();
    is_same(&session.path("web.firn"), &session.path("pulled.firn"));
}

#[test]
fn an_object_that_is_cut_off_is_never_pulled() {
    let session = session_with_image(1);
    let Some(server) = ObjectServer::start(&session) else { return };
    push(&server).succeeds();
    let good = fs::read(server.object("web.firn")).unwrap();
    for part in 0..50 {
        let len = good.len() * part / 50;
        fs::write(server.object("web.firn"), &good[..len]).unwrap();
        let answer = pull(&server);
        assert_ne!(answer.code, 0, "{len} bytes");
        assert!(answer.err.contains(WEB), "{len} bytes: {}", answer.err);
        left_nothing(&session);
    }
}

#[test]
fn an_older_image_stays_until_the_new_one_is_verified() {
    let session = session_with_image(1);
    write_image(&session.path("pulled.firn"), 1, 7, None);
    let old = fs::read(session.path("pulled.firn")).unwrap();
    let Some(server) = ObjectServer::start(&session) else { return };
    push(&server).succeeds();
    let mut bad = fs::read(server.object("web.firn")).unwrap();
    bad[300_000] ^= 1;
    fs::write(server.object("web.firn"), bad).unwrap();
    let answer = pull(&server).fails(6, "is damaged: 1 problems");
    assert!(answer.err.contains("memory block"), "{}", answer.err);
    assert!(fs::read(session.path("pulled.firn")).unwrap() == old);
}

#[test]
fn a_damaged_object_is_replaced_by_a_good_copy() {
    let session = session_with_image(1);
    let Some(server) = ObjectServer::start(&session) else { return };
    push(&server).succeeds();
    let mut bad = fs::read(server.object("web.firn")).unwrap();
    bad[300_000] ^= 1;
    fs::write(server.object("web.firn"), bad).unwrap();
    let answer = pull(&server).fails(6, "is damaged: 1 problems");
    assert!(answer.err.contains("push the image again with --force"), "{}", answer.err);
    server.firn(&["image", "push", "web.firn", WEB, "--force"]).succeeds();
    pull(&server).succeeds();
}

#[test]
fn a_damaged_image_is_not_pushed() {
    let session = session_with_image(1);
    let Some(server) = ObjectServer::start(&session) else { return };
    let mut bad = fs::read(session.path("web.firn")).unwrap();
    bad[300_000] ^= 1;
    fs::write(session.path("web.firn"), bad).unwrap();
    push(&server).fails(6, "is damaged: 1 problems");
    assert_eq!(server.list(), Vec::<String>::new());
    assert_eq!(server.leftovers(), Vec::<String>::new());
}

#[test]
fn a_full_disk_leaves_nothing_of_a_pull() {
    let session = session_with_image(40);
    let Some(server) = ObjectServer::start(&session) else { return };
    push(&server).succeeds();
    for fault in ["image.create=ENOSPC", "image.write@3=ENOSPC", "image.sync=ENOSPC"] {
        let args = ["image", "pull", WEB, "pulled.firn"];
        server.firn_with_fault(fault, &args).fails(1, "No space left on device");
        left_nothing(&session);
    }
    for point in ["image.write@3", "image.rename"] {
        server.firn_with_fault(point, &["image", "pull", WEB, "pulled.firn"]);
        assert!(!session.path("pulled.firn").exists(), "{point}");
    }
    pull(&server).succeeds();
    is_same(&session.path("web.firn"), &session.path("pulled.firn"));
    assert_eq!(session.files(".pulled"), Vec::<String>::new());
}

#[test]
fn without_its_program_there_is_no_object_storage() {
    let session = session_with_image(1);
    let alone = session.path("firn");
    fs::copy(crate::session::program(), &alone).unwrap();
    let mut command = std::process::Command::new(&alone);
    let command = command.args(["image", "push", "web.firn", WEB]).current_dir(session.path(""));
    let answer = Answer::of(command.output().unwrap()).fails(7, "there is no ");
    assert!(answer.err.contains("firn-store") && answer.err.contains("make install"));
}

#[test]
fn credentials_are_needed_and_never_printed() {
    let session = session_with_image(1);
    let Some(server) = ObjectServer::start(&session) else { return };
    let with = |name: &str, value: Option<&str>, args: &[&str]| {
        let mut command = server.command(args);
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
        let answer = Answer::of(command.output().unwrap());
        let shown = format!("{}{}", answer.out, answer.err);
        assert!(!shown.contains(SECRET) && !shown.contains("hush"), "{shown}");
        answer
    };
    let push = ["image", "push", "web.firn", WEB];
    for args in [&push[..], &["image", "ls", "s3://vms"], &["image", "pull", WEB, "x.firn"]] {
        with("AWS_SECRET_ACCESS_KEY", Some("hush-wrong"), args).fails(7, "denied access");
        with("AWS_ACCESS_KEY_ID", Some("ANOTHERKEY"), args).fails(7, "denied access");
        with("AWS_ACCESS_KEY_ID", None, args).fails(7, "AWS_ACCESS_KEY_ID is not");
    }
    let location = "https://me:hush@host/web.firn";
    with("FIRN_LOG", Some("trace"), &["image", "pull", location, "x.firn"])
        .fails(2, "a location has no user and no password");
    with("FIRN_LOG", Some("trace"), &["image", "ls", location]).fails(2, "no password");
    assert_eq!(server.list(), Vec::<String>::new());
}

#[test]
fn a_signature_goes_with_its_image() {
    let session = session_with_image(1);
    let Some(server) = ObjectServer::start(&session) else { return };
    fs::write(session.path("web.firn.sig"), "a signature").unwrap();
    assert_eq!(server.json(&["image", "push", "web.firn", WEB])["files"][0]["signed"], true);
    let pulled = server.json(&["image", "pull", WEB, "pulled.firn"]);
    assert_eq!(pulled["files"][0]["signed"], true);
    is_same(&session.path("web.firn.sig"), &session.path("pulled.firn.sig"));
    // That of an image which is replaced is not the new one's.
    fs::remove_file(session.path("web.firn.sig")).unwrap();
    write_image(&session.path("web.firn"), 1, 9, None);
    server.firn(&["image", "push", "web.firn", WEB, "--force"]).succeeds();
    assert!(!server.object("web.firn.sig").exists());
    server.firn(&["image", "rm", WEB]).succeeds();
    assert!(!server.object("web.firn").exists());
}

#[test]
fn a_web_server_is_read_and_never_written() {
    let session = session_with_image(20);
    let Some(server) = ObjectServer::start(&session) else { return };
    push(&server).succeeds();
    let open = server.start_open();
    let location = format!("http://{}/vms/web.firn", open.address());
    server.firn(&["image", "pull", &location, "pulled.firn"]).succeeds();
    is_same(&session.path("web.firn"), &session.path("pulled.firn"));
    server.firn(&["image", "push", "web.firn", &location, "--force"]).fails(2, "only be read");
    let missing = location.replace("web.firn", "none.firn");
    server.firn(&["image", "pull", &missing, "none.firn"]).fails(1, "there is no object");
}

#[test]
fn what_is_not_there_or_no_image_is_named() {
    let session = session_with_image(1);
    let Some(server) = ObjectServer::start(&session) else { return };
    pull(&server).fails(1, "there is no object s3://vms/web.firn");
    server.firn(&["image", "rm", WEB]).fails(1, "there is no object");
    server
        .firn(&["image", "push", "web.firn", "s3://none/web.firn"])
        .fails(1, "there is no bucket");
    server.firn(&["image", "push", "web.firn", "s3://vms"]).fails(2, "names no object");
    server.firn(&["image", "push", "web.firn", "gs://vms/web.firn"]).fails(2, "no access to gs");
    fs::write(server.object("web.firn"), "no image").unwrap();
    pull(&server).fails(6, "too few for an image");
    push(&server).fails(4, "exists already");
    let listed = server.json(&["image", "ls", "s3://vms"]);
    assert!(listed[0]["problem"].as_str().unwrap().contains("too few"), "{listed}");
    server.firn(&["image", "rm", WEB]).fails(6, "too few");
    server.firn(&["image", "rm", WEB, "--force"]).succeeds();
    left_nothing(&session);
}

#[test]
fn verbs_that_need_a_file_say_so() {
    let session = session_with_image(1);
    let hint = |answer: Answer, verb: &str| {
        let answer = answer.fails(2, "object storage");
        assert!(answer.err.contains(&format!("firn image {verb}")), "{}", answer.err);
    };
    hint(session.firn(&["image", "verify", WEB]), "pull");
    session.firn(&["image", "rm", "web.firn", WEB]).fails(2, "one command");
    session.firn(&["image", "rm", "web.firn", "--force"]).fails(2, "one command");
    assert!(session.path("web.firn").exists());
}
