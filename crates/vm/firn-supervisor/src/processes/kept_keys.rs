//! The keys of a sealed image, which the guards of a restore keep for the supervisor's successor.
//!
//! ```text
//!   0  8  magic: "FIRNKEYS"
//!   8 32  a key, for each file of the chain
//! ```
//!
//! They are in a file that exists in memory alone (`memfd_create(2)`), and that can't be changed any
//! more. It is sent like the open files of the image, after them. So a supervisor that dies in the
//! middle of a restore has a successor that can read the image, and no key is written to a disk.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;

use firn_image::{Image, ImageKey, KEY_BYTES, key_ring};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, memfd_create};

use crate::records::failure::{Failure, FailureContext, FailureKind, image_failure};
use crate::records::image_ids::ImageIds;
use crate::records::journal::{Journal, VmPhase};

const MAGIC: [u8; 8] = *b"FIRNKEYS";

/// The maximum number of keys: a chain has no more files.
const KEYS_MAX: usize = firn_image::CHAIN_MAX;

/// The seals of the file with the keys: nothing can change it.
const SEALS: SealFlags =
    SealFlags::WRITE.union(SealFlags::GROW).union(SealFlags::SHRINK).union(SealFlags::SEAL);

/// What the guards keep: the open files of an image, and its keys, if it is sealed.
pub(crate) fn files_to_keep(image: &Image) -> Result<Vec<File>, Failure> {
    let mut files = image.try_clone_files().map_err(|error| image_failure(&error))?;
    let keys = image.keys();
    if !keys.is_empty() {
        files.push(store_keys(&keys).while_doing("keeping the keys of the image")?);
    }
    Ok(files)
}

fn store_keys(keys: &[ImageKey]) -> io::Result<File> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let mut file = File::from(memfd_create("firn-keys", flags)?);
    file.write_all(&MAGIC)?;
    keys.iter().try_for_each(|key| file.write_all(key.expose_bytes()))?;
    fcntl_add_seals(&file, SEALS)?;
    Ok(file)
}

/// Adds keys that a user gives for the image that a VM is being restored from.
pub(crate) fn use_given_keys(journal: &Journal, keys: &[ImageKey]) -> Result<(), Failure> {
    if let VmPhase::Restoring { image, ids, .. } = &journal.phase {
        check_given_keys(image, ids, keys)?;
    }
    key_ring().add_keys(keys);
    Ok(())
}

/// Refuses keys of another image, which the user has unlocked in place of the right one.
fn check_given_keys(image: &Path, ids: &ImageIds, keys: &[ImageKey]) -> Result<(), Failure> {
    let path = image.display();
    let Some(id) = &ids.key_id else {
        let text = format!("the VM needs no key: its image {path} was not sealed");
        return Err(Failure::new(FailureKind::Refused, text));
    };
    if keys.iter().any(|key| key.id().to_string() == *id) {
        return Ok(());
    }
    let text = format!("{path} is not the image it was when the restore began");
    let failure = Failure::new(FailureKind::Refused, text);
    Err(failure.with_hint("put the sealed image back, which has another key"))
}

/// Adds the keys that are among these files to those of this process.
pub(crate) fn use_keys(files: &[File]) {
    files.iter().filter_map(read_keys).for_each(|keys| key_ring().add_keys(&keys));
}

/// The keys in a file; `None` if it is another file. Nothing is read of a file of an image: its
/// storage may not answer, and then the successor would wait here, before it serves the VM.
fn read_keys(file: &File) -> Option<Vec<ImageKey>> {
    if !is_sealed_memory(file) {
        return None;
    }
    let mut magic = [0; MAGIC.len()];
    file.read_exact_at(&mut magic, 0).ok().filter(|()| magic == MAGIC)?;
    let mut reader = KeyReader { file, offset: MAGIC.len() as u64 };
    let next = |reader: &mut KeyReader<'_>| {
        let mut key = [0; KEY_BYTES];
        reader.read_exact(&mut key).ok().map(|()| ImageKey::from_bytes(key))
    };
    Some(std::iter::from_fn(|| next(&mut reader)).take(KEYS_MAX).collect())
}

/// Whether a file is in memory, and can't be changed any more. A file in a file system has no such
/// seals; in a tmpfs it has `F_SEAL_SEAL` alone.
fn is_sealed_memory(file: &File) -> bool {
    fcntl_get_seals(file).is_ok_and(|seals| seals.contains(SEALS))
}

/// Reads a file by offsets: its position is shared by all processes that have it.
struct KeyReader<'a> {
    file: &'a File,
    offset: u64,
}

impl Read for KeyReader<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read_at(bytes, self.offset)?;
        self.offset += read as u64;
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::records::name::VmName;
    use firn_restore::{FillChoices, ReadFailurePolicy, RestoreMode};

    #[test]
    fn only_the_key_of_the_restored_image_is_accepted() {
        let (right, wrong) = (ImageKey::from_bytes([71; 32]), ImageKey::from_bytes([72; 32]));
        let restoring = |key_id| {
            let phase = VmPhase::Restoring {
                image: "/web.firn".into(),
                ids: ImageIds { identity: "1f".into(), key_id },
                mode: RestoreMode::Lazy,
                started: true,
                must_stay_paused: false,
                on_error: ReadFailurePolicy::Stop,
                fill: FillChoices::default(),
                paused_by_us: false,
            };
            Journal { phase, ..Journal::new(VmName::new("web").unwrap(), None) }
        };
        let sealed = restoring(Some(right.id().to_string()));
        for keys in [&[][..], std::slice::from_ref(&wrong)] {
            let failure = use_given_keys(&sealed, keys).unwrap_err();
            assert!(failure.to_string().contains("/web.firn"), "{failure}");
        }
        assert!(use_given_keys(&restoring(None), std::slice::from_ref(&right)).is_err());
        assert!(!key_ring().known_keys().contains(&right));
        // A chain has more keys.
        use_given_keys(&sealed, &[wrong, right.clone()]).unwrap();
        assert!(key_ring().known_keys().contains(&right));
    }

    #[test]
    fn keys_are_found_among_other_files_and_stay_as_they_are() {
        let keys = [ImageKey::from_bytes([1; 32]), ImageKey::from_bytes([2; 32])];
        let mut kept = store_keys(&keys).unwrap();
        assert_eq!(read_keys(&kept).as_deref(), Some(&keys[..]));
        assert_eq!(read_keys(&kept).as_deref(), Some(&keys[..]), "again");
        assert!(kept.write_all(b"x").is_err(), "it can't be changed");
        let mut other = tempfile::tempfile().unwrap();
        other.write_all(b"\x89FIRN and more").unwrap();
        assert_eq!(read_keys(&other), None);
        assert_eq!(read_keys(&tempfile::tempfile().unwrap()), None);
    }

    /// Files with the right bytes, on a disk, in a tmpfs and in memory that can be changed: a file
    /// that is not looked at is not read either.
    #[test]
    fn only_sealed_memory_is_read() {
        let mut bytes = MAGIC.to_vec();
        bytes.extend([7; KEY_BYTES]);
        let open = |it: std::io::Result<File>| {
            let mut file = it.unwrap();
            file.write_all(&bytes).unwrap();
            file
        };
        let unsealed = memfd_create("firn-keys", MemfdFlags::CLOEXEC).map(File::from);
        for file in [
            open(tempfile::tempfile()),
            open(tempfile::tempfile_in("/dev/shm")),
            open(unsealed.map_err(io::Error::from)),
        ] {
            assert!(!is_sealed_memory(&file));
            assert_eq!(read_keys(&file), None);
        }
        assert!(is_sealed_memory(&store_keys(&[]).unwrap()));
    }
}
