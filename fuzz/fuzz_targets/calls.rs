//! Arbitrary decisions of a hostile program beside an application that calls its host.

#![no_main]

use libfuzzer_sys::fuzz_target;

#[allow(dead_code, reason = "shared with the driver that needs no fuzzing engine")]
#[path = "../../crates/app/firn-calls/examples/hostile/round.rs"]
mod round;

fuzz_target!(|bytes: &[u8]| {
    let dice = round::Dice::Bytes(bytes.to_vec().into_iter());
    if let Err(what) = round::Round::new(dice).run() {
        panic!("{what}");
    }
});
