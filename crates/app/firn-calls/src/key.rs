//! Keys, proofs and seals: values that only the application and the host can compute.
//!
//! ```text
//!   key        shared beforehand, listed in the host's policy         never in the window
//!   numbers    one of the application, one of the host                in the clear
//!   proof      HMAC(key, "proof" || numbers)                          only in the application's memory, at an address it names
//!   seal key   HMAC(key, "seal" || numbers || slot)                   never in the window
//!   seal       SipHash(seal key, sender || request number || message) before each message
//!   report key SipHash(seal key, "4" || request number)               the plugin seals its reports with it, from this request on
//! ```
//!
//! HMAC is with SHA-256 (RFC 2104). Two seals are made for each call, in a guest that may be
//! emulated: SipHash-2-4 with 128 bits (Aumasson, Bernstein, "SipHash: a fast short-input PRF",
//! INDOCRYPT 2012) costs a tenth. A seal covers the sender and the number of the request, so that
//! an old message, or the application's own one, is not accepted as a reply.

use std::fmt;
use std::hash::Hasher as _;
use std::str::FromStr;

use hmac::{Hmac, Mac as _};
use sha2::Sha256;
use siphasher::sip128::{Hasher128 as _, SipHasher24};
use thiserror::Error;

type HmacSha256 = Hmac<Sha256>;

/// Bytes of a seal.
pub(crate) const SEAL_BYTES: usize = 16;

/// A number that is used once.
pub type Nonce = [u8; 32];
/// The bytes by which the host identifies the application's address space.
pub type Proof = [u8; 32];

/// An application's key: 32 bytes, 64 hexadecimal digits in a file.
#[derive(Clone, PartialEq, Eq)]
pub struct ApplicationKey([u8; 32]);

/// The text is no key.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("a key is 64 hexadecimal digits (as from `openssl rand -hex 32`)")]
pub struct KeyError;

impl FromStr for ApplicationKey {
    type Err = KeyError;

    fn from_str(text: &str) -> Result<Self, KeyError> {
        let digits: Vec<u8> = text
            .trim()
            .chars()
            .map(|digit| digit.to_digit(16).map(|value| value as u8).ok_or(KeyError))
            .collect::<Result<_, _>>()?;
        let bytes: Vec<u8> =
            digits.chunks(2).map(|pair| pair[0] << 4 | pair.get(1).unwrap_or(&0)).collect();
        match (digits.len(), <[u8; 32]>::try_from(bytes)) {
            (64, Ok(bytes)) => Ok(Self(bytes)),
            _ => Err(KeyError),
        }
    }
}

/// Prints no key: keys must not get into logs.
impl fmt::Debug for ApplicationKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(..)")
    }
}

impl ApplicationKey {
    /// A key of these bytes.
    pub fn new(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// The proof that lies in the application's memory while it may call.
    pub fn compute_proof(&self, numbers: &[Nonce; 2]) -> Proof {
        compute_hmac(&self.0, &[b"firn calls: proof", &numbers[0], &numbers[1]])
    }

    /// Derives the key that seals the messages of one session, in one slot of the window.
    pub(crate) fn derive_seal_key(&self, numbers: &[Nonce; 2], slot: u32) -> SealKey {
        let key = compute_hmac(
            &self.0,
            &[b"firn calls: seal", &numbers[0], &numbers[1], &slot.to_le_bytes()],
        );
        SealKey(std::array::from_fn(|at| key[at]))
    }
}

/// The sender of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MessageSender {
    Application,
    Host,
    /// The plugin of the hypervisor, which records the application's stores to its areas.
    Plugin,
}

/// The key of one session.
#[derive(Clone)]
pub(crate) struct SealKey([u8; 16]);

impl SealKey {
    pub(crate) fn new(key: [u8; 16]) -> Self {
        Self(key)
    }

    fn compute_seal(&self, speaker: MessageSender, sequence: u64, message: &[u8]) -> u128 {
        let purpose = match speaker {
            MessageSender::Application => 1,
            MessageSender::Host => 2,
            MessageSender::Plugin => 3,
        };
        self.compute_keyed_hash(purpose, sequence, message)
    }

    fn compute_keyed_hash(&self, purpose: u8, sequence: u64, message: &[u8]) -> u128 {
        let mut hash = SipHasher24::new_with_key(&self.0);
        hash.write(&[purpose]);
        hash.write(&sequence.to_le_bytes());
        hash.write(message);
        hash.finish128().as_u128()
    }

    /// The bytes of the key with which the plugin seals its reports, from this request on.
    pub(crate) fn derive_key_bytes(&self, sequence: u64) -> [u8; 16] {
        self.compute_keyed_hash(4, sequence, &[]).to_le_bytes()
    }

    /// The value by which the application ends an epoch: it stores the token to the end word.
    pub(crate) fn compute_epoch_token(&self, epoch: u64) -> u64 {
        self.compute_keyed_hash(5, epoch, &[]) as u64
    }

    /// Puts a seal before the message.
    pub(crate) fn seal_message(
        &self,
        speaker: MessageSender,
        sequence: u64,
        message: &[u8],
    ) -> Vec<u8> {
        [&self.compute_seal(speaker, sequence, message).to_le_bytes(), message].concat()
    }

    /// The message, if the seal is valid. The time does not depend on which bytes are wrong.
    pub(crate) fn open_message<'b>(
        &self,
        speaker: MessageSender,
        sequence: u64,
        sealed: &'b [u8],
    ) -> Option<&'b [u8]> {
        let (seal, message) = sealed.split_first_chunk::<SEAL_BYTES>()?;
        let differs = self.compute_seal(speaker, sequence, message) ^ u128::from_le_bytes(*seal);
        (differs == 0).then_some(message)
    }
}

fn new_hmac(key: &[u8; 32]) -> HmacSha256 {
    // HMAC takes keys of any length.
    HmacSha256::new_from_slice(key).unwrap_or_else(|_| unreachable!("a key of 32 bytes"))
}

fn compute_hmac(key: &[u8; 32], parts: &[&[u8]]) -> [u8; 32] {
    let mut hash = new_hmac(key);
    for part in parts {
        hash.update(part);
    }
    hash.finalize().into_bytes().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    const NUMBERS: [Nonce; 2] = [[1; 32], [2; 32]];

    #[test]
    fn a_key_is_read_from_its_digits() {
        let digits = "00ff".repeat(16);
        let bytes: [u8; 32] = std::array::from_fn(|at| if at % 2 == 0 { 0 } else { 0xff });
        assert_eq!(format!("{digits}\n").parse(), Ok(ApplicationKey::new(bytes)));
        for wrong in ["", "00", &digits[1..], &format!("{digits}0"), &digits.replace('f', "g")] {
            assert_eq!(wrong.parse::<ApplicationKey>(), Err(KeyError), "{wrong}");
        }
        assert_eq!(format!("{:?}", ApplicationKey::new(bytes)), "Key(..)");
    }

    #[test]
    fn a_seal_is_for_one_speaker_one_request_and_one_session() {
        let key = ApplicationKey::new([7; 32]);
        let seal = key.derive_seal_key(&NUMBERS, 3);
        let sealed = seal.seal_message(MessageSender::Host, 9, b"yes");
        assert_eq!(seal.open_message(MessageSender::Host, 9, &sealed), Some(&b"yes"[..]));
        assert_eq!(seal.open_message(MessageSender::Application, 9, &sealed), None);
        assert_eq!(seal.open_message(MessageSender::Host, 10, &sealed), None);
        assert_eq!(seal.open_message(MessageSender::Host, 9, &sealed[..10]), None);
        for other in [
            key.derive_seal_key(&NUMBERS, 4),
            ApplicationKey::new([8; 32]).derive_seal_key(&NUMBERS, 3),
        ] {
            assert_eq!(other.open_message(MessageSender::Host, 9, &sealed), None);
        }
        let mut bent = sealed;
        *bent.last_mut().unwrap() ^= 1;
        assert_eq!(seal.open_message(MessageSender::Host, 9, &bent), None);
    }

    #[test]
    fn a_proof_depends_on_the_key_and_both_numbers() {
        let key = ApplicationKey::new([7; 32]);
        let proof = key.compute_proof(&NUMBERS);
        assert_ne!(proof, ApplicationKey::new([8; 32]).compute_proof(&NUMBERS));
        assert_ne!(proof, key.compute_proof(&[NUMBERS[0], [3; 32]]));
        assert_ne!(proof, key.compute_proof(&[[3; 32], NUMBERS[1]]));
    }
}
