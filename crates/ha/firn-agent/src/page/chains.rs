//! The images that a checkpoint consists of: the image itself, the parent that it builds on, and so
//! on. Only the end of each file is read, and only once, as long as the file is the same.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use firn_image::ImageOutline;

/// The most images of one chain that are followed, and the most files that are read for one page.
const CHAIN_FILES_MAX: usize = 64;
const FILES_MAX: usize = 1024;

/// The largest read: an outline reads the end of a file, or a section.
const READ_BYTES_MAX: u64 = 16 << 20;

/// A file of a chain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChainFile {
    /// Its path.
    pub path: PathBuf,
    /// Its size in bytes, or why it is no image that can be read.
    pub size: Result<u64, String>,
    /// Whether it is sealed.
    pub is_sealed: bool,
}

/// What the end of an image shows of its place in a chain.
#[derive(Clone, Debug, PartialEq, Eq)]
struct ImageLink {
    identity: String,
    bytes: u64,
    is_sealed: bool,
    /// The identity of its parent, and its path relative to the image.
    parent: Option<(String, PathBuf)>,
}

/// The kind of a version of a file: its device, inode, size, and time of change.
type FileVersion = (u64, u64, u64, i64, i64);

/// The links of all files that were read for the last page.
#[derive(Debug, Default)]
pub(super) struct LinkCache {
    links: BTreeMap<PathBuf, (FileVersion, Result<ImageLink, String>)>,
}

impl LinkCache {
    /// The chains of these images, by image. Images in object storage have none here.
    pub(super) fn read_chains(&mut self, images: Vec<String>) -> BTreeMap<String, Vec<ChainFile>> {
        let mut read = Self::default();
        let local = images.into_iter().filter(|image| image.starts_with('/'));
        let chains = local.map(|image| {
            let chain = follow_chain(Path::new(&image), &mut |path| read.read_link(path, self));
            (image, chain)
        });
        let chains = chains.collect();
        *self = read;
        chains
    }

    /// Reads a file, unless it was read before and is the same.
    fn read_link(&mut self, path: &Path, before: &Self) -> Result<ImageLink, String> {
        let version = file_version(path).map_err(|error| error.to_string())?;
        let known = self.links.get(path).or_else(|| before.links.get(path));
        let link = match known.filter(|(of, _)| *of == version) {
            Some((_, link)) => link.clone(),
            None if self.links.len() >= FILES_MAX => Err("not read: there are too many".to_owned()),
            None => read_link(path).map_err(|error| error.to_string()),
        };
        self.links.insert(path.to_owned(), (version, link.clone()));
        link
    }
}

/// Follows a chain to its end, or to a file that can't be read.
fn follow_chain(
    image: &Path,
    read: &mut dyn FnMut(&Path) -> Result<ImageLink, String>,
) -> Vec<ChainFile> {
    let mut files: Vec<ChainFile> = Vec::new();
    let mut next = Some((None, image.to_owned()));
    while let Some((identity, path)) = next.take().filter(|_| files.len() < CHAIN_FILES_MAX) {
        let link = match read(&path) {
            Ok(link) if identity.as_ref().is_some_and(|needed| *needed != link.identity) => {
                Err("another image has this name now".to_owned())
            }
            link => link,
        };
        let directory = path.parent().unwrap_or(Path::new("/"));
        let parent = link.as_ref().ok().and_then(|link| link.parent.clone());
        next = parent.map(|(identity, named)| (Some(identity), directory.join(named)));
        let is_sealed = link.as_ref().is_ok_and(|link| link.is_sealed);
        files.push(ChainFile { path, size: link.map(|link| link.bytes), is_sealed });
    }
    files
}

fn file_version(path: &Path) -> io::Result<FileVersion> {
    let found = std::fs::metadata(path)?;
    Ok((found.dev(), found.ino(), found.len(), found.mtime(), found.mtime_nsec()))
}

fn read_link(path: &Path) -> io::Result<ImageLink> {
    let file = firn_files::open_input(path)?;
    let len = file.metadata()?.len();
    let outline = ImageOutline::read(len, &mut |range| read_range(&file, range));
    let ImageOutline { identity, file_bytes, parent, is_sealed, .. } =
        outline.map_err(io::Error::other)?;
    let parent = parent.map(|parent| (parent.identity, parent.path));
    Ok(ImageLink { identity, bytes: file_bytes, is_sealed, parent })
}

fn read_range(file: &File, range: Range<u64>) -> io::Result<Vec<u8>> {
    let len = range.end.saturating_sub(range.start);
    if len > READ_BYTES_MAX {
        return Err(io::Error::other(format!("a part of it has {len} bytes")));
    }
    let mut bytes = vec![0; len as usize];
    file.read_exact_at(&mut bytes, range.start).map(|()| bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn link(identity: &str, parent: Option<(&str, &str)>) -> ImageLink {
        let parent = parent.map(|(identity, path)| (identity.to_owned(), PathBuf::from(path)));
        ImageLink { identity: identity.to_owned(), bytes: 4096, is_sealed: false, parent }
    }

    fn paths(files: &[ChainFile]) -> Vec<&str> {
        files.iter().map(|file| file.path.to_str().unwrap()).collect()
    }

    #[test]
    fn a_chain_is_followed_by_relative_and_absolute_paths() {
        let mut read = |path: &Path| match path.to_str().unwrap() {
            "/i/3.firn" => Ok(link("c", Some(("b", "2.firn")))),
            "/i/2.firn" => Ok(link("b", Some(("a", "/base/1.firn")))),
            "/base/1.firn" => Ok(link("a", None)),
            other => Err(format!("no {other}")),
        };
        let chain = follow_chain(Path::new("/i/3.firn"), &mut read);
        assert_eq!(paths(&chain), ["/i/3.firn", "/i/2.firn", "/base/1.firn"]);
        assert!(chain.iter().all(|file| file.size == Ok(4096)));
    }

    #[test]
    fn a_chain_ends_where_it_is_broken() {
        let mut replaced = |path: &Path| match path.to_str().unwrap() {
            "/i/2.firn" => Ok(link("b", Some(("a", "1.firn")))),
            _ => Ok(link("other", Some(("x", "0.firn")))),
        };
        let chain = follow_chain(Path::new("/i/2.firn"), &mut replaced);
        assert_eq!(paths(&chain), ["/i/2.firn", "/i/1.firn"]);
        assert!(chain[1].size.clone().unwrap_err().contains("another image"));
        // An image that names itself as its parent.
        let mut circle = |_: &Path| Ok(link("a", Some(("a", "1.firn"))));
        let chain = follow_chain(Path::new("/i/1.firn"), &mut circle);
        assert_eq!(chain.len(), CHAIN_FILES_MAX);
    }

    #[test]
    fn files_that_are_no_images_are_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
        std::fs::write(path("short"), "x").unwrap();
        std::fs::write(path("zeros"), vec![0; 10_000]).unwrap();
        std::fs::create_dir(path("directory")).unwrap();
        let names = ["short", "zeros", "directory", "absent"].map(path);
        let mut images = names.to_vec();
        images.push("s3://bucket/web.firn".to_owned());
        let mut cache = LinkCache::default();
        let chains = cache.read_chains(images);
        assert_eq!(chains.len(), names.len(), "{chains:?}");
        for name in names {
            let [file] = &chains[&name][..] else { panic!("{chains:?}") };
            assert!(file.size.is_err(), "{file:?}");
        }
        assert_eq!(cache.links.len(), 3, "a file that is not there has no version");
    }
}
