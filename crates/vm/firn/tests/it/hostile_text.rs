//! Text that QEMU, a user's QEMU command line, an image or a file name brings: no terminal obeys it, and no line is forged.

use firn_types::is_shown;

use crate::edges::{ESCAPES, write_image};
use crate::own_qemu::OwnQemu;
use crate::session::{Answer, Session, text};

/// What would be a line of Firn's own.
const FORGED: &str = "FORGED: all is well";

/// A name of a file or a device with control characters and a line break.
fn hostile(name: &str) -> String {
    format!("{name}{ESCAPES}\n{FORGED}")
}

/// Nothing in it is obeyed, and what was to be a line of its own is none.
#[track_caller]
fn is_shown_on_one_line(answer: &Answer, what: &str) {
    for text in [&answer.out, &answer.err] {
        assert!(text.chars().all(|it| is_shown(it) || it == '\n'), "{what}: {text:?}");
        assert!(
            !text.lines().any(|line| line.trim_start().starts_with("FORGED")),
            "{what}: {text}"
        );
    }
}

/// It is shown, escaped.
#[track_caller]
fn shows(answer: &Answer, what: &str) {
    is_shown_on_one_line(answer, what);
    let all = format!("{}{}", answer.out, answer.err);
    assert!(all.contains("\\u{1b}[2K"), "{what} does not show it: {all}");
}

#[test]
fn the_command_line_of_a_users_qemu() {
    let session = Session::new();
    let disk = session.path(&hostile("disk"));
    std::fs::write(&disk, vec![0; 1 << 20]).unwrap();
    let name = hostile("guest");
    let drive = format!("file={},format=raw,if=none,id=d", text(&disk).replace(',', ",,"));
    let own = ["-name", &name, "-drive", &drive, "-device", "virtio-blk-pci,drive=d"];
    let program = hostile("qemu");
    let mine = OwnQemu::named(&program, &session, &own);
    shows_nothing_raw(&session, &mine);
    // Errors and outputs name the disk where it is copied, and where it is missing.
    let saved = session.firn(&["checkpoint", "mine", "-o", "mine.firn"]);
    shows(&saved, "checkpoint");
    saved.succeeds();
    is_shown_on_one_line(&session.firn(&["image", "inspect", "mine.firn"]).succeeds(), "inspect");
    shows(&session.firn(&["image", "verify", "--restorable", "mine.firn"]), "verify --restorable");
    let restore = ["restore", "mine.firn", "--name", "copy"];
    shows(&session.firn(&restore), "a restore of a program that is no QEMU");
    let qemu = firn_lab::guest::default_program();
    let named = [&restore[..], &["--qemu", qemu.to_str().unwrap()]].concat();
    let restored = session.firn(&named);
    is_shown_on_one_line(&restored, "restore");
    restored.succeeds();
    is_shown_on_one_line(&session.firn(&["status", "copy"]), "status of a copy");
    shows(&session.firn(&["stop", "copy"]).succeeds(), "the command line to go on with");
    session.firn(&["stop", "mine"]).succeeds();
    // The image has a copy of the disk.
    for file in session.files("disk") {
        std::fs::remove_file(session.path(&file)).unwrap();
    }
    let refused = session.firn(&named);
    shows(&refused, "a disk that is not there");
    assert_eq!(refused.code, 5, "{}", refused.err);
}

fn shows_nothing_raw(session: &Session, mine: &OwnQemu) {
    let attached = mine.try_attach(session, "mine");
    is_shown_on_one_line(&attached, "attach");
    attached.succeeds();
    // Who has it already is named.
    is_shown_on_one_line(&mine.try_attach(session, "again"), "attach");
    for verb in [&["status", "mine"][..], &["ls"], &["logs", "mine"]] {
        is_shown_on_one_line(&session.firn(verb).succeeds(), &verb.join(" "));
    }
    let json = session.firn(&["--json", "status", "mine"]).succeeds();
    is_shown_on_one_line(&json, "--json status");
}

/// QEMU writes what it was given into its errors, as it is.
#[test]
fn errors_of_qemu() {
    let session = Session::new();
    let (device, program) = (hostile("no-such-device"), "qemu-system-x86_64");
    for bad in [["-device", &device], ["-drive", &device], ["-netdev", &device]] {
        let machine = ["run", "web", "--", program, "-nodefaults", "-display", "none"];
        let refused = session.firn(&[&machine[..], &bad].concat());
        assert_ne!(refused.code, 0, "{bad:?}");
        is_shown_on_one_line(&refused, bad[0]);
        assert!(refused.err.contains("no-such-device"), "{}", refused.err);
    }
    let none = session.firn(&["run", "web", "--", &hostile("./none")]);
    shows(&none, "a program that is not there");
    assert_eq!(session.ls(), []);
}

/// Verbs that show what is in an image, or name it.
#[test]
fn images_with_hostile_strings_and_names() {
    let session = Session::new();
    write_image(&session.path("good.firn"));
    let name = hostile("image");
    std::fs::copy(session.path("good.firn"), session.path(&name)).unwrap();
    for verb in [&["inspect"][..], &["verify"], &["verify", "--restorable"], &["chain"]] {
        for image in [name.as_str(), "good.firn"] {
            let answer = session.firn(&[&["image"], verb, &[image]].concat());
            is_shown_on_one_line(&answer, &format!("image {}", verb.join(" ")));
        }
    }
    shows(&session.firn(&["image", "chain", &name]).succeeds(), "image chain");
    let out = hostile("out");
    for image in [name.as_str(), "good.firn"] {
        shows(&session.firn(&["image", "merge", image, "-o", &out]).succeeds(), "image merge");
        let reorder = ["image", "reorder", image, "--by", "physical", "-o", &out];
        shows(&session.firn(&reorder).succeeds(), "image reorder");
    }
    shows(&session.firn(&["image", "rm", &out]).succeeds(), "image rm");
    shows(&session.firn(&["image", "rm", &hostile("none")]), "image rm of none");
    is_shown_on_one_line(&session.firn(&["restore", &name]), "restore");
    let bytes = std::fs::read(session.path(&name)).unwrap();
    std::fs::write(session.path(&name), &bytes[..bytes.len() - 1]).unwrap();
    let damaged = session.firn(&["image", "verify", &name]);
    shows(&damaged, "a damaged image");
    assert_eq!(damaged.code, 6, "{}", damaged.err);
}
