//! Images of unknown origin: a restore does nothing that the user did not agree to, and says what it would have done.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::forge::{DEVICE_STATE, Forge, PARENT};
use crate::session::{Answer, Session, text};
use crate::traps::{ATTACKS, Attack, Bait, Control, Trace, drive, with_meta, with_words};

/// A QEMU without a guest, whose command line opens nothing of the host.
const QUIET: &str = "qemu-system-x86_64 -M pc -m 8 -accel tcg,tb-size=8 -nodefaults -display none";

/// How long a trap may take to spring, on a busy host.
const PATIENCE: Duration = Duration::from_secs(20);

const RESTORE: [&str; 4] = ["restore", "bad.firn", "--name", "copy"];

/// A session with an image of a VM with these words.
fn session_with(more: &str) -> Session {
    let session = Session::new();
    save_as(&session, more, "web.firn");
    session
}

fn save_as(session: &Session, more: &str, image: &str) {
    let qemu = QUIET.split(' ').chain(more.split(' ')).filter(|word| !word.is_empty());
    let run = ["run", "web", "--quiet", "--"].into_iter().chain(qemu);
    session.firn(&run.collect::<Vec<_>>()).succeeds();
    session.firn(&["checkpoint", "web", "-o", image]).succeeds();
    session.firn(&["stop", "web"]).succeeds();
}

fn write(session: &Session, forge: &Forge) {
    forge.write(&session.path("bad.firn"));
}

/// What is in the session's directory: a refused restore leaves it so.
fn files(session: &Session) -> Vec<String> {
    let mut files = session.files("");
    let runtime = fs::read_dir(session.runtime_dir()).unwrap();
    files.extend(runtime.map(|entry| entry.unwrap().file_name().into_string().unwrap()));
    files.retain(|name| name != ".storage");
    files
}

/// A restore without trust is refused, and nothing has happened.
#[track_caller]
fn does_nothing(session: &Session, bait: &Bait, args: &[&str], parts: &[&str]) -> Answer {
    let before = files(session);
    let refused = session.firn(args);
    assert_eq!(refused.code, 5, "{}{}", refused.out, refused.err);
    for part in parts.iter().chain(&["its origin is unknown", "try: --trust"]) {
        assert!(refused.err.contains(part), "{} does not say {part:?}", refused.err);
    }
    assert!(bait.is_untouched(), "{}", refused.err);
    assert_eq!(session.ls(), []);
    assert_eq!(files(session), before);
    refused
}

/// Removes what a restore with trust has started.
fn end_copy(session: &Session) {
    if !session.ls().is_empty() {
        let _ = session.firn(&["stop", "--force", "copy"]);
        let _ = session.firn(&["rm", "copy"]);
    }
    assert_eq!(session.ls(), []);
}

/// With trust, the trap springs: else the test above would pass whatever Firn does.
#[track_caller]
fn springs_if_trusted(session: &Session, bait: &Bait, attack: &Attack) {
    let (restored, start) = (session.firn(&[&RESTORE[..], &["--trust"]].concat()), Instant::now());
    let mut is_sprung = bait.is_sprung(attack.trace);
    while attack.control == Control::Springs && !is_sprung && start.elapsed() < PATIENCE {
        std::thread::sleep(Duration::from_millis(20));
        is_sprung = bait.is_sprung(attack.trace);
    }
    eprintln!("  with --trust: exit {}, sprung: {is_sprung}", restored.code);
    match attack.control {
        Control::Springs => assert!(is_sprung, "{}: {}", attack.options, restored.err),
        Control::Never => assert!(!is_sprung, "{}: {}", attack.options, restored.err),
        Control::Maybe => {}
    }
    end_copy(session);
}

#[test]
fn a_malicious_command_line_does_nothing_without_trust() {
    let session = session_with("");
    let bait = Bait::put_out(&session);
    let good = Forge::read(&session.path("web.firn"));
    for attack in ATTACKS {
        eprintln!("{}", attack.options);
        let words = bait.words(attack);
        write(&session, &with_words(&good, &words));
        // The option that would open something is named.
        let first = words[0].trim_start_matches('-');
        bait.reset();
        does_nothing(&session, &bait, &RESTORE, &[first]);
        let inspected = session.json(&["image", "inspect", "bad.firn"]);
        assert_eq!(inspected["origin"], "changed");
        assert_ne!(inspected["opens"], json!([]), "{}", attack.options);
        does_nothing(&session, &bait, &["restore", "bad.firn", "--count", "2"], &[first]);
        springs_if_trusted(&session, &bait, attack);
    }
}

/// What is not in the options: the disks of the description, programs, directories, parents, XML.
#[test]
fn a_malicious_description_does_nothing_without_trust() {
    let session = session_with("");
    let bait = Bait::put_out(&session);
    let good = Forge::read(&session.path("web.firn"));
    let (secret, link) = (bait.path("SECRET"), bait.path("LINK"));
    fs::write(session.path("own.raw"), vec![0; 1 << 20]).unwrap();
    let own = ["-drive", "file=own.raw,format=raw,if=none,id=d"].map(str::to_owned);
    // The command line names a file of the user's own; the description has its contents in another one.
    for (file, shown) in [(&secret, "SECRET"), (&link, "which is ")] {
        let forge = with_meta(&with_words(&good, &own), |meta| {
            meta["drives"] = json!([drive("own.raw", file)]);
        });
        write(&session, &forge);
        bait.reset();
        does_nothing(&session, &bait, &RESTORE, &[shown, "--disk"]);
        let moved = ["--disk", "own.raw=own.raw"];
        let refused = session.firn(&[&RESTORE[..], &moved].concat());
        assert!(matches!(refused.code, 2 | 5) && bait.is_untouched(), "{}", refused.err);
        let attack = Attack { options: "drives", trace: Trace::Opened, control: Control::Springs };
        springs_if_trusted(&session, &bait, &attack);
    }
    let forge = with_meta(&good, |meta| meta["domain_xml"] = json!("<domain type='qemu'/>"));
    write(&session, &forge);
    let domain = ["restore", "bad.firn", "--libvirt"];
    does_nothing(&session, &bait, &domain, &["libvirt start a domain"]);
    let mut forge = good.clone();
    forge.set_version(2);
    let parent = text(&secret).as_bytes();
    *forge.section(PARENT) = [&[0; 16][..], parent].concat();
    write(&session, &forge);
    bait.reset();
    assert_eq!(session.firn(&RESTORE).code, 6, "a file that is no image is no parent");
}

/// An image can't hide a file behind a disk that the user names.
#[test]
fn one_disk_that_is_named_covers_no_other_option() {
    let session = session_with("");
    let bait = Bait::put_out(&session);
    let good = Forge::read(&session.path("web.firn"));
    let (secret, mine) = (bait.path("SECRET"), session.path("mine.raw"));
    fs::write(&mine, vec![0; 1 << 20]).unwrap();
    let words = ["-drive", &format!("file={},format=raw,if=none,id=d", text(&secret))];
    let hidden = [&words[..], &["-cdrom", text(&secret)]].concat();
    for (words, code) in [(&words[..], 0), (&hidden, 5)] {
        let words: Vec<String> = words.iter().map(|&word| word.to_owned()).collect();
        // Its contents are in a file of another name, and the user knows that one.
        write(
            &session,
            &with_meta(&with_words(&good, &words), |meta| {
                meta["drives"] = json!([drive(text(&secret), &mine)]);
            }),
        );
        bait.reset();
        let named = format!("{0}={0}", text(&mine));
        let restored = session.firn(&[&RESTORE[..], &["--disk", &named]].concat());
        assert_eq!(restored.code, code, "{}", restored.err);
        assert!(bait.is_untouched());
        end_copy(&session);
    }
}

/// Programs that an image names: QEMU, and the tool for disks, which Firn takes from the same directory.
#[test]
fn no_program_of_an_image_runs() {
    let session = session_with("");
    let bait = Bait::put_out(&session);
    let good = Forge::read(&session.path("web.firn"));
    for name in ["qemu-system-x86_64", "qemu-img"] {
        fs::copy(bait.path("SCRIPT"), bait.path(name)).unwrap();
    }
    let program = bait.path("qemu-system-x86_64");
    write(&session, &with_meta(&good, |meta| meta["qemu"]["user_args"][0] = json!(program)));
    for trust in [&[][..], &["--trust"]] {
        let refused = session.firn(&[&RESTORE[..], trust].concat());
        refused.fails(5, "is no QEMU that this host allows");
        assert!(bait.is_untouched());
    }
    let verified = session.firn(&["image", "verify", "--restorable", "bad.firn"]);
    assert!(verified.code == 5 && bait.is_untouched(), "{}", verified.out);
    let own = ["-drive", "file=own.raw,format=raw,if=none,id=d"].map(str::to_owned);
    fs::write(session.path("own.raw"), vec![0; 1 << 20]).unwrap();
    let forge = with_meta(&with_words(&good, &own), |meta| {
        meta["drives"] = json!([drive("own.raw", &session.path("own.raw"))]);
        meta["qemu"]["args"] = json!([program]);
    });
    write(&session, &forge);
    does_nothing(&session, &bait, &RESTORE, &["own.raw"]);
    // The disk is restored, by another tool.
    session.firn(&[&RESTORE[..], &["--trust"]].concat()).succeeds();
    assert!(bait.is_untouched());
    end_copy(&session);
}

/// QEMU searches its directory for firmware.
#[test]
fn firmware_in_the_directory_of_an_image_is_not_used() {
    let session = session_with("");
    let bait = Bait::put_out(&session);
    let good = Forge::read(&session.path("web.firn"));
    let (bios, rom) = (bait.path("bios-256k.bin"), bait.path("bios.bin"));
    [bios, rom].iter().for_each(|file| symlink(bait.path("SECRET"), file).unwrap());
    let directory = bait.path("");
    write(&session, &with_meta(&good, |meta| meta["qemu"]["directory"] = json!(directory)));
    bait.reset();
    session.firn(&RESTORE).succeeds();
    assert!(bait.is_untouched());
    end_copy(&session);
    let attack = Attack { options: "directory", trace: Trace::Opened, control: Control::Springs };
    springs_if_trusted(&session, &bait, &attack);
}

/// An image on another one, which is not beside it: the guest would get the memory of that VM.
#[test]
fn a_parent_elsewhere_needs_trust() {
    let session = session_with("");
    let bait = Bait::put_out(&session);
    fs::create_dir(session.path("other")).unwrap();
    let run = ["run", "web", "--quiet", "--"].into_iter().chain(QUIET.split(' '));
    session.firn(&run.collect::<Vec<_>>()).succeeds();
    session.firn(&["checkpoint", "web", "-o", "other/base.firn"]).succeeds();
    session
        .firn(&["checkpoint", "web", "-o", "near.firn", "--parent", "other/base.firn"])
        .succeeds();
    fs::create_dir(session.path("child")).unwrap();
    let far = ["checkpoint", "web", "-o", "child/far.firn", "--parent", "other/base.firn"];
    session.firn(&far).succeeds();
    session.firn(&["stop", "web"]).succeeds();
    let unmark = |image: &str, to: &str| {
        let forge = Forge::read(&session.path(image));
        with_meta(&forge, |meta| drop(meta.as_object_mut().unwrap().remove("origin")))
            .write(&session.path(to));
    };
    unmark("child/far.firn", "child/bad.firn");
    let restore = ["restore", "child/bad.firn", "--name", "copy"];
    does_nothing(&session, &bait, &restore, &["base.firn, on which it builds"]);
    // Below the directory of the image it came with the image.
    unmark("near.firn", "bad.firn");
    session.firn(&RESTORE).succeeds();
    end_copy(&session);
    session.firn(&[&restore[..], &["--trust"]].concat()).succeeds();
    end_copy(&session);
}

/// Images whose description is large, or of the wrong form: refused, within the limits of `bombs`.
#[test]
fn bombs_in_the_description_do_nothing() {
    let session = session_with("");
    let bait = Bait::put_out(&session);
    let good = Forge::read(&session.path("web.firn"));
    let long = "path=/x,".repeat(1 << 20);
    let mark = |value: Value| with_meta(&good, |meta| meta["origin"] = value);
    let word = |word: &str| with_words(&good, &["-chardev".to_owned(), word.to_owned()]);
    let bombs = [
        ("long", word(&format!("file,id=c,{long}"))),
        ("wide", word(&format!("file,id=c,{}", &long[..60_000]))),
        ("many", with_words(&good, &vec!["x".repeat(500); 30_000])),
        ("deep", word(&format!("{{{}}}", "\"a\":{".repeat(100)))),
        ("mark", with_words(&mark(json!({ "key": long, "mark": long })), &["-s".to_owned()])),
        ("list", with_words(&mark(json!(vec![0; 10_000])), &["-s".to_owned()])),
        ("text", with_words(&mark(json!("origin")), &["-s".to_owned()])),
    ];
    for (name, forge) in bombs {
        eprintln!("{name}");
        write(&session, &forge);
        let start = Instant::now();
        // Some take more memory than their files explain.
        let refused = session.firn(&RESTORE);
        assert!(matches!(refused.code, 5 | 6), "{name}: exit {}: {}", refused.code, refused.err);
        assert!(refused.err.len() < 20_000, "{name}: {} bytes", refused.err.len());
        assert!(bait.is_untouched() && session.ls().is_empty(), "{name}");
        let inspected = session.firn(&["image", "inspect", "bad.firn"]);
        assert_eq!(inspected.code == 0, refused.code == 5, "{name}: {}", inspected.err);
        assert!(start.elapsed() < Duration::from_secs(60), "{name}");
    }
}

#[test]
fn an_image_of_this_user_needs_no_trust_however_it_is_rewritten() {
    let session = session_with("-netdev user,id=net0 -device e1000,netdev=net0");
    let is_known = |image: &str, origin: &str| {
        let inspected = session.json(&["image", "inspect", image]);
        assert_eq!(inspected["origin"], origin, "{image}");
        assert!(inspected["opens"][0]["option"].as_str().unwrap().contains("-netdev user"));
        session.firn(&["restore", image, "--name", "copy"]).succeeds();
        end_copy(&session);
    };
    is_known("web.firn", "this-user");
    let shown = session.firn(&["image", "inspect", "web.firn"]).succeeds().out;
    assert!(shown.contains("saved by this user") && shown.contains("opens"), "{shown}");
    fs::copy(session.path("web.firn"), session.path("moved.firn")).unwrap();
    is_known("moved.firn", "this-user");
    let firn = |line: &str| {
        session.firn(&line.split(' ').collect::<Vec<_>>()).succeeds();
    };
    firn("image reorder web.firn --by physical -o ordered.firn");
    is_known("ordered.firn", "this-user");
    firn("image reorder ordered.firn --by random --codec zstd:1 -o again.firn");
    is_known("again.firn", "this-user");
    firn("image merge again.firn -o merged.firn");
    is_known("merged.firn", "this-user");
    firn("image rebase merged.firn --parent web.firn");
    is_known("merged.firn", "this-user");
    // A restored VM that is saved again.
    firn("restore web.firn --name copy --wait");
    firn("suspend copy -o second.firn");
    is_known("second.firn", "this-user");
    // One of unknown origin stays so.
    let forge = Forge::read(&session.path("web.firn"));
    write(&session, &with_meta(&forge, |meta| meta["name"] = json!("other")));
    firn("image reorder bad.firn --by physical -o worse.firn");
    assert_eq!(session.json(&["image", "inspect", "worse.firn"])["origin"], "changed");
    session.firn(&["restore", "worse.firn"]).fails(5, "its origin is unknown");
}

#[test]
fn a_changed_image_is_of_unknown_origin() {
    let session = session_with("-netdev user,id=net0 -device e1000,netdev=net0");
    let good = Forge::read(&session.path("web.firn"));
    let origin = |forge: &Forge| {
        write(&session, forge);
        session.firn(&RESTORE).fails(5, "its origin is unknown");
        session.json(&["image", "inspect", "bad.firn"])["origin"].clone()
    };
    let flipped = with_meta(&good, |meta| {
        let word = meta["qemu"]["user_args"][2].as_str().unwrap().replace("pc", "qc");
        meta["qemu"]["user_args"][2] = json!(word);
    });
    assert_eq!(origin(&flipped), "changed");
    let mut state = good.clone();
    state.section(DEVICE_STATE)[100] ^= 1;
    assert_eq!(origin(&state), "changed");
    let mark = |key: &str, value: &str| with_meta(&good, |meta| meta["origin"][key] = json!(value));
    assert_eq!(origin(&mark("mark", &"0".repeat(64))), "changed");
    assert_eq!(origin(&mark("mark", "")), "changed");
    assert_eq!(origin(&mark("key", "0123456789abcdef")), "other-user");
    let unmarked = with_meta(&good, |meta| drop(meta.as_object_mut().unwrap().remove("origin")));
    assert_eq!(origin(&unmarked), "unmarked");
    // The form of the text is no change.
    write(&session, &with_meta(&good, |_| ()));
    session.firn(&RESTORE).succeeds();
    end_copy(&session);
}

#[test]
fn an_image_of_another_user_is_trusted_once() {
    let session = session_with("-netdev user,id=net0 -device e1000,netdev=net0,id=nic");
    let mine = session.path("mine");
    let firn = |args: &[&str]| {
        Answer::of(session.command(args).env("FIRN_STATE_DIR", &mine).output().unwrap())
    };
    let restore = ["restore", "web.firn", "--name", "copy"];
    let refused = firn(&restore).fails(5, "another user, or another host, saved the image");
    assert!(refused.err.contains("--netdev net0=BACKEND"), "{}", refused.err);
    assert!(!mine.exists(), "a refused restore writes nothing");
    let verified = firn(&["image", "verify", "--restorable", "web.firn"]);
    assert!(verified.code == 5 && verified.out.contains("NO  origin"), "{}", verified.out);
    // What the user names is the user's.
    firn(&[&restore[..], &["--netdev", "net0=user,restrict=on"]].concat()).succeeds();
    end_copy(&session);
    firn(&[&restore[..], &["--set", "netdev.net0.restrict=on"]].concat()).succeeds();
    end_copy(&session);
    firn(&restore).fails(5, "its origin is unknown");
    firn(&[&restore[..], &["--trust"]].concat()).succeeds();
    end_copy(&session);
    firn(&restore).succeeds();
    end_copy(&session);
    let trusted = firn(&["--json", "image", "inspect", "web.firn"]).succeeds().out;
    assert!(trusted.contains("\"origin\": \"trusted\""), "{trusted}");
    // A changed image is another one.
    let good = Forge::read(&session.path("web.firn"));
    write(&session, &with_words(&good, &["-s".to_owned()]));
    firn(&RESTORE).fails(5, "its origin is unknown");
    session.firn(&restore).succeeds();
    end_copy(&session);
}

/// Runs `ssh-keygen` in the session's directory.
fn ssh_keygen(session: &Session, words: &[&str]) {
    let mut command = Command::new("ssh-keygen");
    command.args(words).current_dir(session.path("")).stdin(Stdio::null());
    let done = command.output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
}

#[test]
fn a_signature_by_a_listed_key_is_enough() {
    if Command::new("ssh-keygen").arg("-?").output().is_err() {
        return firn_skip::skip_test("ssh-keygen is not installed");
    }
    let session = session_with("-nic user");
    let list = session.path("allowed_signers");
    let firn_with = |args: &[&str], path: &str| {
        let mut command = session.command(args);
        command.env("FIRN_STATE_DIR", session.path("mine")).env("PATH", path);
        Answer::of(command.env("FIRN_ALLOWED_SIGNERS", &list).output().unwrap())
    };
    let path = std::env::var("PATH").unwrap();
    let firn = |args: &[&str]| firn_with(args, &path);
    let restore = ["restore", "web.firn", "--name", "copy"];
    for key in ["listed", "other"] {
        ssh_keygen(&session, &["-q", "-t", "ed25519", "-N", "", "-C", key, "-f", key]);
    }
    let public = fs::read_to_string(session.path("listed.pub")).unwrap();
    fs::write(&list, format!("alice@example.org {public}")).unwrap();
    fs::set_permissions(&list, fs::Permissions::from_mode(0o644)).unwrap();
    let sign = |key: &str, purpose: &str| {
        let _ = fs::remove_file(session.path("web.firn.sig"));
        ssh_keygen(&session, &["-q", "-Y", "sign", "-f", key, "-n", purpose, "web.firn"]);
    };
    firn(&restore).fails(5, "its origin is unknown");
    sign("other", "firn");
    firn(&restore).fails(5, "by no key that");
    sign("listed", "file");
    firn(&restore).fails(5, "no signature of this image for Firn");
    sign("listed", "firn");
    // Without the program, with a list that others can write to, and without one.
    firn_with(&restore, "/nonexistent").fails(5, "running ssh-keygen");
    fs::set_permissions(&list, fs::Permissions::from_mode(0o666)).unwrap();
    firn(&restore).fails(5, "others can write it");
    fs::set_permissions(&list, fs::Permissions::from_mode(0o644)).unwrap();
    let inspected = firn(&["image", "inspect", "web.firn"]).succeeds().out;
    assert!(inspected.contains("lists: alice@example.org"), "{inspected}");
    firn(&restore).succeeds();
    end_copy(&session);
    // Of another file it is none.
    let good = Forge::read(&session.path("web.firn"));
    with_words(&good, &["-s".to_owned()]).write(&session.path("web.firn"));
    firn(&restore).fails(5, "no signature of this image for Firn");
    assert!(!session.path("mine").exists());
}

#[test]
fn disks_that_the_user_names_are_the_users() {
    let session = Session::new();
    let disk = |name: &str| {
        fs::write(session.path(name), vec![0; 1 << 20]).unwrap();
        let file = fs::File::options().write(true).open(session.path(name)).unwrap();
        file.set_modified(std::time::SystemTime::UNIX_EPOCH).unwrap();
    };
    ["disk.raw", "read.raw"].into_iter().for_each(disk);
    let drives = "-drive file=disk.raw,format=raw,if=none,id=d -device virtio-blk-pci,drive=d \
        -drive file=read.raw,format=raw,if=none,id=r,readonly=on -device virtio-blk-pci,drive=r";
    save_as(&session, drives, "web.firn");
    let other = session.path("mine");
    let restore = |more: &[&str]| {
        let args = [&["restore", "web.firn", "--name", "copy"], more].concat();
        Answer::of(session.command(&args).env("FIRN_STATE_DIR", &other).output().unwrap())
    };
    let refused = restore(&[]).fails(5, "its origin is unknown");
    assert!(
        refused.err.contains("disk.raw") && refused.err.contains("read.raw"),
        "{}",
        refused.err
    );
    let inspected = session.json(&["image", "inspect", "web.firn"]);
    let kept = inspected["meta"]["drives"][0]["file"].as_str().unwrap().to_owned();
    // A copy is as good: of the same length and time.
    fs::copy(&kept, session.path("moved.raw")).unwrap();
    let time = fs::metadata(&kept).unwrap().modified().unwrap();
    let moved = fs::File::options().write(true).open(session.path("moved.raw")).unwrap();
    moved.set_modified(time).unwrap();
    let pairs = [format!("{kept}=moved.raw"), "read.raw=read.raw".to_owned()];
    restore(&["--disk", &pairs[0]]).fails(5, "its origin is unknown");
    restore(&["--disk", &pairs[0], "--disk", &pairs[1]]).succeeds();
    end_copy(&session);
}

#[test]
fn a_key_that_others_can_read_marks_nothing() {
    let session = session_with("");
    let key = session.state_dir().join("origin/key");
    assert_eq!(fs::metadata(&key).unwrap().permissions().mode() & 0o7777, 0o600);
    fs::set_permissions(&key, fs::Permissions::from_mode(0o644)).unwrap();
    session.firn(&["restore", "web.firn", "--name", "copy"]).fails(7, "others can read it");
    assert_eq!(session.ls(), []);
    // A save succeeds all the same, and says so.
    let run = ["run", "web", "--quiet", "--"].into_iter().chain(QUIET.split(' '));
    session.firn(&run.collect::<Vec<_>>()).succeeds();
    let saved = session.firn(&["checkpoint", "web", "-o", "second.firn"]).succeeds();
    assert!(saved.out.contains("needs --trust, because the image has no mark"), "{}", saved.out);
    session.firn(&["stop", "web"]).succeeds();
    fs::set_permissions(&key, fs::Permissions::from_mode(0o600)).unwrap();
    let inspected = session.json(&["image", "inspect", "second.firn"]);
    assert_eq!(inspected["origin"], "unmarked");
    session.firn(&["restore", "web.firn", "--name", "copy"]).succeeds();
    end_copy(&session);
}

/// A user without rights has a key of their own.
#[test]
fn each_user_has_a_key() {
    if !rustix::process::geteuid().is_root() {
        return firn_skip::skip_test("only root can be two users");
    }
    let session = session_with("-nic user");
    let program = session.path("firn");
    fs::copy(crate::session::program(), &program).unwrap();
    let open = |path: &Path, mode| {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    };
    [(session.path(""), 0o755), (program.clone(), 0o755), (session.path("web.firn"), 0o644)]
        .iter()
        .for_each(|(path, mode)| open(path, *mode));
    let inspect = |state: &Path| {
        let mut command = Command::new(&program);
        command.args(["--json", "image", "inspect"]).arg(session.path("web.firn"));
        command.env("FIRN_STATE_DIR", state).current_dir("/").stdin(Stdio::null());
        use std::os::unix::process::CommandExt as _;
        Answer::of(command.uid(65534).gid(65534).output().unwrap())
    };
    let other = inspect(Path::new("/nonexistent/state")).succeeds();
    assert!(other.out.contains("\"origin\": \"other-user\""), "{}", other.out);
    // The directory of root is closed to others.
    let closed = inspect(&session.state_dir());
    assert_eq!(closed.code, 7, "{}{}", closed.out, closed.err);
}
