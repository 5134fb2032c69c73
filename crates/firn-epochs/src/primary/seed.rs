//! Seed: the first epoch, which sends all disks and all of memory while the VM runs. Changes of the
//! part of a disk that was copied already are sent in between.

use std::io::BufWriter;

use crossbeam_channel::Receiver;
use firn_cluster::Epoch;
use firn_cluster::predict::PageSet;
use firn_types::{PAGE_SIZE, Page};

use super::{Ending, PrimaryError, Told, Watch};
use crate::endpoint::Stream;
use crate::guest::{Guest, GuestError};
use crate::sender::Event;
use crate::wire::{PAGES_MAX, Writer};

/// The number of rounds that bring the seed up to date before the first cut.
const SEED_ROUNDS: usize = 3;
/// The number of pages that are left to the first epoch without another round.
const SEED_FEW: usize = 2048;

/// Sends all of memory to a backup that has nothing.
pub(super) struct Seed<'a> {
    pub(super) guest: &'a mut Guest,
    pub(super) writer: &'a mut Writer<BufWriter<Stream>>,
    pub(super) events: &'a Receiver<Event>,
    pub(super) ending: &'a Ending,
    pub(super) told: &'a dyn Watch,
}

impl Seed<'_> {
    pub(super) fn run(mut self) -> Result<(), PrimaryError> {
        self.disks()?;
        let mut pages = PageSet::new();
        let backed = self.guest.memory().backed_runs().map_err(GuestError::from)?;
        backed.into_iter().for_each(|run| pages.insert_run(run));
        let mut sent = 0;
        for _ in 0..SEED_ROUNDS {
            self.send(&pages, &mut sent)?;
            pages = self.guest.newly_written()?;
            if pages.len() <= SEED_FEW {
                break;
            }
        }
        self.send(&pages, &mut sent)?;
        match self.ending.is_asked() {
            // The seed is incomplete.
            true => Ok(()),
            false => Ok(self.writer.end(Epoch(0), &[], &[], false)?),
        }
    }

    fn disks(&mut self) -> Result<(), PrimaryError> {
        self.guest.disks().begin();
        while !self.disks_step()? && !self.is_over()? {
            let (done, all) = self.guest.disks().seeded();
            self.told.told(Told::SeedingDisks(done, all));
        }
        Ok(())
    }

    /// Takes a step for each disk. Returns whether all are whole.
    fn disks_step(&mut self) -> Result<bool, PrimaryError> {
        let mut is_whole = true;
        for number in self.guest.disks().numbers() {
            let (changes, is_there) = self.guest.disks().seed(number).map_err(GuestError::from)?;
            self.writer.changes(Epoch(0), number, &changes)?;
            is_whole &= is_there;
        }
        Ok(is_whole)
    }

    fn is_over(&self) -> Result<bool, PrimaryError> {
        match self.events.try_recv() {
            Ok(Event::Lost(error)) => Err(error),
            _ => Ok(self.ending.is_asked()),
        }
    }

    fn send(&mut self, pages: &PageSet, sent: &mut u64) -> Result<(), PrimaryError> {
        let numbers: Vec<Page> = pages.iter().collect();
        let mut bytes = Vec::new();
        for some in numbers.chunks(PAGES_MAX) {
            if self.is_over()? {
                return Ok(());
            }
            self.disks_step()?;
            self.guest.copy_running(&some.iter().copied().collect(), &mut bytes)?;
            let contents = bytes.chunks_exact(PAGE_SIZE);
            self.writer.pages(Epoch(0), some.iter().copied().zip(contents))?;
            *sent += some.len() as u64;
            self.told.told(Told::Seeding(*sent));
        }
        Ok(())
    }
}
