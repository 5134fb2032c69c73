//! Messages: requests of an application, and replies of the host.

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::key::Nonce;

/// The number of a followed area within its session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct FollowedAreaId(pub u16);

/// A request of an application. All but `Hello` are sealed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum CallRequest {
    /// Introduces the application. Ends an unproven session in this slot.
    Hello {
        /// Its name in the policy.
        name: String,
        /// A random number of the application.
        number: Nonce,
    },
    /// The proof lies at this address of the application's memory, and stays there.
    Prove {
        /// A multiple of 32.
        at: u64,
    },
    /// Follow these pages of the application's memory. No page of them counts as written at first.
    Follow {
        /// The address of the first page.
        start: u64,
        /// The count of pages.
        pages: u32,
    },
    /// Follow this area no longer.
    Forget(FollowedAreaId),
    /// Which pages were written since they were followed, or since the last reply that arrived?
    Collect {
        /// The number of the last `Collect` whose reply arrived and was valid; 0 before. Pages that
        /// were reported in replies that never arrived are reported again.
        known: u64,
    },
    /// End the session.
    Bye,
    /// Have the plugin record the application's stores to the areas followed now. An epoch ends at
    /// each store of a token to this address, that of the slot's end word. Valid until the next
    /// `Follow` or `Forget`.
    RecordStores {
        /// A multiple of 8.
        end: u64,
    },
}

/// Consecutive pages of an area.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PageRun {
    /// The area.
    pub area: FollowedAreaId,
    /// The first page, counted from the start of the area.
    pub first: u32,
    /// The count of pages.
    pub pages: u32,
}

/// A reply of the host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum CallReply {
    /// To `Hello`: the host's random number.
    Challenge(Nonce),
    /// The request was carried out.
    Done,
    /// To `Follow`.
    Following(FollowedAreaId),
    /// To `Collect`: these pages may have been written, and no others.
    Written(Vec<PageRun>),
    /// To `Collect`, when the host does not know: any page may have been written.
    Anything,
    /// The request was not carried out.
    Refused(CallRefusal),
    /// To `RecordStores`: the first epoch has begun.
    RecordingStores,
}

/// Why a request is not carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, Error)]
#[non_exhaustive]
pub enum CallRefusal {
    /// The bytes are no request.
    #[error("this is no request")]
    Garbled,
    /// The name, or the key of the seal, is not that of an application that may call.
    #[error("no application of this name and key may call (see the policy file of the host)")]
    Unknown,
    /// No address space has the proof at this address, or more than one has.
    #[error("the proof at {0:#x} was not found in the memory of exactly one process")]
    NotProven(u64),
    /// The process that the proof was found in is gone.
    #[error("the process that may call is gone, or its proof at {0:#x} is")]
    Gone(u64),
    /// The address is not within the part of the address space that belongs to programs.
    #[error("{0:#x} is not memory of a program")]
    Kernel(u64),
    /// The page is not mapped, or not in memory.
    #[error("nothing is mapped at {0:#x}, or it is not in memory")]
    Unmapped(u64),
    /// The page is not writable.
    #[error("the page at {0:#x} is not writable")]
    ReadOnly(u64),
    /// The page is not RAM of the guest.
    #[error("the page at {0:#x} is not RAM")]
    NotRam(u64),
    /// The address is not aligned, or the area extends beyond the end of the address space.
    #[error("{0:#x} is not where an area can start, or it is too long")]
    Misplaced(u64),
    /// More pages than the policy allows.
    #[error("more than the {0} pages that the policy allows")]
    TooMuch(u32),
    /// More areas than a session may have.
    #[error("more than {0} areas")]
    TooMany(u16),
    /// There is no such area.
    #[error("no such area")]
    NoArea,
    /// Another request must come first.
    #[error("not in this state: first hello, then prove")]
    Early,
    /// The host cannot follow writes: the reason is in its log.
    #[error("the host can't follow writes to this VM's memory now")]
    Unavailable,
    /// The hypervisor does not emulate the processor, or it has no plugin of Firn.
    #[error("no plugin observes the stores of this VM")]
    NoStores,
}

/// Encodes a message.
pub(crate) fn encode_message(message: &impl Serialize) -> Vec<u8> {
    // Serialization into a vector cannot fail for these types.
    postcard::to_stdvec(message).unwrap_or_default()
}

/// Decodes a message. `None` if the bytes are malformed, or bytes are left over.
pub(crate) fn decode_message<'b, T: Deserialize<'b>>(bytes: &'b [u8]) -> Option<T> {
    let (message, rest) = postcard::take_from_bytes(bytes).ok()?;
    rest.is_empty().then_some(message)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_decoded_message_equals_the_encoded_one() {
        let request = CallRequest::Hello { name: "kv".to_owned(), number: [3; 32] };
        assert_eq!(decode_message(&encode_message(&request)), Some(request.clone()));
        let run = PageRun { area: FollowedAreaId(1), first: 70_000, pages: 2 };
        let answer = CallReply::Written(vec![run; 3]);
        assert_eq!(decode_message(&encode_message(&answer)), Some(answer));
        let longer = [encode_message(&request), vec![0]].concat();
        assert_eq!(decode_message::<CallRequest>(&longer), None);
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_message_or_none(garbage in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = decode_message::<CallRequest>(&garbage);
            let _ = decode_message::<CallReply>(&garbage);
        }
    }
}
