//! Writes a VM's memory at random, and passes its epochs through the sender and the wire to a
//! backup. The memory of the backup must be that of the primary at the cut of the committed epoch,
//! byte for byte.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::error::Error;
use std::io::{self, Read, Write};
use std::ops::Range;
use std::rc::Rc;

use crossbeam_channel::Receiver;
use firn_cluster::Epoch;
use firn_cluster::predict::{DirtyPagePredictor, PageSet};
use firn_types::{PAGE_SIZE, Page, RegionMap};
use proptest::prelude::*;

use crate::backup::{BackupReceiveError, BackupReceiver as Backup};
use crate::copy::EpochCopy;
use crate::endpoint::EpochStream;
use crate::primary::{ProtectionError, prefer_backup_reason};
use crate::protection_end::ProtectionEnd;
use crate::sender::{ConnectionEvent, EpochSender, SendJob, read_messages};
use crate::standby::{StandbyRam, StandbyVm};
use crate::wire::{EpochReader, EpochStreamError, EpochWriter, PageBatch, PrimaryHello, VERSION};

const PAGES: u32 = 8;
/// The number of written pages that makes a guest busy.
const BUSY: Range<usize> = 2..PAGES as usize;
/// An epoch with more pages is sent from within its pause.
const BUFFER_PAGES: usize = 5;

/// The value that was last written to each page.
type Bytes = [u8; PAGES as usize];

/// The contents of a page with a value: values 0 and 1 differ in a few bytes, value 2 in nearly
/// all.
fn held(value: u8) -> Vec<u8> {
    let mut bytes = vec![value / 2; PAGE_SIZE];
    [9, 2000, 2001].into_iter().for_each(|at| bytes[at] = value);
    bytes
}

/// All bytes of all pages.
fn all(values: &Bytes) -> Vec<u8> {
    values.iter().flat_map(|&value| held(value)).collect()
}

impl StandbyRam for Vec<u8> {
    fn write_bytes(&mut self, page: Page, at: usize, bytes: &[u8]) -> io::Result<()> {
        let from = page.index() * PAGE_SIZE + at;
        self[from..from + bytes.len()].copy_from_slice(bytes);
        Ok(())
    }
}

/// Both ends of a connection, and the position at which it is cut.
#[derive(Clone, Default)]
struct Link(Rc<RefCell<VecDeque<u8>>>);

impl Read for Link {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.0.borrow_mut().read(into)
    }
}

impl Write for Link {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        self.0.borrow_mut().write(from)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[derive(Clone, Debug)]
enum Step {
    /// The guest writes a value, perhaps the one that the page has already.
    Write(u32, u8),
    /// Pages are protected and copied ahead of the next cut.
    Ahead,
    Cut,
    /// The predictor receives the result of a comparison.
    Hear,
}

struct World {
    memory: Bytes,
    protected: [bool; PAGES as usize],
    predictor: DirtyPagePredictor,
    /// Pages copied ahead, with their contents.
    ahead: (Vec<Page>, Vec<u8>),
    sending: EpochSender<Link>,
    events: Receiver<ConnectionEvent>,
    link: Link,
    reader: EpochReader<Link>,
    standby: StandbyVm<Vec<u8>>,
    /// Memory at each cut.
    cuts: Vec<Bytes>,
}

impl World {
    fn new(predicts: bool) -> Self {
        let (tell, events) = crossbeam_channel::unbounded();
        let link = Link::default();
        let mut writer = EpochWriter::new(link.clone());
        writer.write_end(Epoch(0), &[], &[], false).unwrap();
        let regions = RegionMap::lay_out([("ram", u64::from(PAGES) * PAGE_SIZE as u64)]).unwrap();
        Self {
            memory: [0; PAGES as usize],
            protected: [true; PAGES as usize],
            predictor: DirtyPagePredictor::new(predicts).with_busy_counts(BUSY),
            ahead: (Vec::new(), Vec::new()),
            sending: EpochSender::new(writer, tell),
            events,
            reader: EpochReader::new(link.clone()),
            link,
            standby: StandbyVm::new(regions, all(&[0; PAGES as usize])),
            cuts: Vec::new(),
        }
    }

    fn step(&mut self, step: &Step) {
        match *step {
            Step::Write(page, value) => {
                self.memory[page as usize] = value;
                self.protected[page as usize] = false;
            }
            Step::Ahead => self.copy_ahead(),
            Step::Cut => self.cut(),
            Step::Hear => self.hear(),
        }
    }

    fn newest(&self) -> Epoch {
        Epoch(self.cuts.len() as u64)
    }

    fn writable(&self) -> PageSet {
        (0..PAGES).filter(|&page| !self.protected[page as usize]).map(Page).collect()
    }

    fn copies(&self, pages: &PageSet) -> (Vec<Page>, Vec<u8>) {
        let pages: Vec<Page> = pages.iter().collect();
        let bytes = pages.iter().flat_map(|page| held(self.memory[page.index()])).collect();
        (pages, bytes)
    }

    /// Executed once for each cut.
    fn copy_ahead(&mut self) {
        if self.ahead.0.is_empty() {
            let pages = self.predictor.plan_ahead(&self.writable());
            pages.iter().for_each(|page| self.protected[page.index()] = true);
            self.ahead = self.copies(&pages);
        }
    }

    fn cut(&mut self) {
        let epoch = self.newest().next();
        let mut plan = self.predictor.plan_cut(&self.writable());
        if plan.copy.len() > BUFFER_PAGES {
            self.predictor.give_up_plan(&mut plan);
        }
        plan.protect.iter().for_each(|page| self.protected[page.index()] = true);
        let (mut pages, mut copied) = self.copies(&plan.copy);
        let (ahead, mut bytes) = std::mem::take(&mut self.ahead);
        if pages.len() > BUFFER_PAGES {
            let (numbers, bytes) = (std::mem::take(&mut pages), std::mem::take(&mut copied));
            self.sending.send_job(SendJob::Part(epoch, PageBatch { numbers, bytes })).unwrap();
        }
        bytes.extend(copied);
        let (devices, aux, last) = (vec![1], Vec::new(), false);
        let disks = Vec::new();
        let card = None;
        let copy = EpochCopy { epoch, plan, ahead, pages, bytes, devices, aux, disks, card, last };
        self.cuts.push(self.memory);
        self.sending.send_job(SendJob::Epoch(Box::new(copy))).unwrap();
    }

    fn hear(&mut self) {
        for event in self.events.try_iter() {
            match event {
                ConnectionEvent::Compared { epoch, plan, same }
                    if epoch == Epoch(self.cuts.len() as u64) =>
                {
                    self.predictor.record_unchanged(&plan, &same);
                }
                _ => {}
            }
        }
    }

    /// The backup handles all messages that have arrived.
    fn arrive(&mut self) -> Result<(), Box<dyn Error>> {
        while !self.link.0.borrow().is_empty() {
            let message = self.reader.read_message()?;
            self.standby.handle_message(message)?;
        }
        Ok(())
    }

    /// Whether the state that a failover would run is that of the primary.
    fn ends_well(self) -> bool {
        let expected = self.standby.progress().committed;
        match self.standby.promote_at(None) {
            Ok(committed) => {
                let at_cut = self.cuts[committed.epoch.0 as usize - 1];
                committed.epoch == expected && committed.ram == all(&at_cut)
            }
            Err(_) => expected == Epoch(0),
        }
    }
}

/// The backup refuses, and closes its end while the primary still sends.
#[test]
fn the_refusal_of_a_backup_is_received_though_sending_failed() {
    let (primary, backup) = EpochStream::connected_pair().unwrap();
    let mut sent = primary.try_clone().unwrap();
    sent.write_all(&[0; 4096]).unwrap();
    EpochWriter::new(backup).write_refusal("there is no room").unwrap();
    let broken = sent.write_all(&[0; 4096]).unwrap_err();
    let (tell, events) = crossbeam_channel::unbounded();
    std::thread::spawn(move || read_messages(primary, &tell));
    let said = prefer_backup_reason(EpochStreamError::Io(broken).into(), &events);
    assert!(
        matches!(&said, ProtectionError::Refused(why) if why == "there is no room"),
        "{said:?}"
    );
}

/// A primary that requests to continue alone gets a confirmation only if the VM is never run here.
#[test]
fn a_release_is_agreed_to_or_not_answered() {
    for agrees in [true, false] {
        let (primary, backup) = EpochStream::connected_pair().unwrap();
        let regions = RegionMap::lay_out([("ram", u64::from(PAGES) * PAGE_SIZE as u64)]).unwrap();
        let (disks, meta) = (Vec::new(), serde_json::Value::Null);
        let hello =
            PrimaryHello { version: VERSION, regions, disks, leased: false, member: None, meta };
        let mut writer = EpochWriter::new(primary.try_clone().unwrap());
        writer.write_hello(&hello).unwrap();
        writer.write_release().unwrap();
        let (mut receiver, hello) = Backup::accept_hello(&backup).unwrap();
        let mut standby = StandbyVm::new(hello.regions, all(&[0; PAGES as usize]));
        let ended = receiver.receive_epochs(&mut standby, &mut |_| (), &mut |_| agrees);
        assert_eq!(matches!(ended, BackupReceiveError::Released), agrees, "{ended:?}");
        drop((receiver, backup));
        let (tell, events) = crossbeam_channel::unbounded();
        read_messages(primary, &tell);
        let heard = events.try_recv().unwrap();
        assert_eq!(matches!(heard, ConnectionEvent::Released), agrees, "{heard:?}");
    }
}

/// The backup records how the protection ended at the primary, and the primary is informed of that.
/// A backup that is about to run the VM records nothing.
#[test]
fn a_protection_end_is_recorded_or_not_answered() {
    for notes in [true, false] {
        let (primary, backup) = EpochStream::connected_pair().unwrap();
        let regions = RegionMap::lay_out([("ram", u64::from(PAGES) * PAGE_SIZE as u64)]).unwrap();
        let (disks, meta) = (Vec::new(), serde_json::Value::Null);
        let hello =
            PrimaryHello { version: VERSION, regions, disks, leased: false, member: None, meta };
        let mut writer = EpochWriter::new(primary.try_clone().unwrap());
        writer.write_hello(&hello).unwrap();
        writer.write_protection_end(&ProtectionEnd::Stopped).unwrap();
        let (mut receiver, hello) = Backup::accept_hello(&backup).unwrap();
        let mut standby = StandbyVm::new(hello.regions, all(&[0; PAGES as usize]));
        let ended = receiver.receive_epochs(&mut standby, &mut |_| (), &mut |end| {
            assert_eq!(*end, ProtectionEnd::Stopped);
            notes
        });
        let is_recorded = matches!(ended, BackupReceiveError::Ended(ProtectionEnd::Stopped));
        assert_eq!(is_recorded, notes, "{ended:?}");
        drop((receiver, backup));
        let (tell, events) = crossbeam_channel::unbounded();
        read_messages(primary, &tell);
        let heard = events.try_recv().unwrap();
        assert_eq!(matches!(heard, ConnectionEvent::EndRecorded), notes, "{heard:?}");
    }
}

/// A standby that its user stops reports that it never runs the VM.
#[test]
fn a_backup_that_declines_is_understood() {
    let (primary, backup) = EpochStream::connected_pair().unwrap();
    EpochWriter::new(backup).write_decline("its user stopped the standby").unwrap();
    let (tell, events) = crossbeam_channel::unbounded();
    read_messages(primary, &tell);
    let heard = events.try_recv().unwrap();
    let ConnectionEvent::Lost(ProtectionError::Declined(why)) = heard else { panic!("{heard:?}") };
    assert_eq!(why, "its user stopped the standby");
}

#[test]
fn a_backup_that_dies_silently_has_no_reason() {
    let (primary, backup) = EpochStream::connected_pair().unwrap();
    drop(backup);
    let broken = primary.try_clone().unwrap().write_all(&[0]).unwrap_err();
    let (tell, events) = crossbeam_channel::unbounded();
    std::thread::spawn(move || read_messages(primary, &tell));
    let said = prefer_backup_reason(EpochStreamError::Io(broken).into(), &events);
    assert!(matches!(said, ProtectionError::Wire(_)), "{said:?}");
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        6 => (0..PAGES, 0..3_u8).prop_map(|(page, value)| Step::Write(page, value)),
        2 => Just(Step::Ahead),
        2 => Just(Step::Cut),
        2 => Just(Step::Hear),
    ];
    prop::collection::vec(step, 1..120)
}

proptest! {
    #[test]
    fn the_backup_has_the_memory_of_the_committed_epoch(steps in steps(), predicts: bool) {
        let mut world = World::new(predicts);
        for step in &steps {
            world.step(step);
        }
        world.arrive().unwrap();
        let (newest, committed) = (world.newest(), world.standby.progress().committed);
        prop_assert_eq!(committed, newest.previous(), "one behind");
        prop_assert!(world.ends_well());
    }

    #[test]
    fn a_connection_cut_anywhere_leaves_a_committed_epoch(steps in steps(), at: prop::sample::Index) {
        let mut world = World::new(true);
        steps.iter().for_each(|step| world.step(step));
        let length = world.link.0.borrow().len();
        world.link.0.borrow_mut().truncate(at.index(length));
        // The connection may have been cut between two messages.
        let _ = world.arrive();
        prop_assert!(world.ends_well());
    }

    #[test]
    fn a_flipped_bit_leaves_a_committed_epoch(steps in steps(), at: prop::sample::Index, bit in 0..8_u8) {
        let mut world = World::new(true);
        steps.iter().for_each(|step| world.step(step));
        let length = world.link.0.borrow().len();
        world.link.0.borrow_mut()[at.index(length)] ^= 1 << bit;
        prop_assert!(world.arrive().is_err(), "it was not noticed");
        prop_assert!(world.ends_well());
    }
}
