//! A hostile program beside an honest application: it writes arbitrary bytes into the memory that
//! all share.
//!
//! ```text
//!   cargo run --release -p firn-calls --example hostile -- --seconds 600 [--seed N]
//!   cargo run --release -p firn-calls --example hostile -- --bytes FILE      what the fuzz target `calls` has found
//! ```
//!
//! Between any two steps of the application and the host it overwrites words at random, replays old
//! requests and replies (modified, truncated, in other slots, under other numbers), and sends
//! hellos. The host must not panic, and must not search for an address space for a program without
//! a key. A report that the application accepts must include at least what it wrote. Rounds follow
//! from the seed alone.

mod round;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use round::{Dice, Round, STEPS};

fn main() -> ExitCode {
    match option("--bytes") {
        Some(file) => one(&file),
        None => many(),
    }
}

fn option(name: &str) -> Option<String> {
    std::env::args().skip_while(|word| word != name).nth(1)
}

fn one(file: &str) -> ExitCode {
    let run = |bytes: Vec<u8>| Round::new(Dice::Bytes(bytes.into_iter())).run();
    match std::fs::read(file).map_err(|error| error.to_string()).and_then(run) {
        Ok(()) => ExitCode::SUCCESS,
        Err(what) => {
            eprintln!("{file}: {what}");
            ExitCode::FAILURE
        }
    }
}

fn many() -> ExitCode {
    let number = |name: &str| option(name)?.parse::<u64>().ok();
    let (limit, first) =
        (Duration::from_secs(number("--seconds").unwrap_or(10)), number("--seed").unwrap_or(1));
    let since = Instant::now();
    let (mut rounds, mut accepted) = (0u64, 0);
    while since.elapsed() < limit {
        let seed = first + rounds;
        let mut round = Round::new(Dice::Seed(seed));
        if let Err(what) = round.run() {
            eprintln!("seed {seed}: {what}");
            return ExitCode::FAILURE;
        }
        accepted += round.accepted;
        rounds += 1;
    }
    println!(
        "{rounds} rounds of {STEPS} steps from seed {first}: {accepted} answers accepted, all right"
    );
    ExitCode::SUCCESS
}
