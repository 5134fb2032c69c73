//! The mark by which Firn knows the images that it has saved for this user.
//!
//! ```text
//!   metadata, without "origin" and "found_late" --.
//!   region map ------------------------------------+-- SHA-256 --> digest -- HMAC-SHA256, the user's key --> mark
//!   device state ---------------------------------|
//!   key ID, of a sealed image ---------------------'
//!
//!   metadata of the image: "origin": { "key": the key's number, "mark": ... }
//! ```
//!
//! The mark covers what a restore runs and gives to QEMU: the command line, the description of the
//! VM with its disks, RAM's layout, and the state of devices. It does not cover guest memory, which
//! a lazy restore has not read when the guest starts. So a rewritten image keeps its mark: reorder,
//! merge and rebase change how memory is stored, and copy the rest. Of a sealed image the mark covers
//! the key: so only who has the key can have changed its memory.
//!
//! The digest is that of the JSON's values, not of its text, because each rewrite writes the text
//! anew. `found_late` is the only number with a fraction; its text may change, and a restore uses it
//! only to decide how early it reads.

use std::fmt;

use firn_image::KeyId;
use firn_types::RegionMap;
use hmac::{Hmac, Mac};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};

/// Bytes in a key.
pub(crate) const KEY_BYTES: usize = 32;

/// The key of the mark among the metadata.
const MARK: &str = "origin";

/// Metadata that the mark does not cover.
const NOT_COVERED: [&str; 2] = [MARK, "found_late"];

/// The first bytes that are hashed, so that no digest or mark has a meaning elsewhere.
const DIGEST_CONTEXT: &[u8] = b"firn image origin 1\0digest";
const NUMBER_CONTEXT: &[u8] = b"firn image origin 1\0number of the key";

/// The digest of what a restore of an image acts on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OriginDigest([u8; 32]);

/// The mark in an image's metadata.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct OriginMark {
    /// The number of the key, which does not disclose it.
    key: String,
    /// The authentication code.
    mark: String,
}

/// The key of a user.
#[derive(Clone)]
pub(crate) struct OriginKey([u8; KEY_BYTES]);

impl fmt::Debug for OriginKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "OriginKey({})", self.number())
    }
}

impl OriginDigest {
    /// The digest of a sealed image: that of its parts, and its key.
    pub(crate) fn with_key(self, key: Option<KeyId>) -> Self {
        let Some(key) = key else { return self };
        let mut hash = Sha256::new_with_prefix(DIGEST_CONTEXT);
        hash_bytes(&mut hash, b'd', &self.0);
        hash_bytes(&mut hash, b'e', key.to_string().as_bytes());
        Self(hash.finalize().into())
    }

    /// The digest of an image's parts.
    pub(crate) fn of_parts(meta: &Value, regions: &RegionMap, device_state: &[u8]) -> Self {
        let mut hash = Sha256::new_with_prefix(DIGEST_CONTEXT);
        let covered = |key: &str| !NOT_COVERED.contains(&key);
        hash_value(&mut hash, meta, &covered);
        let regions = serde_json::to_value(regions).unwrap_or_default();
        hash_value(&mut hash, &regions, &|_| true);
        hash_bytes(&mut hash, b's', device_state);
        Self(hash.finalize().into())
    }
}

impl fmt::Display for OriginDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&to_hex(&self.0))
    }
}

impl OriginKey {
    pub(crate) fn from_bytes(bytes: [u8; KEY_BYTES]) -> Self {
        Self(bytes)
    }

    pub(crate) fn mark(&self, digest: &OriginDigest) -> OriginMark {
        let mark = self.authenticate(&digest.0).finalize().into_bytes();
        OriginMark { key: self.number(), mark: to_hex(&mark) }
    }

    /// Whether a mark is one of this key.
    pub(crate) fn has_number(&self, mark: &OriginMark) -> bool {
        mark.key == self.number()
    }

    /// Whether a mark is the one of this key for a digest. The time does not depend on the mark.
    pub(crate) fn has_made(&self, mark: &OriginMark, digest: &OriginDigest) -> bool {
        let code = from_hex(&mark.mark);
        code.is_some_and(|code| self.authenticate(&digest.0).verify_slice(&code).is_ok())
    }

    fn number(&self) -> String {
        to_hex(&self.authenticate(NUMBER_CONTEXT).finalize().into_bytes()[..8])
    }

    fn authenticate(&self, bytes: &[u8]) -> Hmac<Sha256> {
        // Padded to a block, as HMAC does with a key that is shorter.
        let mut key = [0; 64];
        key[..KEY_BYTES].copy_from_slice(&self.0);
        let mut code = <Hmac<Sha256> as Mac>::new(&key.into());
        code.update(bytes);
        code
    }
}

impl OriginMark {
    /// The mark in metadata, if there is one.
    pub(crate) fn find_in(meta: &Value) -> Option<Self> {
        serde_json::from_value(meta.get(MARK)?.clone()).ok()
    }

    /// Adds the mark to metadata.
    pub(crate) fn add_to(self, meta: &mut Value) {
        if let (Some(meta), Ok(mark)) = (meta.as_object_mut(), serde_json::to_value(self)) {
            meta.insert(MARK.to_owned(), mark);
        }
    }
}

/// Hashes a value so that no other value has the same bytes, in the order of keys.
fn hash_value(hash: &mut Sha256, value: &Value, covered: &dyn Fn(&str) -> bool) {
    match value {
        Value::Null => hash_bytes(hash, b'0', b""),
        Value::Bool(it) => hash_bytes(hash, b'b', &[u8::from(*it)]),
        Value::Number(it) => hash_bytes(hash, b'n', it.to_string().as_bytes()),
        Value::String(it) => hash_bytes(hash, b't', it.as_bytes()),
        Value::Array(items) => {
            hash_bytes(hash, b'a', &(items.len() as u64).to_le_bytes());
            items.iter().for_each(|it| hash_value(hash, it, &|_| true));
        }
        Value::Object(object) => {
            let mut keys: Vec<_> = object.iter().filter(|(key, _)| covered(key)).collect();
            keys.sort_unstable_by_key(|(key, _)| *key);
            hash_bytes(hash, b'o', &(keys.len() as u64).to_le_bytes());
            for (key, it) in keys {
                hash_bytes(hash, b'k', key.as_bytes());
                hash_value(hash, it, &|_| true);
            }
        }
    }
}

fn hash_bytes(hash: &mut Sha256, kind: u8, bytes: &[u8]) {
    hash.update([kind]);
    hash.update((bytes.len() as u64).to_le_bytes());
    hash.update(bytes);
}

fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn from_hex(text: &str) -> Option<Vec<u8>> {
    let is_hex = text.len() % 2 == 0 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    let byte = |at: usize| u8::from_str_radix(text.get(at..at + 2)?, 16).ok();
    is_hex.then(|| (0..text.len()).step_by(2).map(byte).collect()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn key(byte: u8) -> OriginKey {
        OriginKey::from_bytes([byte; KEY_BYTES])
    }

    fn regions() -> RegionMap {
        RegionMap::lay_out([("ram", 1 << 20)]).unwrap()
    }

    fn digest(meta: &Value) -> OriginDigest {
        OriginDigest::of_parts(meta, &regions(), b"state")
    }

    #[test]
    fn a_mark_is_that_of_one_key_and_one_digest() {
        let meta = json!({ "name": "web", "qemu": { "user_args": ["qemu", "-S"] } });
        let mark = key(1).mark(&digest(&meta));
        assert!(key(1).has_made(&mark, &digest(&meta)) && key(1).has_number(&mark));
        assert!(!key(2).has_made(&mark, &digest(&meta)) && !key(2).has_number(&mark));
        let mut marked = meta.clone();
        mark.clone().add_to(&mut marked);
        assert_eq!(OriginMark::find_in(&marked), Some(mark.clone()));
        assert_eq!(digest(&marked), digest(&meta), "the mark does not cover itself");
        for wrong in ["", "0", "zz", &mark.mark[..62], &format!("{}00", mark.mark)] {
            let wrong = OriginMark { mark: wrong.to_owned(), ..mark.clone() };
            assert!(!key(1).has_made(&wrong, &digest(&meta)), "{wrong:?}");
        }
    }

    #[test]
    fn every_part_is_covered() {
        let meta = json!({ "name": "web", "qemu": { "args": ["a", "b"] }, "n": 1 });
        let first = digest(&meta);
        for other in [
            json!({ "name": "web", "qemu": { "args": ["a", "c"] }, "n": 1 }),
            json!({ "name": "web", "qemu": { "args": ["ab"] }, "n": 1 }),
            json!({ "name": "web", "qemu": { "args": ["a"] }, "b": 1, "n": 1 }),
            json!({ "name": "web", "qemu": { "args": ["a", "b"], "origin": 1 }, "n": 1 }),
            json!({ "name": "web", "qemu": { "args": ["a", "b"] }, "n": "1" }),
            json!({ "name": "web", "qemu": { "args": ["a", "b"] }, "n": 1.0 }),
            json!(null),
            json!([]),
        ] {
            assert_ne!(digest(&other), first, "{other}");
        }
        let ram = RegionMap::lay_out([("ram", 2 << 20)]).unwrap();
        assert_ne!(OriginDigest::of_parts(&meta, &ram, b"state"), first);
        assert_ne!(OriginDigest::of_parts(&meta, &regions(), b"stat"), first);
        let key = |byte| Some(firn_image::ImageKey::from_bytes([byte; 32]).id());
        assert_ne!(first.with_key(key(1)), first, "sealed");
        assert_ne!(first.with_key(key(1)), first.with_key(key(2)), "with another key");
        assert_eq!(first.with_key(None), first);
    }

    #[test]
    fn the_text_of_the_json_does_not_matter() {
        let meta: Value = serde_json::from_str(r#"{"b":[1,{"d":-2,"c":null}],"a":"é"}"#).unwrap();
        let again: Value = serde_json::from_str(
            "{ \"found_late\": 0.1234567890123, \"a\" : \"\\u00e9\", \"b\" : [1,{\"c\":null,\"d\":-2}] }",
        )
        .unwrap();
        assert_eq!(digest(&meta), digest(&again));
    }
}
