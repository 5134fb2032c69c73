//! What goes between the gates of two members: a frame of its own kind, which switches carry like any other.
//!
//! ```text
//!   | to: 6 | from: 6 | 88 b5 | version: u8 | kind: u8 | cluster: u32 | from: u16 | to: u16 |
//!   | generation: u32 | mark's term: u32 | mark's count: u32 | seq: u64 | a frame ... |            big endian
//! ```
//!
//! | kind | `seq` | |
//! |---|---|---|
//! | 1 | of this frame | a frame; nothing follows the others |
//! | 2 | the newest that was let out | asks how far the receiver has come |
//! | 3 | the one that is expected | answers, or says that there is a hole |
//! | 4 | the newest that is included | a global checkpoint has it at the receiver: it need not be kept |

use crate::cut::Stamp;
use crate::switch::{FRAME_BYTES_MAX, Mac};
use crate::{Generation, RequestNumber, Seq, Vm};

/// The type of such frames: for experiments, IEEE 802.
const KIND: [u8; 2] = [0x88, 0xb5];
const VERSION: u8 = 1;

/// Bytes before the frame that is carried.
pub const HEAD_BYTES: usize = 44;

/// The longest frame that can be carried.
pub const CARRIED_BYTES_MAX: usize = FRAME_BYTES_MAX - HEAD_BYTES;

/// Where something comes from and goes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ends {
    /// The cluster.
    pub cluster: u32,
    /// Who sends.
    pub from: (Vm, Mac),
    /// Who is to get it.
    pub to: (Vm, Mac),
}

/// What is said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Says<'a> {
    /// A frame of the VM.
    Frame(Seq, &'a [u8]),
    /// The newest that was let out; how far have you come?
    Newest(Seq),
    /// This one is expected.
    Expects(Seq),
    /// Up to this one, arrivals are in a global checkpoint.
    Included(Seq),
}

/// Something between two gates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message<'a> {
    /// Between whom.
    pub ends: Ends,
    /// The sender's timeline and newest mark.
    pub stamp: Stamp,
    /// What is said.
    pub says: Says<'a>,
}

/// Whether that is what a frame is, if it is sound or not.
pub fn is_wrapped(frame: &[u8]) -> bool {
    frame.get(12..14) == Some(&KIND[..])
}

impl<'a> Message<'a> {
    /// As a frame. What is carried has at most [`CARRIED_BYTES_MAX`].
    pub fn to_frame(&self) -> Vec<u8> {
        let (kind, seq, carried) = match self.says {
            Says::Frame(seq, frame) => (1, seq, frame),
            Says::Newest(seq) => (2, seq, &[][..]),
            Says::Expects(seq) => (3, seq, &[][..]),
            Says::Included(seq) => (4, seq, &[][..]),
        };
        let Ends { cluster, from, to } = self.ends;
        let Stamp { generation, mark } = self.stamp;
        let mut frame = Vec::with_capacity(HEAD_BYTES + carried.len());
        frame.extend([to.1.0, from.1.0].concat());
        frame.extend(KIND);
        frame.extend([VERSION, kind]);
        frame.extend(cluster.to_be_bytes());
        frame.extend([from.0.0.to_be_bytes(), to.0.0.to_be_bytes()].concat());
        frame.extend([generation.0, mark.term, mark.count].map(u32::to_be_bytes).concat());
        frame.extend(seq.0.to_be_bytes());
        frame.extend(carried);
        frame
    }

    /// Of a frame; nothing if it is none of these, or cut short.
    pub fn of(frame: &'a [u8]) -> Option<Self> {
        let (head, carried) = frame.split_at_checked(HEAD_BYTES)?;
        let (macs, head) = head.split_at(12);
        let (to, from) = macs.split_at(6);
        let [kind @ .., version, says] = *head.first_chunk::<4>()?;
        if (kind, version) != (KIND, VERSION) {
            return None;
        }
        let short = |at: usize| Some(u16::from_be_bytes(*head.get(at..)?.first_chunk()?));
        let word = |at: usize| Some(u32::from_be_bytes(*head.get(at..)?.first_chunk()?));
        let seq = Seq(u64::from_be_bytes(*head.get(24..)?.first_chunk()?));
        let says = match (says, carried.is_empty()) {
            (1, false) => Says::Frame(seq, carried),
            (2, true) => Says::Newest(seq),
            (3, true) => Says::Expects(seq),
            (4, true) => Says::Included(seq),
            _ => return None,
        };
        let ends = Ends {
            cluster: word(4)?,
            from: (Vm(short(8)?), Mac(*from.first_chunk()?)),
            to: (Vm(short(10)?), Mac(*to.first_chunk()?)),
        };
        let mark = RequestNumber { term: word(16)?, count: word(20)? };
        Some(Self { ends, stamp: Stamp { generation: Generation(word(12)?), mark }, says })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn message(numbers: [u32; 4], seq: u64, says: u8, carried: &[u8]) -> Message<'_> {
        let [cluster, generation, term, count] = numbers;
        let ends = Ends {
            cluster,
            from: (Vm(1), Mac([2, 0, 0, 0, 0, 1])),
            to: (Vm(0x102), Mac([2, 0, 0, 0, 0, 2])),
        };
        let stamp =
            Stamp { generation: Generation(generation), mark: RequestNumber { term, count } };
        let says = match says {
            0 => Says::Frame(Seq(seq), carried),
            1 => Says::Newest(Seq(seq)),
            2 => Says::Expects(Seq(seq)),
            _ => Says::Included(Seq(seq)),
        };
        Message { ends, stamp, says }
    }

    #[test]
    fn the_bytes_are_those_of_the_drawing() {
        let frame = message([7, 3, 4, 5], 6, 0, b"x").to_frame();
        let wanted = "0200000000020200000000018 8b501 01 00000007 0001 0102 00000003 00000004 00000005 \
            0000000000000006 78";
        let hex: String = frame.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hex, wanted.replace(' ', ""));
    }

    proptest! {
        #[test]
        fn what_is_said_is_heard(
            numbers in any::<[u32; 4]>(),
            seq in any::<u64>(),
            says in 0..4_u8,
            carried in prop::collection::vec(any::<u8>(), 1..100),
        ) {
            let message = message(numbers, seq, says, &carried);
            let frame = message.to_frame();
            prop_assert!(is_wrapped(&frame));
            prop_assert_eq!(Message::of(&frame), Some(message));
            for cut in 0..HEAD_BYTES {
                prop_assert_eq!(Message::of(&frame[..cut]), None);
            }
        }

        #[test]
        fn garbage_is_nothing_or_comes_back(mut frame in prop::collection::vec(any::<u8>(), 0..120)) {
            if frame.len() > 16 {
                frame[12..15].copy_from_slice(&[0x88, 0xb5, 1]);
            }
            if let Some(message) = Message::of(&frame) {
                prop_assert_eq!(message.to_frame(), frame);
            }
        }
    }
}
