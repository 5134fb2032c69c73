//! A series of checkpoints of one VM, made at intervals, each an incremental image on the one
//! before.
//!
//! ```text
//!   --output web.firn --keep 4        web-000001.firn <- web-000002.firn <- ... <- web-000005.firn
//!   the next checkpoint makes six. The newest four stay, and the oldest of them is merged with its parents:
//!                                     web-000003.firn <- web-000004.firn <- ... <- web-000006.firn
//! ```
//!
//! Merging an image with its parents costs as much as writing a full checkpoint, so it is not done
//! each time: there may be a quarter more images than requested. The merged image replaces the old
//! one at its path, and only then its ancestors are removed. So all images that exist can be
//! restored at any time, whenever this is interrupted. Images that were not removed then are
//! removed the next time.

use std::path::{Path, PathBuf};

use firn_supervisor::{Failure, FailureContext, FailureKind};

/// The minimum number of digits, so that names sort like numbers.
const DIGITS: usize = 6;

/// The images that an output path stands for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageSeries {
    dir: PathBuf,
    stem: String,
    extension: String,
}

/// The plan for surplus images.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SurplusPlan {
    /// The image to merge with its parents first.
    pub whole: PathBuf,
    /// The images to remove afterwards.
    pub remove: Vec<PathBuf>,
}

impl ImageSeries {
    /// The series of `web.firn`: `web-000001.firn` and so on, in its directory.
    pub fn from_output(output: &Path) -> Result<Self, Failure> {
        let text =
            |part: Option<&std::ffi::OsStr>| part.and_then(|it| it.to_str()).map(str::to_owned);
        let Some(stem) = text(output.file_stem()) else {
            let problem = format!("{} is no name for a series of images", output.display());
            return Err(Failure::new(FailureKind::Usage, problem));
        };
        let extension = text(output.extension()).map_or(String::new(), |it| format!(".{it}"));
        let dir = output.parent().unwrap_or(Path::new("")).to_owned();
        Ok(Self { dir, stem, extension })
    }

    /// The numbers of the images that exist, in order.
    pub fn list_members(&self) -> Result<Vec<u32>, Failure> {
        let looking = || format!("searching for images in {}", self.dir.display());
        let mut members = Vec::new();
        for entry in std::fs::read_dir(&self.dir).while_doing(looking())? {
            let name = entry.while_doing(looking())?.file_name();
            members.extend(name.to_str().and_then(|name| self.number_in(name)));
        }
        members.sort_unstable();
        Ok(members)
    }

    /// The path of the image with this number.
    pub fn image_path(&self, number: u32) -> PathBuf {
        let Self { dir, stem, extension } = self;
        dir.join(format!("{stem}-{number:0DIGITS$}{extension}"))
    }

    fn number_in(&self, name: &str) -> Option<u32> {
        let rest = name.strip_prefix(&self.stem)?.strip_prefix('-')?;
        let number = rest.strip_suffix(&self.extension)?.parse().ok()?;
        // Excludes `+7` and `0000007`.
        (self.image_path(number).file_name()?.to_str()? == name).then_some(number)
    }

    /// The plan that leaves the newest `keep` images, if there are too many.
    pub fn plan_surplus(&self, members: &[u32], keep: usize) -> Option<SurplusPlan> {
        let keep = keep.max(1);
        if members.len() <= keep + keep / 4 {
            return None;
        }
        let (old, kept) = members.split_at(members.len() - keep);
        let whole = self.image_path(*kept.first()?);
        // The newest first: each image that is left at any time has all that it builds on.
        Some(SurplusPlan {
            whole,
            remove: old.iter().rev().map(|&number| self.image_path(number)).collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn series() -> ImageSeries {
        ImageSeries::from_output(Path::new("/a/web.firn")).unwrap()
    }

    #[test]
    fn names_and_numbers_belong_together() {
        assert_eq!(series().image_path(7), Path::new("/a/web-000007.firn"));
        assert_eq!(series().image_path(1_234_567), Path::new("/a/web-1234567.firn"));
        assert_eq!(series().number_in("web-000007.firn"), Some(7));
        for other in [
            "web.firn",
            "web-7.firn",
            "web-00000x.firn",
            "web-0000007.firn",
            "web-+00007.firn",
            "db-000007.firn",
            "web-000007.firn.learned",
        ] {
            assert_eq!(series().number_in(other), None, "{other}");
        }
        let plain = ImageSeries::from_output(Path::new("/a/web")).unwrap();
        assert_eq!(plain.image_path(1), Path::new("/a/web-000001"));
        assert!(ImageSeries::from_output(Path::new("/")).is_err());
    }

    #[test]
    fn a_quarter_more_than_asked_for_may_lie_there() {
        let surplus =
            |count: u32, keep| series().plan_surplus(&(1..=count).collect::<Vec<_>>(), keep);
        assert_eq!(surplus(5, 4), None);
        let path = |number| series().image_path(number);
        let expected = SurplusPlan { whole: path(3), remove: vec![path(2), path(1)] };
        assert_eq!(surplus(6, 4), Some(expected));
        assert_eq!(surplus(1, 1), None);
        assert_eq!(surplus(2, 1), Some(SurplusPlan { whole: path(2), remove: vec![path(1)] }));
        assert_eq!(surplus(2, 0), surplus(2, 1));
        assert_eq!(surplus(25, 20), None);
        assert_eq!(surplus(26, 20).map(|it| it.remove.len()), Some(6));
    }
}
