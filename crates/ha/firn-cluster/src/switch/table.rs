//! Switch table: records which address is behind which port.
//!
//! ```text
//!           a frame from it             no frame from it for `age_max`, its port is gone,
//!   unknown ----------------> known ---------------------------------------------------> unknown
//!                             |   ^     or its port knows too many and it is the oldest
//!                             +---+ a frame from it through another port: it has moved
//! ```

use std::collections::BTreeMap;
use std::time::Duration;

use super::MacAddress;

/// A port of the switch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SwitchPort(pub u16);

/// The side of a port: what it connects to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PortSide {
    /// A VM of this host.
    LocalVm,
    /// The switch of another host, which is linked to those of all others itself.
    Peer,
    /// An outside network, to which the switches of other hosts may be connected as well.
    Outside,
}

/// The limits of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SwitchRules {
    /// An address is forgotten after this time without a frame from it.
    pub age_max: Duration,
    /// The maximum number of addresses known behind one port.
    pub per_port_max: usize,
    /// For this time after a frame from it, an address of the cluster isn't accepted from outside.
    pub cluster_age_max: Duration,
}

impl Default for SwitchRules {
    fn default() -> Self {
        let seconds = Duration::from_secs;
        Self { age_max: seconds(300), per_port_max: 1024, cluster_age_max: seconds(10) }
    }
}

#[derive(Clone, Copy, Debug)]
struct KnownAddress {
    port: SwitchPort,
    seen: Duration,
}

/// A learning switch. It decides where frames go, and doesn't store any.
#[derive(Clone, Debug)]
pub struct Switch {
    rules: SwitchRules,
    ports: BTreeMap<SwitchPort, PortSide>,
    known: BTreeMap<MacAddress, KnownAddress>,
}

impl Switch {
    /// A switch without ports.
    pub fn new(rules: SwitchRules) -> Self {
        Self { rules, ports: BTreeMap::new(), known: BTreeMap::new() }
    }

    /// Connects a port.
    pub fn connect_port(&mut self, port: SwitchPort, side: PortSide) {
        self.ports.insert(port, side);
    }

    /// Disconnects a port, and forgets the addresses behind it.
    pub fn disconnect_port(&mut self, port: SwitchPort) {
        self.ports.remove(&port);
        self.known.retain(|_, known| known.port != port);
    }

    /// Routes a frame that has arrived at a port: returns the ports to which to send it. Never the
    /// one at which it arrived, and never from a port that is not [`PortSide::LocalVm`] to another
    /// such port.
    pub fn route_frame(
        &mut self,
        port: SwitchPort,
        frame: &[u8],
        now: Duration,
    ) -> Vec<SwitchPort> {
        let Some((to, from)) = MacAddress::frame_addresses(frame) else { return Vec::new() };
        let Some(&side) = self.ports.get(&port) else { return Vec::new() };
        if from.is_group() || (side == PortSide::Outside && self.is_cluster_address(from, now)) {
            return Vec::new();
        }
        self.learn_address(from, port, now);
        let known = self.port_behind(to, now);
        let is_meant =
            |other: &SwitchPort| *other != port && known.is_none_or(|known| known == *other);
        let may_pass = |other: PortSide| side == PortSide::LocalVm || other == PortSide::LocalVm;
        let passes = |(other, to): (&SwitchPort, &PortSide)| {
            (is_meant(other) && may_pass(*to)).then_some(*other)
        };
        self.ports.iter().filter_map(passes).collect()
    }

    /// Whether a frame from an address was seen within the cluster just now.
    fn is_cluster_address(&self, mac: MacAddress, now: Duration) -> bool {
        self.known.get(&mac).is_some_and(|known| {
            let is_inside =
                self.ports.get(&known.port).is_some_and(|side| *side != PortSide::Outside);
            is_inside && now.saturating_sub(known.seen) <= self.rules.cluster_age_max
        })
    }

    /// The port behind which an address is, if it is known.
    pub fn port_behind(&self, mac: MacAddress, now: Duration) -> Option<SwitchPort> {
        let known = self.known.get(&mac)?;
        self.is_fresh(known, now).then_some(known.port)
    }

    /// Forgets old entries. Not needed for correctness: an old entry isn't used.
    pub fn expire_old(&mut self, now: Duration) {
        let age_max = self.rules.age_max;
        self.known.retain(|_, known| now.saturating_sub(known.seen) <= age_max);
    }

    /// The number of addresses in the table.
    pub fn len(&self) -> usize {
        self.known.len()
    }

    /// Whether the table is empty.
    pub fn is_empty(&self) -> bool {
        self.known.is_empty()
    }

    fn is_fresh(&self, known: &KnownAddress, now: Duration) -> bool {
        now.saturating_sub(known.seen) <= self.rules.age_max
    }

    fn learn_address(&mut self, mac: MacAddress, port: SwitchPort, now: Duration) {
        let before = self.known.insert(mac, KnownAddress { port, seen: now });
        if before.is_none_or(|before| before.port != port) {
            self.make_room(port, mac);
        }
    }

    /// Forgets the oldest address behind a port that knows too many.
    fn make_room(&mut self, port: SwitchPort, newest: MacAddress) {
        let here = || self.known.iter().filter(|(_, known)| known.port == port);
        if here().count() <= self.rules.per_port_max {
            return;
        }
        let others = here().filter(|(mac, _)| **mac != newest);
        let oldest = others.min_by_key(|(_, known)| known.seen).map(|(mac, _)| *mac);
        oldest.map(|mac| self.known.remove(&mac));
    }
}
