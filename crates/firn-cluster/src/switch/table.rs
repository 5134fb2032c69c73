//! Which address is behind which port.
//!
//! ```text
//!             a frame from it               no frame from it for `age_max`, its port is gone,
//!   unknown ------------------> known -------------------------------------------------------> unknown
//!                               |   ^       or its port knows too many and it is the oldest
//!                               +---+ a frame from it through another port: it has moved
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::Mac;

/// One side of the switch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Port(pub u16);

/// What the table may hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rules {
    /// An address is forgotten after so long without a frame from it.
    pub age_max: Duration,
    /// Addresses known behind one port at most.
    pub per_port_max: usize,
}

impl Default for Rules {
    fn default() -> Self {
        Self { age_max: Duration::from_secs(300), per_port_max: 1024 }
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
    ports: BTreeSet<Port>,
    known: BTreeMap<Mac, Known>,
}

impl Switch {
    /// A switch without ports.
    pub fn new(rules: Rules) -> Self {
        Self { rules, ports: BTreeSet::new(), known: BTreeMap::new() }
    }

    /// A port is connected.
    pub fn plug(&mut self, port: Port) {
        self.ports.insert(port);
    }

    /// A port is gone, and so is what was behind it.
    pub fn unplug(&mut self, port: Port) {
        self.ports.remove(&port);
        self.known.retain(|_, known| known.port != port);
    }

    /// A frame has come in through a port: the ports to send it out of. Never the one it came through.
    pub fn arrived(&mut self, port: Port, frame: &[u8], now: Duration) -> Vec<Port> {
        let Some((to, from)) = Mac::ends(frame) else { return Vec::new() };
        if !self.ports.contains(&port) || from.is_group() {
            return Vec::new();
        }
        self.learn(from, port, now);
        match self.behind(to, now) {
            Some(known) if known == port => Vec::new(),
            Some(known) => vec![known],
            None => self.ports.iter().copied().filter(|other| *other != port).collect(),
        }
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
