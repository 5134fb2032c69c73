//! Arbitrary bytes as an image: opened, looked up, decoded.

#![no_main]

use libfuzzer_sys::fuzz_target;

#[allow(dead_code, reason = "shared with the driver that needs no fuzzing engine")]
#[path = "../../crates/core/firn-image/examples/fuzz/exercise.rs"]
mod exercise;

fuzz_target!(|bytes: &[u8]| {
    let path = std::env::temp_dir().join(format!("firn-fuzz-image-{}", std::process::id()));
    if std::fs::write(&path, bytes).is_ok() {
        exercise::exercise(&path);
    }
});
