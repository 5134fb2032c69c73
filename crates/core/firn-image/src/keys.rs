//! The keys of sealed images: what a process knows of them, and how it gets them.
//!
//! ```text
//!   firn (age identity, key file, command)            supervisor
//!     opener: wrapped key of an image --> key         keys that arrived with a request
//!                  '--------------- key ring of the process ---------------'
//!                                        |
//!                                 Image::open: by the key ID in the image
//! ```
//!
//! Each image has a random key of 32 bytes, and holds it in wrapped forms that others than this
//! crate can read. A process keeps the keys of the images that it has opened. They are overwritten
//! when they are dropped, are never printed, and are written nowhere.

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::sync::{Arc, PoisonError, RwLock};

use ring::hmac;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use zeroize::{Zeroize, Zeroizing};

/// The length of a key in bytes.
pub const KEY_BYTES: usize = 32;

/// The bytes by which an encrypted section is longer than what was encrypted.
pub(crate) const SECTION_TAG_BYTES: usize = 16;

/// The authentication code of an encrypted part.
pub(crate) type SealTag = [u8; SECTION_TAG_BYTES];

/// The key of an image: from it the key of each file that has the image is derived.
#[derive(Clone)]
pub struct ImageKey(Zeroizing<[u8; KEY_BYTES]>);

/// The number by which an image names its key. It is derived from the key, and shows nothing of it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct KeyId(pub(crate) [u8; 16]);

impl ImageKey {
    /// A new random key.
    ///
    /// # Errors
    /// If the system has no random numbers.
    pub fn random() -> io::Result<Self> {
        Ok(Self(Zeroizing::new(random_bytes()?)))
    }

    /// The key with these bytes.
    pub fn from_bytes(bytes: [u8; KEY_BYTES]) -> Self {
        Self(Zeroizing::new(bytes))
    }

    /// Its bytes, for a program that wraps them.
    pub fn expose_bytes(&self) -> &[u8; KEY_BYTES] {
        &self.0
    }

    /// Its number.
    pub fn id(&self) -> KeyId {
        let mut id = [0; 16];
        id.copy_from_slice(&self.derive(b"firn key id", &[])[..16]);
        KeyId(id)
    }

    /// What a child image knows of this key: proof that its parent was sealed by a process that had
    /// the key.
    pub(crate) fn link(&self) -> [u8; 32] {
        *self.derive(b"firn parent link", &[])
    }

    /// A key for one purpose (HKDF-Expand of RFC 5869 with one block; the key is uniformly random,
    /// so nothing has to be extracted first).
    pub(crate) fn derive(&self, purpose: &[u8], salt: &[u8]) -> Zeroizing<[u8; KEY_BYTES]> {
        let mut context = hmac::Context::with_key(&hmac::Key::new(hmac::HMAC_SHA256, &*self.0));
        context.update(purpose);
        context.update(salt);
        context.update(&[1]);
        let mut out = Zeroizing::new([0; KEY_BYTES]);
        out.copy_from_slice(context.sign().as_ref());
        out
    }
}

/// Random bytes of the system.
pub(crate) fn random_bytes<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes)
}

impl PartialEq for ImageKey {
    fn eq(&self, other: &Self) -> bool {
        self.id() == other.id()
    }
}

impl Eq for ImageKey {}

impl fmt::Debug for ImageKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ImageKey({})", self.id())
    }
}

/// For the connection between a command and a supervisor, which is for one user alone.
impl Serialize for ImageKey {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut text = to_hex(&*self.0);
        let written = serializer.serialize_str(&text);
        text.zeroize();
        written
    }
}

impl<'de> Deserialize<'de> for ImageKey {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = Zeroizing::new(String::deserialize(deserializer)?);
        let bytes = from_hex(&text).map(Zeroizing::new);
        let bytes = bytes.and_then(|bytes| <[u8; KEY_BYTES]>::try_from(bytes.as_slice()).ok());
        bytes.map(Self::from_bytes).ok_or_else(|| serde::de::Error::custom("not a key"))
    }
}

impl fmt::Display for KeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&to_hex(&self.0))
    }
}

impl fmt::Debug for KeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Bytes in hexadecimal.
pub fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The bytes of a text in hexadecimal; `None` if it is none.
pub fn from_hex(text: &str) -> Option<Vec<u8>> {
    let digits = text.as_bytes();
    let digit = |byte: &u8| char::from(*byte).to_digit(16).map(|it| it as u8);
    let pair = |pair: &[u8]| match pair {
        [high, low] => Some(digit(high)? << 4 | digit(low)?),
        _ => None,
    };
    digits.chunks(2).map(pair).collect()
}

/// How a key is wrapped.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WrapMethod {
    /// An age file.
    Age = 1,
    /// By a key in a file.
    KeyFile = 2,
    /// By the user's command.
    Command = 3,
}

impl WrapMethod {
    pub(crate) fn from_code(code: u32) -> Option<Self> {
        [Self::Age, Self::KeyFile, Self::Command].into_iter().find(|it| *it as u32 == code)
    }
}

impl fmt::Display for WrapMethod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Age => "the age recipient",
            Self::KeyFile => "the key file",
            Self::Command => "the key command",
        })
    }
}

/// A wrapped form of an image's key.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct WrappedKey {
    /// How it is wrapped.
    pub method: WrapMethod,
    /// What a user can recognize: for whom or with what it is wrapped. Not secret.
    pub name: String,
    /// The wrapped key.
    #[serde(with = "hex_bytes")]
    pub bytes: Vec<u8>,
}

/// Bytes as a text in hexadecimal: a list of numbers would be twice as long.
mod hex_bytes {
    use serde::{Deserialize as _, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(bytes: &[u8], serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&super::to_hex(bytes))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Vec<u8>, D::Error> {
        let text = String::deserialize(deserializer)?;
        super::from_hex(&text).ok_or_else(|| serde::de::Error::custom("not hexadecimal"))
    }
}

/// The key with which an image is sealed, and its wrapped forms.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ImageSeal {
    /// The key.
    pub key: ImageKey,
    /// Its wrapped forms, which the image holds.
    pub wraps: Vec<WrappedKey>,
}

/// Unwraps keys of images.
pub trait KeyOpener: Send + Sync {
    /// The key in one of these wrapped forms; `None` if none of them is for this opener.
    ///
    /// # Errors
    /// If one is, and can't be unwrapped: the reason.
    fn unwrap_key(&self, wraps: &[WrappedKey]) -> Result<Option<ImageKey>, String>;
}

/// The keys that a process knows, and the openers with which it gets others.
#[derive(Default)]
pub struct KeyRing {
    keys: RwLock<Vec<ImageKey>>,
    openers: RwLock<Vec<Arc<dyn KeyOpener>>>,
}

static PROCESS_KEYS: KeyRing =
    KeyRing { keys: RwLock::new(Vec::new()), openers: RwLock::new(Vec::new()) };

/// The key ring of this process, by which [`crate::Image::open`] opens sealed images.
pub fn key_ring() -> &'static KeyRing {
    &PROCESS_KEYS
}

impl KeyRing {
    /// Adds keys.
    pub fn add_keys(&self, keys: &[ImageKey]) {
        keys.iter().cloned().for_each(|key| self.add_key(key));
    }

    /// Adds a key.
    pub fn add_key(&self, key: ImageKey) {
        let mut keys = self.keys.write().unwrap_or_else(PoisonError::into_inner);
        if !keys.contains(&key) {
            keys.push(key);
        }
    }

    /// All keys that were added or found.
    pub fn known_keys(&self) -> Vec<ImageKey> {
        self.keys.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Adds a source of keys.
    pub fn add_opener(&self, opener: Arc<dyn KeyOpener>) {
        self.openers.write().unwrap_or_else(PoisonError::into_inner).push(opener);
    }

    /// The key with this number, one of whose wrapped forms may have to be unwrapped.
    ///
    /// # Errors
    /// The reason, for an error that names the image.
    pub(crate) fn find_key(&self, id: KeyId, wraps: &[WrappedKey]) -> Result<ImageKey, String> {
        let keys = self.keys.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(key) = keys.iter().find(|key| key.id() == id) {
            return Ok(key.clone());
        }
        drop(keys);
        let openers = self.openers.read().unwrap_or_else(PoisonError::into_inner).clone();
        let mut problem = None;
        for opener in openers {
            match opener.unwrap_key(wraps) {
                Ok(Some(key)) if key.id() == id => {
                    self.add_key(key.clone());
                    return Ok(key);
                }
                Ok(Some(_)) => {
                    problem = Some("its wrapped key is that of another image".to_owned());
                }
                Ok(None) => {}
                Err(reason) => problem = Some(reason),
            }
        }
        let missing = || {
            format!("it is sealed, and its key is not here: it was sealed for {}", name_all(wraps))
        };
        Err(problem.unwrap_or_else(missing))
    }
}

fn name_all(wraps: &[WrappedKey]) -> String {
    let names: Vec<_> = wraps.iter().map(|it| format!("{} {}", it.method, it.name)).collect();
    if names.is_empty() { "no recipient".to_owned() } else { names.join(", ") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_never_printed() {
        let key = ImageKey::from_bytes([0xab; 32]);
        assert!(!format!("{key:?}").contains("abab"));
        let seal = ImageSeal { key, wraps: Vec::new() };
        assert!(!format!("{seal:?}").contains("abab"));
    }

    #[test]
    fn a_key_arrives_as_it_was_sent() {
        let key = ImageKey::random().unwrap();
        let text = serde_json::to_string(&key).unwrap();
        assert_eq!(serde_json::from_str::<ImageKey>(&text).unwrap().0, key.0);
        for bad in ["\"\"", "\"0\"", "\"zz\"", "7"] {
            assert!(serde_json::from_str::<ImageKey>(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn derived_values_differ() {
        let (one, other) = (ImageKey::from_bytes([1; 32]), ImageKey::from_bytes([2; 32]));
        assert_ne!(one.id(), other.id());
        assert_ne!(one.link(), other.link());
        assert_ne!(*one.derive(b"a", b"1"), *one.derive(b"a", b"2"));
        assert_ne!(*one.derive(b"a", b"1"), *one.derive(b"b", b"1"));
        assert_ne!(&one.link(), one.expose_bytes());
    }

    #[test]
    fn an_opener_is_asked_once() {
        struct Counter(std::sync::atomic::AtomicU32);
        impl KeyOpener for Counter {
            fn unwrap_key(&self, wraps: &[WrappedKey]) -> Result<Option<ImageKey>, String> {
                self.0.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                Ok(wraps.first().map(|_| ImageKey::from_bytes([7; 32])))
            }
        }
        let (ring, counter) = (KeyRing::default(), Arc::new(Counter(0.into())));
        ring.add_opener(Arc::clone(&counter) as Arc<dyn KeyOpener>);
        let id = ImageKey::from_bytes([7; 32]).id();
        let wrap = WrappedKey { method: WrapMethod::Age, name: "x".into(), bytes: Vec::new() };
        let problem = ring.find_key(id, &[]).unwrap_err();
        assert!(problem.contains("its key is not here"), "{problem}");
        for _ in 0..3 {
            assert!(ring.find_key(id, std::slice::from_ref(&wrap)).is_ok());
        }
        assert_eq!(counter.0.load(std::sync::atomic::Ordering::Relaxed), 2);
        assert!(ring.find_key(ImageKey::from_bytes([8; 32]).id(), &[wrap]).is_err());
    }
}
