//! How the bytes of a sealed image are encrypted and authenticated.
//!
//! ```text
//!   image key (32 random bytes; the same for each file that has this image)
//!      '--> file key = HKDF(image key, salt of the file) --> AES-256-GCM
//!
//!   nonce (12)   1 0 0 0   locality block   offset           a memory block; its tag is in the index
//!                2 0 0 0   section kind     0                a section; its tag follows it
//!                3 0 0 0   0                0                header, parent section, seal section and footer;
//!                                                            nothing is encrypted; the tag is in the footer
//!   also authenticated: the identity of the image, and the number of the memory block
//! ```
//!
//! Each file has a random salt, so each has a key of its own, under which every nonce is used once:
//! a locality block is written once, and a file is never changed.
//!
//! The seal section is the only part of the sections that is needed before the key is known, with
//! the parent section, by which the files of a chain are found. It is the last section:
//!
//! ```text
//!    0  4  algorithm: 1 AES-256-GCM
//!    4 16  key ID
//!   20 32  salt
//!   52  8  xxh3 of all locality blocks: a copy can be checked without the key
//!   60  4  number of wrapped keys, at most 16; then each:
//!          4 method   2 length of the name   name, UTF-8   4 length   wrapped key
//! ```

use ring::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, Tag, UnboundKey};

use crate::bytes::ByteReader;
use crate::error::ImageFlaw;
use crate::footer::{SEAL_BYTES_MAX, SectionKind};
use crate::header::ImageIdentity;
use crate::keys::{ImageKey, ImageSeal, KeyId, SECTION_TAG_BYTES, SealTag, WrapMethod, WrappedKey};
use crate::locality::{BlockEntry, LocalityBlockId};

/// The only algorithm so far.
const ALGORITHM: u32 = 1;

/// The maximum number of wrapped forms of a key.
const WRAPS_MAX: usize = 16;

const PLACE: &str = "seal section";

/// A part that can't be encrypted: it is too long, which no part is.
#[derive(Debug)]
pub(crate) struct CipherError;

/// The cipher of one file.
pub(crate) struct FileCipher {
    key: LessSafeKey,
    identity: ImageIdentity,
}

/// The contents of the seal section.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct SealSection {
    pub(crate) key_id: KeyId,
    pub(crate) salt: [u8; 32],
    pub(crate) blocks_checksum: u64,
    pub(crate) wraps: Vec<WrappedKey>,
}

/// The seal of an open file.
pub(crate) struct OpenSeal {
    pub(crate) cipher: FileCipher,
    pub(crate) seal: ImageSeal,
}

impl FileCipher {
    pub(crate) fn new(
        key: &ImageKey,
        salt: &[u8; 32],
        identity: ImageIdentity,
    ) -> Result<Self, CipherError> {
        let derived = key.derive(b"firn file", salt);
        let key = UnboundKey::new(&AES_256_GCM, &*derived).map_err(|_| CipherError)?;
        Ok(Self { key: LessSafeKey::new(key), identity })
    }

    /// What is authenticated with a memory block.
    fn block_context(&self, entry: &BlockEntry) -> [u8; 20] {
        let mut context = [0; 20];
        context[..16].copy_from_slice(&self.identity.0);
        context[16..].copy_from_slice(&entry.block.0.to_le_bytes());
        context
    }

    fn section_context(&self, kind: SectionKind) -> [u8; 20] {
        let mut context = [0; 20];
        context[..16].copy_from_slice(&self.identity.0);
        context[16..].copy_from_slice(&(kind as u32).to_le_bytes());
        context
    }

    fn seal_bytes(
        &self,
        nonce: Nonce,
        context: &[u8],
        bytes: &mut [u8],
    ) -> Result<SealTag, CipherError> {
        let tag = self.key.seal_in_place_separate_tag(nonce, Aad::from(context), bytes);
        let tag = tag.map_err(|_| CipherError)?;
        tag.as_ref().try_into().map_err(|_| CipherError)
    }

    fn open_bytes(&self, nonce: Nonce, context: &[u8], tag: &SealTag, bytes: &mut [u8]) -> bool {
        let tag = Tag::from(*tag);
        self.key.open_in_place_separate_tag(nonce, Aad::from(context), tag, bytes, 0..).is_ok()
    }

    /// Encrypts the stored bytes of a memory block.
    pub(crate) fn seal_block(
        &self,
        id: LocalityBlockId,
        entry: &BlockEntry,
        bytes: &mut [u8],
    ) -> Result<SealTag, CipherError> {
        self.seal_bytes(block_nonce(id, entry), &self.block_context(entry), bytes)
    }

    /// Decrypts them. False if they are not what was encrypted there.
    pub(crate) fn open_block(
        &self,
        id: LocalityBlockId,
        entry: &BlockEntry,
        tag: &SealTag,
        bytes: &mut [u8],
    ) -> bool {
        self.open_bytes(block_nonce(id, entry), &self.block_context(entry), tag, bytes)
    }

    /// Encrypts a section, and appends its tag.
    pub(crate) fn seal_section(
        &self,
        kind: SectionKind,
        bytes: &mut Vec<u8>,
    ) -> Result<(), CipherError> {
        let nonce = make_nonce(2, kind as u32, 0);
        let tag = self.seal_bytes(nonce, &self.section_context(kind), bytes)?;
        bytes.extend(tag);
        Ok(())
    }

    /// Decrypts a section. False if it is not what was encrypted.
    pub(crate) fn open_section(&self, kind: SectionKind, bytes: &mut Vec<u8>) -> bool {
        let Some(len) = bytes.len().checked_sub(SECTION_TAG_BYTES) else { return false };
        let Ok(tag) = SealTag::try_from(&bytes[len..]) else { return false };
        bytes.truncate(len);
        let nonce = make_nonce(2, kind as u32, 0);
        self.open_bytes(nonce, &self.section_context(kind), &tag, bytes)
    }

    /// The tag of the parts that are not encrypted.
    pub(crate) fn clear_tag(&self, parts: &[&[u8]]) -> Result<SealTag, CipherError> {
        self.seal_bytes(make_nonce(3, 0, 0), &parts.concat(), &mut [])
    }

    /// Whether this is the tag of the parts that are not encrypted.
    pub(crate) fn has_clear_tag(&self, parts: &[&[u8]], tag: &SealTag) -> bool {
        self.open_bytes(make_nonce(3, 0, 0), &parts.concat(), tag, &mut [])
    }
}

fn block_nonce(id: LocalityBlockId, entry: &BlockEntry) -> Nonce {
    make_nonce(1, id.0, entry.offset)
}

fn make_nonce(purpose: u8, first: u32, second: u32) -> Nonce {
    let mut nonce = [0; 12];
    nonce[0] = purpose;
    nonce[4..8].copy_from_slice(&first.to_le_bytes());
    nonce[8..].copy_from_slice(&second.to_le_bytes());
    Nonce::assume_unique_for_key(nonce)
}

impl SealSection {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend(ALGORITHM.to_le_bytes());
        bytes.extend(self.key_id.0);
        bytes.extend(self.salt);
        bytes.extend(self.blocks_checksum.to_le_bytes());
        bytes.extend((self.wraps.len() as u32).to_le_bytes());
        for WrappedKey { method, name, bytes: wrapped } in &self.wraps {
            bytes.extend((*method as u32).to_le_bytes());
            bytes.extend((name.len() as u16).to_le_bytes());
            bytes.extend(name.as_bytes());
            bytes.extend((wrapped.len() as u32).to_le_bytes());
            bytes.extend(wrapped);
        }
        bytes
    }

    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, ImageFlaw> {
        let mut fields = ByteReader::new(PLACE, bytes);
        let algorithm = fields.read_u32()?;
        if algorithm != ALGORITHM {
            let problem = format!("algorithm {algorithm} is not known to this Firn");
            return Err(fields.flaw_here(problem));
        }
        let (key_id, salt) = (KeyId(fields.read_array()?), fields.read_array()?);
        let (blocks_checksum, count) = (fields.read_u64()?, fields.read_u32()? as usize);
        if count > WRAPS_MAX {
            return Err(fields.flaw_here(format!("{count} wrapped keys, at most {WRAPS_MAX}")));
        }
        let wraps = (0..count).map(|_| parse_wrap(&mut fields)).collect::<Result<_, _>>()?;
        fields.expect_end()?;
        Ok(Self { key_id, salt, blocks_checksum, wraps })
    }
}

fn parse_wrap(fields: &mut ByteReader<'_>) -> Result<WrappedKey, ImageFlaw> {
    let method = fields.read_u32()?;
    let method = WrapMethod::from_code(method).ok_or_else(|| {
        fields.flaw_here(format!("wrap method {method} is not known to this Firn"))
    })?;
    let len = usize::from(fields.read_u16()?);
    let name = String::from_utf8(fields.take_bytes(len)?.to_vec())
        .map_err(|_| fields.flaw_here("a name is not UTF-8"))?;
    let len = fields.read_u32()? as usize;
    Ok(WrappedKey { method, name, bytes: fields.take_bytes(len)?.to_vec() })
}

/// The reason why a key can't be stored in these wrapped forms, if there is one.
pub(crate) fn unstorable_wraps(wraps: &[WrappedKey]) -> Option<String> {
    if wraps.is_empty() || wraps.len() > WRAPS_MAX {
        return Some(format!("{} wrapped keys, 1 to {WRAPS_MAX} fit", wraps.len()));
    }
    let bytes: usize = wraps.iter().map(|it| 10 + it.name.len() + it.bytes.len()).sum();
    let fits = bytes as u64 + 64 <= SEAL_BYTES_MAX;
    let names_fit = wraps.iter().all(|it| it.name.len() <= usize::from(u16::MAX));
    (!fits || !names_fit).then(|| format!("wrapped keys of {bytes} bytes, too many"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::StoredAs;
    use firn_types::Block;

    fn cipher(key: u8, salt: u8) -> FileCipher {
        let identity = ImageIdentity([9; 16]);
        FileCipher::new(&ImageKey::from_bytes([key; 32]), &[salt; 32], identity).unwrap()
    }

    fn entry(block: u32, offset: u32) -> BlockEntry {
        let (stored_as, checksum) = (StoredAs::Lz4, 0);
        BlockEntry { block: Block(block), offset, stored_len: 100, stored_as, checksum }
    }

    #[test]
    fn a_block_opens_only_where_it_was_sealed() {
        let mut bytes = [7; 100];
        let tag = cipher(1, 1).seal_block(LocalityBlockId(3), &entry(5, 64), &mut bytes).unwrap();
        assert_ne!(bytes, [7; 100]);
        let open = |cipher: FileCipher, id, entry: BlockEntry, tag: &SealTag| {
            let mut copy = bytes;
            cipher.open_block(LocalityBlockId(id), &entry, tag, &mut copy) && copy == [7; 100]
        };
        assert!(open(cipher(1, 1), 3, entry(5, 64), &tag));
        assert!(!open(cipher(2, 1), 3, entry(5, 64), &tag), "another key");
        assert!(!open(cipher(1, 2), 3, entry(5, 64), &tag), "another file");
        assert!(!open(cipher(1, 1), 4, entry(5, 64), &tag), "another locality block");
        assert!(!open(cipher(1, 1), 3, entry(5, 65), &tag), "another offset");
        assert!(!open(cipher(1, 1), 3, entry(6, 64), &tag), "another memory block");
        for bit in 0..128 {
            let mut wrong = tag;
            wrong[bit / 8] ^= 1 << (bit % 8);
            assert!(!open(cipher(1, 1), 3, entry(5, 64), &wrong), "bit {bit} of the tag");
        }
    }

    #[test]
    fn a_section_opens_only_as_what_it_was() {
        let mut bytes = b"devices".to_vec();
        cipher(1, 1).seal_section(SectionKind::DeviceState, &mut bytes).unwrap();
        assert_eq!(bytes.len(), 7 + SECTION_TAG_BYTES);
        let mut other = bytes.clone();
        assert!(!cipher(1, 1).open_section(SectionKind::Meta, &mut other));
        assert!(!cipher(1, 1).open_section(SectionKind::DeviceState, &mut vec![0; 15]));
        assert!(cipher(1, 1).open_section(SectionKind::DeviceState, &mut bytes));
        assert_eq!(bytes, b"devices");
    }

    fn section() -> SealSection {
        let wrap = |method, name: &str| WrappedKey {
            method,
            name: name.to_owned(),
            bytes: name.repeat(3).into_bytes(),
        };
        let key = ImageKey::from_bytes([4; 32]);
        let wraps = vec![wrap(WrapMethod::Age, "age1"), wrap(WrapMethod::Command, "vault")];
        SealSection { key_id: key.id(), salt: [3; 32], blocks_checksum: 77, wraps }
    }

    #[test]
    fn decoding_returns_the_encoded_value() {
        let bytes = section().encode();
        assert_eq!(SealSection::parse(&bytes), Ok(section()));
        for len in 0..bytes.len() {
            assert!(SealSection::parse(&bytes[..len]).is_err(), "length {len}");
        }
        for (at, value) in [(0, 2), (60, 17), (64, 9), (70, 0xff)] {
            let mut bad = bytes.clone();
            bad[at] = value;
            assert!(SealSection::parse(&bad).is_err(), "byte {at}");
        }
        assert_eq!(unstorable_wraps(&section().wraps), None);
        assert!(unstorable_wraps(&[]).is_some());
        let long = WrappedKey { bytes: vec![0; 70_000], ..section().wraps[0].clone() };
        assert!(unstorable_wraps(&[long]).is_some());
    }
}
