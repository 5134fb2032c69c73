//! Output buffer: decides which frames may leave, and when. Pure.
//!
//! ```text
//!              push_frame             its epoch is committed, or the output is opened
//!   the VM ---------------> buffered ---------------------------> released -- sent --> gone
//!             |                                                      ^
//!             '-------------------- the output is open --------------'
//! ```
//!
//! A frame belongs to the epoch that runs when the frame is read from the VM's socket. The VM may
//! have sent it in the epoch before. Then it is buffered longer than necessary, never shorter.
//!
//! The output closes at the first cut of a protection. Before that there is no state to which the
//! VM could go back; every state to which it can go back later includes what it sent until then.
//! After that only [`OutputBuffer::open_output`] opens the output. The end of the protection does
//! not, because the backup may be running the VM.
//!
//! At the bound no frame is taken, except from a VM that is about to be paused: QEMU drops a frame
//! that waits for room when it stops a VM (`net_vm_change_state_handler`, net/net.c).

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use firn_cluster::output::{FrameDestination, FrameOutbox, InputFlow, SentFrame};
use firn_cluster::{Epoch, FrameNumber};

/// The memory that is counted for a frame besides its bytes.
const FRAME_COST: usize = 64;
/// The maximum number of bytes taken beyond the bound, so that a VM that is about to be paused has
/// no frames left to send.
pub(crate) const OVERSHOOT_BYTES_MAX: usize = 1 << 20;
/// The number of delays that are stored: the newest.
const DELAYS_MAX: usize = 1000;

/// A frame, and when it was read from the VM's socket.
#[derive(Clone, Debug)]
struct BufferedFrame {
    bytes: Arc<[u8]>,
    at: Duration,
}

/// The contents of an output buffer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BufferUsage {
    /// The number of frames.
    pub frames: usize,
    /// The bytes of these frames.
    pub bytes: usize,
}

/// The output buffer of one network card.
#[derive(Debug)]
pub struct OutputBuffer {
    outbox: FrameOutbox<BufferedFrame>,
    is_open: bool,
    /// The number of epochs of earlier protections. Epochs are numbered across protections.
    before: Epoch,
    /// The running epoch, numbered across protections.
    running: Epoch,
    leaving: VecDeque<SentFrame<BufferedFrame>>,
    held: BufferUsage,
    /// The VM is about to be paused.
    is_pausing: bool,
    /// The bytes taken since the bound was reached.
    overshoot_bytes: usize,
    delays: VecDeque<Duration>,
    sent_frames: u64,
}

impl OutputBuffer {
    /// An open or closed output, for `bytes_max` bytes of frames or a little more.
    pub fn new(bytes_max: usize, is_open: bool) -> Self {
        Self {
            outbox: FrameOutbox::new(bytes_max),
            is_open,
            before: Epoch(0),
            running: Epoch(1),
            leaving: VecDeque::new(),
            held: BufferUsage::default(),
            is_pausing: false,
            overshoot_bytes: 0,
            delays: VecDeque::new(),
            sent_frames: 0,
        }
    }

    /// Takes a frame that the VM has sent.
    pub fn push_frame(&mut self, frame: &[u8], now: Duration) {
        let bytes = frame.len();
        self.held = BufferUsage { frames: self.held.frames + 1, bytes: self.held.bytes + bytes };
        self.overshoot_bytes = match self.outbox.input_flow() {
            InputFlow::Go => 0,
            InputFlow::Stop => self.overshoot_bytes + bytes + FRAME_COST,
        };
        let frame = BufferedFrame { bytes: frame.into(), at: now };
        self.outbox.push_frame(self.running, FrameDestination::Outside, frame, bytes + FRAME_COST);
        if self.is_open {
            self.release_up_to(self.running);
        }
    }

    /// Begins a protection, whose first epoch is 1. Frames that are buffered from an earlier
    /// protection belong to the output of that epoch.
    pub fn begin_protection(&mut self) {
        self.before = self.running;
        self.running = self.running.next();
    }

    /// Ends an epoch. The VM is paused and its socket is empty: later frames belong to the next
    /// epoch.
    pub fn cut_epoch(&mut self, epoch: Epoch) {
        if self.is_open {
            self.delays.clear();
        }
        self.is_open = false;
        self.running = self.absolute_epoch(epoch).next();
    }

    /// Releases the output of an epoch, and of those before it: no failover undoes them any more.
    pub fn commit_epoch(&mut self, epoch: Epoch) {
        if epoch > Epoch(0) {
            self.release_up_to(self.absolute_epoch(epoch));
        }
    }

    /// Opens the output: releases all buffered frames, and later frames as they come. No failover
    /// can undo anything any more.
    pub fn open_output(&mut self) {
        if !self.is_open {
            self.delays.clear();
        }
        self.is_open = true;
        self.release_up_to(self.running);
    }

    /// Whether frames are released as they come.
    pub fn is_open(&self) -> bool {
        self.is_open
    }

    /// The next released frame.
    pub fn next_frame(&self) -> Option<Arc<[u8]>> {
        self.leaving.front().map(|sent| Arc::clone(&sent.frame.bytes))
    }

    /// Removes the next released frame, which has been sent.
    pub fn confirm_sent(&mut self, now: Duration) {
        let Some(SentFrame { seq, frame, .. }) = self.leaving.pop_front() else { return };
        self.outbox.trim_up_to(FrameDestination::Outside, seq);
        self.sent_frames += 1;
        if self.delays.len() == DELAYS_MAX {
            self.delays.pop_front();
        }
        self.delays.push_back(now.saturating_sub(frame.at));
    }

    /// Drops the released frames, because no process is at the uplink. They are lost, as with a
    /// cable that is unplugged.
    pub fn drop_released(&mut self) {
        let last = self.leaving.drain(..).next_back().map_or(FrameNumber(0), |sent| sent.seq);
        self.outbox.trim_up_to(FrameDestination::Outside, last);
    }

    /// Sets whether the VM is about to be paused.
    pub fn set_pausing(&mut self, is_pausing: bool) {
        self.is_pausing = is_pausing;
    }

    /// Whether to continue to read from the VM's socket.
    pub fn input_flow(&self) -> InputFlow {
        match self.is_pausing && self.overshoot_bytes < OVERSHOOT_BYTES_MAX {
            true => InputFlow::Go,
            false => self.outbox.input_flow(),
        }
    }

    /// The frames that are buffered and not released.
    pub fn buffer_usage(&self) -> BufferUsage {
        self.held
    }

    /// The number of frames that were sent.
    pub fn sent_count(&self) -> u64 {
        self.sent_frames
    }

    /// The delays from the VM's socket to the uplink, of the newest thousand frames since the
    /// output was opened or closed.
    pub fn release_delays(&self) -> impl Iterator<Item = Duration> {
        self.delays.iter().copied()
    }

    fn absolute_epoch(&self, epoch: Epoch) -> Epoch {
        Epoch(self.before.0 + epoch.0)
    }

    fn release_up_to(&mut self, up_to: Epoch) {
        for sent in self.outbox.release_outside(up_to) {
            self.held.frames -= 1;
            self.held.bytes -= sent.frame.bytes.len();
            self.leaving.push_back(sent);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const NOW: Duration = Duration::from_secs(1);

    fn buffer() -> OutputBuffer {
        OutputBuffer::new(1 << 20, true)
    }

    fn send(buffer: &mut OutputBuffer, byte: u8) {
        buffer.push_frame(&[byte; 60], NOW);
    }

    fn leaves(buffer: &mut OutputBuffer) -> Vec<u8> {
        let mut left = Vec::new();
        while let Some(frame) = buffer.next_frame() {
            left.push(frame[0]);
            buffer.confirm_sent(NOW);
        }
        left
    }

    #[test]
    fn an_unprotected_vm_sends_at_once() {
        let mut buffer = buffer();
        send(&mut buffer, 1);
        assert_eq!((leaves(&mut buffer), buffer.buffer_usage()), (vec![1], BufferUsage::default()));
    }

    #[test]
    fn a_frame_waits_for_its_epoch() {
        let mut buffer = buffer();
        buffer.begin_protection();
        send(&mut buffer, 1);
        assert_eq!(leaves(&mut buffer), [1], "there is nothing yet that could be gone back to");
        buffer.cut_epoch(Epoch(1));
        send(&mut buffer, 2);
        buffer.cut_epoch(Epoch(2));
        send(&mut buffer, 3);
        buffer.commit_epoch(Epoch(1));
        assert_eq!(
            (leaves(&mut buffer), buffer.buffer_usage()),
            (vec![], BufferUsage { frames: 2, bytes: 120 })
        );
        buffer.commit_epoch(Epoch(2));
        assert_eq!(leaves(&mut buffer), [2]);
        buffer.open_output();
        assert_eq!((leaves(&mut buffer), buffer.buffer_usage()), (vec![3], BufferUsage::default()));
    }

    #[test]
    fn output_of_an_earlier_protection_waits_for_the_next_epoch() {
        let mut buffer = buffer();
        buffer.begin_protection();
        (1..=5).for_each(|epoch| buffer.cut_epoch(Epoch(epoch)));
        send(&mut buffer, 1);
        buffer.begin_protection();
        send(&mut buffer, 2);
        buffer.commit_epoch(Epoch(0));
        assert_eq!(leaves(&mut buffer), []);
        buffer.cut_epoch(Epoch(1));
        send(&mut buffer, 3);
        buffer.commit_epoch(Epoch(1));
        assert_eq!(leaves(&mut buffer), [1, 2]);
    }

    #[test]
    fn a_closed_gate_stays_so_and_stops_the_vm_at_its_bound() {
        let mut buffer = OutputBuffer::new(1000, false);
        (0..8).for_each(|_| send(&mut buffer, 1));
        assert_eq!(buffer.input_flow(), InputFlow::Go);
        send(&mut buffer, 1);
        assert_eq!((buffer.input_flow(), buffer.next_frame().is_some()), (InputFlow::Stop, false));
        buffer.open_output();
        assert_eq!(buffer.input_flow(), InputFlow::Stop, "what can leave takes room until it has");
        buffer.drop_released();
        assert_eq!((buffer.input_flow(), buffer.sent_count()), (InputFlow::Go, 0));
        send(&mut buffer, 2);
        assert_eq!(leaves(&mut buffer), [2]);
    }

    #[test]
    fn output_before_a_stop_may_exceed_the_limit() {
        let mut buffer = OutputBuffer::new(1000, false);
        (0..9).for_each(|_| send(&mut buffer, 1));
        for _ in 0..2 {
            assert_eq!(buffer.input_flow(), InputFlow::Stop);
            buffer.set_pausing(true);
            assert_eq!(buffer.input_flow(), InputFlow::Go);
            (0..100).for_each(|_| send(&mut buffer, 2));
            buffer.set_pausing(false);
        }
        buffer.set_pausing(true);
        let mut more = 0;
        while buffer.input_flow() == InputFlow::Go {
            send(&mut buffer, 3);
            more += 1;
        }
        let bytes = (more + 200) * (60 + FRAME_COST);
        assert!(
            (OVERSHOOT_BYTES_MAX..OVERSHOOT_BYTES_MAX + 200).contains(&bytes),
            "{bytes}: not twice as much for two"
        );
        buffer.open_output();
        buffer.drop_released();
        buffer.set_pausing(false);
        assert_eq!(buffer.input_flow(), InputFlow::Go);
    }

    #[test]
    fn delays_are_those_of_the_newest() {
        let mut buffer = buffer();
        for ms in 0..2 * DELAYS_MAX as u64 {
            send(&mut buffer, 1);
            buffer.confirm_sent(NOW + Duration::from_millis(ms));
        }
        let delays: Vec<Duration> = buffer.release_delays().collect();
        assert_eq!(
            (delays.len(), delays[0]),
            (DELAYS_MAX, Duration::from_millis(DELAYS_MAX as u64))
        );
    }

    #[derive(Clone, Debug)]
    enum Step {
        Send,
        Cut,
        Commit(u64),
        Write,
    }

    proptest! {
        /// Frames leave in their order, each once, none before its epoch is committed.
        #[test]
        fn nothing_leaves_too_early_or_twice(steps in prop::collection::vec(
            prop_oneof![
                4 => Just(Step::Send),
                2 => Just(Step::Cut),
                2 => (1..4_u64).prop_map(Step::Commit),
                3 => Just(Step::Write),
            ],
            0..200,
        )) {
            let mut buffer = buffer();
            buffer.begin_protection();
            buffer.cut_epoch(Epoch(1));
            let (mut running, mut committed, mut expected) = (2_u64, 0_u64, 0_u64);
            let mut epochs = Vec::new();
            for step in steps {
                match step {
                    Step::Send => {
                        buffer.push_frame(&(epochs.len() as u64).to_le_bytes(), NOW);
                        epochs.push(running);
                    }
                    Step::Cut => {
                        buffer.cut_epoch(Epoch(running));
                        running += 1;
                    }
                    Step::Commit(some) => {
                        committed = (committed + some).min(running - 1);
                        buffer.commit_epoch(Epoch(committed));
                    }
                    Step::Write => if let Some(frame) = buffer.next_frame() {
                        prop_assert_eq!(&frame[..], expected.to_le_bytes());
                        prop_assert!(epochs[expected as usize] <= committed);
                        expected += 1;
                        buffer.confirm_sent(NOW);
                    }
                }
                let waiting = epochs.iter().filter(|epoch| **epoch > committed).count();
                prop_assert_eq!(buffer.buffer_usage().frames, waiting);
            }
        }
    }
}
