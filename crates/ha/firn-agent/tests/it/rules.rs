//! The alert rules, checked by `promtool`, which Debian's package `prometheus` has.

use std::path::Path;
use std::process::Command;

fn promtool(args: &[&str]) {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it");
    let run = Command::new("promtool").args(args).current_dir(directory).output().unwrap();
    let output = [run.stdout, run.stderr].concat();
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&output));
}

#[test]
fn prometheus_loads_the_alert_rules_and_they_fire() {
    if Command::new("promtool").arg("--version").output().is_err() {
        return firn_skip::skip_test("there is no promtool: `apt install prometheus` has it");
    }
    promtool(&["check", "rules", "../../../../../packaging/prometheus/firn.rules.yml"]);
    promtool(&["test", "rules", "rules.yml"]);
}
