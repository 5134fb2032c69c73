//! The guest part of `app-size`: the cost of a transaction by the size of its areas, if Firn on the
//! host finds the written pages.
//!
//! `guest.commit_us.SYSTEM.areasN.mibM` is the mean time of begin, write and commit of one word, in
//! one page chosen at random, of N areas of M MiB together. `guest.ratio.SYSTEM.areasN` is that of
//! the largest size to that of the smallest.

use anyhow::Result;
use firn_app::TrackerKind;
use firn_transactions::{TrackerSystem, WriteShape};
use serde_json::json;

use super::guest::{GuestSize, TransactionGuest};
use crate::lab::Lab;
use crate::report::Report;

/// The systems: words by comparison, and pages.
const SYSTEMS: &[TrackerSystem] =
    &[TrackerSystem::AssistedByHost, TrackerSystem::Plain(TrackerKind::Host)];
/// Space for areas of 1 GiB, their last committed copy, and a buffer of the measurement.
const SIZE: GuestSize = GuestSize { mib: 6 << 10, pages: 1 << 20 };
/// Sizes of all areas together, in MiB.
const SIZES: [usize; 4] = [1, 16, 256, 1024];
/// Counts of areas.
const COUNTS: [usize; 2] = [1, 1000];
/// Transactions of a run, in quick and in full runs.
const TRANSACTIONS: (usize, usize) = (1000, 5000);
/// Rounds, in quick and in full runs.
const ROUNDS: (usize, usize) = (1, 3);
const PAGES_PER_MIB: usize = 256;

/// Measures all sizes in one guest.
pub(super) fn measure_in_guest(lab: &Lab, report: &mut Report) -> Result<()> {
    let guest = TransactionGuest::boot_guest(lab, SYSTEMS, SIZE)?;
    for areas in COUNTS {
        for mib in SIZES {
            lab.log_progress(&format!("a guest, {areas} areas, {mib} MiB"));
            measure_size(lab, report, &guest, areas, mib)?;
        }
        for system in SYSTEMS {
            let of = |mib| report.figure_value(&report_key(*system, areas, mib));
            if let (Some(small), Some(large)) = (of(SIZES[0]), of(SIZES[SIZES.len() - 1])) {
                let key = format!("guest.ratio.{}.areas{areas}", system.name());
                report.add_number(key, large / small);
            }
        }
    }
    Ok(())
}

fn measure_size(
    lab: &Lab,
    report: &mut Report,
    guest: &TransactionGuest<'_>,
    areas: usize,
    mib: usize,
) -> Result<()> {
    let transactions = lab.extent.pick(TRANSACTIONS.0, TRANSACTIONS.1);
    let rounds = lab.extent.runs(ROUNDS.0, ROUNDS.1);
    let shape = WriteShape { ppt: 1, wpp: 1, pages: pages_of_area(mib, areas), areas };
    let runs = guest.measure_systems(&["--shape", &shape.name()], &[1], transactions, rounds)?;
    for system in SYSTEMS {
        let own = runs.iter().filter(|run| run.system == system.name());
        let times: Vec<f64> = own.clone().map(|run| run.taken.us).collect();
        let blind: u64 = own.map(|run| run.taken.blind).sum();
        report.add_repetition(json!({ "place": "guest", "tracker": system.name(),
            "areas": areas, "mib": mib, "us": times, "blind": blind }));
        report.add_sample(report_key(*system, areas, mib), times);
    }
    Ok(())
}

/// The pages of each area: a power of two, and the nearest to a fair share.
fn pages_of_area(mib: usize, areas: usize) -> usize {
    let share = mib * PAGES_PER_MIB / areas;
    let above = share.max(1).next_power_of_two();
    if above - share.max(1) > share / 3 { above / 2 } else { above }
}

fn report_key(system: TrackerSystem, areas: usize, mib: usize) -> String {
    format!("guest.commit_us.{}.areas{areas}.mib{mib}", system.name())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn areas_have_about_their_share() {
        let pages = |areas| SIZES.map(|mib| pages_of_area(mib, areas));
        assert_eq!(pages(1), [256, 4096, 65_536, 262_144]);
        assert_eq!(pages(1000), [1, 4, 64, 256]);
    }
}
