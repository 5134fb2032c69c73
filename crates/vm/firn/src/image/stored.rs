//! What the verbs for images in object storage have in common: the program that they run.
//!
//! `firn-store`, beside `firn`, has the clients of stores. It replies on its standard output, one JSON
//! value per line: progress, then facts or a failure. It ends with the process that started it.

use std::ffi::OsStr;
use std::io::{BufRead as _, BufReader};
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};

use firn_cache::is_location;
use firn_supervisor::{Failure, FailureContext as _, FailureKind, SupervisorReply};
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
    let mut child = spawn_store(args)?;
    let replied = read_replies(&mut child);
    // If its reply is no reply, it may still run, and be blocked.
    if replied.is_err() {
        let _ = child.kill();
    }
    let status = child.wait().while_doing("waiting for firn-store")?;
    match replied? {
        Some(SupervisorReply::Done { facts }) => Ok(facts),
        Some(SupervisorReply::Failed(failure)) => Err(failure),
        _ => Err(Failure::new(FailureKind::Other, describe_end(status))),
    }
}

fn describe_end(status: ExitStatus) -> String {
    match status.signal() {
        Some(signal) => format!("firn-store was ended by signal {signal}"),
        None => format!("firn-store ended without a reply ({status})"),
    }
}

fn spawn_store<I: AsRef<OsStr>>(args: impl IntoIterator<Item = I>) -> Result<Child, Failure> {
    let program = find_program()?;
    let mut command = Command::new(&program);
    command.args(args).stdin(Stdio::null()).stdout(Stdio::piped());
    command.spawn().while_doing(format!("running {}", program.display()))
}

/// The program beside this one.
fn find_program() -> Result<PathBuf, Failure> {
    let this = std::env::current_exe().while_doing("finding the program firn")?;
    let program = this.with_file_name(firn_cache::PROGRAM);
    match program.exists() {
        true => Ok(program),
        false => {
            let text = format!("there is no {}, which object storage needs", program.display());
            let hint = "install all programs of Firn in one directory (`make install`)";
            Err(Failure::new(FailureKind::Host, text).with_hint(hint))
        }
    }
}

/// Its last reply. `None` if it ended without one.
fn read_replies(child: &mut Child) -> Result<Option<SupervisorReply>, Failure> {
    let mut bar = TerminalBar::new();
    let lines = child.stdout.take().map(BufReader::new).into_iter().flat_map(BufReader::lines);
    for line in lines {
        let line = line.while_doing("reading the reply of firn-store")?;
        match serde_json::from_str(&line).while_doing("reading the reply of firn-store")? {
            SupervisorReply::Progress(progress) => bar.show_progress(&progress),
            last => return Ok(Some(last)),
        }
    }
    Ok(None)
}
