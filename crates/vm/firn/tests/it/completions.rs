//! Shell completions.

use std::process::Command;

use crate::own_qemu::OwnQemu;
use crate::session::{Session, text};

#[test]
fn every_shell_gets_a_script() {
    let session = Session::new();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = session.firn(&["completions", shell]).succeeds().out;
        assert!(script.contains("FIRN_COMPLETE"), "{shell}: {script}");
    }
    session.firn(&["completions", "csh"]).fails(2, "invalid value 'csh'");
}

/// What bash offers for the last of these words.
fn bash_offers(session: &Session, words: &[&str]) -> Vec<String> {
    let script = session.firn(&["completions", "bash"]).succeeds().out;
    let path = session.path("firn.bash");
    std::fs::write(&path, script).unwrap();
    let firn = session.command(&[]);
    let program = std::path::Path::new(firn.get_program());
    let search = format!("{}:{}", text(program.parent().unwrap()), std::env::var("PATH").unwrap());
    let offer = "source ./firn.bash; COMP_WORDS=(\"$@\"); COMP_CWORD=$(($# - 1)); COMP_TYPE=9; \
        _clap_complete_firn firn \"${@: -1}\" x && printf '%s\\n' \"${COMPREPLY[@]}\"";
    let mut bash = Command::new("bash");
    bash.args(["-c", offer, "bash", "firn"]).args(words).env("PATH", search);
    bash.current_dir(session.path("")).env("FIRN_RUNTIME_DIR", session.runtime_dir());
    let output = bash.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect()
}

#[test]
fn bash_offers_verbs_values_and_the_names_of_vms() {
    let session = Session::new();
    let first = OwnQemu::start(&session, &[]);
    first.attach(&session, "mine");
    let offers = |words: &[&str]| bash_offers(&session, words);
    assert!(offers(&["che"]).contains(&"checkpoint".to_owned()));
    assert!(offers(&["stop", ""]).contains(&"mine".to_owned()));
    assert_eq!(offers(&["stop", "m"]), ["mine"]);
    assert_eq!(offers(&["disk", "commit", "m"]), ["mine"]);
    // A new VM needs a new name.
    assert!(!offers(&["run", "m"]).contains(&"mine".to_owned()));
    let strategies = offers(&["checkpoint", "mine", "--strategy", ""]);
    assert_eq!(strategies, ["trace", "cow", "pre-copy", "stop"]);
    std::fs::write(session.path("web.firn"), "").unwrap();
    assert_eq!(offers(&["restore", "web"]), ["web.firn"]);
    session.firn(&["stop", "mine"]).succeeds();
}
