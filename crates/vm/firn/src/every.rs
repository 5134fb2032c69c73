//! `firn checkpoint --every`: periodic checkpoints until the user ends the command.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use firn_image::{ChainPart, Image, list_chain};
use firn_supervisor::{
    Failure, FailureKind, RuntimeDir, SaveRequest, SupervisorRequest, VmName, image_failure,
    remove_images, send_request,
};

use crate::checkpoint::{describe_checkpoint, request_save};
use crate::keys::{SealArgs, keys_of};
use crate::output::FactPrinter;
use crate::series::ImageSeries;

/// The number of consecutive failures after which the series ends.
const FAILURES_MAX: u32 = 3;

/// Periodic checkpoints of a VM.
pub struct PeriodicCheckpoints {
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

impl PeriodicCheckpoints {
    /// Makes the checkpoints.
    pub fn run(&self, base: &RuntimeDir, seal: &SealArgs, out: FactPrinter) -> Result<(), Failure> {
        let series = ImageSeries::from_output(&self.request.image)?;
        let (mut next, mut failures) = (Instant::now(), 0);
        for made in 1.. {
            match self.make_checkpoint(base, &series, seal, out) {
                Ok(()) => failures = 0,
                Err(failure) if failures + 1 == FAILURES_MAX || is_final(&failure) => {
                    return Err(failure);
                }
                Err(failure) => {
                    failures += 1;
                    out.print_failure(&failure);
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

    fn make_checkpoint(
        &self,
        base: &RuntimeDir,
        series: &ImageSeries,
        seal: &SealArgs,
        out: FactPrinter,
    ) -> Result<(), Failure> {
        let mut members = series.list_members()?;
        let number = members.last().map_or(1, |last| last + 1);
        let mut request = self.request.clone();
        request.image = series.image_path(number);
        let is_sealed = request.choices.seal.is_some();
        request.choices.parent = members
            .last()
            .map(|&last| series.image_path(last))
            .filter(|it| Image::open(it).is_ok_and(|it| it.is_sealed() == is_sealed));
        if is_sealed {
            // A key of its own for each image.
            request.choices.seal = seal.make_seal()?;
        }
        request.keys = request.choices.parent.as_deref().map_or(Ok(Vec::new()), keys_of)?;
        let facts = request_save(base, &self.name, &SupervisorRequest::for_checkpoint(request))
            .map_err(|failure| failure.while_doing(format!("no checkpoint of {}", self.name)))?;
        out.print_line(&facts, || describe_checkpoint(&facts))?;
        members.push(number);
        // The checkpoint exists nevertheless; the next one tries this again.
        if let Err(failure) = self.rotate_images(base, series, &members) {
            out.print_failure(&failure);
        }
        self.merge_layers(base, out);
        Ok(())
    }

    /// Merges disk layers that were needed only by images that are removed. Layers that are not
    /// merged now are merged the next time.
    fn merge_layers(&self, base: &RuntimeDir, out: FactPrinter) {
        if let Err(failure) =
            send_request(base, &self.name, &SupervisorRequest::MergeDisks, &mut |_| ())
        {
            out.print_failure(&failure.while_doing("disk layers are not merged"));
        }
    }

    fn rotate_images(
        &self,
        base: &RuntimeDir,
        series: &ImageSeries,
        members: &[u32],
    ) -> Result<(), Failure> {
        let Some(surplus) = series.plan_surplus(members, self.keep) else { return Ok(()) };
        let whole = &surplus.whole;
        let merged = Image::open(whole).and_then(|image| match image.chain_paths().len() {
            1 => Ok(()),
            _ => firn_image::merge_chain(
                &image,
                whole,
                crate::image::open::worker_count(),
                &|_, _| (),
            )
            .map(drop),
        });
        merged.map_err(|error| {
            image_failure(&error)
                .while_doing(format!("merging {} with its parents", whole.display()))
        })?;
        let needed = needed_files(series, members, &surplus.remove);
        let free: Vec<&PathBuf> =
            surplus.remove.iter().filter(|it| !needed.contains(&canonical_path(it))).collect();
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
fn needed_files(series: &ImageSeries, members: &[u32], remove: &[PathBuf]) -> Vec<PathBuf> {
    let chain = |chain: Vec<ChainPart>| {
        chain.iter().skip(1).map(|it| canonical_path(&it.path)).collect::<Vec<_>>()
    };
    let paths = members.iter().map(|&number| series.image_path(number));
    let staying = paths.filter(|path| !remove.contains(path));
    staying.filter_map(|path| list_chain(&path).ok()).flat_map(chain).collect()
}

fn canonical_path(path: &Path) -> PathBuf {
    std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned())
}

/// Whether the VM does not exist any more, or the request can never succeed.
fn is_final(failure: &Failure) -> bool {
    use FailureKind::{Ended, NoSuchVm, Refused, Usage};
    matches!(failure.kind, Ended | NoSuchVm | Refused | Usage)
}
