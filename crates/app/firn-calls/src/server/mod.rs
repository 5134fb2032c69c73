//! The host's side of calls: decides what each application may do, and which replies it gets.
//!
//! ```text
//!   a slot      nothing ---hello---> challenged ---prove---> open ---follow, collect, ...---> bye: nothing
//!                                       ^                     |
//!                                       `------- hello -------'  (the open session stays until the new one is proven:
//!                                                                 any program of the guest can write a hello anywhere)
//! ```
//!
//! Bytes that programs of the guest can write into the window at any time cause at worst an error
//! reply. The expensive work, the search for an address space, is done only for applications with a
//! key.

mod access;
mod area;
mod followed_pages;
mod page_index;
mod pending_report;
mod session;

use std::collections::{BTreeMap, BTreeSet};

use firn_types::Page;

use crate::key::{MessageSender, Nonce, SealKey};
use crate::message::{self, CallRefusal, CallReply, CallRequest};
use crate::policy::{ApplicationPolicy, CallPolicy};
pub use access::{GuestAccess, PartMapping, PartNumber, PartTranslation};
use session::CallSession;

/// An event that the supervisor writes to its log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CallLogEvent {
    /// An application has opened a session.
    Opened {
        /// The application.
        name: String,
    },
    /// An application has ended its session, or its process is gone.
    Closed {
        /// The application.
        name: String,
    },
    /// A request was refused.
    Refused {
        /// The application, if it is known.
        name: Option<String>,
        /// The reason.
        refusal: CallRefusal,
    },
}

/// The result of one request on the host's side: the reply, and the event to log.
#[derive(Clone, Debug)]
pub struct ServedCall {
    /// The reply.
    pub bytes: Vec<u8>,
    /// The event to log.
    pub event: Option<CallLogEvent>,
    /// Whether the application has proven its key.
    pub is_known: bool,
}

impl ServedCall {
    fn from_known_caller(bytes: Vec<u8>, event: Option<CallLogEvent>) -> Self {
        Self { bytes, event, is_known: true }
    }
}

/// The server of all sessions of a VM.
#[derive(Debug, Default)]
pub struct SessionServer {
    policy: CallPolicy,
    slots: BTreeMap<u32, SlotState>,
}

#[derive(Debug, Default)]
struct SlotState {
    pending: Option<PendingSession>,
    open: Option<CallSession>,
}

/// An application that has sent `Hello`, but not proven its identity.
struct PendingSession {
    slot: u32,
    name: String,
    application: ApplicationPolicy,
    numbers: [Nonce; 2],
    seal: SealKey,
    /// A sweep has already found it here.
    is_old: bool,
}

impl std::fmt::Debug for PendingSession {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("PendingSession").field(&self.name).finish()
    }
}

impl SessionServer {
    /// A server for the applications of a policy.
    pub fn new(policy: CallPolicy) -> Self {
        Self { policy, slots: BTreeMap::new() }
    }

    /// Answers a request. `asked` is its number as the window has it. Returns the bytes of the
    /// reply.
    pub fn answer_request(
        &mut self,
        slot: u32,
        asked: u32,
        request: Option<&[u8]>,
        below: &mut dyn GuestAccess,
    ) -> ServedCall {
        let request = request.unwrap_or_default();
        if let Some(answered) = self.answer_open(slot, asked, request, below) {
            return answered;
        }
        if let Some(answered) = self.answer_pending(slot, asked, request, below) {
            return answered;
        }
        let answer = match message::decode_message(request) {
            Some(CallRequest::Hello { name, number }) => {
                self.begin_session(slot, &name, number, below)
            }
            _ => CallReply::Refused(self.garbled_refusal(slot)),
        };
        // Text of an unknown sender is not repeated, in no log either.
        let (bytes, event) = (message::encode_message(&answer), refusal_event(None, &answer));
        ServedCall { bytes, event, is_known: false }
    }

    /// Ends the sessions of processes that are gone. Returns the slots in use: those of sessions,
    /// and those of applications that have sent `Hello` since the last sweep.
    pub fn sweep_sessions(
        &mut self,
        below: &mut dyn GuestAccess,
    ) -> (BTreeSet<u32>, Vec<CallLogEvent>) {
        let open =
            self.slots.iter_mut().filter_map(|(slot, state)| Some((*slot, state.open.as_mut()?)));
        let gone: Vec<u32> =
            open.filter_map(|(slot, session)| session.is_gone(below).then_some(slot)).collect();
        let events = gone.into_iter().filter_map(|slot| self.end_session(slot, below)).collect();
        self.slots.retain(|_, state| {
            let is_young = state.pending.as_ref().is_some_and(|pending| !pending.is_old);
            state.pending.iter_mut().for_each(|pending| pending.is_old = true);
            is_young || state.open.is_some()
        });
        (self.slots.keys().copied().collect(), events)
    }

    fn end_session(&mut self, slot: u32, below: &mut dyn GuestAccess) -> Option<CallLogEvent> {
        let mut session = self.slots.remove(&slot)?.open?;
        session.end_recording(below);
        Some(CallLogEvent::Closed { name: session.name })
    }

    fn garbled_refusal(&self, slot: u32) -> CallRefusal {
        if self.slots.contains_key(&slot) { CallRefusal::Garbled } else { CallRefusal::Early }
    }

    fn begin_session(
        &mut self,
        slot: u32,
        name: &str,
        number: Nonce,
        below: &mut dyn GuestAccess,
    ) -> CallReply {
        let Some(application) = self.policy.find_application(name) else {
            return CallReply::Refused(CallRefusal::Unknown);
        };
        let own = below.random_number();
        let numbers = [number, own];
        let seal = application.key.derive_seal_key(&numbers, slot);
        let (name, application) = (name.to_owned(), application.clone());
        self.slots.entry(slot).or_default().pending =
            Some(PendingSession { slot, name, application, numbers, seal, is_old: false });
        CallReply::Challenge(own)
    }

    /// Answers a request that the open session of the slot has sealed.
    fn answer_open(
        &mut self,
        slot: u32,
        asked: u32,
        request: &[u8],
        below: &mut dyn GuestAccess,
    ) -> Option<ServedCall> {
        let session = self.slots.get_mut(&slot)?.open.as_mut()?;
        let (sequence, request) = session.open_request(asked, request)?;
        let (answer, written) = session.handle_request(sequence, &request, below);
        let (name, sealed) = (session.name.clone(), session.seal_reply(sequence, &answer));
        self.mark_for_others(slot, &written);
        match answer {
            CallReply::Done if request == CallRequest::Bye => {
                Some(ServedCall::from_known_caller(sealed, self.end_session(slot, below)))
            }
            answer => {
                Some(ServedCall::from_known_caller(sealed, refusal_event(Some(name), &answer)))
            }
        }
    }

    /// Marks pages in all other sessions: a write is reported once, to one session, but all that
    /// follow the page must know.
    fn mark_for_others(&mut self, slot: u32, written: &[Page]) {
        let others = self.slots.iter_mut().filter(|(other, _)| **other != slot);
        let sessions = others.filter_map(|(_, state)| state.open.as_mut());
        sessions.for_each(|session| session.mark_written(written));
    }

    /// Answers a request that the pending session of the slot has sealed.
    fn answer_pending(
        &mut self,
        slot: u32,
        asked: u32,
        request: &[u8],
        below: &mut dyn GuestAccess,
    ) -> Option<ServedCall> {
        let state = self.slots.get_mut(&slot)?;
        let sequence = u64::from(asked);
        let pending = state.pending.as_ref()?;
        let plain = pending.seal.open_message(MessageSender::Application, sequence, request)?;
        let request = message::decode_message::<CallRequest>(plain);
        let pending = state.pending.take()?;
        let (seal, name) = (pending.seal.clone(), pending.name.clone());
        let (answer, event) = match request {
            Some(CallRequest::Prove { at }) => match pending.open_session(sequence, at, below) {
                Ok(session) => {
                    state.open.iter_mut().for_each(|session| session.end_recording(below));
                    state.open = Some(session);
                    (CallReply::Done, Some(CallLogEvent::Opened { name }))
                }
                Err(refusal) => (
                    CallReply::Refused(refusal),
                    Some(CallLogEvent::Refused { name: Some(name), refusal }),
                ),
            },
            _ => {
                let refusal = CallRefusal::Early;
                (
                    CallReply::Refused(refusal),
                    Some(CallLogEvent::Refused { name: Some(name), refusal }),
                )
            }
        };
        let sealed =
            seal.seal_message(MessageSender::Host, sequence, &message::encode_message(&answer));
        Some(ServedCall::from_known_caller(sealed, event))
    }
}

impl PendingSession {
    /// Opens the session: the sender has the key. Finds the process by the proof.
    fn open_session(
        self,
        sequence: u64,
        at: u64,
        below: &mut dyn GuestAccess,
    ) -> Result<CallSession, CallRefusal> {
        if at % 32 != 0 {
            return Err(CallRefusal::Misplaced(at));
        }
        let proof = self.application.key.compute_proof(&self.numbers);
        match below.find_spaces(at, &proof)[..] {
            [space] => Ok(CallSession::new(self, sequence, space, at, proof)),
            _ => Err(CallRefusal::NotProven(at)),
        }
    }
}

fn refusal_event(name: Option<String>, answer: &CallReply) -> Option<CallLogEvent> {
    match *answer {
        // Each application makes this request to find out whether stores are recorded.
        CallReply::Refused(CallRefusal::NoStores) => None,
        CallReply::Refused(refusal) => Some(CallLogEvent::Refused { name, refusal }),
        _ => None,
    }
}
