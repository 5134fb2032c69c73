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
    Codec, CompressedBlock, FilledBy, Geometry, Image, ImageError, ImageWriter,
    LocalityBlockPacker, PackedBlock, compress_block,
};
use firn_memory::scheduling;
use firn_types::Block;

use crate::buffers::SaveBuffers;
use crate::duty_cycle::DutyCycle;
use crate::lane::PackingLane;

/// How often a thread that waits for the pipeline checks it.
const DONE_POLL_INTERVAL: Duration = Duration::from_micros(200);

/// A memory block as it was at the cut.
pub(crate) struct RawBlock {
    pub(crate) lane: PackingLane,
    pub(crate) block: Block,
    pub(crate) bytes: Box<[u8]>,
    /// Whether the block was submitted before. If that was with other content, it must be done: see
    /// [`PipelineIntake::wait_until_done`].
    pub(crate) again: bool,
}

enum FinishedBlock {
    /// The parent image has the same content.
    Inherited,
    Zero(ZeroBlock),
    Packed(PackingLane, PackedBlock),
}

/// A block of zeros, and whether it was submitted before.
struct ZeroBlock {
    block: Block,
    again: bool,
}

/// The sending end: used by the fault handler and the sweep.
#[derive(Clone)]
pub(crate) struct PipelineIntake {
    blocks: Sender<RawBlock>,
    buffers: Arc<SaveBuffers>,
    state: Arc<PipelineState>,
    duty_cycle: Arc<DutyCycle>,
}

#[derive(Default)]
struct PipelineState {
    failed: AtomicBool,
    written: AtomicU64,
    /// The numbers of blocks that entered the pipeline, and that left it.
    submitted: AtomicU64,
    done: AtomicU64,
    /// The number of blocks that the guest's accesses saved and that the image stores.
    guest_blocks: AtomicU64,
}

impl PipelineState {
    /// A block that is stored a second time is no progress.
    fn count_guest_block(&self, done: &FinishedBlock, again: bool) {
        let is_first =
            matches!(done, FinishedBlock::Packed(lane, _) if *lane != PackingLane::Sweep);
        let is_guests = is_first && !again;
        self.guest_blocks.fetch_add(u64::from(is_guests), Ordering::Relaxed);
    }
}

/// Marks the pipeline as failed if its thread panics: blocks that the thread had taken will never
/// leave the pipeline.
struct PipelineAlarm(Arc<PipelineState>);

impl Drop for PipelineAlarm {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.failed.store(true, Ordering::Release);
        }
    }
}

impl PipelineIntake {
    /// An empty buffer of one memory block, waiting for one if necessary. `None` once the pipeline
    /// is gone.
    pub(crate) fn take_buffer(&self) -> Option<Box<[u8]>> {
        self.buffers.take_buffer()
    }

    /// The pauses of background work.
    pub(crate) fn duty_cycle(&self) -> &Arc<DutyCycle> {
        &self.duty_cycle
    }

    /// The maximum number of buffers.
    pub(crate) fn buffer_count_max(&self) -> usize {
        self.buffers.count_max()
    }

    /// Submits a filled buffer. Never waits: there are no more blocks than buffers.
    pub(crate) fn submit_block(&self, block: RawBlock) {
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
    pub(crate) fn wait_until_done(&self, cancelled: &dyn Fn() -> bool) {
        let count = |number: &AtomicU64| number.load(Ordering::Acquire);
        while count(&self.state.done) < count(&self.state.submitted)
            && !self.has_failed()
            && !cancelled()
        {
            thread::sleep(DONE_POLL_INTERVAL);
        }
    }

    /// Whether enough buffers are free that the fault handler still finds some when one is taken.
    pub(crate) fn has_room(&self) -> bool {
        self.buffers.free_count() * 4 > self.buffers.count_max()
    }

    /// Whether the image can no longer be written.
    pub(crate) fn has_failed(&self) -> bool {
        self.state.failed.load(Ordering::Acquire)
    }

    /// The number of blocks so far that an access of the guest saved and that the image stores: not
    /// those that hold zeros, or equal the parent's.
    pub(crate) fn guest_block_count(&self) -> u64 {
        self.state.guest_blocks.load(Ordering::Relaxed)
    }

    /// Bytes written to the image so far, and those of blocks that are not compressed yet.
    pub(crate) fn written_at_most(&self) -> u64 {
        let count = |number: &AtomicU64| number.load(Ordering::Acquire);
        let waiting = count(&self.state.submitted).saturating_sub(count(&self.state.done));
        self.written_bytes() + waiting * self.buffers.block_bytes() as u64
    }

    /// Bytes written to the image so far.
    pub(crate) fn written_bytes(&self) -> u64 {
        self.state.written.load(Ordering::Relaxed)
    }
}

/// The threads between [`PipelineIntake`] and the image file.
pub(crate) struct ImagePipeline {
    compressors: Vec<JoinHandle<()>>,
    writer: JoinHandle<Result<ImageWriter, ImageError>>,
}

impl ImagePipeline {
    /// Starts the threads around a new image file. `parent` is the image that the new one builds
    /// on: blocks with the same content are not written again.
    pub(crate) fn start_threads(
        writer: ImageWriter,
        codec: Codec,
        parent: Option<Arc<Image>>,
        limits: PipelineLimits,
    ) -> (Self, PipelineIntake) {
        let geometry = writer.geometry();
        let block_bytes = geometry.block_size.byte_count();
        let buffers = (limits.buffer_bytes / block_bytes).max(16);
        // Twice as many slots as buffers: a sender never reaches a slot from which a receiver is
        // just taking a block.
        let (blocks, raw) = bounded(2 * buffers);
        let buffers = Arc::new(SaveBuffers::new(buffers, block_bytes));
        let (finished, packed) = bounded(1024);
        let state: Arc<PipelineState> = Arc::default();
        let giver = Arc::new(BufferReturn(Arc::clone(&buffers)));
        let turns = Arc::new(DutyCycle::new());
        let compressors = (0..limits.compressors.max(1))
            .map(|_| CompressorThread {
                codec,
                parent: parent.clone(),
                raw: raw.clone(),
                buffer_return: Arc::clone(&giver),
                finished: finished.clone(),
                alarm: PipelineAlarm(Arc::clone(&state)),
                duty_cycle: Arc::clone(&turns),
            })
            .map(|compressor| thread::spawn(move || compressor.run_thread()))
            .collect();
        let intake = PipelineIntake {
            blocks,
            buffers,
            state: Arc::clone(&state),
            duty_cycle: Arc::clone(&turns),
        };
        let writer = thread::spawn(move || {
            let _alarm = PipelineAlarm(Arc::clone(&state));
            scheduling::set_background();
            write_all(writer, geometry, &packed, &state, &turns)
        });
        (Self { compressors, writer }, intake)
    }

    /// Waits until everything submitted is in the file. All intakes must have been dropped.
    pub(crate) fn finish_image(self) -> Result<ImageWriter, ImageError> {
        self.compressors.into_iter().for_each(propagate_panic);
        match self.writer.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }
}

/// The resources that a pipeline may use.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PipelineLimits {
    pub(crate) compressors: usize,
    pub(crate) buffer_bytes: usize,
}

fn propagate_panic(thread: JoinHandle<()>) {
    if let Err(panic) = thread.join() {
        std::panic::resume_unwind(panic);
    }
}

/// Returns buffers: shared by all compressors, and closed with the last of them.
struct BufferReturn(Arc<SaveBuffers>);

impl Drop for BufferReturn {
    fn drop(&mut self) {
        self.0.close_stock();
    }
}

/// One of the threads that compress.
struct CompressorThread {
    codec: Codec,
    parent: Option<Arc<Image>>,
    raw: Receiver<RawBlock>,
    buffer_return: Arc<BufferReturn>,
    finished: Sender<FinishedBlock>,
    alarm: PipelineAlarm,
    duty_cycle: Arc<DutyCycle>,
}

impl CompressorThread {
    fn run_thread(self) {
        let Self { codec, parent, raw, buffer_return: giver, finished, alarm, duty_cycle: turns } =
            self;
        let mut buffer = Vec::new();
        scheduling::set_background();
        for RawBlock { lane, block, bytes, again } in raw {
            let parent = parent.as_ref().filter(|_| !again);
            let done = match parent.is_some_and(|it| it.holds_bytes(block, &bytes, &mut buffer)) {
                true => FinishedBlock::Inherited,
                false => match compress_block(codec, block, &bytes) {
                    CompressedBlock::Zero => FinishedBlock::Zero(ZeroBlock { block, again }),
                    CompressedBlock::Packed(packed) => FinishedBlock::Packed(lane, packed),
                },
            };
            alarm.0.count_guest_block(&done, again);
            giver.0.return_buffer(bytes);
            // A guest that waits for a buffer waits for this thread.
            if giver.0.free_count() > 1 {
                turns.pause_if_due();
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
    mut writer: ImageWriter,
    geometry: Geometry,
    packed: &Receiver<FinishedBlock>,
    state: &PipelineState,
    turns: &DutyCycle,
) -> Result<ImageWriter, ImageError> {
    let mut packers = LanePackers { geometry, open: BTreeMap::new() };
    let mut result = Ok(());
    for done in packed {
        if result.is_ok() {
            result = packers.pack_block(done, &mut writer);
            state.failed.fetch_or(result.is_err(), Ordering::AcqRel);
            state.written.store(writer.bytes_written(), Ordering::Relaxed);
        }
        state.done.fetch_add(1, Ordering::AcqRel);
        turns.pause_if_due();
    }
    result?;
    packers.finish_lanes(&mut writer)?;
    Ok(writer)
}

/// One open locality block per lane.
struct LanePackers {
    geometry: Geometry,
    open: BTreeMap<PackingLane, LocalityBlockPacker>,
}

impl LanePackers {
    fn pack_block(
        &mut self,
        done: FinishedBlock,
        writer: &mut ImageWriter,
    ) -> Result<(), ImageError> {
        let (lane, packed) = match done {
            FinishedBlock::Inherited => return Ok(()),
            FinishedBlock::Zero(ZeroBlock { block, again }) => {
                if again {
                    self.write_out(block, writer)?;
                }
                writer.set_zero(block);
                return Ok(());
            }
            FinishedBlock::Packed(lane, packed) => (lane, packed),
        };
        let packer = self
            .open
            .entry(lane)
            .or_insert_with(|| LocalityBlockPacker::filled_by(self.geometry, lane.into()));
        match packer.push_block(packed) {
            Some(full) => writer.append(full).map(drop),
            None => Ok(()),
        }
    }

    /// The content that the writer receives last counts. Earlier content of the block may still be
    /// in a packer here, so it is written first.
    fn write_out(&mut self, block: Block, writer: &mut ImageWriter) -> Result<(), ImageError> {
        let mut holding = self.open.values_mut().filter(|packer| packer.has_open_block(block));
        holding.try_for_each(|packer| match packer.take_filled() {
            Some(part) => writer.append(part).map(drop),
            None => Ok(()),
        })
    }

    fn finish_lanes(self, writer: &mut ImageWriter) -> Result<(), ImageError> {
        for mut packer in self.open.into_values() {
            if let Some(rest) = packer.take_filled() {
                writer.append(rest)?;
            }
        }
        Ok(())
    }
}

impl From<PackingLane> for FilledBy {
    fn from(lane: PackingLane) -> Self {
        match lane {
            PackingLane::Vcpu(vcpu) => Self::Vcpu(vcpu),
            PackingLane::Device => Self::Device,
            PackingLane::Sweep => Self::Sweep,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use firn_image::{BlockOrganization, ImageDraft, ImageSections};
    use firn_types::RegionMap;

    const PAGES: u32 = 64;

    fn submit(intake: &PipelineIntake, block: u32, byte: u8, again: bool) {
        let mut bytes = intake.take_buffer().unwrap();
        bytes.fill(byte);
        intake.submit_block(RawBlock {
            lane: PackingLane::Sweep,
            block: Block(block),
            bytes,
            again,
        });
    }

    /// Every memory block is submitted with one content, then with another.
    #[test]
    fn the_last_content_of_a_block_counts() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.firn");
        let whole = ImageDraft::whole_image(Geometry::new(PAGES), BlockOrganization::Access);
        let writer =
            ImageWriter::create(&path, &ImageDraft { allows_again: true, ..whole }).unwrap();
        let limits = PipelineLimits { compressors: 2, buffer_bytes: 1 << 20 };
        let (pipeline, intake) = ImagePipeline::start_threads(writer, Codec::Lz4, None, limits);
        let rounds = [[7, 0, 7, 0], [0, 7, 8, 0]];
        for (number, contents) in rounds.iter().enumerate() {
            for block in 0..PAGES / 2 {
                submit(&intake, block, contents[block as usize % 4], number > 0);
            }
            intake.wait_until_done(&|| false);
        }
        drop(intake);
        let regions = RegionMap::lay_out([("ram", u64::from(PAGES) * 4096)]).unwrap();
        pipeline
            .finish_image()
            .unwrap()
            .finish(ImageSections { regions, ..ImageSections::default() })
            .unwrap();
        let image = Image::open(&path).unwrap();
        let (mut stored, mut bytes) = (Vec::new(), vec![0; 8192]);
        for block in 0..PAGES / 2 {
            image.read_block(Block(block), &mut stored, &mut bytes).unwrap();
            let expected = rounds[1][block as usize % 4];
            assert!(bytes.iter().all(|&byte| byte == expected), "block {block}: {}", bytes[0]);
        }
    }
}
