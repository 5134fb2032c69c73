//! The common parts of most tests: a guest, an image of its expected memory, a directory.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use firn_image::{Codec, Image};
use firn_memory::{PageFaults, Tracee};
use firn_restore::{OnFatal, PrefilledMemory, PresenceFile, RestoreOptions, RunningRestore};
use firn_types::Block;
use tempfile::TempDir;

use crate::content::Model;
use crate::driver::Guest;

/// How this executable runs as another process of a test.
pub const CHILD: [&str; 4] = ["--exact", "child_process", "--nocapture", "--test-threads=1"];

pub struct Scene {
    pub model: Model,
    pub guest: Guest,
    pub image: Arc<Image>,
    pub dir: TempDir,
    pub fatal: Receiver<String>,
    tell: Arc<Mutex<std::sync::mpsc::Sender<String>>>,
}

impl Scene {
    /// A guest with regions of these many pages, and an image with blocks of this many, in shuffled
    /// order.
    pub fn new(sizes: &[u64], block_pages: u8, codec: Codec) -> Self {
        Self::with(sizes, block_pages, codec, Vec::new())
    }

    pub fn with(sizes: &[u64], block_pages: u8, codec: Codec, working_set: Vec<Block>) -> Self {
        let model = Model::new(sizes, 1);
        let dir = tempfile::tempdir().unwrap();
        let geometry = model.geometry(block_pages);
        let order = model.shuffled(&geometry, 7);
        let path = dir.path().join("image.firn");
        let image = Arc::new(model.write(&path, geometry, codec, &order, working_set));
        let guest = Guest::spawn(&model.map, &CHILD);
        let (tell, fatal) = channel();
        Self { model, guest, image, dir, fatal, tell: Arc::new(Mutex::new(tell)) }
    }

    pub fn image_path(&self) -> PathBuf {
        self.dir.path().join("image.firn")
    }

    pub fn presence_path(&self) -> PathBuf {
        self.dir.path().join("presence")
    }

    pub fn pages(&self) -> u32 {
        self.model.map.total_pages()
    }

    /// Sends the error, with what caused it, to `self.fatal`.
    pub fn on_fatal(&self) -> OnFatal {
        let tell = self.tell.clone();
        Box::new(move |error| {
            let _ = tell.lock().unwrap().send(chain(error));
        })
    }

    pub fn begin(&self, options: RestoreOptions) -> RunningRestore {
        self.begin_prefilled(options, &PrefilledMemory::default())
    }

    pub fn begin_prefilled(
        &self,
        options: RestoreOptions,
        prefilled: &PrefilledMemory,
    ) -> RunningRestore {
        let presence = PresenceFile::create(&self.presence_path(), self.pages()).unwrap();
        let (image, memory) = (self.image.clone(), self.guest.memory.clone());
        let (faults, fatal) = (self.guest.attach(), self.on_fatal());
        RunningRestore::begin_prefilled(image, memory, faults, options, presence, prefilled, fatal)
            .unwrap()
    }

    /// Continues with the restore that another process left.
    pub fn resume(&self, options: RestoreOptions) -> RunningRestore {
        let presence = PresenceFile::open(&self.presence_path(), self.pages()).unwrap();
        let (image, memory) = (self.image.clone(), self.guest.memory.clone());
        let faults = self.adopt().unwrap();
        RunningRestore::resume(image, memory, faults, options, presence, self.on_fatal()).unwrap()
    }

    pub fn adopt(&self) -> Option<PageFaults> {
        PageFaults::adopt(&self.guest.process, self.guest.memory.clone()).unwrap()
    }

    /// Has a guest thread read these pages, which must be in one region.
    pub fn check(&mut self, thread: usize, pages: Range<u32>) {
        let found = self.guest.ask(thread, &format!("sum {} {}", pages.start, pages.end));
        if found != self.model.sum(pages.clone()) {
            self.blame(pages);
        }
    }

    /// Names the first page that is wrong.
    fn blame(&mut self, pages: Range<u32>) -> ! {
        self.guest.send(0, &format!("sums {} {}", pages.start, pages.end));
        let sums = self.guest.result(0);
        let found = sums.split(' ').map(|sum| sum.parse::<u64>().unwrap());
        let wrong = pages.clone().zip(found).find(|(page, sum)| self.model.sum_of(*page) != *sum);
        panic!("of {pages:?}, this page and its sum are wrong: {wrong:?}");
    }

    /// Has a guest thread read all of memory.
    pub fn check_all(&mut self) {
        let regions: Vec<_> = self.model.map.regions().iter().map(|it| it.page_range()).collect();
        regions.into_iter().for_each(|range| self.check(0, range.start.0..range.end.0));
    }

    /// Waits until all memory is present, and checks that nothing of the restore is left in the
    /// guest then.
    pub fn finish(&mut self, restore: RunningRestore) -> firn_restore::RunRecord {
        restore.wait().unwrap();
        assert!(restore.progress().finished);
        assert_eq!(restore.progress().present, restore.progress().total);
        assert!(!self.guest.is_registered());
        let stopped = restore.stop().unwrap();
        self.check_all();
        self.guest.detach(stopped.faults);
        stopped.record
    }

    /// Whether a dead restore's descriptor is still in the guest.
    pub fn close_stale(&self) -> usize {
        let mut tracee = Tracee::seize(&self.guest.process, &self.guest.tids).unwrap();
        PageFaults::close_stale(&mut tracee).unwrap()
    }

    pub fn fatal_within(&self, time: Duration) -> Option<String> {
        self.fatal.recv_timeout(time).ok()
    }
}

/// An error and its causes.
pub fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |cause| cause.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}
