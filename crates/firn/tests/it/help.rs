//! What the command says about itself.

use crate::session::Session;

const VERBS: [&str; 18] = [
    "run",
    "attach",
    "detach",
    "ls",
    "status",
    "checkpoint",
    "suspend",
    "restore",
    "protect",
    "release",
    "standby",
    "failover",
    "agent",
    "stop",
    "rm",
    "image",
    "doctor",
    "completions",
];

#[test]
fn every_verb_explains_itself() {
    let session = Session::new();
    let all = session.firn(&["--help"]).succeeds().out;
    for verb in VERBS {
        assert!(all.contains(&format!("  {verb} ")), "{verb} is not in:\n{all}");
        let help = session.firn(&[verb, "--help"]).succeeds().out;
        assert!(help.contains(&format!("Usage: firn {verb}")), "{help}");
        let has_verbs = ["image", "agent"].contains(&verb);
        assert!(has_verbs || help.contains("Example"), "{verb} has no example:\n{help}");
    }
}

#[test]
fn exit_codes_are_documented() {
    let help = Session::new().firn(&["--help"]).succeeds().out;
    for code in 0..=8 {
        assert!(help.contains(&format!("\n  {code}  ")), "{code} is not in:\n{help}");
    }
}

#[test]
fn what_belongs_to_firn_alone_is_hidden() {
    let help = Session::new().firn(&["--help"]).succeeds().out;
    assert!(!help.contains("__"), "{help}");
}
