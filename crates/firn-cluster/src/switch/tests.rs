use std::time::Duration;

use proptest::prelude::*;

use super::*;

const S: Duration = Duration::from_secs(1);
const A: Mac = Mac([2, 0, 0, 0, 0, 0xa]);
const B: Mac = Mac([2, 0, 0, 0, 0, 0xb]);

fn frame(to: Mac, from: Mac) -> Vec<u8> {
    [&to.0[..], &from.0, &[8, 0], b"payload"].concat()
}

fn switch() -> Switch {
    let mut switch = Switch::new(Rules { age_max: 300 * S, per_port_max: 3 });
    (1..=3).for_each(|port| switch.plug(Port(port)));
    switch
}

#[test]
fn an_address_is_found_once_it_has_sent() {
    let mut switch = switch();
    assert_eq!(switch.arrived(Port(1), &frame(B, A), S), [Port(2), Port(3)]);
    assert_eq!(switch.arrived(Port(2), &frame(A, B), S), [Port(1)]);
    assert_eq!(switch.arrived(Port(1), &frame(B, A), S), [Port(2)]);
    assert_eq!(switch.arrived(Port(2), &frame(B, B), S), [], "it is where it came from");
    assert_eq!(switch.arrived(Port(1), &frame(Mac::BROADCAST, A), S), [Port(2), Port(3)]);
}

#[test]
fn an_address_that_moved_is_found_by_its_announcement() {
    let mut switch = switch();
    switch.arrived(Port(1), &frame(B, A), S);
    let announced = announcement(A);
    assert_eq!(Mac::ends(&announced), Some((Mac::BROADCAST, A)));
    assert_eq!(switch.arrived(Port(3), &announced, S), [Port(1), Port(2)]);
    assert_eq!(switch.arrived(Port(2), &frame(A, B), S), [Port(3)]);
}

#[test]
fn what_is_old_or_gone_is_not_used() {
    let mut switch = switch();
    switch.arrived(Port(1), &frame(B, A), S);
    assert_eq!(switch.behind(A, 301 * S), Some(Port(1)));
    assert_eq!(switch.behind(A, 302 * S), None);
    switch.age(302 * S);
    assert!(switch.is_empty());
    switch.arrived(Port(1), &frame(B, A), 303 * S);
    switch.unplug(Port(1));
    assert_eq!(switch.arrived(Port(2), &frame(A, B), 303 * S), [Port(3)]);
}

#[test]
fn garbage_teaches_nothing() {
    let mut switch = switch();
    assert_eq!(switch.arrived(Port(1), &[0; 13], S), []);
    assert_eq!(switch.arrived(Port(1), &frame(B, Mac::BROADCAST), S), []);
    assert_eq!(switch.arrived(Port(9), &frame(B, A), S), [], "there is no such port");
    assert!(switch.is_empty());
}

#[test]
fn a_port_that_floods_pushes_out_its_own_addresses_only() {
    let mut switch = switch();
    switch.arrived(Port(2), &frame(A, B), S);
    for last in 0..50 {
        switch.arrived(Port(1), &frame(B, Mac([2, 0, 0, 0, 1, last])), S + S * u32::from(last));
    }
    assert_eq!(switch.len(), 4);
    assert_eq!(switch.behind(B, 9 * S), Some(Port(2)));
    assert_eq!(switch.behind(Mac([2, 0, 0, 0, 1, 49]), 60 * S), Some(Port(1)));
}

#[test]
fn a_length_beyond_any_frame_ends_the_stream() {
    let mut decoder = Decoder::new();
    let mut frames = 0;
    decoder.push(&[0, 0, 0, 1], |_| frames += 1).unwrap();
    assert!(!decoder.is_between_frames());
    decoder.push(&[7], |_| frames += 1).unwrap();
    let error = decoder.push(b"GET / HTTP/1.1", |_| frames += 1).unwrap_err();
    assert_eq!(error, StreamError { bytes: 0x4745_5420, at: 5 });
    let again = decoder.push(&[0, 0, 0, 0], |_| frames += 1);
    assert_eq!((again, frames), (Err(error), 1));
}

proptest! {
    #[test]
    fn frames_come_out_as_they_went_in_however_the_stream_is_cut(
        frames in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..200), 0..20),
        cuts in prop::collection::vec(1..50_usize, 1..50),
    ) {
        let stream: Vec<u8> =
            frames.iter().flat_map(|frame| [&head(frame).unwrap()[..], frame].concat()).collect();
        let (mut decoder, mut found, mut rest) = (Decoder::new(), Vec::new(), &stream[..]);
        for cut in cuts.iter().cycle() {
            if rest.is_empty() { break; }
            let (now, later) = rest.split_at((*cut).min(rest.len()));
            decoder.push(now, |frame| found.push(frame.to_vec())).unwrap();
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
        let (mut decoder, mut switch) = (Decoder::new(), switch());
        for piece in pieces {
            let result = decoder.push(&piece, |frame| {
                assert!(frame.len() <= FRAME_BYTES_MAX);
                switch.arrived(Port(1), frame, S);
            });
            if result.is_err() { break; }
        }
        prop_assert!(switch.len() <= 3);
    }
}
