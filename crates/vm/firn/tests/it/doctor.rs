//! What `firn doctor` reports is what happens.

use std::process::Command;

use serde_json::Value;

use crate::session::{Answer, Session, text};
use crate::vm::image;

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
