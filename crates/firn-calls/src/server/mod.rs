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

mod area;
mod session;

use std::collections::{BTreeMap, BTreeSet};

use firn_types::{GuestPhys, Page};

use crate::key::{Nonce, Proof, SealKey, Speaker};
use crate::message::{self, Answer, Refusal, Request};
use crate::noting::Order;
use crate::policy::{Application, Policy};
use session::Session;

/// The server's access to the guest.
pub trait Below {
    /// A random number that no program can guess.
    fn number(&mut self) -> Nonce;

    /// The address spaces that have these bytes at this address.
    fn find(&mut self, at: u64, proof: &Proof) -> Vec<GuestPhys>;

    /// Whether this address space has these bytes at this address.
    fn has(&mut self, space: GuestPhys, at: u64, proof: &Proof) -> bool;

    /// The physical pages of an address space, if the program owns them and may write them: one
    /// result for each page.
    fn translate(&mut self, space: GuestPhys, start: u64, pages: u32)
    -> Vec<Result<Page, Refusal>>;

    /// Of these pages, in ascending order, those that were written since they were last reported,
    /// and the era: the number of the period since whose begin all writes are known. Another era
    /// than before means that some writes were missed in between. `None` if writes cannot be
    /// followed now. Other pages may be reported too: each write is reported once, to the session
    /// that asks first.
    fn written(&mut self, pages: &[Page]) -> Option<(u64, Vec<Page>)>;

    /// Sends an order to the plugin. False if no plugin observes stores.
    fn order(&mut self, order: &Order) -> bool;
}

/// An event for the host's log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Noted {
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
        refusal: Refusal,
    },
}

/// The result of a request on the host's side.
#[derive(Clone, Debug)]
pub struct Answered {
    /// The reply.
    pub bytes: Vec<u8>,
    /// The event to log.
    pub noted: Option<Noted>,
    /// Whether the application has proven its key.
    pub is_known: bool,
}

impl Answered {
    fn known(bytes: Vec<u8>, noted: Option<Noted>) -> Self {
        Self { bytes, noted, is_known: true }
    }
}

/// The server of all sessions of a VM.
#[derive(Debug, Default)]
pub struct Server {
    policy: Policy,
    slots: BTreeMap<u32, State>,
}

#[derive(Debug, Default)]
struct State {
    pending: Option<Pending>,
    open: Option<Session>,
}

/// An application that has sent `Hello`, but not proven its identity.
struct Pending {
    slot: u32,
    name: String,
    application: Application,
    numbers: [Nonce; 2],
    seal: SealKey,
    /// A sweep has already found it here.
    is_old: bool,
}

impl std::fmt::Debug for Pending {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("PendingSession").field(&self.name).finish()
    }
}

impl Server {
    /// A server for the applications of a policy.
    pub fn new(policy: Policy) -> Self {
        Self { policy, slots: BTreeMap::new() }
    }

    /// Answers a request. `asked` is its number as the window has it. Returns the bytes of the
    /// reply.
    pub fn answer(
        &mut self,
        slot: u32,
        asked: u32,
        request: Option<&[u8]>,
        below: &mut dyn Below,
    ) -> Answered {
        let request = request.unwrap_or_default();
        if let Some(answered) = self.answer_open(slot, asked, request, below) {
            return answered;
        }
        if let Some(answered) = self.answer_pending(slot, asked, request, below) {
            return answered;
        }
        let answer = match message::parse(request) {
            Some(Request::Hello { name, number }) => self.hello(slot, &name, number, below),
            _ => Answer::Refused(self.not_understood(slot)),
        };
        // Text of an unknown sender is not repeated, in no log either.
        let (bytes, noted) = (message::bytes(&answer), refused(None, &answer));
        Answered { bytes, noted, is_known: false }
    }

    /// Ends the sessions of processes that are gone. Returns the slots in use: those of sessions,
    /// and those of applications that have sent `Hello` since the last sweep.
    pub fn sweep(&mut self, below: &mut dyn Below) -> (BTreeSet<u32>, Vec<Noted>) {
        let open =
            self.slots.iter_mut().filter_map(|(slot, state)| Some((*slot, state.open.as_mut()?)));
        let gone: Vec<u32> =
            open.filter_map(|(slot, session)| session.is_gone(below).then_some(slot)).collect();
        let noted = gone.into_iter().filter_map(|slot| self.released(slot, below)).collect();
        self.slots.retain(|_, state| {
            let is_young = state.pending.as_ref().is_some_and(|pending| !pending.is_old);
            state.pending.iter_mut().for_each(|pending| pending.is_old = true);
            is_young || state.open.is_some()
        });
        (self.slots.keys().copied().collect(), noted)
    }

    fn released(&mut self, slot: u32, below: &mut dyn Below) -> Option<Noted> {
        let mut session = self.slots.remove(&slot)?.open?;
        session.end_noting(below);
        Some(Noted::Closed { name: session.name })
    }

    fn not_understood(&self, slot: u32) -> Refusal {
        if self.slots.contains_key(&slot) { Refusal::Garbled } else { Refusal::Early }
    }

    fn hello(&mut self, slot: u32, name: &str, number: Nonce, below: &mut dyn Below) -> Answer {
        let Some(application) = self.policy.find(name) else {
            return Answer::Refused(Refusal::Unknown);
        };
        let own = below.number();
        let numbers = [number, own];
        let seal = application.key.seal_key(&numbers, slot);
        let (name, application) = (name.to_owned(), application.clone());
        self.slots.entry(slot).or_default().pending =
            Some(Pending { slot, name, application, numbers, seal, is_old: false });
        Answer::Challenge(own)
    }

    /// Answers a request that the open session of the slot has sealed.
    fn answer_open(
        &mut self,
        slot: u32,
        asked: u32,
        request: &[u8],
        below: &mut dyn Below,
    ) -> Option<Answered> {
        let session = self.slots.get_mut(&slot)?.open.as_mut()?;
        let (sequence, request) = session.unseal(asked, request)?;
        let (answer, written) = session.answer(sequence, &request, below);
        let (name, sealed) = (session.name.clone(), session.seal(sequence, &answer));
        self.tell_others(slot, &written);
        match answer {
            Answer::Done if request == Request::Bye => {
                Some(Answered::known(sealed, self.released(slot, below)))
            }
            answer => Some(Answered::known(sealed, refused(Some(name), &answer))),
        }
    }

    /// Marks pages in all other sessions: a write is reported once, to one session, but all that
    /// follow the page must know.
    fn tell_others(&mut self, slot: u32, written: &[Page]) {
        let others = self.slots.iter_mut().filter(|(other, _)| **other != slot);
        let sessions = others.filter_map(|(_, state)| state.open.as_mut());
        sessions.for_each(|session| session.note(written));
    }

    /// Answers a request that the pending session of the slot has sealed.
    fn answer_pending(
        &mut self,
        slot: u32,
        asked: u32,
        request: &[u8],
        below: &mut dyn Below,
    ) -> Option<Answered> {
        let state = self.slots.get_mut(&slot)?;
        let sequence = u64::from(asked);
        let pending = state.pending.as_ref()?;
        let plain = pending.seal.open(Speaker::Application, sequence, request)?;
        let request = message::parse::<Request>(plain);
        let pending = state.pending.take()?;
        let (seal, name) = (pending.seal.clone(), pending.name.clone());
        let (answer, noted) = match request {
            Some(Request::Prove { at }) => match pending.prove(sequence, at, below) {
                Ok(session) => {
                    state.open.iter_mut().for_each(|session| session.end_noting(below));
                    state.open = Some(session);
                    (Answer::Done, Some(Noted::Opened { name }))
                }
                Err(refusal) => {
                    (Answer::Refused(refusal), Some(Noted::Refused { name: Some(name), refusal }))
                }
            },
            _ => {
                let refusal = Refusal::Early;
                (Answer::Refused(refusal), Some(Noted::Refused { name: Some(name), refusal }))
            }
        };
        let sealed = seal.seal(Speaker::Host, sequence, &message::bytes(&answer));
        Some(Answered::known(sealed, noted))
    }
}

impl Pending {
    /// Opens the session: the sender has the key. Finds the process by the proof.
    fn prove(self, sequence: u64, at: u64, below: &mut dyn Below) -> Result<Session, Refusal> {
        if at % 32 != 0 {
            return Err(Refusal::Misplaced(at));
        }
        let proof = self.application.key.proof(&self.numbers);
        match below.find(at, &proof)[..] {
            [space] => Ok(Session::new(self, sequence, space, at, proof)),
            _ => Err(Refusal::NotProven(at)),
        }
    }
}

fn refused(name: Option<String>, answer: &Answer) -> Option<Noted> {
    match *answer {
        // Each application makes this request to find out whether stores are noted.
        Answer::Refused(Refusal::NoStores) => None,
        Answer::Refused(refusal) => Some(Noted::Refused { name, refusal }),
        _ => None,
    }
}
