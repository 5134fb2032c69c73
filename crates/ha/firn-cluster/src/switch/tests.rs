use std::time::Duration;

use proptest::prelude::*;

use super::*;

const S: Duration = Duration::from_secs(1);
const A: MacAddress = MacAddress([2, 0, 0, 0, 0, 0xa]);
const B: MacAddress = MacAddress([2, 0, 0, 0, 0, 0xb]);
const C: MacAddress = MacAddress([2, 0, 0, 0, 0, 0xc]);
const D: MacAddress = MacAddress([2, 0, 0, 0, 0, 0xd]);

fn frame(to: MacAddress, from: MacAddress) -> Vec<u8> {
    [&to.0[..], &from.0, &[8, 0], b"payload"].concat()
}

fn switch() -> Switch {
    let mut switch =
        Switch::new(SwitchRules { age_max: 300 * S, per_port_max: 3, cluster_age_max: 10 * S });
    (1..=3).for_each(|port| switch.connect_port(SwitchPort(port), PortSide::LocalVm));
    switch
}

/// With two links to other hosts, 4 and 5, and an uplink, 6.
fn linked() -> Switch {
    let mut switch = switch();
    (4..=5).for_each(|port| switch.connect_port(SwitchPort(port), PortSide::Peer));
    switch.connect_port(SwitchPort(6), PortSide::Outside);
    switch
}

#[test]
fn frames_from_another_host_go_only_to_local_vms() {
    let mut switch = linked();
    let near = [1, 2, 3].map(SwitchPort);
    assert_eq!(switch.route_frame(SwitchPort(4), &frame(MacAddress::BROADCAST, A), S), near);
    assert_eq!(switch.route_frame(SwitchPort(6), &frame(MacAddress::BROADCAST, B), S), near);
    assert_eq!(
        switch.route_frame(SwitchPort(5), &frame(A, C), S),
        [],
        "that host is linked to A's itself"
    );
    assert_eq!(switch.route_frame(SwitchPort(5), &frame(B, C), S), [], "and has its own uplink");
    assert_eq!(switch.route_frame(SwitchPort(6), &frame(A, B), S), []);
    assert_eq!(switch.route_frame(SwitchPort(1), &frame(A, D), S), [SwitchPort(4)]);
    assert_eq!(switch.route_frame(SwitchPort(1), &frame(B, D), S), [SwitchPort(6)]);
    let everywhere = [2, 3, 4, 5, 6].map(SwitchPort);
    assert_eq!(switch.route_frame(SwitchPort(1), &frame(MacAddress::BROADCAST, D), S), everywhere);
}

#[test]
fn a_frame_that_returns_by_the_uplink_is_dropped() {
    let mut switch = linked();
    switch.route_frame(SwitchPort(4), &frame(MacAddress::BROADCAST, A), S);
    assert_eq!(switch.route_frame(SwitchPort(6), &frame(MacAddress::BROADCAST, A), 2 * S), []);
    assert_eq!(switch.port_behind(A, 2 * S), Some(SwitchPort(4)));
    assert_eq!(
        switch.route_frame(SwitchPort(6), &frame(B, A), 12 * S),
        [1, 2, 3].map(SwitchPort),
        "it has left"
    );
    assert_eq!(switch.port_behind(A, 12 * S), Some(SwitchPort(6)));
    switch.route_frame(SwitchPort(5), &frame(B, A), 13 * S);
    assert_eq!(switch.port_behind(A, 13 * S), Some(SwitchPort(5)), "and is back at once");
}

#[test]
fn an_address_is_found_once_it_has_sent() {
    let mut switch = switch();
    assert_eq!(switch.route_frame(SwitchPort(1), &frame(B, A), S), [SwitchPort(2), SwitchPort(3)]);
    assert_eq!(switch.route_frame(SwitchPort(2), &frame(A, B), S), [SwitchPort(1)]);
    assert_eq!(switch.route_frame(SwitchPort(1), &frame(B, A), S), [SwitchPort(2)]);
    assert_eq!(switch.route_frame(SwitchPort(2), &frame(B, B), S), [], "it is where it came from");
    assert_eq!(
        switch.route_frame(SwitchPort(1), &frame(MacAddress::BROADCAST, A), S),
        [SwitchPort(2), SwitchPort(3)]
    );
}

#[test]
fn an_address_that_moved_is_found_by_its_announcement() {
    let mut switch = switch();
    switch.route_frame(SwitchPort(1), &frame(B, A), S);
    let announced = announcement_frame(A);
    assert_eq!(MacAddress::frame_addresses(&announced), Some((MacAddress::BROADCAST, A)));
    assert_eq!(switch.route_frame(SwitchPort(3), &announced, S), [SwitchPort(1), SwitchPort(2)]);
    assert_eq!(switch.route_frame(SwitchPort(2), &frame(A, B), S), [SwitchPort(3)]);
}

#[test]
fn expired_addresses_are_not_used() {
    let mut switch = switch();
    switch.route_frame(SwitchPort(1), &frame(B, A), S);
    assert_eq!(switch.port_behind(A, 301 * S), Some(SwitchPort(1)));
    assert_eq!(switch.port_behind(A, 302 * S), None);
    switch.expire_old(302 * S);
    assert!(switch.is_empty());
    switch.route_frame(SwitchPort(1), &frame(B, A), 303 * S);
    switch.disconnect_port(SwitchPort(1));
    assert_eq!(switch.route_frame(SwitchPort(2), &frame(A, B), 303 * S), [SwitchPort(3)]);
}

#[test]
fn garbage_teaches_nothing() {
    let mut switch = switch();
    assert_eq!(switch.route_frame(SwitchPort(1), &[0; 13], S), []);
    assert_eq!(switch.route_frame(SwitchPort(1), &frame(B, MacAddress::BROADCAST), S), []);
    assert_eq!(switch.route_frame(SwitchPort(9), &frame(B, A), S), [], "there is no such port");
    assert!(switch.is_empty());
}

#[test]
fn a_port_that_floods_pushes_out_its_own_addresses_only() {
    let mut switch = switch();
    switch.route_frame(SwitchPort(2), &frame(A, B), S);
    for last in 0..50 {
        switch.route_frame(
            SwitchPort(1),
            &frame(B, MacAddress([2, 0, 0, 0, 1, last])),
            S + S * u32::from(last),
        );
    }
    assert_eq!(switch.len(), 4);
    assert_eq!(switch.port_behind(B, 9 * S), Some(SwitchPort(2)));
    assert_eq!(switch.port_behind(MacAddress([2, 0, 0, 0, 1, 49]), 60 * S), Some(SwitchPort(1)));
}

#[test]
fn a_length_beyond_any_frame_ends_the_stream() {
    let mut decoder = FrameDecoder::new();
    let mut frames = 0;
    decoder.push_bytes(&[0, 0, 0, 1], |_| frames += 1).unwrap();
    assert!(!decoder.is_between_frames());
    decoder.push_bytes(&[7], |_| frames += 1).unwrap();
    let error = decoder.push_bytes(b"GET / HTTP/1.1", |_| frames += 1).unwrap_err();
    assert_eq!(error, FrameStreamError { bytes: 0x4745_5420, at: 5 });
    let again = decoder.push_bytes(&[0, 0, 0, 0], |_| frames += 1);
    assert_eq!((again, frames), (Err(error), 1));
}

proptest! {
    #[test]
    fn frames_are_decoded_from_any_split_of_the_stream(
        frames in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..200), 0..20),
        cuts in prop::collection::vec(1..50_usize, 1..50),
    ) {
        let stream: Vec<u8> =
            frames.iter().flat_map(|frame| [&length_prefix(frame).unwrap()[..], frame].concat()).collect();
        let (mut decoder, mut found, mut rest) = (FrameDecoder::new(), Vec::new(), &stream[..]);
        for cut in cuts.iter().cycle() {
            if rest.is_empty() { break; }
            let (now, later) = rest.split_at((*cut).min(rest.len()));
            decoder.push_bytes(now, |frame| found.push(frame.to_vec())).unwrap();
            rest = later;
        }
        let sent: Vec<_> = frames.into_iter().filter(|frame| !frame.is_empty()).collect();
        prop_assert_eq!(found, sent);
        prop_assert!(decoder.is_between_frames());
    }

    #[test]
    fn garbage_is_survived_in_bounded_memory(
        pieces in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..3000), 0..40),
    ) {
        let (mut decoder, mut switch) = (FrameDecoder::new(), switch());
        for piece in pieces {
            let result = decoder.push_bytes(&piece, |frame| {
                assert!(frame.len() <= FRAME_BYTES_MAX);
                switch.route_frame(SwitchPort(1), frame, S);
            });
            if result.is_err() { break; }
        }
        prop_assert!(switch.len() <= 3);
    }
}

/// Hosts that are all linked, each with an uplink to one outside network, as [`PortSide`]
/// describes.
struct World {
    switches: Vec<Switch>,
}

impl World {
    /// The ports of each host: two VMs, the uplink, then a link to each host.
    fn new(hosts: u16) -> Self {
        let host = |own| {
            let mut switch = Switch::new(SwitchRules::default());
            (0..2).for_each(|port| switch.connect_port(SwitchPort(port), PortSide::LocalVm));
            switch.connect_port(SwitchPort(2), PortSide::Outside);
            let others = (0..hosts).filter(|other| *other != own);
            others.for_each(|other| switch.connect_port(SwitchPort(3 + other), PortSide::Peer));
            switch
        };
        Self { switches: (0..hosts).map(host).collect() }
    }

    /// The VMs that receive a frame of one of them, in the order of time; `worldly` if the copies
    /// through the outside arrive first.
    fn send(
        &mut self,
        from: (u16, u16),
        frame: &[u8],
        worldly: bool,
        now: Duration,
    ) -> Vec<(u16, u16)> {
        let (mut under_way, mut got) = (vec![(from.0, SwitchPort(from.1))], Vec::new());
        let hosts = self.switches.len() as u16;
        for step in 0.. {
            assert!(step < 1000, "it goes round and round");
            if under_way.is_empty() {
                break;
            }
            let (host, port) = under_way.remove(0);
            for out in self.switches[usize::from(host)].route_frame(port, frame, now) {
                match out {
                    SwitchPort(vm @ 0..=1) => got.push((host, vm)),
                    SwitchPort(2) => {
                        let copies =
                            (0..hosts).filter(|other| *other != host).map(|it| (it, SwitchPort(2)));
                        let at = if worldly { 0 } else { under_way.len() };
                        under_way.splice(at..at, copies);
                    }
                    SwitchPort(link) => under_way.push((link - 3, SwitchPort(3 + host))),
                }
            }
        }
        got
    }
}

proptest! {
    /// Whichever VM sends frames to which others in any order: no frame circulates, no VM receives
    /// its own frame, and once an address is known, each VM receives each frame once.
    #[test]
    fn a_frame_to_all_reaches_each_once(
        sends in prop::collection::vec((0..4_u16, 0..2_u16, any::<bool>()), 1..40),
    ) {
        let mut world = World::new(4);
        let mac = |(host, vm): (u16, u16)| MacAddress([2, 0, 0, 0, host as u8, vm as u8]);
        let mut known = Vec::new();
        for (at, (host, vm, worldly)) in sends.into_iter().enumerate() {
            let now = Duration::from_millis(at as u64 * 10);
            let mut got = world.send((host, vm), &frame(MacAddress::BROADCAST, mac((host, vm))), worldly, now);
            got.sort_unstable();
            prop_assert!(!got.contains(&(host, vm)));
            let is_known = known.contains(&(host, vm));
            got.dedup_by(|one, other| one == other && !is_known);
            prop_assert_eq!(got.len(), 7, "{:?}", got);
            known.push((host, vm));
        }
    }
}
