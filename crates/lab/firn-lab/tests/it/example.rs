//! Example application: a memcached that can be killed.

use std::process::Command;

/// The numbers of a row of the table.
fn row(table: &str, system: &str) -> Vec<f64> {
    let line = table.lines().find_map(|line| line.strip_prefix(&format!("{system} "))).unwrap();
    line.split_whitespace().filter_map(|word| word.parse().ok()).collect()
}

#[test]
fn values_that_memcached_acknowledged_survive_a_kill() {
    let output = Command::new(env!("CARGO_BIN_EXE_firn-lab"))
        .args(["demo-app", "--kills", "5"])
        .output()
        .unwrap();
    let (table, errors) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{table}{errors}");
    let [plain, firn] = ["memcached", "memcached -e firn:LOG"].map(|system| row(&table, system));
    // Acknowledged, kills, lost. The test proves something only if stock memcached loses something.
    assert!(plain[0] > 0.0 && plain[2] > 0.0, "{table}");
    assert!(firn[0] > 0.0, "{table}");
    assert_eq!((firn[1], firn[2]), (5.0, 0.0), "{table}");
}
