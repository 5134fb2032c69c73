//! What decides over a card's frames: the gate of a VM by itself, or that of a member of a cluster.

use std::sync::Arc;
use std::time::Duration;

use firn_cluster::Epoch;
use firn_cluster::member::OfEpoch;
use firn_cluster::output::Flow;

use crate::gate::{Gate, Held};
use crate::joined::Joined;

/// One of the two.
#[derive(Debug)]
pub(crate) enum Way {
    Alone(Gate),
    Joined(Box<Joined>),
}

impl Way {
    pub(crate) fn joined(&self) -> Option<&Joined> {
        match self {
            Self::Alone(_) => None,
            Self::Joined(joined) => Some(joined),
        }
    }

    pub(crate) fn joined_mut(&mut self) -> Option<&mut Joined> {
        match self {
            Self::Alone(_) => None,
            Self::Joined(joined) => Some(joined),
        }
    }

    /// What was to leave leaves.
    pub(crate) fn become_member(&mut self, mut joined: Joined) {
        while let Some(frame) = self.next() {
            joined.passes(frame);
            self.has_left(Duration::ZERO);
        }
        *self = Self::Joined(Box::new(joined));
    }

    /// What was to leave leaves; what others have not got is as lost as in any network.
    pub(crate) fn become_alone(&mut self, bytes_max: usize, now: Duration) {
        let mut gate = Gate::new(bytes_max, true);
        while let Some(frame) = self.next() {
            gate.sent(&frame, now);
            self.has_left(now);
        }
        *self = Self::Alone(gate);
    }

    pub(crate) fn sent(&mut self, frame: &[u8], now: Duration) {
        match self {
            Self::Alone(gate) => gate.sent(frame, now),
            Self::Joined(joined) => joined.sent(frame),
        }
    }

    /// What the VM is to be given of a frame that has come.
    pub(crate) fn arrived(&mut self, frame: Vec<u8>, now: Duration) -> Vec<Vec<u8>> {
        match self {
            Self::Alone(_) => vec![frame],
            Self::Joined(joined) => joined.arrived(&frame, now),
        }
    }

    pub(crate) fn begin(&mut self) {
        if let Self::Alone(gate) = self {
            gate.begin();
        }
    }

    pub(crate) fn cut(&mut self, epoch: Epoch) -> Option<OfEpoch> {
        match self {
            Self::Alone(gate) => {
                // For tests that want to see what happens without.
                if firn_fault::io("net.hold").is_ok() {
                    gate.cut(epoch);
                }
                None
            }
            Self::Joined(joined) => Some(joined.cut()),
        }
    }

    pub(crate) fn committed(&mut self, epoch: Epoch) {
        match self {
            Self::Alone(gate) => gate.committed(epoch),
            Self::Joined(joined) => joined.committed(epoch),
        }
    }

    pub(crate) fn open(&mut self) {
        match self {
            Self::Alone(gate) => gate.open(),
            Self::Joined(joined) => joined.let_out(),
        }
    }

    pub(crate) fn is_open(&self) -> bool {
        match self {
            Self::Alone(gate) => gate.is_open(),
            Self::Joined(joined) => joined.is_open(),
        }
    }

    pub(crate) fn next(&self) -> Option<Arc<[u8]>> {
        match self {
            Self::Alone(gate) => gate.next(),
            Self::Joined(joined) => joined.next(),
        }
    }

    pub(crate) fn has_left(&mut self, now: Duration) {
        match self {
            Self::Alone(gate) => gate.has_left(now),
            Self::Joined(joined) => joined.has_left(),
        }
    }

    pub(crate) fn lose(&mut self) {
        match self {
            Self::Alone(gate) => gate.lose(),
            Self::Joined(joined) => joined.lose(),
        }
    }

    pub(crate) fn stopping(&mut self, is_stopping: bool) {
        match self {
            Self::Alone(gate) => gate.stopping(is_stopping),
            Self::Joined(joined) => joined.stopping(is_stopping),
        }
    }

    pub(crate) fn flow(&self) -> Flow {
        match self {
            Self::Alone(gate) => gate.flow(),
            Self::Joined(joined) => joined.flow(),
        }
    }

    pub(crate) fn held(&self) -> Held {
        match self {
            Self::Alone(gate) => gate.held(),
            Self::Joined(joined) => joined.held(),
        }
    }

    pub(crate) fn left(&self) -> u64 {
        match self {
            Self::Alone(gate) => gate.left(),
            Self::Joined(joined) => joined.left(),
        }
    }

    /// Of a member's frames that is not measured.
    pub(crate) fn delays(&self) -> Vec<Duration> {
        match self {
            Self::Alone(gate) => gate.delays().collect(),
            Self::Joined(_) => Vec::new(),
        }
    }
}
