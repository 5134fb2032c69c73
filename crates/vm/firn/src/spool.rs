//! Images that are saved to object storage: which file is written first.
//!
//! ```text
//!   -o s3://vms/prod/web.firn   STATE/spool/1a2b3c-4711/web.firn      or below --spool DIR
//! ```
//!
//! The supervisor writes the file, pushes it and removes it, with its directory. What can be checked
//! before the VM is saved is checked here: credentials, the bucket, the name.

use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use firn_cache::{StoreLocation, is_location};
use firn_supervisor::{
    Failure, FailureContext as _, FailureKind, SaveRequest, StoreCredentials, StoreTarget,
    absolute_path, make_private, spool_dir,
};

use crate::image::stored::run_store;
use crate::output::check_directory;

/// The location that an output names, if it is not a file.
pub fn find_location(output: &Path) -> Option<&str> {
    output.to_str().filter(|text| is_location(text))
}

/// Plans a save to object storage: the file, in a new directory, and the object.
///
/// # Errors
/// If there could be no such object, or no such file. Then nothing was made.
pub fn plan_upload(
    location: &str,
    spool: Option<&Path>,
) -> Result<(PathBuf, StoreTarget), Failure> {
    const USING: &str = "the location can't be used";
    let at: StoreLocation = location.parse().while_doing_as(FailureKind::Usage, USING)?;
    spool.map_or(Ok(()), check_directory)?;
    run_store(["check", "--", location]).map_err(|failure| match failure.kind {
        FailureKind::Busy => {
            let hint = format!("choose another name, or remove that image: firn image rm {at}");
            Failure { hint: Some(hint), ..failure }
        }
        _ => failure,
    })?;
    let image = make_directory(spool)?.join(at.name());
    let credentials = StoreCredentials::from_env();
    Ok((image, StoreTarget { location: at.to_string(), credentials }))
}

/// Makes a directory for one image, which only this user can read.
fn make_directory(spool: Option<&Path>) -> Result<PathBuf, Failure> {
    let parent = match spool {
        Some(spool) => absolute_path(spool)?,
        None => make_spool()?,
    };
    let since = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_millis());
    let directory = parent.join(format!("{since:x}-{}", std::process::id()));
    let made = DirBuilder::new().mode(0o700).create(&directory);
    let making = || format!("making the directory {} for the image", directory.display());
    made.while_doing_as(FailureKind::Host, making())?;
    Ok(directory)
}

fn make_spool() -> Result<PathBuf, Failure> {
    let spool = spool_dir()?;
    let making = || format!("making the directory {}", spool.display());
    let parent = spool.parent().unwrap_or(Path::new("/"));
    let made = DirBuilder::new().mode(0o700).recursive(true).create(parent);
    made.while_doing_as(FailureKind::Host, making())?;
    make_private(&spool).while_doing_as(FailureKind::Host, making())?;
    Ok(spool)
}

/// Removes the directory of an image that was not saved, if it is empty.
pub fn remove_unused(request: &SaveRequest) {
    let directory = request.store.as_ref().and_then(|_| request.image.parent());
    directory.into_iter().for_each(|directory| _ = std::fs::remove_dir(directory));
}
