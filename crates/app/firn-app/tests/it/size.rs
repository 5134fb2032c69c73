//! The memory that a session needs, as a multiple of its areas.

use std::path::Path;
use std::process::Command;

use firn_app::{BackupTarget, FsyncPolicy, Session, SessionOptions, TrackerKind};

const CHILD: &str = "FIRN_APP_SIZE_CHILD";
const NAME: &str = "size::memory_is_bounded_by_the_areas";

/// The size of the area in MiB; `FIRN_APP_MIB` sets another one.
fn mib() -> usize {
    std::env::var("FIRN_APP_MIB").ok().and_then(|mib| mib.parse().ok()).unwrap_or(64)
}

/// The maximum of resident memory so far, as a multiple of the area.
fn peak() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM")).unwrap();
    let kib: f64 = line.split_whitespace().nth(1).unwrap().parse().unwrap();
    kib / 1024.0 / mib() as f64
}

/// The child: commits or recovers, and prints the peak of its memory.
fn use_area(log: &Path) {
    let target = BackupTarget::file(log).fsync(FsyncPolicy::Never);
    let options = SessionOptions::new("size").tracker(TrackerKind::Assisted).backup(target);
    let mut session = Session::open(options).unwrap();
    let area = session.allocate("area", mib() << 20).unwrap();
    let recovered = session.recover().unwrap();
    let mut transaction = session.begin().unwrap();
    let words = transaction.words(&area);
    match recovered {
        0 => words.iter_mut().enumerate().for_each(|(at, word)| *word = mix(at as u64)),
        _ => assert!(words.iter().enumerate().skip(1).all(|(at, word)| *word == mix(at as u64))),
    }
    words[0] = recovered + 1;
    transaction.commit().unwrap();
    println!("\npeak {}", peak());
}

fn mix(at: u64) -> u64 {
    at.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1
}

#[test]
fn memory_is_bounded_by_the_areas() {
    if let Ok(log) = std::env::var(CHILD) {
        return use_area(Path::new(&log));
    }
    let dir = tempfile::tempdir().unwrap();
    // The first commit has the area, the committed state and the transaction; a recovery has the
    // log and the state, and then the area and the state.
    for (what, max) in [("first commit", 3.3), ("recovery", 2.2)] {
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", NAME, "--nocapture", "--test-threads=1"])
            .env(CHILD, dir.path().join("log"))
            .output()
            .unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let peak = text.lines().find_map(|line| line.strip_prefix("peak "));
        let peak: f64 = peak.unwrap_or_else(|| panic!("{text}")).parse().unwrap();
        println!("{what}: {peak:.2} times the area");
        assert!(peak < max, "{what}: {peak:.2} times the area, {max} at most");
    }
}
