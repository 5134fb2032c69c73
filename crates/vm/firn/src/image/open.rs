//! How the verbs of `firn image` open images and name their failures.

use std::path::Path;

use firn_image::{Image, ImageError};
use firn_supervisor::{Failure, FailureKind};

/// Opens an image.
pub fn open_image(path: &Path) -> Result<Image, Failure> {
    super::stored::refuse_location(path, "pull")?;
    Image::open(path).map_err(|error| open_failure(path, &error))
}

/// The failure for an image that cannot be opened.
pub fn open_failure(path: &Path, error: &ImageError) -> Failure {
    let failure = to_failure(error);
    match error {
        // Both name the file.
        ImageError::Io { .. } => failure.with_hint("check the path of the image"),
        ImageError::NotRegular { .. } => {
            failure.with_hint("give an image, a file that `firn checkpoint` wrote")
        }
        _ => failure.while_doing(format!("opening {}", path.display())),
    }
}

/// The failure for an error of an image, with its kind.
pub fn to_failure(error: &ImageError) -> Failure {
    firn_supervisor::image_failure(error)
}

/// The failure for a damaged image.
pub fn damage_failure(text: String) -> Failure {
    Failure::new(FailureKind::Damaged, text)
}

/// The number of threads with which `verify`, `reorder`, `merge`, `rebase` and series process an
/// image: one for each available processor.
pub fn worker_count() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}
