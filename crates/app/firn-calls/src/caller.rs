//! The application's side of calls: makes requests, and opens replies.
//!
//! Any program of the guest may have written the bytes in the window. Until a session is open the
//! application accepts a reply unchecked: a forged one leads to a proof that no host searches for.
//! From then on it accepts only replies that the host has sealed.

use thiserror::Error;

use crate::key::{ApplicationKey, MessageSender, Nonce, Proof, SealKey};
use crate::message::{self, CallRefusal, CallReply, CallRequest, FollowedAreaId, PageRun};
use crate::store_recording::ReportReader;

/// Why a call did not succeed.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum CallError {
    /// The host refuses.
    #[error("the host refuses")]
    Refused(#[from] CallRefusal),
    /// The bytes in the window are not the host's reply: other programs wrote there, or the host
    /// has lost the session (Firn was restarted, or the VM was restored).
    #[error(
        "the reply is not the host's: the session has ended, or another program writes to the window"
    )]
    NotTheHosts,
    /// A reply that does not belong to the request.
    #[error("the host's reply does not belong to the request")]
    Confused,
}

/// A call session on the application's side.
pub struct Caller {
    name: String,
    key: ApplicationKey,
    slot: u32,
    own: Nonce,
    sequence: u64,
    seal: Option<SealKey>,
    /// The number of the last `Collect` whose reply arrived.
    known: u64,
}

/// The pages that were written, as the host reports them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WrittenPages {
    /// These pages may have been written, and no others.
    Runs(Vec<PageRun>),
    /// Any page may have been written.
    Anything,
}

impl Caller {
    /// A caller for an application of this name and key, in a slot of the window. `own` is a number
    /// that no other process can guess.
    pub fn new(name: &str, key: ApplicationKey, slot: u32, own: Nonce) -> Self {
        let name = name.to_owned();
        // Replies to the previous owner of the slot may still lie there: the numbers must differ.
        let [a, b, c, d, ..] = own;
        let sequence = u64::from(u32::from_le_bytes([a, b, c, d]) >> 1);
        Self { name, key, slot, own, sequence, seal: None, known: 0 }
    }

    /// The number of the last request, as stored in the window.
    pub fn request_number(&self) -> u32 {
        self.sequence as u32
    }

    /// Makes the first request.
    pub fn hello_request(&mut self) -> Vec<u8> {
        self.sequence += 1;
        message::encode_message(&CallRequest::Hello { name: self.name.clone(), number: self.own })
    }

    /// Opens the reply to it. Returns the proof that the application must store in its memory.
    ///
    /// # Errors
    /// If the host does not know the application.
    pub fn accept_challenge(&mut self, answer: &[u8]) -> Result<Proof, CallError> {
        match message::decode_message(answer) {
            Some(CallReply::Challenge(hosts)) => {
                let numbers = [self.own, hosts];
                self.seal = Some(self.key.derive_seal_key(&numbers, self.slot));
                Ok(self.key.compute_proof(&numbers))
            }
            Some(CallReply::Refused(refusal)) => Err(refusal.into()),
            _ => Err(CallError::NotTheHosts),
        }
    }

    /// Makes any further request, sealed.
    pub fn seal_request(&mut self, request: &CallRequest) -> Vec<u8> {
        self.sequence += 1;
        let bytes = message::encode_message(request);
        match &self.seal {
            Some(seal) => seal.seal_message(MessageSender::Application, self.sequence, &bytes),
            None => bytes,
        }
    }

    /// Opens the reply to `RecordStores`. Returns the reader of the epochs from now on.
    ///
    /// # Errors
    /// As [`Self::open_reply`].
    pub fn accept_recording(&self, sealed: &[u8]) -> Result<ReportReader, CallError> {
        match (self.open_reply(sealed)?, &self.seal) {
            (CallReply::RecordingStores, Some(seal)) => {
                Ok(ReportReader::new(&seal.derive_report_key(self.sequence)))
            }
            _ => Err(CallError::Confused),
        }
    }

    /// Makes a `Collect` request, which acknowledges the last reply that arrived.
    pub fn collect_request(&mut self) -> Vec<u8> {
        let known = self.known;
        self.seal_request(&CallRequest::Collect { known })
    }

    /// Opens the reply to the last request.
    ///
    /// # Errors
    /// If it is not the host's, or the host refuses.
    pub fn open_reply(&self, sealed: &[u8]) -> Result<CallReply, CallError> {
        let seal = self.seal.as_ref().ok_or(CallError::NotTheHosts)?;
        let opened = seal
            .open_message(MessageSender::Host, self.sequence, sealed)
            .and_then(message::decode_message);
        match opened.ok_or(CallError::NotTheHosts)? {
            CallReply::Refused(refusal) => Err(refusal.into()),
            answer => Ok(answer),
        }
    }

    /// Opens the reply to a request that has no result.
    ///
    /// # Errors
    /// As [`Self::open_reply`].
    pub fn accept_done(&self, sealed: &[u8]) -> Result<(), CallError> {
        match self.open_reply(sealed)? {
            CallReply::Done => Ok(()),
            _ => Err(CallError::Confused),
        }
    }

    /// Opens the reply to `Follow`.
    ///
    /// # Errors
    /// As [`Self::open_reply`].
    pub fn accept_following(&self, sealed: &[u8]) -> Result<FollowedAreaId, CallError> {
        match self.open_reply(sealed)? {
            CallReply::Following(id) => Ok(id),
            _ => Err(CallError::Confused),
        }
    }

    /// Opens the reply to `Collect`: from now on the host need not report these pages again.
    ///
    /// # Errors
    /// As [`Self::open_reply`].
    pub fn accept_written(&mut self, sealed: &[u8]) -> Result<WrittenPages, CallError> {
        let changed = match self.open_reply(sealed)? {
            CallReply::Written(runs) => WrittenPages::Runs(runs),
            CallReply::Anything => WrittenPages::Anything,
            _ => return Err(CallError::Confused),
        };
        self.known = self.sequence;
        Ok(changed)
    }
}
