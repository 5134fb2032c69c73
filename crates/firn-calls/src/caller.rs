//! The application's side: makes requests, and opens answers.
//!
//! What comes out of the window may have been written by anybody. Until a session is open an answer is taken as it is: a
//! wrong one leads to a proof that nobody looks for. From then on only what the host has sealed counts.

use thiserror::Error;

use crate::key::{Key, Nonce, Proof, SealKey, Speaker};
use crate::message::{self, Answer, AreaId, Refusal, Request, Run};
use crate::noting::Reader;

/// A call did not do what it was to.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum CallError {
    /// The host refuses.
    #[error("the host refuses")]
    Refused(#[from] Refusal),
    /// What lies in the window is not the host's answer: other programs wrote there, or the host has lost the session (it was
    /// started anew, or the VM was restored).
    #[error(
        "the answer is not the host's: the session is over, or somebody else writes to the window"
    )]
    NotTheHosts,
    /// An answer that does not belong to the request.
    #[error("the host's answer does not belong to what was asked")]
    Confused,
}

/// A session, from the application's side.
pub struct Caller {
    name: String,
    key: Key,
    slot: u32,
    own: Nonce,
    sequence: u64,
    seal: Option<SealKey>,
    /// The last `Collect` whose answer came.
    known: u64,
}

/// What changed, as the host tells it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Changed {
    /// These pages may have been, and no others.
    Runs(Vec<Run>),
    /// Anything may have been.
    Anything,
}

impl Caller {
    /// Speaks as an application of this name and key, in a slot of the window. `own` is a number that nobody can guess.
    pub fn new(name: &str, key: Key, slot: u32, own: Nonce) -> Self {
        let name = name.to_owned();
        // Of who had the slot before, answers may lie there still.
        let [a, b, c, d, ..] = own;
        let sequence = u64::from(u32::from_le_bytes([a, b, c, d]) >> 1);
        Self { name, key, slot, own, sequence, seal: None, known: 0 }
    }

    /// The number of the request that was made last, as the window has it.
    pub fn asked(&self) -> u32 {
        self.sequence as u32
    }

    /// The first request.
    pub fn hello(&mut self) -> Vec<u8> {
        self.sequence += 1;
        message::bytes(&Request::Hello { name: self.name.clone(), number: self.own })
    }

    /// Takes the answer to it. Gives the proof that has to lie in memory.
    ///
    /// # Errors
    /// If the host does not know the application.
    pub fn challenged(&mut self, answer: &[u8]) -> Result<Proof, CallError> {
        match message::parse(answer) {
            Some(Answer::Challenge(hosts)) => {
                let numbers = [self.own, hosts];
                self.seal = Some(self.key.seal_key(&numbers, self.slot));
                Ok(self.key.proof(&numbers))
            }
            Some(Answer::Refused(refusal)) => Err(refusal.into()),
            _ => Err(CallError::NotTheHosts),
        }
    }

    /// Any further request, sealed.
    pub fn request(&mut self, request: &Request) -> Vec<u8> {
        self.sequence += 1;
        let bytes = message::bytes(request);
        match &self.seal {
            Some(seal) => seal.seal(Speaker::Application, self.sequence, &bytes),
            None => bytes,
        }
    }

    /// Opens the answer to `Note`: what reads the epochs from now on.
    ///
    /// # Errors
    /// As [`Self::answered`].
    pub fn noting(&self, sealed: &[u8]) -> Result<Reader, CallError> {
        match (self.answered(sealed)?, &self.seal) {
            (Answer::Noting, Some(seal)) => Ok(Reader::new(&seal.noting(self.sequence))),
            _ => Err(CallError::Confused),
        }
    }

    /// `Collect`, with what has come so far.
    pub fn collect(&mut self) -> Vec<u8> {
        let known = self.known;
        self.request(&Request::Collect { known })
    }

    /// Opens the answer to the last request.
    ///
    /// # Errors
    /// If it is not the host's, or the host refuses.
    pub fn answered(&self, sealed: &[u8]) -> Result<Answer, CallError> {
        let seal = self.seal.as_ref().ok_or(CallError::NotTheHosts)?;
        let opened = seal.open(Speaker::Host, self.sequence, sealed).and_then(message::parse);
        match opened.ok_or(CallError::NotTheHosts)? {
            Answer::Refused(refusal) => Err(refusal.into()),
            answer => Ok(answer),
        }
    }

    /// Opens the answer to something that is only done or not.
    ///
    /// # Errors
    /// As [`Self::answered`].
    pub fn done(&self, sealed: &[u8]) -> Result<(), CallError> {
        match self.answered(sealed)? {
            Answer::Done => Ok(()),
            _ => Err(CallError::Confused),
        }
    }

    /// Opens the answer to `Follow`.
    ///
    /// # Errors
    /// As [`Self::answered`].
    pub fn following(&self, sealed: &[u8]) -> Result<AreaId, CallError> {
        match self.answered(sealed)? {
            Answer::Following(id) => Ok(id),
            _ => Err(CallError::Confused),
        }
    }

    /// Opens the answer to `Collect`: from now on the host need not tell this again.
    ///
    /// # Errors
    /// As [`Self::answered`].
    pub fn collected(&mut self, sealed: &[u8]) -> Result<Changed, CallError> {
        let changed = match self.answered(sealed)? {
            Answer::Written(runs) => Changed::Runs(runs),
            Answer::Anything => Changed::Anything,
            _ => return Err(CallError::Confused),
        };
        self.known = self.sequence;
        Ok(changed)
    }
}
