//! The first-level guest: a machine in which KVM works. It boots for minutes, and only `make test-platforms` needs it, so
//! these tests are of `make test-all` (`FIRN_ALL=1`).

use std::time::Duration;

use firn_lab::kvm_host::{GuestPayload, KvmHost};

const LIMIT: Duration = Duration::from_secs(300);

/// Whether this test is left to `make test-all`.
fn is_left_out() -> bool {
    let is_left_out = std::env::var("FIRN_ALL").is_err();
    if is_left_out {
        firn_skip::skip_test("boots an emulated machine for minutes; make test-all runs it");
    }
    is_left_out
}

#[test]
fn runs_a_command_beside_a_working_kvm() {
    if is_left_out() {
        return;
    }
    let host = KvmHost::new().unwrap();
    let payload = GuestPayload::new("test -c /dev/kvm && ./words out && ./words err >&2; exit 7")
        .add_program("words", "/bin/echo");
    for _ in 0..2 {
        let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
        let status = host.run_payload(&payload, LIMIT, &mut stdout, &mut stderr).unwrap();
        let said = (status, String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
        assert_eq!(said, (7, "out\n".into(), "err\n".into()));
    }
}

#[test]
fn a_command_that_never_ends_is_given_up() {
    if is_left_out() {
        return;
    }
    let host = KvmHost::new().unwrap();
    let limit = Duration::from_secs(1);
    let error =
        host.run_payload(&GuestPayload::new("sleep 1000"), limit, &mut Vec::new(), &mut Vec::new());
    assert!(error.unwrap_err().to_string().contains("took too long"));
}
