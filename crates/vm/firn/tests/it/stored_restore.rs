//! Images that are restored from object storage: exact, waiting or refused, whatever breaks.

use std::fs;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use firn_cache::{
    CacheConnection, CacheReply, CacheRequest, ObjectName, StoreEnvironment, map_path,
};
use firn_image::{
    BlockOrganization, HEADER_BYTES, Image, ListedWorkingSet, LocalityBlockId, ReorderOptions,
    reorder_image,
};

use crate::faults::base;
use crate::fork::is_well;
use crate::object_server::ObjectServer;
use crate::objects::write_image;
use crate::session::{Answer, Session, eventually, kill, text};
use crate::storage::waits;
use crate::vm::Vm;

const PATIENCE: Duration = Duration::from_secs(120);
const WEB: &str = "s3://vms/web.firn";
const MIB: u64 = 1 << 20;

/// A session with an image of 20 MiB in the store, and no VM.
fn session_with_object() -> Session {
    let session = Session::new();
    write_image(&session.path("web.firn"), 20, 1, None);
    session
}

fn push(server: &ObjectServer<'_>) {
    server.firn(&["image", "push", "web.firn", WEB]).succeeds();
}

/// The file of the cache for an image in the store.
fn open_with(
    server: &ObjectServer<'_>,
    location: &str,
    set: &[(&str, &str)],
) -> Result<PathBuf, String> {
    let mut command =
        server.command_of(&Session::program_beside("firn-store"), &["open", location]);
    command.envs(set.iter().copied());
    let answer = Answer::of(command.output().unwrap());
    let reply: serde_json::Value = serde_json::from_str(answer.out.trim()).unwrap();
    match reply["facts"]["image"].as_str() {
        Some(path) => Ok(path.into()),
        None => Err(reply["chain"].to_string()),
    }
}

fn open(server: &ObjectServer<'_>) -> PathBuf {
    open_with(server, WEB, &[]).unwrap()
}

/// Reads all bytes through the cache, and checks them.
fn verify(server: &ObjectServer<'_>, path: &Path) -> Answer {
    server.firn(&["image", "verify", text(path)])
}

/// The reason why bytes in the middle of an object can't be fetched.
fn read_fails(session: &Session, path: &Path, environment: StoreEnvironment) -> String {
    let name = ObjectName::read_from(&fs::File::open(map_path(path)).unwrap()).unwrap();
    let mut connection = CacheConnection::to_running(&session.cache()).unwrap();
    let opened =
        connection.request(&CacheRequest::Open { object: name.hash, environment }).unwrap();
    assert_eq!(opened, CacheReply::Done {});
    let read = CacheRequest::Read { offset: name.len / 2, len: 100, in_order: false };
    match connection.request(&read).unwrap() {
        CacheReply::Failed { message, .. } => message,
        reply => unreachable!("{reply:?}"),
    }
}

fn flip_bytes(path: &Path, at: u64) {
    let file = fs::File::options().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[!byte[0]], at).unwrap();
}

#[test]
fn what_was_fetched_is_not_fetched_again() {
    let session = session_with_object();
    let Some(server) = ObjectServer::start(&session) else { return };
    push(&server);
    let path = open(&server);
    let fetched = || session.cache_report().unwrap().fetched_bytes;
    assert!(fetched() < 6 * MIB, "{}", fetched());
    verify(&server, &path).succeeds();
    assert_eq!(fetched(), fs::metadata(server.object("web.firn")).unwrap().len());
    // Another process, and another one after the server was killed.
    assert_eq!(open(&server), path);
    verify(&server, &path).succeeds();
    std::thread::sleep(Duration::from_secs(2));
    session.kill_cache();
    assert_eq!(open(&server), path);
    verify(&server, &path).succeeds();
    assert_eq!(fetched(), 0);
    assert!(fs::read(&path).unwrap() == fs::read(session.path("web.firn")).unwrap());
}

#[test]
fn a_chain_shares_its_parents_in_the_cache() {
    let session = Session::new();
    let path = |name: &str| session.path(name);
    write_image(&path("base.firn"), 20, 1, None);
    write_image(&path("web-1.firn"), 2, 2, Some(&path("base.firn")));
    write_image(&path("web-2.firn"), 1, 3, Some(&path("base.firn")));
    let Some(server) = ObjectServer::start(&session) else { return };
    for name in ["web-1.firn", "web-2.firn"] {
        server.firn(&["image", "push", name, &format!("s3://vms/{name}"), "--chain"]).succeeds();
    }
    for name in ["web-1.firn", "web-2.firn"] {
        let opened = open_with(&server, &format!("s3://vms/{name}"), &[]).unwrap();
        server.firn(&["image", "verify", "--chain", text(&opened)]);
        verify(&server, &opened).succeeds();
    }
    assert_eq!(session.cache_report().unwrap().objects, 3);
    // A parent that is another image now is not used.
    server.firn(&["image", "push", "web-1.firn", "s3://vms/base.firn", "--force"]);
    write_image(&path("other.firn"), 1, 9, None);
    server.firn(&["image", "push", "other.firn", "s3://vms/base.firn", "--force"]).succeeds();
    let refused = open_with(&server, "s3://vms/web-2.firn", &[]).unwrap_err();
    assert!(refused.contains("is not the image that"), "{refused}");
}

#[test]
fn killed_at_any_point_the_cache_has_no_wrong_bytes() {
    let session = session_with_object();
    let Some(server) = ObjectServer::start(&session) else { return };
    push(&server);
    for point in ["cache.fetched", "cache.write", "cache.written", "cache.synced"] {
        for count in [1, 2, 5] {
            session.kill_cache();
            let _ = fs::remove_dir_all(session.path("cache"));
            let fault = format!("{point}@{count}");
            // The server may be killed while it makes the files; then nothing has their names.
            let path = match open_with(&server, WEB, &[("FIRN_FAULT", &fault)]) {
                Ok(path) => path,
                Err(error) => {
                    assert!(error.contains("cache"), "{fault}: {error}");
                    open(&server)
                }
            };
            verify(&server, &path).succeeds();
            std::thread::sleep(Duration::from_millis(1100));
            session.kill_cache();
            verify(&server, &path).succeeds();
            assert!(fs::read(&path).unwrap() == fs::read(session.path("web.firn")).unwrap());
        }
    }
}

#[test]
fn wrong_bytes_of_the_cache_are_fetched_again() {
    let session = session_with_object();
    let Some(server) = ObjectServer::start(&session) else { return };
    push(&server);
    let path = open(&server);
    verify(&server, &path).succeeds();
    let len = fs::metadata(&path).unwrap().len();
    for at in [HEADER_BYTES + 100, 7 * MIB, len - 500] {
        flip_bytes(&path, at);
        assert!(fs::read(&path).unwrap() != fs::read(session.path("web.firn")).unwrap());
        // The first reader finds it; a second attempt, or a second opening, has the right bytes.
        let first = open_with(&server, WEB, &[]).unwrap();
        let _ = verify(&server, &first);
        verify(&server, &open(&server)).succeeds();
        std::thread::sleep(Duration::from_secs(6));
    }
}

#[test]
fn wrong_bytes_in_the_store_are_an_error() {
    let session = session_with_object();
    let Some(server) = ObjectServer::start(&session) else { return };
    push(&server);
    let len = fs::metadata(server.object("web.firn")).unwrap().len();
    for at in [0, 5 * MIB, len - 500, len - 2000] {
        session.kill_cache();
        let _ = fs::remove_dir_all(session.path("cache"));
        flip_bytes(&server.object("web.firn"), at);
        match open_with(&server, WEB, &[]) {
            Ok(path) => _ = verify(&server, &path).fails(6, "is damaged"),
            Err(error) => assert!(error.contains(WEB), "{at}: {error}"),
        }
        flip_bytes(&server.object("web.firn"), at);
    }
}

#[test]
fn an_object_that_is_replaced_is_never_mixed_with_the_other() {
    let session = session_with_object();
    write_image(&session.path("other.firn"), 20, 2, None);
    let Some(server) = ObjectServer::start(&session) else { return };
    push(&server);
    let path = open(&server);
    server.firn(&["image", "push", "other.firn", WEB, "--force"]).succeeds();
    assert_ne!(verify(&server, &path).code, 0);
    let reason = read_fails(&session, &path, server.environment());
    assert!(reason.contains("was replaced"), "{reason}");
    let other = open(&server);
    assert_ne!(other, path);
    verify(&server, &other).succeeds();
    assert!(fs::read(&other).unwrap() == fs::read(session.path("other.firn")).unwrap());
}

#[test]
fn the_cache_is_bounded() {
    let session = session_with_object();
    let Some(server) = ObjectServer::start(&session) else { return };
    let open_named = |name: &str, size: &str| {
        let location = format!("s3://vms/{name}");
        open_with(&server, &location, &[("FIRN_STORE_CACHE_SIZE", size)]).unwrap()
    };
    let report = || session.cache_report().unwrap();
    for name in ["a.firn", "b.firn", "c.firn"] {
        server.firn(&["image", "push", "web.firn", &format!("s3://vms/{name}")]).succeeds();
        let path = open_named(name, "10M");
        verify(&server, &path).succeeds();
        assert!(report().cached_bytes <= 10 * MIB, "{:?}", report());
        assert!(path.exists());
        // What was used just before is not removed.
        std::thread::sleep(Duration::from_secs(4));
    }
    // The oldest is gone, with its image; what is larger than the cache is fetched all the same.
    assert!(report().objects < 3, "{:?}", report());
    let path = open_named("a.firn", "10M");
    verify(&server, &path).succeeds();
    assert!(report().cached_bytes <= 10 * MIB, "{:?}", report());
}

#[test]
fn a_full_disk_keeps_nothing_and_fetches_all() {
    let session = session_with_object();
    let Some(server) = ObjectServer::start(&session) else { return };
    push(&server);
    let path = open_with(&server, WEB, &[("FIRN_FAULT", "cache.write=ENOSPC")]).unwrap();
    verify(&server, &path).succeeds();
    let report = session.cache_report().unwrap();
    assert!(report.cached_bytes < MIB && report.fetched_bytes >= 20 * MIB, "{report:?}");
}

#[test]
fn credentials_are_needed_for_the_cache_too() {
    let session = session_with_object();
    let Some(server) = ObjectServer::start(&session) else { return };
    push(&server);
    let wrong = [("AWS_SECRET_ACCESS_KEY", "hush-wrong")];
    let refused = open_with(&server, WEB, &wrong).unwrap_err();
    assert!(refused.contains("denied access") && !refused.contains("hush"), "{refused}");
    let path = open(&server);
    let mut environment = server.environment();
    environment.insert("AWS_SECRET_ACCESS_KEY".to_owned(), "hush-wrong".to_owned());
    let reason = read_fails(&session, &path, environment);
    assert!(reason.contains("denied access") && !reason.contains("hush"), "{reason}");
    // The next process that has valid ones makes it work again.
    verify(&server, &path).succeeds();
    let log = fs::read_to_string(session.cache().log_file()).unwrap();
    assert!(!log.contains("hush") && !log.contains(crate::object_server::SECRET), "{log}");
}

/// A saved VM whose image is in the store.
pub fn stored_vm() -> Option<Vm> {
    let vm = base();
    let server = ObjectServer::start(&vm.session)?;
    server.firn(&["image", "push", "base.firn", WEB]).succeeds();
    drop(server);
    fs::rename(vm.image("base.firn"), vm.image("kept.firn")).unwrap();
    Some(vm)
}

pub fn stop(vm: &Vm) {
    vm.session.firn(&["stop", "web", "--discard"]).succeeds();
}

#[test]
fn a_guest_runs_from_the_store() {
    let Some(vm) = stored_vm() else { return };
    let server = ObjectServer::start(&vm.session).unwrap();
    let facts = server.json(&["image", "inspect", WEB]);
    assert_eq!(facts["meta"]["name"], "web");
    server.firn(&["restore", WEB, "--wait"]).succeeds();
    vm.is_well();
    stop(&vm);
    let fetched = || vm.session.cache_report().unwrap().fetched_bytes;
    let before = fetched();
    server.firn(&["restore", WEB, "--wait"]).succeeds();
    vm.is_well();
    assert_eq!(fetched(), before);
    // A supervisor that dies, with a server of the cache that dies.
    vm.session.kill_cache();
    let supervisor = vm.session.status("web")["supervisor_pid"].as_i64();
    supervisor.into_iter().for_each(kill);
    vm.is_well();
    stop(&vm);
}

/// What restores of an image have learned is pushed with it, and known where it is restored from the store.
#[test]
fn what_restores_have_learned_goes_with_the_image() {
    let vm = base();
    let session = &vm.session;
    let Some(server) = ObjectServer::start(session) else { return };
    let image = Image::open(&vm.image("base.firn")).unwrap();
    let how = ReorderOptions {
        working_set: ListedWorkingSet::Dropped(100),
        ..ReorderOptions::for_organization(BlockOrganization::Access)
    };
    reorder_image(&image, &how, &vm.image("web.firn"), &|_, _| ()).unwrap();
    session.firn(&["restore", "web.firn", "--wait"]).succeeds();
    stop(&vm);
    let learned = || fs::read(session.path("web.firn.learned")).unwrap();
    assert!(learned().len() > 100);
    push(&server);
    assert_eq!(fs::read(server.object("web.firn.learned")).unwrap(), learned());
    server.firn(&["image", "pull", WEB, "pulled.firn"]).succeeds();
    assert_eq!(fs::read(session.path("pulled.firn.learned")).unwrap(), learned());
    let listed = server.json(&["image", "ls", "s3://vms"]);
    assert_eq!(listed.as_array().unwrap().len(), 1, "{listed}");
    let ahead_pages = |no_learn: &[&str]| {
        server.firn(&[&["restore", WEB, "--wait"], no_learn].concat()).succeeds();
        vm.is_well();
        let record = fs::read(session.path("run/web/restore.json")).unwrap();
        let record: serde_json::Value = serde_json::from_slice(&record).unwrap();
        stop(&vm);
        record["counts"]["ahead_pages"].as_u64().unwrap()
    };
    assert!(ahead_pages(&[]) > 0);
    assert_eq!(ahead_pages(&["--no-learn"]), 0);
    // Blocks of another image are of no use, and no error.
    fs::write(server.object("web.firn.learned"), "[1, 2").unwrap();
    session.kill_cache();
    let _ = fs::remove_dir_all(session.cache().path());
    assert_eq!(ahead_pages(&[]), 0);
    server.firn(&["image", "rm", WEB]).succeeds();
    assert!(!server.object("web.firn.learned").exists());
}

/// What `restore` says of the background fill.
fn fill_of(server: &ObjectServer<'_>, args: &[&str]) -> String {
    let facts = server.json(&[&["restore"], args].concat());
    facts["fill"].as_str().unwrap().to_owned()
}

#[test]
fn a_fill_from_the_store_waits_for_a_responsive_guest() {
    let Some(vm) = stored_vm() else { return };
    let server = ObjectServer::start(&vm.session).unwrap();
    let filling = vm.session.path("filling");
    let mut command = server.command(&["--json", "restore", WEB]);
    command.env("FIRN_FAULT", format!("restore.fill=WAIT:{}", text(&filling)));
    let restored = Answer::of(command.output().unwrap()).succeeds();
    let facts: serde_json::Value = serde_json::from_str(&restored.out).unwrap();
    assert_eq!(facts["fill"], "when-responsive");
    // After a second in which the guest hardly waited, or sooner if it waited for as long as the fill takes.
    eventually("the fill begins", PATIENCE, || filling.exists());
    let (fetched, all) = (
        vm.session.cache_report().unwrap().fetched_bytes,
        fs::metadata(server.object("web.firn")).unwrap().len(),
    );
    assert!(fetched < all, "{fetched} of {all}");
    fs::remove_file(&filling).unwrap();
    vm.session.firn(&["status", "web", "--watch"]).succeeds();
    vm.is_well();
    stop(&vm);
    // What is in the cache, and on the disk, is filled as a file is.
    std::thread::sleep(Duration::from_secs(2));
    assert_eq!(fill_of(&server, &[WEB, "--wait"]), "at-once");
    stop(&vm);
    assert_eq!(
        fill_of(&server, &["kept.firn", "--fill", "when-responsive", "--wait"]),
        "when-responsive"
    );
    vm.is_well();
    stop(&vm);
}

/// Restores in the lazy mode, and does something when the guest is about to run.
pub fn restore_and(vm: &Vm, server: &ObjectServer<'_>, then: impl FnOnce()) {
    let begun = vm.session.path("begun");
    let mut command = server.command(&["restore", WEB, "--mode", "lazy"]);
    command.env("FIRN_FAULT", format!("restore.resumed=WAIT:{}", text(&begun)));
    let restoring = command.stderr(std::process::Stdio::piped()).spawn().unwrap();
    eventually("the guest runs", PATIENCE, || begun.exists());
    then();
    fs::remove_file(&begun).unwrap();
    Answer::of(restoring.wait_with_output().unwrap()).succeeds();
}

pub fn runs_again(vm: &Vm) {
    eventually("it runs", PATIENCE, || vm.session.status("web")["state"] != "waiting");
    vm.is_well();
    vm.session.firn(&["status", "web", "--watch"]).succeeds();
    vm.is_well();
}

#[test]
fn a_guest_waits_for_a_store_that_is_away() {
    let Some(vm) = stored_vm() else { return };
    let mut server = ObjectServer::start(&vm.session).unwrap();
    restore_and(&vm, &server, || kill(server.process()));
    let status = waits(&vm);
    let shown = status.to_string();
    assert!(shown.contains(WEB) && shown.contains("Connection refused"), "{shown}");
    server.restart();
    runs_again(&vm);
    stop(&vm);
}

#[test]
fn a_guest_does_not_notice_that_the_server_of_the_cache_was_killed() {
    let Some(vm) = stored_vm() else { return };
    let server = ObjectServer::start(&vm.session).unwrap();
    let mut pid = 0;
    restore_and(&vm, &server, || {
        pid = vm.session.cache_report().unwrap().pid;
        vm.session.kill_cache();
    });
    runs_again(&vm);
    assert_ne!(vm.session.cache_report().unwrap().pid, pid);
    stop(&vm);
}

#[test]
fn a_guest_waits_while_the_store_has_wrong_bytes() {
    let Some(vm) = stored_vm() else { return };
    let server = ObjectServer::start(&vm.session).unwrap();
    let object =
        fs::File::options().read(true).write(true).open(server.object("web.firn")).unwrap();
    let good = fs::read(server.object("web.firn")).unwrap();
    restore_and(&vm, &server, || {
        let image = Image::open(&vm.image("kept.firn")).unwrap();
        let end = image.geometry().offset_of(LocalityBlockId(image.locality_blocks()));
        let wrong = vec![0x55; (end - HEADER_BYTES) as usize];
        object.write_all_at(&wrong, HEADER_BYTES).unwrap();
    });
    let shown = waits(&vm).to_string();
    assert!(shown.contains("is damaged"), "{shown}");
    object.write_all_at(&good, 0).unwrap();
    runs_again(&vm);
    stop(&vm);
}

#[test]
fn a_guest_waits_if_its_object_was_replaced() {
    let Some(vm) = stored_vm() else { return };
    write_image(&vm.session.path("other.firn"), 20, 2, None);
    let server = ObjectServer::start(&vm.session).unwrap();
    restore_and(&vm, &server, || {
        server.firn(&["image", "push", "other.firn", WEB, "--force"]).succeeds();
    });
    // The server of the tests does not replace bytes and ETag together: a reply may have had the new bytes with the old
    // ETag. Then the guest waits because they are damaged, until they are fetched once more.
    eventually("the reason is known", PATIENCE, || waits(&vm).to_string().contains("was replaced"));
    vm.session.firn(&["stop", "web", "--force", "--discard"]);
}

#[test]
fn clones_run_from_the_store() {
    let Some(vm) = stored_vm() else { return };
    let server = ObjectServer::start(&vm.session).unwrap();
    let wanted = fs::metadata(server.object("web.firn")).unwrap().len();
    server.firn(&["restore", WEB, "--count", "2", "--wait"]).succeeds();
    for name in ["web-1", "web-2"] {
        // Clones have sockets of their own.
        is_well(&vm.session.path(&format!("run/{name}/user-agent")));
    }
    let report = vm.session.cache_report().unwrap();
    assert!(report.fetched_bytes <= wanted + 2 * MIB, "{report:?}");
    vm.session.firn(&["stop", "web-1", "web-2", "--discard"]).succeeds();
}

#[test]
fn an_object_of_unknown_origin_is_refused() {
    let Some(vm) = stored_vm() else { return };
    let server = ObjectServer::start(&vm.session).unwrap();
    let restore = |more: &[&str]| {
        let mut command = server.command(&[&["restore", WEB][..], more].concat());
        command.env("FIRN_STATE_DIR", vm.session.path("other-state"));
        Answer::of(command.output().unwrap())
    };
    restore(&[]).fails(5, "--trust");
    restore(&["--trust", "--wait"]).succeeds();
    vm.is_well();
    stop(&vm);
}
