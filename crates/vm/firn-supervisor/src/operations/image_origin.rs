//! The origin of an image, and what a restore of an image of unknown origin may do.
//!
//! ```text
//!   mark of this user's key ---------> this user's     restored
//!   restored with --trust before ----> trusted         restored
//!   else ----------------------------> unknown         opens nothing of the host, or what the user
//!                                                      names anew --> restored
//!                                                      --trust -----> recorded as trusted, restored
//!                                                      opens more: signed by a listed key --> restored
//!                                                                  else -> refused, with a list of it
//! ```
//!
//! The check is made on the image that is open already, so the file can't be another one when the
//! restore uses it.

use std::path::{Path, PathBuf};

use firn_image::Image;
use firn_vmm::command_line::{self, CommandOverrides, HostAccess};
use serde::Serialize;

use crate::operations::image_signature;
use crate::processes::state_dir::StateDir;
use crate::records::failure::{self, Failure, FailureKind};
use crate::records::meta::{FrozenDrive, ImageMeta};
use crate::records::origin::{OriginDigest, OriginKey, OriginMark};

/// The maximum number of accesses that a failure lists.
const LISTED_MAX: usize = 20;

/// The maximum number of files of disks that are listed, and of characters of a name.
const DISKS_MAX: usize = 200;
const NAME_CHARS_MAX: usize = 200;

/// The formats of disks that a restore can use.
const FORMATS: [&str; 2] = ["qcow2", "raw"];

/// Who made an image, as far as Firn knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum ImageOrigin {
    /// This user saved it, and what a restore runs has not changed since.
    ThisUser,
    /// This user trusts it.
    Trusted,
    /// It is signed by a key that this host lists.
    Signed,
    /// It has no mark: an older Firn saved it.
    Unmarked,
    /// Another user, or this user on another host, saved it.
    OtherUser,
    /// What a restore runs has changed since this user saved it.
    Changed,
}

impl ImageOrigin {
    /// Whether a restore may run everything that the image names.
    pub fn is_known(self) -> bool {
        matches!(self, Self::ThisUser | Self::Trusted | Self::Signed)
    }

    /// The origin in a few words.
    pub fn describe(self) -> &'static str {
        match self {
            Self::ThisUser => "saved by this user",
            Self::Trusted => "trusted by this user",
            Self::Signed => "signed by a key that this host lists",
            Self::Unmarked => "unknown: the image has no mark of a user",
            Self::OtherUser => "unknown: another user, or another host, saved the image",
            Self::Changed => "unknown: the image was changed after this user had saved it",
        }
    }
}

/// The origin of an image, and what a restore of it opens on the host.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct OriginReport {
    /// Its origin.
    pub origin: ImageOrigin,
    /// The listed signer, if the origin is a signature.
    pub signed_by: Option<String>,
    /// What a restore opens, unless the user names something else.
    pub opens: Vec<HostAccess>,
}

/// Finds the origin of an image, and what a restore without further arguments opens.
pub fn report_origin(image: &Image) -> Result<OriginReport, Failure> {
    let origin = find_origin(&StateDir::from_env()?, image, &digest_of(image))?;
    // What is wrong with a signature is a failure of a restore only.
    let signed_by = match origin.is_known() {
        true => None,
        false => image_signature::find_signer(image).ok().flatten(),
    };
    let origin = if signed_by.is_some() { ImageOrigin::Signed } else { origin };
    let (none, libvirt) = (CommandOverrides::default(), false);
    let meta = serde_json::from_value::<ImageMeta>(image.meta().clone()).ok();
    let opens = meta.map(|meta| find_accesses(image, &meta, &none, libvirt)).transpose()?;
    Ok(OriginReport { origin, signed_by, opens: opens.unwrap_or_default() })
}

/// What a restore changes on request, and whether the user trusts the image.
pub(crate) struct TrustChoices<'a> {
    pub(crate) trust: bool,
    pub(crate) overrides: &'a CommandOverrides,
    pub(crate) libvirt: bool,
}

/// Refuses an image of unknown origin that opens more than the user has named. Records that the user
/// trusts the image, if that is so. `meta` is the description in the image, without changes.
pub(crate) fn check_origin(
    image: &Image,
    meta: &ImageMeta,
    choices: &TrustChoices<'_>,
) -> Result<ImageOrigin, Failure> {
    let state = StateDir::from_env()?;
    let digest = digest_of(image);
    let origin = find_origin(&state, image, &digest)?;
    if origin.is_known() {
        return Ok(origin);
    }
    if choices.trust {
        let path = std::path::absolute(image.path()).unwrap_or_else(|_| image.path().to_owned());
        state.record_trust(&digest, &path)?;
        return Ok(ImageOrigin::Trusted);
    }
    let accesses = find_accesses(image, meta, choices.overrides, choices.libvirt)?;
    if accesses.is_empty() {
        return Ok(origin);
    }
    let mut refusal = refuse_accesses(origin, &accesses);
    match image_signature::find_signer(image) {
        Ok(Some(_)) => return Ok(ImageOrigin::Signed),
        Ok(None) => {}
        Err(failure) => refusal.chain.push(failure.to_string()),
    }
    Err(refusal)
}

fn refuse_accesses(origin: ImageOrigin, accesses: &[HostAccess]) -> Failure {
    let mut chain = vec![format!(
        "its origin is {}, and a restore would use what is listed here of this host",
        origin.describe()
    )];
    chain.extend(accesses.iter().take(LISTED_MAX).map(HostAccess::to_string));
    if let Some(more) = accesses.len().checked_sub(LISTED_MAX).filter(|more| *more > 0) {
        chain.push(format!("{more} more, which `firn image inspect` lists"));
    }
    let remedies: Vec<&str> = accesses.iter().map(|it| &*it.remedy).collect();
    let named = remedies.iter().filter(|it| !it.is_empty()).take(3).copied().collect::<Vec<_>>();
    let instead = match named.is_empty() {
        true => String::new(),
        false => format!("; or name something else for each: {}", named.join(" ")),
    };
    let hint = format!("--trust, if you trust the one who gave you the image{instead}");
    Failure { kind: FailureKind::Refused, chain, hint: None }.with_hint(hint)
}

fn digest_of(image: &Image) -> OriginDigest {
    OriginDigest::of_parts(image.meta(), image.regions(), image.device_state())
        .with_key(image.seal().map(|seal| seal.key.id()))
}

fn find_origin(
    state: &StateDir,
    image: &Image,
    digest: &OriginDigest,
) -> Result<ImageOrigin, Failure> {
    if state.is_trusted(digest)? {
        return Ok(ImageOrigin::Trusted);
    }
    let Some(mark) = OriginMark::find_in(image.meta()) else { return Ok(ImageOrigin::Unmarked) };
    Ok(compare_mark(state.read_key()?.as_ref(), &mark, digest))
}

fn compare_mark(key: Option<&OriginKey>, mark: &OriginMark, digest: &OriginDigest) -> ImageOrigin {
    match key.filter(|key| key.has_number(mark)) {
        None => ImageOrigin::OtherUser,
        Some(key) if key.has_made(mark, digest) => ImageOrigin::ThisUser,
        Some(_) => ImageOrigin::Changed,
    }
}

/// What a restore opens on the host, without what the user names.
fn find_accesses(
    image: &Image,
    meta: &ImageMeta,
    overrides: &CommandOverrides,
    libvirt: bool,
) -> Result<Vec<HostAccess>, Failure> {
    let mut found = find_parents(image);
    if libvirt {
        found.push(HostAccess {
            option: "--libvirt".to_owned(),
            effect: "has libvirt start a domain from the XML in the image".to_owned(),
            disk: None,
            remedy: String::new(),
        });
    }
    let directory = &meta.qemu.directory;
    let words = &meta.qemu.user_args;
    let of_command = match words.is_empty() {
        true => Vec::new(),
        false => command_line::find_host_accesses(words, overrides, directory)
            .map_err(failure::command_line_failure)?,
    };
    let moved = meta.clone().with_disks_moved(overrides)?;
    // Firn replaces these files by the ones that the image names for them.
    let is_replaced = |it: &HostAccess| {
        it.disk.as_ref().is_some_and(|file| moved.drives.iter().any(|drive| drive.named == *file))
    };
    found.extend(of_command.into_iter().filter(|it| !is_replaced(it)));
    found.extend(find_disks(&moved, overrides, &found));
    Ok(found)
}

/// The disks that the description names, beside those that are found already.
fn find_disks(
    moved: &ImageMeta,
    overrides: &CommandOverrides,
    found: &[HostAccess],
) -> Vec<HostAccess> {
    let whole = |file: &Path| moved.qemu.directory.join(file);
    let is_users = |file: &Path| overrides.disks.iter().any(|(_, new)| whole(new.as_ref()) == file);
    let is_found = |file: &Path| {
        found.iter().filter_map(|it| it.disk.as_ref()).any(|it| whole(it.as_ref()) == file)
    };
    let drives = moved.drives.iter().map(|drive| drive.file.clone());
    let files = drives.chain(moved.disks.iter().map(|disk| PathBuf::from(&disk.file)));
    let mut files: Vec<PathBuf> = files.map(|file| whole(&file)).collect();
    files.sort_unstable();
    files.dedup();
    files.retain(|file| !is_users(file) && !is_found(file));
    files.truncate(DISKS_MAX);
    let formats = moved.drives.iter().filter(|drive| !FORMATS.contains(&&*drive.format)).take(1);
    files.iter().map(|file| describe_disk(file)).chain(formats.map(describe_format)).collect()
}

fn describe_disk(file: &Path) -> HostAccess {
    let name = shorten(&file.to_string_lossy());
    let target = file.canonicalize().ok().filter(|target| target != file);
    let link = target.map(|target| format!(", which is {}", target.display())).unwrap_or_default();
    HostAccess {
        option: format!("the disk {name}{link}:"),
        effect: "the guest reads it".to_owned(),
        remedy: format!("--disk {name}=NEW"),
        disk: Some(name),
    }
}

fn shorten(name: &str) -> String {
    name.chars().take(NAME_CHARS_MAX).collect()
}

fn describe_format(drive: &FrozenDrive) -> HostAccess {
    HostAccess {
        option: format!("the disk {}", shorten(&drive.named)),
        effect: format!("has the format {:?}, which is none of a disk's", shorten(&drive.format)),
        disk: None,
        remedy: String::new(),
    }
}

/// The images that this one builds on, if they are not beside it. Their memory becomes the guest's.
fn find_parents(image: &Image) -> Vec<HostAccess> {
    let real = |path: &Path| path.canonicalize().ok();
    let beside = real(image.path()).and_then(|path| path.parent().map(Path::to_owned));
    let is_beside = |path: &Path| match (real(path), &beside) {
        (Some(path), Some(beside)) => path.starts_with(beside),
        _ => false,
    };
    let outside = image.chain_paths().skip(1).filter(|path| !is_beside(path));
    let access = |path: &Path| HostAccess {
        option: format!("the image {}, on which it builds:", path.display()),
        effect: "the guest gets its memory".to_owned(),
        disk: None,
        remedy: String::new(),
    };
    outside.map(access).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::records::origin::KEY_BYTES;
    use firn_types::RegionMap;
    use firn_vmm::{DiskImage, FileIdentity};
    use serde_json::json;

    const IDENTITY: FileIdentity = FileIdentity { dev: 1, inode: 2, size: 3, mtime_ns: 4 };

    fn meta(drive: &str, format: &str) -> ImageMeta {
        let drive = FrozenDrive {
            named: "a.qcow2".into(),
            file: drive.into(),
            format: format.into(),
            bytes: 1,
            identity: IDENTITY,
            is_clone: false,
            is_storage_snapshot: false,
        };
        let disk = DiskImage {
            node: "n".into(),
            file: "/base".into(),
            format: "raw".into(),
            read_only: true,
            size: 1,
            identity: Some(IDENTITY),
        };
        let mut meta = ImageMeta { drives: vec![drive], disks: vec![disk], ..ImageMeta::default() };
        meta.qemu.directory = "/vms".into();
        meta
    }

    fn disks(meta: &ImageMeta, moved: &[(&str, &str)]) -> Vec<String> {
        let disks = moved.iter().map(|(old, new)| ((*old).to_owned(), (*new).to_owned())).collect();
        let overrides = CommandOverrides { disks, ..CommandOverrides::default() };
        let moved = meta.clone().with_disks_moved(&overrides).unwrap();
        find_disks(&moved, &overrides, &[]).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn the_files_that_the_description_names_are_accesses() {
        let named = disks(&meta("/etc/shadow", "raw"), &[]);
        assert!(named[0].contains("/base") && named[1].contains("/etc/shadow"), "{named:?}");
        let moved = [("/etc/shadow", "/mnt/a"), ("/base", "/mnt/b")];
        assert_eq!(disks(&meta("/etc/shadow", "raw"), &moved), [""; 0]);
        assert_eq!(disks(&meta("/etc/shadow", "raw"), &moved[..1]).len(), 1);
        assert!(disks(&meta("/etc/shadow", "nbd"), &moved)[0].contains("\"nbd\""));
    }

    #[test]
    fn a_mark_has_to_be_right() {
        let digest = |name: &str| {
            let regions = RegionMap::lay_out([("ram", 1 << 20)]).unwrap();
            OriginDigest::of_parts(&json!({ "name": name }), &regions, b"")
        };
        let key = |byte| OriginKey::from_bytes([byte; KEY_BYTES]);
        let mark = key(1).mark(&digest("a"));
        let compare =
            |key: Option<OriginKey>, name| compare_mark(key.as_ref(), &mark, &digest(name));
        assert_eq!(compare(Some(key(1)), "a"), ImageOrigin::ThisUser);
        assert_eq!(compare(Some(key(1)), "b"), ImageOrigin::Changed);
        assert_eq!(compare(Some(key(2)), "a"), ImageOrigin::OtherUser);
        assert_eq!(compare(None, "a"), ImageOrigin::OtherUser);
    }

    #[test]
    fn a_failure_lists_what_would_be_opened() {
        let access = |number: usize| HostAccess {
            option: format!("-option-{number}"),
            effect: "opens a file".into(),
            disk: None,
            remedy: format!("--set option-{number}=VALUE"),
        };
        let failure =
            refuse_accesses(ImageOrigin::Unmarked, &(0..25).map(access).collect::<Vec<_>>());
        assert_eq!(failure.kind, FailureKind::Refused);
        let text = failure.describe("firn");
        for part in ["-option-19 opens", "5 more", "--trust", "--set option-2=VALUE"] {
            assert!(text.contains(part), "{text}");
        }
    }
}
