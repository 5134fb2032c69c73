//! What `firn doctor` reports is what happens.

use std::process::Command;
use std::time::Duration;

use serde_json::Value;

use crate::own_qemu::{OwnQemu, resources_of};
use crate::session::{Answer, Session, eventually, text};
use crate::vm::image;

const PATIENCE: Duration = Duration::from_secs(60);

/// A QEMU that does not change for so long has started.
const IDLE: Duration = Duration::from_millis(500);

fn finding(findings: &Value, what: &str) -> Value {
    let mut findings = findings.as_array().unwrap().iter();
    findings.find(|finding| finding["what"] == what).unwrap().clone()
}

/// Whether KVM boots a kernel is found out by booting one.
#[test]
fn kvm_is_tried_with_a_kernel() {
    let session = Session::new();
    let kernel = image().kernel.clone();
    let doctor = session.firn(&["--json", "doctor", "--kernel", text(&kernel)]);
    let kvm = finding(&serde_json::from_str(&doctor.out).unwrap(), "KVM");
    let found = kvm["found"].as_str().unwrap();
    eprintln!("{kvm}");
    match (found.starts_with("boots"), found.contains("does not boot")) {
        (true, _) => assert_eq!(kvm["grade"], "good"),
        (_, true) => assert!(found.contains(text(&kernel)), "{found}"),
        _ => assert_eq!(kvm["grade"], "lesser", "skipped: KVM runs nothing here"),
    }
}

/// Runs doctor as an ordinary user, in a mount namespace that these commands prepare.
fn doctor_as_user(session: &Session, before: &str) -> Option<Answer> {
    let program = session.command(&[]).get_program().to_owned();
    let script = format!(
        "set -e; dir=$(mktemp -d); mount -t tmpfs none $dir; chmod 755 $dir; mkdir -m 700 $dir/run; chown 65534:65534 $dir/run; \
         cp \"$0\" $dir/firn; cp -a /dev/userfaultfd $dir/device; {before}; \
         export FIRN_RUNTIME_DIR=$dir/run; cd $dir; \
         exec setpriv --reuid 65534 --regid 65534 --clear-groups ./firn --json doctor"
    );
    let output = Command::new("unshare").args(["-m", "sh", "-c", &script]).arg(program).output();
    let answer = Answer::of(output.ok()?);
    answer.out.starts_with('[').then_some(answer)
}

/// An ordinary user needs access to the device, or the sysctl.
#[test]
fn access_to_the_device_is_enough_for_an_ordinary_user() {
    let session = Session::new();
    let sysctl = std::fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd");
    let without = doctor_as_user(
        &session,
        "chmod 600 $dir/device; mount --bind $dir/device /dev/userfaultfd",
    );
    let with = doctor_as_user(
        &session,
        "chmod 666 $dir/device; mount --bind $dir/device /dev/userfaultfd",
    );
    let (Some(without), Some(with), "0") = (without, with, sysctl.unwrap_or_default().trim())
    else {
        return eprintln!(
            "skipped: this needs root, /dev/userfaultfd and vm.unprivileged_userfaultfd=0"
        );
    };
    let kernel_faults = |answer: &Answer| {
        finding(&serde_json::from_str(&answer.out).unwrap(), "faults in the kernel")
    };
    assert_eq!((without.code, &kernel_faults(&without)["grade"]), (7, &"missing".into()));
    let advice = kernel_faults(&without)["consequence"].to_string();
    assert!(advice.contains("70-firn-userfaultfd.rules"), "{advice}");
    assert_eq!(
        (with.code, &kernel_faults(&with)["found"]),
        (0, &"/dev/userfaultfd".into()),
        "{}",
        with.err
    );
}

/// The checks of a VM, by operation: verdict and text.
pub fn checks(answer: &Answer) -> Vec<(String, String, String)> {
    let checks: Value = serde_json::from_str(&answer.out).unwrap();
    let rows = checks.as_array().unwrap().iter();
    rows.map(|row| {
        let text = |key: &str| row[key].as_str().unwrap().to_owned();
        (text("operation"), text("verdict"), row.to_string())
    })
    .collect()
}

/// What doctor says of a VM is what its commands do, and doctor changes nothing.
#[track_caller]
pub fn commands_do_what_doctor_says(session: &Session, name: &str) -> Vec<String> {
    let mut refused = Vec::new();
    for (operation, verdict, text) in checks(&session.firn(&["--json", "doctor", name])) {
        let Some(options) = operation.strip_prefix("checkpoint") else { continue };
        if options.contains("IMAGE") {
            continue;
        }
        let words: Vec<&str> = options.split_whitespace().collect();
        let save = [&["checkpoint", name, "-o", "seen.firn"][..], &words].concat();
        let answer = session.firn(&save);
        let worked = answer.code == 0;
        assert_eq!(worked, verdict != "refused", "{operation}: {text}\n{}", answer.err);
        if !worked {
            assert_eq!(answer.code, 5, "{}", answer.err);
            let reasons: Value = serde_json::from_str(&text).unwrap();
            for reason in reasons["reasons"].as_array().unwrap() {
                let reason = reason.as_str().unwrap();
                assert!(answer.err.contains(reason), "{reason:?} in {}", answer.err);
            }
            refused.push(operation.clone());
        }
    }
    refused
}

/// A VM that does nothing by itself is as it was.
#[test]
fn a_checked_vm_is_left_as_it_was() {
    let session = Session::new();
    let paused = OwnQemu::start(&session, &["-S"]);
    let own = ["--json", "doctor", "--pid", &paused.pid(), "--qmp", text(&paused.qmp)];
    // The first answer comes when QEMU has started; QEMU closes a connection a moment later.
    session.firn(&own).succeeds();
    let resources = || resources_of(paused.pid().parse().unwrap());
    let mut before = resources();
    eventually("a QEMU that is idle", PATIENCE, || {
        std::thread::sleep(IDLE);
        std::mem::replace(&mut before, resources()) == before
    });
    let now = checks(&session.firn(&own).succeeds());
    eventually("all that doctor used to go", PATIENCE, || resources() == before);
    let restore = now.into_iter().find(|(name, ..)| name == "restore").unwrap();
    assert!(restore.1 == "limited" && restore.2.contains("comes back paused"), "{restore:?}");
    assert_eq!(session.ls(), []);
}

#[test]
fn doctor_lists_the_operations_that_a_vm_permits() {
    let session = Session::new();
    let disk = session.path("disk.raw");
    std::fs::write(&disk, vec![0; 1 << 20]).unwrap();
    let drive = format!("file={},format=raw,if=virtio", text(&disk));
    let mut private = OwnQemu::start(&session, &["-drive", &drive]);
    let own = ["--json", "doctor", "--pid", &private.pid(), "--qmp", text(&private.qmp)];
    let before = session.firn(&own);
    private.attach(&session, "mine");
    // The same before and after it is attached.
    let now = session.firn(&["--json", "doctor", "mine"]);
    assert_eq!(checks(&before), checks(&now));
    let refused = commands_do_what_doctor_says(&session, "mine");
    assert_eq!(refused, ["checkpoint --strategy trace"]);
    let protect = checks(&now).into_iter().find(|(name, ..)| name == "protect").unwrap();
    assert_eq!(protect.1, "works", "its disk is mirrored: {protect:?}");
    session.firn(&["stop", "mine"]).succeeds();
    assert_eq!(private.ended().code(), Some(0));
    // A balloon is a limit for saves only.
    let balloon = OwnQemu::start(&session, &["-device", "virtio-balloon-pci"]);
    balloon.attach(&session, "soft");
    let now = checks(&session.firn(&["--json", "doctor", "soft"]));
    let verdict = |name: &str| now.iter().find(|row| row.0 == name).unwrap().1.clone();
    assert_eq!(verdict("checkpoint"), "limited", "{now:?}");
    assert_eq!(verdict("protect"), "works", "{now:?}");
    let refused = commands_do_what_doctor_says(&session, "soft");
    assert_eq!(refused, ["checkpoint --strategy trace"]);
    session.firn(&["stop", "soft"]).succeeds();
    drop(balloon);
    doctor_refuses_memory_whose_holes_are_not_known(&session);
    session.firn(&["doctor", "none"]).fails(3, "there is no VM called none");
    session.firn(&["doctor", "--pid", "1"]).fails(2, "required arguments were not provided: --qmp");
}

/// What a balloon gives back is not recognized if RAM is of two kinds, or may be in large pages.
fn doctor_refuses_memory_whose_holes_are_not_known(session: &Session) {
    let huge = HugeMount::at(session.path("huge"));
    let in_large_pages = huge.as_ref().map(|huge| {
        let file = format!(
            "memory-backend-file,id=ram,size=64M,share=on,mem-path={}",
            text(&huge.0.join("ram"))
        );
        (
            vec!["-object".to_owned(), file, "-machine".into(), "memory-backend=ram".into()],
            "large pages",
        )
    });
    let of_two_kinds = [
        "-object",
        "memory-backend-memfd,id=a,size=32M,share=on",
        "-object",
        "memory-backend-ram,id=b,size=32M",
        "-numa",
        "node,memdev=a",
        "-numa",
        "node,memdev=b",
    ];
    let of_two_kinds = (of_two_kinds.map(str::to_owned).to_vec(), "a part of its RAM");
    for (words, why) in in_large_pages.into_iter().chain([of_two_kinds]) {
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let qemu =
            OwnQemu::start(session, &[&["-device", "virtio-balloon-pci"], &words[..]].concat());
        qemu.attach(session, "soft");
        let now = checks(&session.firn(&["--json", "doctor", "soft"]));
        for name in ["checkpoint --strategy pre-copy", "protect"] {
            let row = now.iter().find(|row| row.0 == name).unwrap();
            assert!(row.1 == "refused" && row.2.contains(why), "{why}: {row:?}");
        }
        let address = format!("unix:{}", text(&session.path("standby")));
        session.firn(&["protect", "soft", "--to", &address]).fails(5, why);
        session.firn(&["checkpoint", "soft", "-o", "soft.firn", "--strategy", "cow"]).fails(5, why);
        session.firn(&["stop", "soft"]).succeeds();
    }
}

/// A file system whose files may be in large pages; it ends with this value.
struct HugeMount(std::path::PathBuf);

impl HugeMount {
    /// `None` if this machine has none for us.
    fn at(path: std::path::PathBuf) -> Option<Self> {
        std::fs::create_dir(&path).unwrap();
        let mount = ["-t", "tmpfs", "-o", "huge=always,size=128m", "firn-test", text(&path)];
        let done = std::process::Command::new("mount").args(mount).output().unwrap();
        match done.status.success() {
            true => Some(Self(path)),
            false => {
                firn_skip::skip_test(String::from_utf8_lossy(&done.stderr));
                None
            }
        }
    }
}

impl Drop for HugeMount {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount").arg("--lazy").arg(&self.0).output();
    }
}
