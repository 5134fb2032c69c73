//! Which address is behind which port.
//!
//! ```text
//!             a frame from it               no frame from it for `age_max`, its port is gone,
//!   unknown ------------------> known -------------------------------------------------------> unknown
//!                               |   ^       or its port knows too many and it is the oldest
//!                               +---+ a frame from it through another port: it has moved
//! ```

use std::collections::BTreeMap;
use std::time::Duration;

use super::Mac;

/// One side of the switch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Port(pub u16);

/// What a port leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Side {
    /// A VM of this host.
    Near,
    /// The switch of another host, which is linked to those of all others itself.
    Peer,
    /// A network that the switches of other hosts may be linked to as well.
    World,
}

/// What the table may hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rules {
    /// An address is forgotten after so long without a frame from it.
    pub age_max: Duration,
    /// Addresses known behind one port at most.
    pub per_port_max: usize,
    /// So long after a frame from it, an address of the cluster isn't believed to be in the world.
    pub ours_for: Duration,
}

impl Default for Rules {
    fn default() -> Self {
        let seconds = Duration::from_secs;
        Self { age_max: seconds(300), per_port_max: 1024, ours_for: seconds(10) }
    }
}

#[derive(Clone, Copy, Debug)]
struct Known {
    port: Port,
    seen: Duration,
}

/// A learning switch. It says where frames go, and doesn't hold any.
#[derive(Clone, Debug)]
pub struct Switch {
    rules: Rules,
    ports: BTreeMap<Port, Side>,
    known: BTreeMap<Mac, Known>,
}

impl Switch {
    /// A switch without ports.
    pub fn new(rules: Rules) -> Self {
        Self { rules, ports: BTreeMap::new(), known: BTreeMap::new() }
    }

    /// A port is connected.
    pub fn plug(&mut self, port: Port, side: Side) {
        self.ports.insert(port, side);
    }

    /// A port is gone, and so is what was behind it.
    pub fn unplug(&mut self, port: Port) {
        self.ports.remove(&port);
        self.known.retain(|_, known| known.port != port);
    }

    /// A frame has come in through a port: the ports to send it out of. Never the one it came through, and never from one that is
    /// not [`Side::Near`] to another such.
    pub fn arrived(&mut self, port: Port, frame: &[u8], now: Duration) -> Vec<Port> {
        let Some((to, from)) = Mac::ends(frame) else { return Vec::new() };
        let Some(&side) = self.ports.get(&port) else { return Vec::new() };
        if from.is_group() || (side == Side::World && self.is_ours(from, now)) {
            return Vec::new();
        }
        self.learn(from, port, now);
        let known = self.behind(to, now);
        let is_meant = |other: &Port| *other != port && known.is_none_or(|known| known == *other);
        let may_pass = |other: Side| side == Side::Near || other == Side::Near;
        let passes =
            |(other, to): (&Port, &Side)| (is_meant(other) && may_pass(*to)).then_some(*other);
        self.ports.iter().filter_map(passes).collect()
    }

    /// Whether an address was heard of within the cluster just now.
    fn is_ours(&self, mac: Mac, now: Duration) -> bool {
        self.known.get(&mac).is_some_and(|known| {
            let is_inside = self.ports.get(&known.port).is_some_and(|side| *side != Side::World);
            is_inside && now.saturating_sub(known.seen) <= self.rules.ours_for
        })
    }

    /// The port that an address is behind, if that is known.
    pub fn behind(&self, mac: Mac, now: Duration) -> Option<Port> {
        let known = self.known.get(&mac)?;
        self.is_fresh(known, now).then_some(known.port)
    }

    /// Forgets what is too old. Not needed for correctness: an old entry isn't used.
    pub fn age(&mut self, now: Duration) {
        let age_max = self.rules.age_max;
        self.known.retain(|_, known| now.saturating_sub(known.seen) <= age_max);
    }

    /// How many addresses are in the table.
    pub fn len(&self) -> usize {
        self.known.len()
    }

    /// Whether none is.
    pub fn is_empty(&self) -> bool {
        self.known.is_empty()
    }

    fn is_fresh(&self, known: &Known, now: Duration) -> bool {
        now.saturating_sub(known.seen) <= self.rules.age_max
    }

    fn learn(&mut self, mac: Mac, port: Port, now: Duration) {
        let before = self.known.insert(mac, Known { port, seen: now });
        if before.is_none_or(|before| before.port != port) {
            self.make_room(port, mac);
        }
    }

    /// Forgets the oldest address behind a port that knows too many.
    fn make_room(&mut self, port: Port, newest: Mac) {
        let here = || self.known.iter().filter(|(_, known)| known.port == port);
        if here().count() <= self.rules.per_port_max {
            return;
        }
        let others = here().filter(|(mac, _)| **mac != newest);
        let oldest = others.min_by_key(|(_, known)| known.seen).map(|(mac, _)| *mac);
        oldest.map(|mac| self.known.remove(&mac));
    }
}
