//! Shell completions.

use crate::session::Session;

#[test]
fn every_shell_gets_a_script() {
    let session = Session::new();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = session.firn(&["completions", shell]).succeeds().out;
        assert!(script.contains("checkpoint"), "{shell}");
    }
}

#[test]
fn bash_takes_its_script() {
    let session = Session::new();
    let script = session.firn(&["completions", "bash"]).succeeds().out;
    let path = session.path("firn.bash");
    std::fs::write(&path, script).unwrap();
    let status = std::process::Command::new("bash").arg("-n").arg(&path).status().unwrap();
    assert!(status.success());
}
