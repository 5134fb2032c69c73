//! Long walks, of which a run of the tests takes a part: every seventh step.
//!
//! The parts take turns by the day, so that a week covers all. `FIRN_PART=N` chooses one, and
//! `FIRN_ALL=1` takes all of them (`make test-all`).

use std::time::SystemTime;

const PARTS: usize = 7;

/// The part of a walk that this run takes; at least one step.
pub fn part_of<T>(steps: impl IntoIterator<Item = T>) -> impl Iterator<Item = T> {
    let steps: Vec<T> = steps.into_iter().collect();
    let parts = if is_all() { 1 } else { PARTS.min(steps.len()).max(1) };
    let part = part() % parts;
    eprintln!("part {part} of {parts}; FIRN_PART={part} repeats it, FIRN_ALL=1 takes all");
    take(steps, part, parts)
}

fn take<T>(steps: Vec<T>, part: usize, parts: usize) -> impl Iterator<Item = T> {
    steps.into_iter().skip(part).step_by(parts)
}

fn is_all() -> bool {
    std::env::var("FIRN_ALL").is_ok_and(|it| it == "1")
}

/// Chosen, or of today.
fn part() -> usize {
    let chosen = std::env::var("FIRN_PART").ok();
    let chosen = chosen.map(|it| it.parse().unwrap());
    let days = || SystemTime::UNIX_EPOCH.elapsed().unwrap().as_secs() / 86_400;
    chosen.unwrap_or_else(|| days() as usize)
}

#[test]
fn parts_make_a_whole() {
    let all: Vec<usize> = (0..10).collect();
    let mut steps: Vec<usize> =
        (0..PARTS).flat_map(|part| take(all.clone(), part, PARTS)).collect();
    steps.sort_unstable();
    assert_eq!(steps, all);
    assert!(part_of([1]).eq([1]), "a walk of one step is taken whole");
}
