//! Keys wrapped by a key in a file: 64 hexadecimal digits.
//!
//! ```text
//!   0 32  salt          a key for AES-256-GCM = HMAC-SHA256(key of the file, purpose, salt)
//!  32 32  encrypted key
//!  64 16  authentication code
//! ```

use std::path::{Path, PathBuf};

use firn_image::{ImageKey, KEY_BYTES, KeyOpener, WrapMethod, WrappedKey, from_hex, to_hex};
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
use ring::hmac;
use ring::rand::{SecureRandom, SystemRandom};
use zeroize::Zeroizing;

use crate::age_keys::{read_text, refuse_exposed};
use crate::error::KeyError;

const SALT_BYTES: usize = 32;

/// A file with a key that wraps other keys.
#[derive(Clone, Debug)]
pub struct KeyFile {
    path: PathBuf,
}

impl KeyFile {
    /// The key in this file, which is read when it is needed.
    pub fn new(path: &Path) -> Self {
        Self { path: path.to_owned() }
    }

    /// Checks that the file has a key.
    ///
    /// # Errors
    /// If it has none, or other users can read it.
    pub fn check(&self) -> Result<(), KeyError> {
        self.read().map(drop)
    }

    fn read(&self) -> Result<Zeroizing<Vec<u8>>, KeyError> {
        refuse_exposed(&self.path)?;
        let text = read_text(&self.path)?;
        let key = from_hex(text.trim()).map(Zeroizing::new).filter(|it| it.len() == KEY_BYTES);
        key.ok_or_else(|| KeyError::NoKeyFile { path: self.path.clone() })
    }

    /// Wraps the key of an image.
    pub(crate) fn wrap(&self, key: &ImageKey) -> Result<WrappedKey, KeyError> {
        let own = self.read()?;
        let failed = |_| KeyError::Wrap("the key file can't be used".to_owned());
        let mut salt = [0; SALT_BYTES];
        SystemRandom::new().fill(&mut salt).map_err(failed)?;
        let mut sealed = key.expose_bytes().to_vec();
        let cipher =
            wrapping_cipher(&own, &salt).ok_or_else(|| failed(ring::error::Unspecified))?;
        cipher.seal_in_place_append_tag(zero_nonce(), Aad::empty(), &mut sealed).map_err(failed)?;
        let bytes = [&salt[..], &sealed].concat();
        Ok(WrappedKey { method: WrapMethod::KeyFile, name: fingerprint(&own), bytes })
    }

    fn unwrap_one(&self, wrapped: &WrappedKey) -> Result<Option<ImageKey>, KeyError> {
        let own = self.read()?;
        if wrapped.name != fingerprint(&own) {
            return Ok(None);
        }
        let opened = open_wrapped(&own, &wrapped.bytes);
        opened.map(Some).ok_or_else(|| KeyError::Unwrap {
            source_name: self.path.display().to_string(),
            problem: "it was changed".to_owned(),
        })
    }
}

fn open_wrapped(own: &[u8], bytes: &[u8]) -> Option<ImageKey> {
    let (salt, sealed) = bytes.split_at_checked(SALT_BYTES)?;
    let mut sealed = Zeroizing::new(sealed.to_vec());
    let cipher = wrapping_cipher(own, salt)?;
    let opened = cipher.open_in_place(zero_nonce(), Aad::empty(), &mut sealed).ok()?;
    Some(ImageKey::from_bytes((&*opened).try_into().ok()?))
}

/// The cipher that wraps one key: its salt is random, so its key is used once.
fn wrapping_cipher(own: &[u8], salt: &[u8]) -> Option<LessSafeKey> {
    let derived = derive(own, b"firn key file", salt);
    UnboundKey::new(&AES_256_GCM, derived.as_ref()).ok().map(LessSafeKey::new)
}

fn zero_nonce() -> Nonce {
    Nonce::assume_unique_for_key([0; 12])
}

fn derive(own: &[u8], purpose: &[u8], salt: &[u8]) -> hmac::Tag {
    let mut context = hmac::Context::with_key(&hmac::Key::new(hmac::HMAC_SHA256, own));
    context.update(purpose);
    context.update(salt);
    context.sign()
}

/// A name of the key in the file that shows nothing of it.
fn fingerprint(own: &[u8]) -> String {
    let digest = derive(own, b"firn key file fingerprint", &[]);
    to_hex(digest.as_ref().get(..8).unwrap_or_default())
}

impl KeyOpener for KeyFile {
    fn unwrap_key(&self, wraps: &[WrappedKey]) -> Result<Option<ImageKey>, String> {
        for wrapped in wraps.iter().filter(|it| it.method == WrapMethod::KeyFile) {
            if let Some(key) = self.unwrap_one(wrapped).map_err(|error| error.describe())? {
                return Ok(Some(key));
            }
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn key_file(dir: &Path, name: &str, text: &str) -> KeyFile {
        let path = dir.join(name);
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        KeyFile::new(&path)
    }

    #[test]
    fn the_same_key_file_opens_the_key_and_no_other_does() {
        let dir = tempfile::tempdir().unwrap();
        let one = key_file(dir.path(), "one", &format!("{}\n", "1f".repeat(32)));
        let other = key_file(dir.path(), "other", &"2e".repeat(32));
        let key = ImageKey::random().unwrap();
        let wrapped = one.wrap(&key).unwrap();
        assert_eq!(one.unwrap_key(std::slice::from_ref(&wrapped)), Ok(Some(key.clone())));
        assert_eq!(other.unwrap_key(std::slice::from_ref(&wrapped)), Ok(None));
        assert_ne!(one.wrap(&key).unwrap().bytes, wrapped.bytes, "each wrap has a salt");
        for at in 0..wrapped.bytes.len() {
            let mut bad = wrapped.clone();
            bad.bytes[at] ^= 1;
            assert!(one.unwrap_key(&[bad]).is_err(), "byte {at}");
        }
        for len in 0..wrapped.bytes.len() {
            let bad = WrappedKey { bytes: wrapped.bytes[..len].to_vec(), ..wrapped.clone() };
            assert!(one.unwrap_key(&[bad]).is_err(), "length {len}");
        }
    }

    #[test]
    fn what_is_no_key_file_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        for text in ["", "1f", &"1f".repeat(33), &"zz".repeat(32), "\u{e9}"] {
            let file = key_file(dir.path(), "bad", text);
            assert!(matches!(file.check(), Err(KeyError::NoKeyFile { .. })), "{text}");
        }
        let file = key_file(dir.path(), "open", &"1f".repeat(32));
        let open = std::fs::Permissions::from_mode(0o640);
        std::fs::set_permissions(dir.path().join("open"), open).unwrap();
        assert!(matches!(file.check(), Err(KeyError::Exposed { .. })));
    }
}
