//! Member messages: what the cards of two members send each other, in frames of a type of their
//! own, which switches carry like any other frame.
//!
//! ```text
//!   | to: 6 | from: 6 | 88 b5 | version: u8 | kind: u8 | cluster: u32 | from: u16 | to: u16 |
//!   | generation: u32 | mark's term: u32 | mark's count: u32 | seq: u64 | a frame ... | big endian
//! ```
//!
//! | kind | `seq` | |
//! |---|---|---|
//! | 1 | of this frame | a frame, at the end of the message |
//! | 2 | the newest that was released | asks for the newest frame that the receiver has |
//! | 3 | the expected one | the answer, or the report of a missing frame |
//! | 4 | the newest that is included | the receiver's global checkpoint has it: may be dropped |

use crate::cut::FrameStamp;
use crate::switch::{FRAME_BYTES_MAX, MacAddress};
use crate::{FrameNumber, Generation, RequestNumber, VmId};

/// The Ethernet type of such frames: the one for experiments, IEEE 802.
const ETHER_TYPE: [u8; 2] = [0x88, 0xb5];
const VERSION: u8 = 1;

/// The bytes before the frame that is carried.
pub const HEAD_BYTES: usize = 44;

/// The maximum length of a frame that can be carried.
pub const CARRIED_BYTES_MAX: usize = FRAME_BYTES_MAX - HEAD_BYTES;

/// The sender and the receiver of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MessageEnds {
    /// The cluster.
    pub cluster: u32,
    /// The sender.
    pub from: (VmId, MacAddress),
    /// The receiver.
    pub to: (VmId, MacAddress),
}

/// The content of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MessageContent<'a> {
    /// A frame of the VM.
    Frame(FrameNumber, &'a [u8]),
    /// The newest frame that was released; asks for the newest frame that the receiver has.
    Newest(FrameNumber),
    /// The frame that is expected next.
    Expects(FrameNumber),
    /// The arrival of frames up to this one is in a global checkpoint.
    Included(FrameNumber),
}

/// A message between the cards of two members.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemberMessage<'a> {
    /// The sender and the receiver.
    pub ends: MessageEnds,
    /// The sender's generation and newest mark.
    pub stamp: FrameStamp,
    /// The content.
    pub content: MessageContent<'a>,
}

/// Whether a frame has the type of member messages, valid or not.
pub fn is_wrapped(frame: &[u8]) -> bool {
    frame.get(12..14) == Some(&ETHER_TYPE[..])
}

impl<'a> MemberMessage<'a> {
    /// Encodes the message as a frame. A carried frame has at most [`CARRIED_BYTES_MAX`] bytes.
    pub fn to_frame(&self) -> Vec<u8> {
        let (kind, seq, carried) = match self.content {
            MessageContent::Frame(seq, frame) => (1, seq, frame),
            MessageContent::Newest(seq) => (2, seq, &[][..]),
            MessageContent::Expects(seq) => (3, seq, &[][..]),
            MessageContent::Included(seq) => (4, seq, &[][..]),
        };
        let MessageEnds { cluster, from, to } = self.ends;
        let FrameStamp { generation, mark } = self.stamp;
        let mut frame = Vec::with_capacity(HEAD_BYTES + carried.len());
        frame.extend([to.1.0, from.1.0].concat());
        frame.extend(ETHER_TYPE);
        frame.extend([VERSION, kind]);
        frame.extend(cluster.to_be_bytes());
        frame.extend([from.0.0.to_be_bytes(), to.0.0.to_be_bytes()].concat());
        frame.extend([generation.0, mark.term, mark.count].map(u32::to_be_bytes).concat());
        frame.extend(seq.0.to_be_bytes());
        frame.extend(carried);
        frame
    }

    /// Decodes a frame; `None` if it is no such message, or truncated.
    pub fn from_frame(frame: &'a [u8]) -> Option<Self> {
        let (head, carried) = frame.split_at_checked(HEAD_BYTES)?;
        let (macs, head) = head.split_at(12);
        let (to, from) = macs.split_at(6);
        let [kind @ .., version, content] = *head.first_chunk::<4>()?;
        if (kind, version) != (ETHER_TYPE, VERSION) {
            return None;
        }
        let short = |at: usize| Some(u16::from_be_bytes(*head.get(at..)?.first_chunk()?));
        let word = |at: usize| Some(u32::from_be_bytes(*head.get(at..)?.first_chunk()?));
        let seq = FrameNumber(u64::from_be_bytes(*head.get(24..)?.first_chunk()?));
        let content = match (content, carried.is_empty()) {
            (1, false) => MessageContent::Frame(seq, carried),
            (2, true) => MessageContent::Newest(seq),
            (3, true) => MessageContent::Expects(seq),
            (4, true) => MessageContent::Included(seq),
            _ => return None,
        };
        let ends = MessageEnds {
            cluster: word(4)?,
            from: (VmId(short(8)?), MacAddress(*from.first_chunk()?)),
            to: (VmId(short(10)?), MacAddress(*to.first_chunk()?)),
        };
        let mark = RequestNumber { term: word(16)?, count: word(20)? };
        Some(Self { ends, stamp: FrameStamp { generation: Generation(word(12)?), mark }, content })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn message(numbers: [u32; 4], seq: u64, content: u8, carried: &[u8]) -> MemberMessage<'_> {
        let [cluster, generation, term, count] = numbers;
        let ends = MessageEnds {
            cluster,
            from: (VmId(1), MacAddress([2, 0, 0, 0, 0, 1])),
            to: (VmId(0x102), MacAddress([2, 0, 0, 0, 0, 2])),
        };
        let stamp =
            FrameStamp { generation: Generation(generation), mark: RequestNumber { term, count } };
        let content = match content {
            0 => MessageContent::Frame(FrameNumber(seq), carried),
            1 => MessageContent::Newest(FrameNumber(seq)),
            2 => MessageContent::Expects(FrameNumber(seq)),
            _ => MessageContent::Included(FrameNumber(seq)),
        };
        MemberMessage { ends, stamp, content }
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
        fn a_decoded_member_message_equals_the_encoded_one(
            numbers in any::<[u32; 4]>(),
            seq in any::<u64>(),
            content in 0..4_u8,
            carried in prop::collection::vec(any::<u8>(), 1..100),
        ) {
            let message = message(numbers, seq, content, &carried);
            let frame = message.to_frame();
            prop_assert!(is_wrapped(&frame));
            prop_assert_eq!(MemberMessage::from_frame(&frame), Some(message));
            for cut in 0..HEAD_BYTES {
                prop_assert_eq!(MemberMessage::from_frame(&frame[..cut]), None);
            }
        }

        #[test]
        fn invalid_bytes_are_refused_or_reencoded_unchanged(mut frame in prop::collection::vec(any::<u8>(), 0..120)) {
            if frame.len() > 16 {
                frame[12..15].copy_from_slice(&[0x88, 0xb5, 1]);
            }
            if let Some(message) = MemberMessage::from_frame(&frame) {
                prop_assert_eq!(message.to_frame(), frame);
            }
        }
    }
}
