//! Stores that are full, slow, that cut connections or deny access later on: each ends with one clear error,
//! or with a wait that `firn status` names.

use std::fs;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::attached_disks::SmallMount;
use crate::object_server::ObjectServer;
use crate::objects::{is_same, left_nothing, pull, push, push_kills, session_with_image};
use crate::session::{Answer, eventually, text};
use crate::store_proxy::StoreProxy;
use crate::stored_checkpoint::{has_spool_directory, restored_with, spooled};
use crate::stored_restore::{restore_and, runs_again, stop, stored_vm};
use crate::vm::Vm;

const PATIENCE: Duration = Duration::from_secs(120);
const WEB: &str = "s3://vms/web.firn";
const OLD_TOKEN: &str = "hush-old-token";

/// The status of a VM whose memory can't be fetched. Its guest waits if it needs just that.
fn waits(vm: &Vm) -> serde_json::Value {
    let mut status = serde_json::Value::Null;
    eventually("memory is missing", PATIENCE, || {
        status = vm.session.status("web");
        assert_ne!(status["state"], "ended", "{status}");
        status["waiting"]["error"].is_string()
    });
    status
}

/// A server behind a proxy.
fn start_behind_proxy(session: &crate::session::Session) -> Option<(ObjectServer<'_>, StoreProxy)> {
    let mut server = ObjectServer::start(session)?;
    let proxy = StoreProxy::start(&server.address());
    server.put_behind(&proxy);
    Some((server, proxy))
}

#[test]
fn a_full_store_is_an_error_and_no_vm_ends() {
    let vm = Vm::with_base(false);
    let Some(mount) = SmallMount::tmpfs(8) else {
        return firn_skip::skip_test("no tmpfs can be mounted here (root)");
    };
    let Some(server) = ObjectServer::start_at(&vm.session, mount.path().join("objects")) else {
        return;
    };
    restored_with(&vm, "");
    let before = fs::metadata(vm.image("base.firn")).unwrap().len();
    assert!(before > 8 << 20, "the image fits: {before}");
    let push = server.firn(&["image", "push", "base.firn", WEB]).fails(1, WEB);
    assert!(push.err.contains("there is no half image"), "{}", push.err);
    let saved = server.firn(&["checkpoint", "web", "-o", WEB]).fails(1, "and not at");
    vm.is_well();
    let [image] = &spooled(&vm.session)[..] else { unreachable!("{}", saved.err) };
    assert!(saved.err.contains(&format!("firn image push {} {WEB}", text(image))), "{}", saved.err);
    let suspended = server.firn(&["suspend", "web", "-o", WEB]).fails(1, "the VM continues");
    eprintln!("{}{}", saved.err, suspended.err);
    vm.is_well();
    assert!(!server.object("web.firn").exists());
    assert_eq!(spooled(&vm.session), std::slice::from_ref(image));
    // With room, the same commands succeed.
    mount.resize(1024);
    server.firn(&["image", "push", text(image), WEB]).succeeds();
    assert_eq!(server.leftovers(), Vec::<String>::new());
    is_same(image, &server.object("web.firn"));
    server.firn(&["suspend", "web", "-o", "s3://vms/second.firn"]).succeeds();
    server.firn(&["restore", "s3://vms/second.firn", "--wait"]).succeeds();
    vm.is_well();
    stop(&vm);
    fs::remove_file(image).unwrap();
    fs::remove_dir(image.parent().unwrap()).unwrap();
    assert!(!has_spool_directory(&vm.session));
}

/// The credentials of a restore expire before all memory is there. Any command with new ones helps.
#[test]
fn a_guest_waits_for_credentials_that_have_expired() {
    let Some(vm) = stored_vm() else { return };
    let (mut server, proxy) = start_behind_proxy(&vm.session).unwrap();
    server.set_token(OLD_TOKEN);
    restore_and(&vm, &server, || proxy.expire(OLD_TOKEN));
    let shown = waits(&vm).to_string();
    assert!(shown.contains("ExpiredToken") && shown.contains("denied access"), "{shown}");
    assert!(!shown.contains("hush"), "{shown}");
    let listed = vm.session.firn(&["ls"]).succeeds().out;
    assert!(listed.contains("ExpiredToken"), "{listed}");
    server.firn(&["image", "inspect", WEB]).fails(7, "ExpiredToken");
    server.set_token("hush-new-token");
    server.firn(&["image", "inspect", WEB]).succeeds();
    runs_again(&vm);
    stop(&vm);
}

/// A store that accepts the same credentials again, as after a change of what they may do.
#[test]
fn a_guest_continues_when_the_store_accepts_its_credentials_again() {
    let Some(vm) = stored_vm() else { return };
    let (mut server, proxy) = start_behind_proxy(&vm.session).unwrap();
    server.set_token(OLD_TOKEN);
    restore_and(&vm, &server, || proxy.expire(OLD_TOKEN));
    waits(&vm);
    proxy.behave();
    runs_again(&vm);
    stop(&vm);
}

/// A push and a pull whose credentials expire in the middle end with that reason.
#[test]
fn commands_name_credentials_that_have_expired() {
    let session = session_with_image(20);
    let Some((mut server, proxy)) = start_behind_proxy(&session) else { return };
    server.set_token(OLD_TOKEN);
    let begun = session.path("begun");
    let mut command = server.command(&["image", "push", "web.firn", WEB]);
    command.env("FIRN_FAULT", format!("store.part@3=WAIT:{}", text(&begun)));
    let pushing = command.stderr(Stdio::piped()).spawn().unwrap();
    eventually("some parts are there", PATIENCE, || begun.exists());
    proxy.expire(OLD_TOKEN);
    fs::remove_file(&begun).unwrap();
    let answer = Answer::of(pushing.wait_with_output().unwrap()).fails(7, "ExpiredToken");
    assert!(answer.err.contains("AWS_SESSION_TOKEN") && !answer.err.contains("hush"));
    assert!(!server.object("web.firn").exists());
    server.set_token("hush-new-token");
    push(&server).succeeds();
    assert_eq!(server.leftovers(), Vec::<String>::new());
    server.set_token(OLD_TOKEN);
    pull(&server).fails(7, "ExpiredToken");
    left_nothing(&session);
}

/// It accepts connections and answers nothing. The guest waits, and continues when it answers.
#[test]
fn a_guest_waits_for_a_store_that_stalls() {
    let Some(vm) = stored_vm() else { return };
    let (server, proxy) = start_behind_proxy(&vm.session).unwrap();
    restore_and(&vm, &server, || proxy.stall());
    let shown = waits(&vm).to_string();
    assert!(shown.contains(WEB), "{shown}");
    eprintln!("{shown}");
    proxy.behave();
    runs_again(&vm);
    stop(&vm);
}

/// At a random number of bytes all connections end. Then the store is there again, or it stays away and
/// the command is killed.
#[test]
fn connections_cut_anywhere_in_a_push_leave_no_half_image() {
    let session = session_with_image(24);
    let Some((server, proxy)) = start_behind_proxy(&session) else { return };
    let len = fs::metadata(session.path("web.firn")).unwrap().len();
    let (mut random, mut whole) = (firn_random(), 0);
    for step in 0..push_kills() {
        let at = random() % len;
        proxy.cut_after(at);
        let mut command = server.command(&["image", "push", "web.firn", WEB]);
        let mut child = command.stderr(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        let (stays_away, before) = (step % 2 == 1, proxy.cuts());
        if stays_away {
            eventually("the connections end", PATIENCE, || {
                proxy.cuts() > before || child.try_wait().unwrap().is_some()
            });
            proxy.cut();
            std::thread::sleep(Duration::from_millis(random() % 300));
            let _ = child.kill();
        }
        let answer = Answer::of(child.wait_with_output().unwrap());
        proxy.behave();
        let is_there = server.object("web.firn").exists();
        match server.list().as_slice() {
            [] => assert!(!is_there && stays_away, "{at} of {len}: {}", answer.err),
            _ => {
                is_same(&session.path("web.firn"), &server.object("web.firn"));
                whole += 1;
            }
        }
        push(&server).succeeds();
        is_same(&session.path("web.firn"), &server.object("web.firn"));
        server.firn(&["image", "rm", WEB]).succeeds();
        assert_eq!(server.leftovers(), Vec::<String>::new(), "{at} of {len}");
    }
    eprintln!("{} connections cut, {whole} pushes whole all the same", proxy.cuts());
}

/// Random numbers, other ones in each run.
fn firn_random() -> impl FnMut() -> u64 {
    use std::hash::{BuildHasher as _, Hasher as _, RandomState};
    let state = RandomState::new();
    let mut count = 0u64;
    move || {
        count += 1;
        let mut hasher = state.build_hasher();
        hasher.write_u64(count);
        hasher.finish()
    }
}

/// An image in the cache whose store denies access is not damaged.
#[test]
fn an_image_whose_store_denies_access_is_not_called_damaged() {
    let session = session_with_image(20);
    let Some(server) = ObjectServer::start(&session) else { return };
    push(&server).succeeds();
    let mut open =
        server.command_of(&crate::session::Session::program_beside("firn-store"), &["open", WEB]);
    let opened = Answer::of(open.output().unwrap());
    let reply: serde_json::Value = serde_json::from_str(opened.out.trim()).unwrap();
    let path = reply["facts"]["image"].as_str().unwrap().to_owned();
    let verify = |secret: Option<&str>| {
        // What was read by opening it stays, and is on the disk by now.
        std::thread::sleep(Duration::from_secs(2));
        session.kill_cache();
        let mut command: Command = server.command(&["image", "verify", &path]);
        command.envs(secret.map(|secret| ("AWS_SECRET_ACCESS_KEY", secret)));
        Answer::of(command.output().unwrap())
    };
    let denied = verify(Some("hush-wrong"));
    assert_eq!(denied.code, 7, "{}{}", denied.out, denied.err);
    assert!(denied.err.contains("denied access"), "{}", denied.err);
    assert!(denied.err.contains("locality blocks can't be read"), "{}", denied.err);
    assert!(!denied.err.contains("damaged") && !denied.err.contains("hush"), "{}", denied.err);
    verify(None).succeeds();
}
