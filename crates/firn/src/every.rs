//! `firn checkpoint --every`: periodic checkpoints until the user ends the command.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use firn_image::Image;
use firn_supervisor::{
    Failure, FailureKind, Request, RuntimeDir, SaveRequest, VmName, ask, image_failure,
    remove_images,
};

use crate::checkpoint::{describe, save};
use crate::output::{Output, print_failure};
use crate::series::Series;

/// The number of consecutive failures after which the series ends.
const FAILURES_MAX: u32 = 3;

/// Periodic checkpoints of a VM.
pub struct Every {
    /// The VM.
    pub name: VmName,
    /// The request for each checkpoint; its image names the series.
    pub request: SaveRequest,
    /// The time from the beginning of one checkpoint to the beginning of the next.
    pub interval: Duration,
    /// The number of images to keep.
    pub keep: usize,
    /// The number of checkpoints to make; `None` for no end.
    pub times: Option<u32>,
}

impl Every {
    /// Makes the checkpoints.
    pub fn run(&self, base: &RuntimeDir, out: Output) -> Result<(), Failure> {
        let series = Series::of(&self.request.image)?;
        let (mut next, mut failures) = (Instant::now(), 0);
        for made in 1.. {
            match self.one(base, &series, out) {
                Ok(()) => failures = 0,
                Err(failure) if failures + 1 == FAILURES_MAX || is_final(&failure) => {
                    return Err(failure);
                }
                Err(failure) => {
                    failures += 1;
                    print_failure(&failure);
                }
            }
            if self.times == Some(made) {
                break;
            }
            next = (next + self.interval).max(Instant::now());
            std::thread::sleep(next.saturating_duration_since(Instant::now()));
        }
        Ok(())
    }

    fn one(&self, base: &RuntimeDir, series: &Series, out: Output) -> Result<(), Failure> {
        let mut members = series.members()?;
        let number = members.last().map_or(1, |last| last + 1);
        let mut request = self.request.clone();
        request.image = series.path(number);
        request.choices.parent =
            members.last().map(|&last| series.path(last)).filter(|it| Image::open(it).is_ok());
        let facts = save(base, &self.name, &Request::Checkpoint(request))
            .map_err(|failure| failure.while_doing(format!("no checkpoint of {}", self.name)))?;
        out.line(&facts, || describe(&facts))?;
        members.push(number);
        // The checkpoint exists nevertheless; the next one tries this again.
        if let Err(failure) = self.rotate(base, series, &members) {
            print_failure(&failure);
        }
        self.merge(base);
        Ok(())
    }

    /// Merges disk layers that were needed only by images that are removed. Layers that are not
    /// merged now are merged the next time.
    fn merge(&self, base: &RuntimeDir) {
        if let Err(failure) = ask(base, &self.name, &Request::MergeDisks, &mut |_| ()) {
            print_failure(&failure.while_doing("disk layers are not merged"));
        }
    }

    fn rotate(&self, base: &RuntimeDir, series: &Series, members: &[u32]) -> Result<(), Failure> {
        let Some(surplus) = series.surplus(members, self.keep) else { return Ok(()) };
        let whole = &surplus.whole;
        let merged = Image::open(whole).and_then(|image| match image.chain().len() {
            1 => Ok(()),
            _ => firn_image::merge(&image, whole, crate::image::threads(), &|_, _| ()).map(drop),
        });
        merged.map_err(|error| {
            image_failure(&error).while_doing(format!("merging {} with its parents", whole.display()))
        })?;
        let needed = needed(series, members, &surplus.remove);
        let free: Vec<&PathBuf> =
            surplus.remove.iter().filter(|it| !needed.contains(&canonical(it))).collect();
        for image in free {
            match remove_images(base, std::slice::from_ref(image), false) {
                // A VM that was restored from the image uses its disks: the image stays until the
                // VM has ended.
                Err(failure) if failure.kind == FailureKind::Refused => {}
                removed => drop(removed?),
            }
        }
        Ok(())
    }
}

/// The files on which the staying images build: the user may have rebased one.
fn needed(series: &Series, members: &[u32], remove: &[PathBuf]) -> Vec<PathBuf> {
    let chain = |image: Image| image.chain().skip(1).map(canonical).collect::<Vec<_>>();
    let paths = members.iter().map(|&number| series.path(number));
    let staying = paths.filter(|path| !remove.contains(path));
    staying.filter_map(|path| Image::open(&path).ok()).flat_map(chain).collect()
}

fn canonical(path: &Path) -> PathBuf {
    std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned())
}

/// Whether the VM does not exist any more, or the request can never succeed.
fn is_final(failure: &Failure) -> bool {
    use FailureKind::{Ended, NoSuchVm, Refused, Usage};
    matches!(failure.kind, Ended | NoSuchVm | Refused | Usage)
}
