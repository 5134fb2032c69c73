//! What the verbs for images in object storage have in common: they run `firn-store`.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use firn_cache::is_location;
use firn_supervisor::{Failure, FailureKind, StoreProgram};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::bar::TerminalBar;

/// Refuses a location where a path is needed: images in object storage are pushed and pulled as a
/// whole.
pub fn refuse_location(path: &Path, verb: &str) -> Result<(), Failure> {
    if !path.to_str().is_some_and(is_location) {
        return Ok(());
    }
    let text = "this is an image in object storage, and Firn only uses images on this host";
    let hint = match verb {
        "push" => "write the image to a file, then: firn image push FILE LOCATION",
        _ => "fetch it first: firn image pull LOCATION FILE",
    };
    Err(Failure::new(FailureKind::Usage, text).with_hint(hint))
}

/// The file of an image: that of the cache, if the image is in object storage. With `has_prefetch` the
/// cache begins to fetch its working set.
pub fn find_stored(image: &Path, has_prefetch: bool) -> Result<PathBuf, Failure> {
    let Some(location) = image.to_str().filter(|text| is_location(text)) else {
        return Ok(image.to_owned());
    };
    let flag = has_prefetch.then_some("--prefetch");
    let facts = run_store(["open"].into_iter().chain(flag).chain(["--", location]))?;
    let path = facts["image"].as_str().map(PathBuf::from);
    path.ok_or_else(|| Failure::new(FailureKind::Other, "firn-store has replied without a path"))
}

/// A file of an image that was pushed or pulled.
#[derive(Debug, Deserialize)]
pub struct StoredFileFacts {
    pub image: PathBuf,
    pub location: String,
    pub file_bytes: u64,
    pub was_there: bool,
}

/// A text about each file that was pushed or pulled.
pub fn describe_files(facts: &Value, describe: fn(&StoredFileFacts) -> String) -> String {
    let files: Vec<StoredFileFacts> = read_facts(&facts["files"]);
    files.iter().map(describe).collect()
}

/// Facts of `firn-store`; nothing if they are of another version of it.
pub fn read_facts<T: DeserializeOwned + Default>(facts: &Value) -> T {
    T::deserialize(facts).unwrap_or_default()
}

/// Runs a command of `firn-store`; returns its facts. Shows its progress.
pub fn run_store<I: AsRef<OsStr>>(args: impl IntoIterator<Item = I>) -> Result<Value, Failure> {
    let mut bar = TerminalBar::new();
    let program = StoreProgram { credentials: None, cancel: &AtomicBool::new(false) };
    program.run(args, &mut |progress| bar.show_progress(progress))
}
