//! The commands of `firn-store`, and what they print.

use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use clap::Subcommand;
use firn_cache::CacheDir;
use firn_image::{ChainPart, Image, ImageError, ImageFlaw, list_chain};
use firn_objects::{
    CacheLimits, PulledFile, PushOptions, PushedFile, RemovedObject, StoreError, StoreLocation,
    StoredImage, check_new_image, find_image, forget_image, list_images, parse_location,
    pull_image, push_image, query_report, remove_image, start_server, store_failure,
};
use firn_supervisor::{
    Failure, FailureContext as _, FailureKind, OperationProgress, SupervisorReply, image_failure,
};
use serde_json::{Value, json};

/// What to do.
#[derive(Debug, Subcommand)]
pub enum StoreCommand {
    /// Copy an image to a store.
    Push {
        /// The image.
        image: PathBuf,
        /// Where to put it.
        location: String,
        /// Also push the images that it builds on.
        #[arg(long)]
        chain: bool,
        /// Replace another image of that name.
        #[arg(long)]
        force: bool,
    },
    /// Check that an image could be pushed to a new name.
    Check {
        /// Where it is to be.
        location: String,
    },
    /// Copy an image from a store.
    Pull {
        /// The image in the store.
        location: String,
        /// The file to write.
        path: PathBuf,
    },
    /// List the images below a prefix.
    Ls {
        /// The bucket, and the prefix.
        location: String,
    },
    /// Remove images from a store.
    Rm {
        /// The images.
        #[arg(required = true)]
        locations: Vec<String>,
        /// Remove an image although another one builds on it, or it is damaged.
        #[arg(long)]
        force: bool,
    },
    /// Make files of the cache for an image, from which it can be restored.
    Open {
        /// The image in the store.
        location: String,
        /// Begin to fetch its working set.
        #[arg(long)]
        prefetch: bool,
    },
    /// Show what the cache has, and what its server has fetched.
    Cache,
    /// Start the server of a cache.
    Serve {
        /// The directory of the cache.
        directory: PathBuf,
        /// Be the server.
        #[arg(long, hide = true)]
        foreground: bool,
    },
}

impl StoreCommand {
    /// Runs the command; returns the facts that it prints.
    pub fn run(&self) -> Result<Value, Failure> {
        match self {
            Self::Push { image, location, chain, force } => {
                let options = PushOptions { chain: *chain, force: *force, threads: worker_count() };
                push(image, &parse_location(location)?, options)
            }
            Self::Check { location } => check(&parse_location(location)?),
            Self::Pull { location, path } => pull(&parse_location(location)?, path),
            Self::Ls { location } => list(&parse_location(location)?),
            Self::Rm { locations, force } => remove(locations, *force),
            Self::Open { location, prefetch } => open(&parse_location(location)?, *prefetch),
            Self::Cache => report_cache(),
            Self::Serve { directory, .. } => {
                start_server(&CacheDir::at(directory)).map(|()| Value::Null)
            }
        }
    }

    /// Whether the command ends with the process that started it.
    pub fn ends_with_parent(&self) -> bool {
        !matches!(self, Self::Serve { .. })
    }
}

/// Prints a reply. It is no error if the reader is gone: then this process ends soon.
pub fn print_reply(reply: &SupervisorReply) {
    let mut out = io::stdout().lock();
    if let Ok(line) = serde_json::to_string(reply) {
        let _ = writeln!(out, "{line}").and_then(|()| out.flush());
    }
}

fn print_progress(stage: &'static str, done: u64, total: u64) {
    print_reply(&SupervisorReply::Progress(OperationProgress::new(stage, done, total)));
}

fn worker_count() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

fn push(image: &Path, at: &StoreLocation, options: PushOptions) -> Result<Value, Failure> {
    let pushed = push_image(image, at, options, &print_progress)
        .map_err(explain(format!("can't push {}", image.display())))?;
    let files: Vec<_> = pushed.iter().map(pushed_facts).collect();
    let image = image.to_string_lossy();
    Ok(json!({ "image": image, "location": at.to_string(), "files": files }))
}

fn check(at: &StoreLocation) -> Result<Value, Failure> {
    check_new_image(at).map_err(explain(format!("can't make {at}")))?;
    Ok(json!({ "location": at.to_string() }))
}

fn pushed_facts(file: &PushedFile) -> Value {
    json!({
        "image": file.path.to_string_lossy(),
        "location": file.location.to_string(),
        "identity": file.identity,
        "file_bytes": file.bytes,
        "was_there": file.was_there,
        "signed": file.is_signed,
    })
}

fn pull(at: &StoreLocation, path: &Path) -> Result<Value, Failure> {
    let pulled = pull_image(at, path, worker_count(), &print_progress)
        .map_err(explain(format!("can't pull {at}")))?;
    let files: Vec<_> = pulled.iter().map(pulled_facts).collect();
    let image = path.to_string_lossy();
    Ok(json!({ "image": image, "location": at.to_string(), "files": files }))
}

fn pulled_facts(file: &PulledFile) -> Value {
    json!({
        "image": file.path.to_string_lossy(),
        "location": file.location.to_string(),
        "identity": file.identity,
        "file_bytes": file.bytes,
        "was_there": file.was_there,
        "signed": file.is_signed,
    })
}

fn list(prefix: &StoreLocation) -> Result<Value, Failure> {
    let images = list_images(prefix).map_err(explain(format!("can't list {prefix}")))?;
    Ok(images.iter().map(listed_facts).collect())
}

fn listed_facts(image: &StoredImage) -> Value {
    let outline = image.outline.as_ref().ok();
    let meta = outline.map_or(&Value::Null, |outline| &outline.meta);
    let parent = outline.and_then(|outline| outline.parent.as_ref());
    json!({
        "location": image.location.to_string(),
        "identity": outline.map(|outline| &outline.identity),
        "file_bytes": image.bytes,
        "vm": meta["name"].as_str(),
        "created": meta["created"].as_u64(),
        "pushed": image.modified,
        "parent": parent.map(|parent| parent.path.to_string_lossy()),
        "sealed": outline.is_some_and(|outline| outline.is_sealed),
        "parent_identity": parent.map(|parent| &parent.identity),
        "problem": image.outline.as_ref().err().map(ImageFlaw::to_string),
    })
}

fn remove(locations: &[String], force: bool) -> Result<Value, Failure> {
    let locations = locations.iter().map(|it| parse_location(it)).collect::<Result<Vec<_>, _>>()?;
    let remove = |at: &StoreLocation| {
        let removed = remove_image(at, force).map_err(explain(format!("can't remove {at}")))?;
        Ok(removed_facts(&removed))
    };
    locations.iter().map(remove).collect()
}

fn removed_facts(removed: &RemovedObject) -> Value {
    json!({
        "location": removed.location.to_string(),
        "was_there": removed.was_there,
        "aborted_uploads": removed.aborted_uploads,
    })
}

/// Opens an image in the cache, so that all but its memory is there and was checked.
fn open(at: &StoreLocation, prefetch: bool) -> Result<Value, Failure> {
    CacheLimits::from_env()?;
    let opening = || format!("opening {at}");
    let cache = CacheDir::from_env().while_doing_as(FailureKind::Host, opening())?;
    let found = find_image(&cache, at)?;
    let sealed =
        find_sealed(&found.path).map_err(|error| image_failure(&error).while_doing(opening()));
    if let Some(files) = sealed? {
        // The process that restores it has the key, and reads what it needs.
        return Ok(json!({ "image": found.path, "location": at.to_string(), "file_bytes": files }));
    }
    let opened = Image::open(&found.path).or_else(|error| match image_failure(&error).kind {
        // Perhaps the copy is damaged, and not the object.
        FailureKind::Damaged => {
            forget_image(&cache, &found)?;
            Image::open(&found.path).map_err(|error| image_failure(&error).while_doing(opening()))
        }
        _ => Err(image_failure(&error).while_doing(opening())),
    });
    let image = opened?;
    if prefetch {
        image.prefetch_working_set().map_err(|error| image_failure(&error))?;
    }
    let files: Vec<_> = image.chain_files().map(|file| file.file_bytes).collect();
    Ok(json!({ "image": found.path, "location": at.to_string(), "file_bytes": files }))
}

/// The lengths of the files of a sealed image; `None` if it is not sealed, or is damaged: opening it
/// finds that.
fn find_sealed(path: &Path) -> Result<Option<Vec<u64>>, ImageError> {
    match list_chain(path) {
        Ok(chain) if chain.iter().any(|part| part.is_sealed) => {
            let len = |part: &ChainPart| part.file.metadata().map_or(0, |it| it.len());
            Ok(Some(chain.iter().map(len).collect()))
        }
        Ok(_) | Err(ImageError::Damaged { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

fn report_cache() -> Result<Value, Failure> {
    let cache = CacheDir::from_env().while_doing_as(FailureKind::Host, "finding the cache")?;
    let report = query_report(&cache)?;
    Ok(json!({ "directory": cache.path(), "server": report }))
}

fn explain(what: String) -> impl FnOnce(StoreError) -> Failure {
    move |error| store_failure(&error).while_doing(what)
}
