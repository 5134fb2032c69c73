//! What encrypts an image while it is written.

use std::hash::Hasher as _;

use twox_hash::XxHash3_64;

use crate::error::ImageError;
use crate::footer::SectionKind;
use crate::header::ImageIdentity;
use crate::keys::{ImageSeal, SealTag, random_bytes};
use crate::locality::{LocalityBlock, LocalityBlockId};
use crate::seal::{CipherError, FileCipher, SealSection, unstorable_wraps};

/// The cipher of a file that is being written, and what its seal section will have.
pub(crate) struct FileSealing {
    cipher: FileCipher,
    section: SealSection,
    blocks: XxHash3_64,
}

fn cipher_failure(part: &'static str) -> impl Fn(CipherError) -> ImageError {
    move |CipherError| ImageError::Section { part, problem: "it can't be encrypted".to_owned() }
}

impl FileSealing {
    /// Begins a file with a key of its own, derived from that of the image.
    pub(crate) fn begin(seal: &ImageSeal, identity: ImageIdentity) -> Result<Self, ImageError> {
        let part = SectionKind::Seal.section_name();
        if let Some(problem) = unstorable_wraps(&seal.wraps) {
            return Err(ImageError::Section { part, problem });
        }
        let salt = random_bytes().map_err(|source| ImageError::Io {
            step: "read",
            path: "/dev/urandom".into(),
            source,
        })?;
        let cipher = FileCipher::new(&seal.key, &salt, identity).map_err(cipher_failure(part))?;
        let (key_id, wraps) = (seal.key.id(), seal.wraps.clone());
        let section = SealSection { key_id, salt, blocks_checksum: 0, wraps };
        Ok(Self { cipher, section, blocks: XxHash3_64::new() })
    }

    /// Encrypts the memory blocks of a locality block, and returns their tags.
    pub(crate) fn seal_blocks(
        &self,
        id: LocalityBlockId,
        filled: &mut LocalityBlock,
    ) -> Result<Vec<SealTag>, ImageError> {
        let LocalityBlock { entries, bytes, .. } = filled;
        let outside = || ImageError::LocalityBlock {
            id,
            problem: "a memory block is outside its bytes".to_owned(),
        };
        let seal = |entry| {
            let bytes = bytes.get_mut(crate::BlockEntry::range(entry)).ok_or_else(outside)?;
            self.cipher.seal_block(id, entry, bytes).map_err(cipher_failure("memory block"))
        };
        entries.iter().map(seal).collect()
    }

    /// Records the bytes of a locality block as they are written, padding included.
    pub(crate) fn add_written(&mut self, bytes: &[u8]) {
        self.blocks.write(bytes);
    }

    /// Encrypts a section.
    pub(crate) fn seal_section(
        &self,
        kind: SectionKind,
        bytes: &mut Vec<u8>,
    ) -> Result<(), ImageError> {
        let failed = cipher_failure(kind.section_name());
        self.cipher.seal_section(kind, bytes).map_err(failed)
    }

    /// The seal section, once all locality blocks are written.
    pub(crate) fn section(&self) -> SealSection {
        SealSection { blocks_checksum: self.blocks.finish(), ..self.section.clone() }
    }

    /// The authentication code of the parts that are not encrypted.
    pub(crate) fn clear_tag(&self, parts: &[&[u8]]) -> Result<SealTag, ImageError> {
        self.cipher.clear_tag(parts).map_err(cipher_failure("footer"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::geometry::{BlockOrganization, Geometry};
    use crate::keys::{ImageKey, WrapMethod, WrappedKey, key_ring};
    use crate::reader::Image;
    use crate::sections::ImageSections;
    use crate::writer::{ImageDraft, ImageWriter};
    use firn_types::RegionMap;
    use std::path::Path;

    fn seal(key: u8) -> ImageSeal {
        let key = ImageKey::from_bytes([key; 32]);
        key_ring().add_key(key.clone());
        let wrap = WrappedKey { method: WrapMethod::Age, name: String::new(), bytes: vec![1] };
        ImageSeal { key, wraps: vec![wrap] }
    }

    fn write(path: &Path, seal: &ImageSeal, parent: Option<&Image>, identity: ImageIdentity) {
        let whole = ImageDraft::whole_image(Geometry::new(16), BlockOrganization::Access);
        let draft = ImageDraft { seal: Some(seal), parent, ..whole };
        let writer = ImageWriter::with_identity(path, &draft, identity).unwrap();
        let regions = RegionMap::lay_out([("ram", 16 * 4096)]).unwrap();
        writer.finish(ImageSections { regions, ..ImageSections::default() }).unwrap();
    }

    /// Who knows the recipient can seal an image for it, with any identity.
    #[test]
    fn a_parent_that_another_user_has_sealed_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let (base, child) = (dir.path().join("base.firn"), dir.path().join("child.firn"));
        let (one, two) = (ImageIdentity([1; 16]), ImageIdentity([2; 16]));
        write(&base, &seal(101), None, one);
        write(&child, &seal(102), Some(&Image::open(&base).unwrap()), two);
        assert!(Image::open(&child).is_ok());
        write(&base, &seal(103), None, one);
        assert!(Image::open(&base).is_ok(), "it is a good forgery");
        let error = Image::open(&child).unwrap_err().to_string();
        assert!(error.contains("sealed with another key"), "{error}");
        write(&base, &seal(101), None, one);
        assert!(Image::open(&child).is_ok(), "the same checkpoint, written anew");
    }
}
