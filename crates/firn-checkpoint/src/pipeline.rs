//! Image pipeline: brings copied memory blocks to the image file, off the fault path.
//!
//! ```text
//!   fault handler --+                +-- compressor --+              packer vCPU 0 --+
//!                   +-- RawBlocks ---+                +-- packed --- packer vCPU 1 --+--- Writer (one thread)
//!   sweep ----------+   (bounded)    +-- compressor --+   (bounded)  packer sweep  --+
//!        ^                                  |
//!        +------- empty buffers ------------+
//! ```
//!
//! The number of buffers is limited ([`SaveBuffers`]): a thread that copies a block first takes an
//! empty buffer, and waits if there is none. This is the limit of a save's memory, and it slows a
//! guest that touches memory faster than it can be written. When the file can't be written the
//! pipeline continues to take blocks and drops them, so that no thread waits for a buffer that is
//! never returned; the error is returned at the end.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, bounded};
use firn_image::{
    Codec, Compressed, FilledBy, Geometry, Image, ImageError, PackedBlock, Packer, Writer, compress,
};
use firn_memory::urgency;
use firn_types::Block;

use crate::buffers::Buffers;
use crate::lane::Lane;
use crate::turns::Turns;

/// How often a thread that waits for the pipeline checks it.
const SETTLE_LOOK: Duration = Duration::from_micros(200);

/// A memory block as it was at the cut.
pub(crate) struct RawBlock {
    pub(crate) lane: Lane,
    pub(crate) block: Block,
    pub(crate) bytes: Box<[u8]>,
    /// Whether the block was submitted before, with other content. That must be done: see
    /// [`PipelineIntake::wait_until_done`].
    pub(crate) again: bool,
}

enum Finished {
    /// The parent image has the same content.
    Inherited,
    Zero(ZeroBlock),
    Packed(Lane, PackedBlock),
}

/// A block of zeros, and whether it was submitted before with other content.
struct ZeroBlock {
    block: Block,
    again: bool,
}

/// The sending end: used by the fault handler and the sweep.
#[derive(Clone)]
pub(crate) struct Intake {
    blocks: Sender<RawBlock>,
    buffers: Arc<Buffers>,
    state: Arc<PipelineState>,
    turns: Arc<Turns>,
}

#[derive(Default)]
struct PipelineState {
    failed: AtomicBool,
    written: AtomicU64,
    /// The numbers of blocks that entered the pipeline, and that left it.
    submitted: AtomicU64,
    done: AtomicU64,
}

/// Marks the pipeline as failed if its thread panics: blocks that the thread had taken will never
/// leave the pipeline.
struct Alarm(Arc<PipelineState>);

impl Drop for Alarm {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.failed.store(true, Ordering::Release);
        }
    }
}

impl Intake {
    /// An empty buffer of one memory block, waiting for one if necessary. `None` once the pipeline
    /// is gone.
    pub(crate) fn buffer(&self) -> Option<Box<[u8]>> {
        self.buffers.take()
    }

    /// The pauses of background work.
    pub(crate) fn turns(&self) -> &Arc<Turns> {
        &self.turns
    }

    /// The maximum number of buffers.
    pub(crate) fn buffers(&self) -> usize {
        self.buffers.most()
    }

    /// Submits a filled buffer. Never waits: there are no more blocks than buffers.
    pub(crate) fn submit(&self, block: RawBlock) {
        self.state.submitted.fetch_add(1, Ordering::AcqRel);
        // The receivers outlive every sender unless a compressor panicked; then the save fails at
        // its end.
        if self.blocks.send(block).is_err() {
            self.state.failed.store(true, Ordering::Release);
        }
    }

    /// Waits until all submitted blocks are done, or the image can't be written, or `cancelled`
    /// returns true: a block that is submitted again must come after what was submitted of it
    /// before.
    pub(crate) fn settle(&self, cancelled: &dyn Fn() -> bool) {
        let count = |number: &AtomicU64| number.load(Ordering::Acquire);
        while count(&self.state.done) < count(&self.state.submitted)
            && !self.failed()
            && !cancelled()
        {
            thread::sleep(SETTLE_LOOK);
        }
    }

    /// Whether enough buffers are free that the fault handler still finds some when one is taken.
    pub(crate) fn has_room(&self) -> bool {
        self.buffers.free() * 4 > self.buffers.most()
    }

    /// Whether the image can no longer be written.
    pub(crate) fn failed(&self) -> bool {
        self.state.failed.load(Ordering::Acquire)
    }

    /// Bytes written to the image so far.
    pub(crate) fn written(&self) -> u64 {
        self.state.written.load(Ordering::Relaxed)
    }
}

/// The threads between [`PipelineIntake`] and the image file.
pub(crate) struct Pipeline {
    compressors: Vec<JoinHandle<()>>,
    writer: JoinHandle<Result<Writer, ImageError>>,
}

impl Pipeline {
    /// Starts the threads around a new image file. `parent` is the image that the new one builds
    /// on: blocks with the same content are not written again.
    pub(crate) fn start(
        writer: Writer,
        codec: Codec,
        parent: Option<Arc<Image>>,
        limits: Limits,
    ) -> (Self, Intake) {
        let geometry = writer.geometry();
        let block_bytes = geometry.block_size.bytes();
        let buffers = (limits.buffer_bytes / block_bytes).max(16);
        // Twice as many slots as buffers: a sender never reaches a slot from which a receiver is
        // just taking a block.
        let (blocks, raw) = bounded(2 * buffers);
        let buffers = Arc::new(Buffers::new(buffers, block_bytes));
        let (finished, packed) = bounded(1024);
        let state: Arc<PipelineState> = Arc::default();
        let giver = Arc::new(Giver(Arc::clone(&buffers)));
        let turns = Arc::new(Turns::new());
        let compressors = (0..limits.compressors.max(1))
            .map(|_| Compressor {
                codec,
                parent: parent.clone(),
                raw: raw.clone(),
                giver: Arc::clone(&giver),
                finished: finished.clone(),
                alarm: Alarm(Arc::clone(&state)),
                turns: Arc::clone(&turns),
            })
            .map(|compressor| thread::spawn(move || compressor.run()))
            .collect();
        let intake =
            Intake { blocks, buffers, state: Arc::clone(&state), turns: Arc::clone(&turns) };
        let writer = thread::spawn(move || {
            let _alarm = Alarm(Arc::clone(&state));
            urgency::step_back();
            write_all(writer, geometry, &packed, &state, &turns)
        });
        (Self { compressors, writer }, intake)
    }

    /// Waits until everything submitted is in the file. All intakes must have been dropped.
    pub(crate) fn finish(self) -> Result<Writer, ImageError> {
        self.compressors.into_iter().for_each(propagate_panic);
        match self.writer.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }
}

/// The resources that a pipeline may use.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub(crate) compressors: usize,
    pub(crate) buffer_bytes: usize,
}

fn propagate_panic(thread: JoinHandle<()>) {
    if let Err(panic) = thread.join() {
        std::panic::resume_unwind(panic);
    }
}

/// Returns buffers: shared by all compressors, and closed with the last of them.
struct Giver(Arc<Buffers>);

impl Drop for Giver {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// One of the threads that compress.
struct Compressor {
    codec: Codec,
    parent: Option<Arc<Image>>,
    raw: Receiver<RawBlock>,
    giver: Arc<Giver>,
    finished: Sender<Finished>,
    alarm: Alarm,
    turns: Arc<Turns>,
}

impl Compressor {
    fn run(self) {
        let Self { codec, parent, raw, giver, finished, alarm, turns } = self;
        let mut buffer = Vec::new();
        urgency::step_back();
        for RawBlock { lane, block, bytes, again } in raw {
            let parent = parent.as_ref().filter(|_| !again);
            let done = match parent.is_some_and(|it| it.holds(block, &bytes, &mut buffer)) {
                true => Finished::Inherited,
                false => match compress(codec, block, &bytes) {
                    Compressed::Zero => Finished::Zero(ZeroBlock { block, again }),
                    Compressed::Packed(packed) => Finished::Packed(lane, packed),
                },
            };
            giver.0.give(bytes);
            // A guest that waits for a buffer waits for this thread.
            if giver.0.free() > 1 {
                turns.rest();
            }
            if finished.send(done).is_err() {
                break;
            }
        }
        drop(alarm);
    }
}

/// The writing thread. After an error it continues to receive, so that compressors and copying
/// threads never hang.
fn write_all(
    mut writer: Writer,
    geometry: Geometry,
    packed: &Receiver<Finished>,
    state: &PipelineState,
    turns: &Turns,
) -> Result<Writer, ImageError> {
    let mut packers = Packers { geometry, open: BTreeMap::new() };
    let mut result = Ok(());
    for done in packed {
        if result.is_ok() {
            result = packers.take(done, &mut writer);
            state.failed.fetch_or(result.is_err(), Ordering::AcqRel);
            state.written.store(writer.bytes_written(), Ordering::Relaxed);
        }
        state.done.fetch_add(1, Ordering::AcqRel);
        turns.rest();
    }
    result?;
    packers.finish(&mut writer)?;
    Ok(writer)
}

/// One open locality block per lane.
struct Packers {
    geometry: Geometry,
    open: BTreeMap<Lane, Packer>,
}

impl Packers {
    fn take(&mut self, done: Finished, writer: &mut Writer) -> Result<(), ImageError> {
        let (lane, packed) = match done {
            Finished::Inherited => return Ok(()),
            Finished::Zero(ZeroBlock { block, again }) => {
                if again {
                    self.write_out(block, writer)?;
                }
                writer.set_zero(block);
                return Ok(());
            }
            Finished::Packed(lane, packed) => (lane, packed),
        };
        let packer =
            self.open.entry(lane).or_insert_with(|| Packer::filled_by(self.geometry, lane.into()));
        match packer.push(packed) {
            Some(full) => writer.append(full).map(drop),
            None => Ok(()),
        }
    }

    /// The content that the writer receives last counts. Earlier content of the block may still be
    /// in a packer here, so it is written first.
    fn write_out(&mut self, block: Block, writer: &mut Writer) -> Result<(), ImageError> {
        let mut holding = self.open.values_mut().filter(|packer| packer.holds(block));
        holding.try_for_each(|packer| match packer.finish() {
            Some(part) => writer.append(part).map(drop),
            None => Ok(()),
        })
    }

    fn finish(self, writer: &mut Writer) -> Result<(), ImageError> {
        for mut packer in self.open.into_values() {
            if let Some(rest) = packer.finish() {
                writer.append(rest)?;
            }
        }
        Ok(())
    }
}

impl From<Lane> for FilledBy {
    fn from(lane: Lane) -> Self {
        match lane {
            Lane::Vcpu(vcpu) => Self::Vcpu(vcpu),
            Lane::Device => Self::Device,
            Lane::Sweep => Self::Sweep,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use firn_image::{Draft, Organization, Sections};
    use firn_types::RegionMap;

    const PAGES: u32 = 64;

    fn submit(intake: &Intake, block: u32, byte: u8, again: bool) {
        let mut bytes = intake.buffer().unwrap();
        bytes.fill(byte);
        intake.submit(RawBlock { lane: Lane::Sweep, block: Block(block), bytes, again });
    }

    /// Every memory block is submitted with one content, then with another.
    #[test]
    fn what_a_block_was_last_counts() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.firn");
        let whole = Draft::whole(Geometry::new(PAGES), Organization::Access);
        let writer = Writer::create(&path, &Draft { again: true, ..whole }).unwrap();
        let limits = Limits { compressors: 2, buffer_bytes: 1 << 20 };
        let (pipeline, intake) = Pipeline::start(writer, Codec::Lz4, None, limits);
        let rounds = [[7, 0, 7, 0], [0, 7, 8, 0]];
        for (number, contents) in rounds.iter().enumerate() {
            for block in 0..PAGES / 2 {
                submit(&intake, block, contents[block as usize % 4], number > 0);
            }
            intake.settle(&|| false);
        }
        drop(intake);
        let regions = RegionMap::lay_out([("ram", u64::from(PAGES) * 4096)]).unwrap();
        pipeline.finish().unwrap().finish(Sections { regions, ..Sections::default() }).unwrap();
        let image = Image::open(&path).unwrap();
        let (mut stored, mut bytes) = (Vec::new(), vec![0; 8192]);
        for block in 0..PAGES / 2 {
            image.read_block(Block(block), &mut stored, &mut bytes).unwrap();
            let expected = rounds[1][block as usize % 4];
            assert!(bytes.iter().all(|&byte| byte == expected), "block {block}: {}", bytes[0]);
        }
    }
}
