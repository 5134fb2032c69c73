//! What is said.

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::key::Nonce;

/// An area that is followed, by a number within its session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct AreaId(pub u16);

/// What an application asks. All but `Hello` are sealed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    /// Who it is. Ends what was open in this slot.
    Hello {
        /// Its name in the policy.
        name: String,
        /// A number of its own.
        number: Nonce,
    },
    /// The proof lies at this address of its memory, and stays there.
    Prove {
        /// A multiple of 32.
        at: u64,
    },
    /// Follow these pages of its memory. Nothing of them counts as written so far.
    Follow {
        /// Address of the first.
        start: u64,
        /// How many.
        pages: u32,
    },
    /// Follow these no longer.
    Forget(AreaId),
    /// Which pages were written since they were followed, or since the answer that has come?
    Collect {
        /// The number of the last `Collect` whose answer came and was right; 0 before. What was told in answers that never
        /// came is told again.
        known: u64,
    },
    /// That is all.
    Bye,
    /// Note its stores to what is followed now, from below: an epoch of them ends at each store of a token to this address,
    /// that of the slot's end word. Until the next `Follow` or `Forget`.
    Note {
        /// A multiple of 8.
        end: u64,
    },
}

/// Pages of an area, one after another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Run {
    /// Which area.
    pub area: AreaId,
    /// Its first page that is meant, counted from the start of the area.
    pub first: u32,
    /// How many.
    pub pages: u32,
}

/// What the host answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Answer {
    /// To `Hello`: the host's number.
    Challenge(Nonce),
    /// It is done.
    Done,
    /// To `Follow`.
    Following(AreaId),
    /// To `Collect`: these may have been written, and no others.
    Written(Vec<Run>),
    /// To `Collect`, when the host can't tell: anything may have been written.
    Anything,
    /// It is not done.
    Refused(Refusal),
    /// To `Note`: the first epoch has begun.
    Noting,
}

/// Why something is not done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, Error)]
#[non_exhaustive]
pub enum Refusal {
    /// The bytes are no request.
    #[error("this is no request")]
    Garbled,
    /// The name, or the key that the seal was made with, is not that of an application that may call.
    #[error("no application of this name and key may call (see the policy file of the host)")]
    Unknown,
    /// The proof is not there in any address space, or not in exactly one.
    #[error("the proof at {0:#x} was not found in the memory of exactly one process")]
    NotProven(u64),
    /// The process that the proof was found in is gone.
    #[error("the process that may call is gone, or its proof at {0:#x} is")]
    Gone(u64),
    /// Not within the part of the address space that belongs to programs.
    #[error("{0:#x} is not memory of a program")]
    Kernel(u64),
    /// Nothing is there.
    #[error("nothing is mapped at {0:#x}, or it is not in memory")]
    Unmapped(u64),
    /// It may not be written.
    #[error("the page at {0:#x} is not writable")]
    ReadOnly(u64),
    /// Not RAM of the guest.
    #[error("the page at {0:#x} is not RAM")]
    NotRam(u64),
    /// Not a multiple of what it should be, or it reaches beyond the end.
    #[error("{0:#x} is not where an area can start, or it is too long")]
    Misplaced(u64),
    /// More than the policy allows.
    #[error("more than the {0} pages that the policy allows")]
    TooMuch(u32),
    /// More areas than a session may have.
    #[error("more than {0} areas")]
    TooMany(u16),
    /// There is no such area.
    #[error("no such area")]
    NoArea,
    /// First something else has to be asked.
    #[error("not in this state: first hello, then prove")]
    Early,
    /// The host can't follow writes: the reason is in its log.
    #[error("the host can't follow writes to this VM's memory now")]
    Unavailable,
    /// No hypervisor that emulates, or one without Firn's plugin.
    #[error("nobody below sees this VM's stores")]
    NoStores,
}

/// As bytes.
pub(crate) fn bytes(message: &impl Serialize) -> Vec<u8> {
    // Into a vector, and these types have nothing that can fail.
    postcard::to_stdvec(message).unwrap_or_default()
}

/// From bytes, all of them.
pub(crate) fn parse<'b, T: Deserialize<'b>>(bytes: &'b [u8]) -> Option<T> {
    let (message, rest) = postcard::take_from_bytes(bytes).ok()?;
    rest.is_empty().then_some(message)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn messages_come_back_as_they_were() {
        let request = Request::Hello { name: "kv".to_owned(), number: [3; 32] };
        assert_eq!(parse(&bytes(&request)), Some(request.clone()));
        let run = Run { area: AreaId(1), first: 70_000, pages: 2 };
        let answer = Answer::Written(vec![run; 3]);
        assert_eq!(parse(&bytes(&answer)), Some(answer));
        let longer = [bytes(&request), vec![0]].concat();
        assert_eq!(parse::<Request>(&longer), None);
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_message_or_none(garbage in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = parse::<Request>(&garbage);
            let _ = parse::<Answer>(&garbage);
        }
    }
}
