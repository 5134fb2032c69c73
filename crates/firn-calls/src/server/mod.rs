//! The host's side: who may do what, and what each is told.
//!
//! ```text
//!   a slot      nothing ---hello---> challenged ---prove---> open ---follow, collect, ...---> bye: nothing
//!                                       ^                     |
//!                                       `------- hello -------'  (the open session stays until the new one is proven:
//!                                                                 any program of the guest can write a hello anywhere)
//! ```
//!
//! What programs of the guest can write into the window at any time is answered with an error at worst. What costs the
//! host something, looking for an address space, is done for who has a key.

mod area;
mod session;

use std::collections::{BTreeMap, BTreeSet};

use firn_types::{GuestPhys, Page};

use crate::key::{Nonce, Proof, SealKey, Speaker};
use crate::message::{self, Answer, Refusal, Request};
use crate::noting::Order;
use crate::policy::{Application, Policy};
use session::Session;

/// The guest as the server sees it.
pub trait Below {
    /// A number that nobody can guess.
    fn number(&mut self) -> Nonce;

    /// The address spaces that have these bytes at this address.
    fn find(&mut self, at: u64, proof: &Proof) -> Vec<GuestPhys>;

    /// Whether this address space has these bytes there.
    fn has(&mut self, space: GuestPhys, at: u64, proof: &Proof) -> bool;

    /// Where pages of an address space are, if they are the program's own to write: one for each.
    fn translate(&mut self, space: GuestPhys, start: u64, pages: u32)
    -> Vec<Result<Page, Refusal>>;

    /// Of these pages, in ascending order, those that were written since they were told last, and the number of the
    /// time since which all writes are known: another one than before says that some were missed in between. `None` if
    /// writes can't be followed now. Other pages may be told too: each write is told once, to whoever asks.
    fn written(&mut self, pages: &[Page]) -> Option<(u64, Vec<Page>)>;

    /// Has stores noted, or no longer. False if nobody sees them.
    fn order(&mut self, order: &Order) -> bool;
}

/// What is worth a line in the host's log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Noted {
    /// An application may call from now on.
    Opened {
        /// Which.
        name: String,
    },
    /// It has ended its session.
    Closed {
        /// Which.
        name: String,
    },
    /// Something was not done.
    Refused {
        /// Who asked, if that is known.
        name: Option<String>,
        /// Why.
        refusal: Refusal,
    },
}

/// What the host says to a request.
#[derive(Clone, Debug)]
pub struct Answered {
    /// The answer.
    pub bytes: Vec<u8>,
    /// What there is to log.
    pub noted: Option<Noted>,
    /// Who asked has a key.
    pub is_known: bool,
}

impl Answered {
    fn known(bytes: Vec<u8>, noted: Option<Noted>) -> Self {
        Self { bytes, noted, is_known: true }
    }
}

/// All sessions of a VM.
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

/// Somebody who has said hello.
struct Pending {
    slot: u32,
    name: String,
    application: Application,
    numbers: [Nonce; 2],
    seal: SealKey,
    /// It was there at a sweep.
    is_old: bool,
}

impl std::fmt::Debug for Pending {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Pending").field(&self.name).finish()
    }
}

impl Server {
    /// A server for the applications of a policy.
    pub fn new(policy: Policy) -> Self {
        Self { policy, slots: BTreeMap::new() }
    }

    /// Answers a request. `asked` is its number as the window has it. Gives the bytes of the answer.
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
        // What a stranger says is not repeated, in no log either.
        let (bytes, noted) = (message::bytes(&answer), refused(None, &answer));
        Answered { bytes, noted, is_known: false }
    }

    /// Ends the sessions of processes that are gone. Gives the slots in use: those of sessions, and those of who has said hello
    /// since the last sweep.
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

    /// If this is sealed by whom the slot is open for.
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

    /// That a page was written is told once, whoever asked: all who follow it have to know.
    fn tell_others(&mut self, slot: u32, written: &[Page]) {
        let others = self.slots.iter_mut().filter(|(other, _)| **other != slot);
        let sessions = others.filter_map(|(_, state)| state.open.as_mut());
        sessions.for_each(|session| session.note(written));
    }

    /// If this is sealed by whom the slot was last asked for.
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
    /// It has the key. Which process is it?
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
        // Each application asks for that, to know.
        Answer::Refused(Refusal::NoStores) => None,
        Answer::Refused(refusal) => Some(Noted::Refused { name, refusal }),
        _ => None,
    }
}
