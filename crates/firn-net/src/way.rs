//! Output policy of a card: the output buffer of a single VM, or that of a member of a cluster.
//!
//! Members leave a cluster one after another while their VMs run. Until every member has left, a
//! former member still unwraps frames from the others, and transmits the acknowledgements for them
//! at once.

use std::sync::Arc;
use std::time::Duration;

use firn_cluster::Epoch;
use firn_cluster::member::OfEpoch;
use firn_cluster::member::wire::is_wrapped;
use firn_cluster::output::Flow;

use crate::gate::{Gate, Held};
use crate::joined::Joined;

/// The output policy of a card.
#[derive(Debug)]
pub(crate) enum Way {
    /// A VM outside a cluster. The second field is its former output as a member, if it was one. It
    /// is retained until a protection begins.
    Alone(Gate, Option<Box<Joined>>),
    /// A member of a cluster.
    Joined(Box<Joined>),
}

impl Way {
    pub(crate) fn joined(&self) -> Option<&Joined> {
        match self {
            Self::Alone(..) => None,
            Self::Joined(joined) => Some(joined),
        }
    }

    pub(crate) fn joined_mut(&mut self) -> Option<&mut Joined> {
        match self {
            Self::Alone(..) => None,
            Self::Joined(joined) => Some(joined),
        }
    }

    /// Makes the VM a member. Frames that were released before still leave.
    pub(crate) fn become_member(&mut self, mut joined: Joined) {
        while let Some(frame) = self.next() {
            joined.passes(frame);
            self.has_left(Duration::ZERO);
        }
        *self = Self::Joined(Box::new(joined));
    }

    /// Makes the VM a single one. Frames that were released before still leave. Frames that other
    /// members have not received are lost, as in any network.
    pub(crate) fn become_alone(&mut self, bytes_max: usize, now: Duration) {
        let mut gate = Gate::new(bytes_max, true);
        while let Some(frame) = self.next() {
            gate.sent(&frame, now);
            self.has_left(now);
        }
        let before = std::mem::replace(self, Self::Alone(gate, None));
        if let (Self::Joined(joined), Self::Alone(_, was)) = (before, self) {
            *was = Some(joined);
        }
    }

    pub(crate) fn sent(&mut self, frame: &[u8], now: Duration) {
        match self {
            Self::Alone(gate, _) => gate.sent(frame, now),
            Self::Joined(joined) => joined.sent(frame),
        }
    }

    /// Receives a frame from the uplink, and returns the frames that the VM is to be given.
    pub(crate) fn arrived(&mut self, frame: Vec<u8>, now: Duration) -> Vec<Vec<u8>> {
        match self {
            Self::Alone(gate, Some(was)) if is_wrapped(&frame) => {
                let given = was.arrived(&frame, now);
                while let Some(frame) = was.next() {
                    gate.sent(&frame, now);
                    was.has_left();
                }
                given
            }
            Self::Alone(..) => vec![frame],
            Self::Joined(joined) => joined.arrived(&frame, now),
        }
    }

    pub(crate) fn begin(&mut self) {
        if let Self::Alone(gate, was) = self {
            *was = None;
            gate.begin();
        }
    }

    pub(crate) fn cut(&mut self, epoch: Epoch) -> Option<OfEpoch> {
        match self {
            Self::Alone(gate, _) => {
                // Tests switch output commit off to observe the result.
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
            Self::Alone(gate, _) => gate.committed(epoch),
            Self::Joined(joined) => joined.committed(epoch),
        }
    }

    pub(crate) fn open(&mut self) {
        match self {
            Self::Alone(gate, _) => gate.open(),
            Self::Joined(joined) => joined.let_out(),
        }
    }

    pub(crate) fn is_open(&self) -> bool {
        match self {
            Self::Alone(gate, _) => gate.is_open(),
            Self::Joined(joined) => joined.is_open(),
        }
    }

    pub(crate) fn next(&self) -> Option<Arc<[u8]>> {
        match self {
            Self::Alone(gate, _) => gate.next(),
            Self::Joined(joined) => joined.next(),
        }
    }

    pub(crate) fn has_left(&mut self, now: Duration) {
        match self {
            Self::Alone(gate, _) => gate.has_left(now),
            Self::Joined(joined) => joined.has_left(),
        }
    }

    pub(crate) fn lose(&mut self) {
        match self {
            Self::Alone(gate, _) => gate.lose(),
            Self::Joined(joined) => joined.lose(),
        }
    }

    pub(crate) fn stopping(&mut self, is_stopping: bool) {
        match self {
            Self::Alone(gate, _) => gate.stopping(is_stopping),
            Self::Joined(joined) => joined.stopping(is_stopping),
        }
    }

    pub(crate) fn flow(&self) -> Flow {
        match self {
            Self::Alone(gate, _) => gate.flow(),
            Self::Joined(joined) => joined.flow(),
        }
    }

    pub(crate) fn held(&self) -> Held {
        match self {
            Self::Alone(gate, _) => gate.held(),
            Self::Joined(joined) => joined.held(),
        }
    }

    pub(crate) fn left(&self) -> u64 {
        match self {
            Self::Alone(gate, _) => gate.left(),
            Self::Joined(joined) => joined.left(),
        }
    }

    /// Delays are not measured for a member's frames.
    pub(crate) fn delays(&self) -> Vec<Duration> {
        match self {
            Self::Alone(gate, _) => gate.delays().collect(),
            Self::Joined(_) => Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use firn_cluster::member::Membership;
    use firn_cluster::switch::Mac;
    use firn_cluster::{Generation, Vm};

    use super::*;

    const NOW: Duration = Duration::from_secs(1);

    fn mac(vm: u16) -> Mac {
        Mac([2, 0, 0, 0, 0, vm as u8])
    }

    fn way(own: u16) -> Way {
        let members = (0..2).map(|vm| (Vm(vm), mac(vm))).collect();
        let (cluster, own, generation) = (3, Vm(own), Generation(1));
        let of = Membership { cluster, own, members, generation, layout: 0 };
        Way::Joined(Box::new(Joined::open(of)))
    }

    fn frame(byte: u8) -> Vec<u8> {
        [&mac(1).0[..], &mac(0).0, &[8, 0, byte]].concat()
    }

    fn leaves(way: &mut Way) -> Vec<Vec<u8>> {
        let mut left = Vec::new();
        while let Some(frame) = way.next() {
            left.push(frame.to_vec());
            way.has_left(NOW);
        }
        left
    }

    /// Frames that were in flight or lost while only one of the two had left arrive once.
    #[test]
    fn who_has_left_hears_who_is_about_to() {
        let (mut a, mut b) = (way(0), way(1));
        (1..3).for_each(|byte| a.sent(&frame(byte), NOW));
        let under_way = leaves(&mut a);
        b.become_alone(1 << 20, NOW);
        assert_eq!(
            b.arrived(under_way[1].clone(), NOW),
            [] as [Vec<u8>; 0],
            "the first is missing"
        );
        let complaint = leaves(&mut b).remove(0);
        assert!(a.arrived(complaint, NOW).is_empty());
        let again = leaves(&mut a);
        let given: Vec<_> = again.into_iter().flat_map(|it| b.arrived(it, NOW)).collect();
        assert_eq!(given, [frame(1), frame(2)]);
        assert!(b.arrived(under_way[0].clone(), NOW).is_empty());
        a.become_alone(1 << 20, NOW);
        a.sent(&frame(3), NOW);
        let plain = leaves(&mut a);
        assert_eq!(plain, [frame(3)]);
        assert_eq!(b.arrived(frame(3), NOW), [frame(3)]);
    }
}
