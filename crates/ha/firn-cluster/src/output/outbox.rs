//! Frame outbox: the sender's half, with a lane of numbered frames for each destination.
//!
//! ```text
//!   lane to VM 2      | 4 | 5 | 6 | 7 | 8 |
//!                   ^           ^       ^
//!              trimmed = 3  released = 6   next = 9     to the outside: no global checkpoint
//!                                                       includes the epoch of 7 and 8
//! ```

use std::collections::{BTreeMap, VecDeque};

use serde::{Deserialize, Serialize};

use crate::{Epoch, FrameNumber, VmId};

/// The destination of a frame. The switch decides it once, when the VM sends the frame: a frame to
/// several VMs is one frame to each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum FrameDestination {
    /// To another VM of the cluster.
    Vm(VmId),
    /// Through the uplink.
    Outside,
}

/// A frame that may leave now.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct SentFrame<F> {
    /// Its destination.
    pub to: FrameDestination,
    /// Its sequence number for that destination.
    pub seq: FrameNumber,
    /// The frame, or a handle to it.
    pub frame: F,
}

/// Whether to continue to read from the VM's network socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum InputFlow {
    /// Continue to read.
    Go,
    /// The bound is reached: wait until half of it is free.
    Stop,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct OutboxEntry<F> {
    epoch: Epoch,
    bytes: usize,
    frame: F,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct OutboxLane<F> {
    trimmed: FrameNumber,
    released: FrameNumber,
    entries: VecDeque<OutboxEntry<F>>,
}

/// Frames that one VM has sent and that are buffered, or stored to be sent again.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct FrameOutbox<F> {
    lanes: BTreeMap<FrameDestination, OutboxLane<F>>,
    bytes: usize,
    bytes_max: usize,
    stopped: bool,
}

impl<F: Clone> OutboxLane<F> {
    fn new() -> Self {
        Self { trimmed: FrameNumber(0), released: FrameNumber(0), entries: VecDeque::new() }
    }

    fn entries_after(
        &self,
        after: FrameNumber,
    ) -> impl Iterator<Item = (FrameNumber, &OutboxEntry<F>)> {
        let skip = after.0.saturating_sub(self.trimmed.0) as usize;
        let first = self.trimmed.0 + 1;
        let numbered = self.entries.iter().enumerate();
        numbered.skip(skip).map(move |(index, entry)| (FrameNumber(first + index as u64), entry))
    }

    fn release_up_to(&mut self, to: FrameDestination, epoch: Epoch) -> Vec<SentFrame<F>> {
        let ready = self.entries_after(self.released).take_while(|(_, entry)| entry.epoch <= epoch);
        let sent: Vec<_> =
            ready.map(|(seq, entry)| SentFrame { to, seq, frame: entry.frame.clone() }).collect();
        self.released = sent.last().map_or(self.released, |sent| sent.seq);
        sent
    }

    /// Drops frames up to `seq`; returns their bytes.
    fn trim_up_to(&mut self, seq: FrameNumber) -> usize {
        let gone = seq.min(self.released).0.saturating_sub(self.trimmed.0);
        self.trimmed.0 += gone;
        self.entries.drain(..gone as usize).map(|entry| entry.bytes).sum()
    }

    /// Drops frames that a later epoch sent; returns their bytes. The remaining frames may all be
    /// sent.
    fn roll_back(&mut self, epoch: Epoch) -> usize {
        let keep = self.entries.partition_point(|entry| entry.epoch <= epoch);
        self.released = self.trimmed;
        self.entries.drain(keep..).map(|entry| entry.bytes).sum()
    }
}

impl<F: Clone> FrameOutbox<F> {
    /// An empty outbox for about `bytes_max` bytes.
    pub fn new(bytes_max: usize) -> Self {
        Self { lanes: BTreeMap::new(), bytes: 0, bytes_max, stopped: false }
    }

    /// Adds a frame that the VM has sent in an epoch. The backup's copy gets the same frames when
    /// the epoch is sent there.
    pub fn push_frame(
        &mut self,
        epoch: Epoch,
        to: FrameDestination,
        frame: F,
        bytes: usize,
    ) -> FrameNumber {
        let lane = self.lanes.entry(to).or_insert_with(OutboxLane::new);
        lane.entries.push_back(OutboxEntry { epoch, bytes, frame });
        self.bytes += bytes;
        self.stopped |= self.bytes >= self.bytes_max;
        FrameNumber(lane.trimmed.0 + lane.entries.len() as u64)
    }

    /// The frames that the VM sent in an epoch, for its backup.
    pub fn frames_of(&self, epoch: Epoch) -> Vec<SentFrame<F>> {
        let of = |(&to, lane): (&FrameDestination, &OutboxLane<F>)| {
            let entries =
                lane.entries_after(lane.trimmed).filter(|(_, entry)| entry.epoch == epoch);
            let sent =
                entries.map(|(seq, entry)| SentFrame { to, seq, frame: entry.frame.clone() });
            sent.collect::<Vec<_>>()
        };
        self.lanes.iter().flat_map(of).collect()
    }

    /// Releases frames to other VMs up to this epoch that have not left, or not since the VM went
    /// back.
    pub fn release_inside(&mut self, epoch: Epoch) -> Vec<SentFrame<F>> {
        let inside = self.lanes.iter_mut().filter(|(to, _)| **to != FrameDestination::Outside);
        inside.flat_map(|(&to, lane)| lane.release_up_to(to, epoch)).collect()
    }

    /// Releases frames to the outside, because a global checkpoint that includes this VM at `epoch`
    /// is recorded.
    pub fn release_outside(&mut self, epoch: Epoch) -> Vec<SentFrame<F>> {
        let lane = self.lanes.get_mut(&FrameDestination::Outside);
        lane.map(|lane| lane.release_up_to(FrameDestination::Outside, epoch)).unwrap_or_default()
    }

    /// Up to `most` frames that were released to a destination after `after`, to be sent again:
    /// some were lost, or the VM there was replaced.
    pub fn released_after(
        &self,
        to: FrameDestination,
        after: FrameNumber,
        most: usize,
    ) -> Vec<SentFrame<F>> {
        let Some(lane) = self.lanes.get(&to) else { return Vec::new() };
        let out = lane.entries_after(after).take_while(|(seq, _)| *seq <= lane.released).take(most);
        out.map(|(seq, entry)| SentFrame { to, seq, frame: entry.frame.clone() }).collect()
    }

    /// The start of each lane: earlier frames need not be stored any more.
    pub fn lane_starts(&self) -> impl Iterator<Item = (FrameDestination, FrameNumber)> {
        self.lanes.iter().map(|(&to, lane)| (to, lane.trimmed))
    }

    /// Makes an empty lane begin behind that frame.
    pub fn start_lane(&mut self, to: FrameDestination, seq: FrameNumber) {
        let lane = self.lanes.entry(to).or_insert_with(OutboxLane::new);
        if lane.entries.is_empty() {
            (lane.trimmed, lane.released) = (seq.max(lane.trimmed), seq.max(lane.released));
        }
    }

    /// The number of frames that are buffered or stored.
    pub fn frame_count(&self) -> usize {
        self.lanes.values().map(|lane| lane.entries.len()).sum()
    }

    /// The newest frame that was released to a destination.
    pub fn newest_released(&self, to: FrameDestination) -> FrameNumber {
        self.lanes.get(&to).map_or(FrameNumber(0), |lane| lane.released)
    }

    /// As [`Self::trim_up_to`], at the backup: its copy releases no frames, but records that the
    /// primary released them.
    pub fn trim_backup(&mut self, to: FrameDestination, seq: FrameNumber) {
        if let Some(lane) = self.lanes.get_mut(&to) {
            let newest = FrameNumber(lane.trimmed.0 + lane.entries.len() as u64);
            lane.released = lane.released.max(seq.min(newest));
        }
        self.trim_up_to(to, seq);
    }

    /// Drops frames up to `seq`: a global checkpoint includes their arrival, or the uplink has sent
    /// them.
    pub fn trim_up_to(&mut self, to: FrameDestination, seq: FrameNumber) {
        let freed = self.lanes.get_mut(&to).map_or(0, |lane| lane.trim_up_to(seq));
        self.free_bytes(freed);
    }

    /// Goes back to the end of `epoch`. The caller then calls `release_inside(epoch)` and
    /// `release_outside(epoch)`, which return all frames that a receiver may still lack.
    pub fn roll_back(&mut self, epoch: Epoch) {
        let freed = self.lanes.values_mut().map(|lane| lane.roll_back(epoch)).sum();
        self.free_bytes(freed);
    }

    /// Whether to continue to read from the VM's network socket.
    pub fn input_flow(&self) -> InputFlow {
        if self.stopped { InputFlow::Stop } else { InputFlow::Go }
    }

    /// The bytes that are buffered or stored.
    pub fn buffered_bytes(&self) -> usize {
        self.bytes
    }

    fn free_bytes(&mut self, bytes: usize) {
        self.bytes -= bytes;
        self.stopped &= self.bytes > self.bytes_max / 2;
    }
}
