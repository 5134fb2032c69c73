//! Seed: the first epoch, which sends all disks and all of memory while the VM runs. Changes of the
//! part of a disk that was copied already are sent in between. A disk that the hypervisor mirrors is
//! copied by its job, whose writes are logged like those of the guest.

use std::io::BufWriter;
use std::thread;
use std::time::{Duration, Instant};

use crossbeam_channel::Receiver;
use firn_cluster::Epoch;
use firn_cluster::predict::PageSet;
use firn_types::{PAGE_SIZE, Page};

use super::{EndRequest, ProtectionCallbacks, ProtectionError, ProtectionEvent};
use crate::endpoint::EpochStream;
use crate::guest::{GuestError, ProtectedGuest};
use crate::sender::ConnectionEvent;
use crate::wire::{EpochWriter, PAGES_MAX};

/// The number of rounds that bring the seed up to date before the first cut.
const SEED_ROUNDS: usize = 3;
/// The number of pages that are left to the first epoch without another round.
const SEED_REMAINDER_PAGES_MAX: usize = 2048;

/// The wait for a job that mirrors a disk and has sent nothing new.
const MIRROR_WAIT: Duration = Duration::from_millis(1);
/// The interval at which the jobs that mirror disks are queried.
const MIRROR_POLL_INTERVAL: Duration = Duration::from_millis(20);

/// One step of the seed of all disks.
struct DisksStep {
    /// All have been copied.
    is_whole: bool,
    /// There was something to send.
    has_changes: bool,
}

/// Sends all of memory to a backup that has nothing.
pub(super) struct SeedSender<'a> {
    pub(super) guest: &'a mut ProtectedGuest,
    pub(super) writer: &'a mut EpochWriter<BufWriter<EpochStream>>,
    pub(super) events: &'a Receiver<ConnectionEvent>,
    pub(super) ending: &'a EndRequest,
    pub(super) callbacks: &'a dyn ProtectionCallbacks,
}

impl SeedSender<'_> {
    pub(super) fn run(mut self) -> Result<(), ProtectionError> {
        self.seed_disks()?;
        let mut pages = PageSet::new();
        let backed = self.guest.memory().backed_runs().map_err(GuestError::from)?;
        backed.into_iter().for_each(|run| pages.insert_run(run));
        let mut sent = 0;
        for _ in 0..SEED_ROUNDS {
            self.send_pages(&pages, &mut sent)?;
            pages = self.guest.reprotect_running()?;
            if pages.len() <= SEED_REMAINDER_PAGES_MAX {
                break;
            }
        }
        self.send_pages(&pages, &mut sent)?;
        match self.ending.is_end_requested() {
            // The seed is incomplete.
            true => Ok(()),
            false => Ok(self.writer.write_end(Epoch(0), &[], &[], false)?),
        }
    }

    fn seed_disks(&mut self) -> Result<(), ProtectionError> {
        self.guest.begin_disk_logs()?;
        let mut polled = Instant::now();
        loop {
            let step = self.seed_disks_step()?;
            if step.is_whole || self.is_cancelled()? {
                return Ok(());
            }
            let (done, all) = self.guest.disks().seeded_bytes();
            self.callbacks.on_event(ProtectionEvent::SeedingDisks(done, all));
            if !step.has_changes {
                thread::sleep(MIRROR_WAIT);
            }
            if polled.elapsed() >= MIRROR_POLL_INTERVAL {
                self.guest.poll_mirrors()?;
                polled = Instant::now();
            }
        }
    }

    /// Takes a step for each disk.
    fn seed_disks_step(&mut self) -> Result<DisksStep, ProtectionError> {
        let mut step = DisksStep { is_whole: true, has_changes: false };
        for number in self.guest.disks().disk_numbers() {
            let (changes, is_whole) =
                self.guest.disks().seed_step(number).map_err(GuestError::from)?;
            self.writer.write_changes(Epoch(0), number, &changes)?;
            step.is_whole &= is_whole;
            step.has_changes |= !changes.is_empty();
        }
        Ok(step)
    }

    fn is_cancelled(&self) -> Result<bool, ProtectionError> {
        match self.events.try_recv() {
            Ok(ConnectionEvent::Lost(error)) => Err(error),
            _ => Ok(self.ending.is_end_requested()),
        }
    }

    fn send_pages(&mut self, pages: &PageSet, sent: &mut u64) -> Result<(), ProtectionError> {
        let numbers: Vec<Page> = pages.iter().collect();
        let mut bytes = Vec::new();
        for some in numbers.chunks(PAGES_MAX) {
            if self.is_cancelled()? {
                return Ok(());
            }
            self.seed_disks_step()?;
            self.guest.copy_running(&some.iter().copied().collect(), &mut bytes)?;
            let contents = bytes.chunks_exact(PAGE_SIZE);
            self.writer.write_pages(Epoch(0), some.iter().copied().zip(contents))?;
            *sent += some.len() as u64;
            self.callbacks.on_event(ProtectionEvent::Seeding(*sent));
        }
        Ok(())
    }
}
