//! Disks: each file that an option names is an access, and so is each property that may name one.
//!
//! Nodes of `-blockdev` refer to each other by name. A text for `file` is such a name there; in
//! `-drive` it is the name of a file, or the address of a server.

use super::finding::{Exempt, Finding};
use super::values::{Words, has_word, read_properties};
use crate::command_line::drives;
use crate::command_line::properties::OptionProperties;

/// Options whose whole value is the file of a disk, for which a restore may put another file.
const PLAIN: Words = "hda hdb hdc hdd mtdblock pflash sd";

/// The last parts of the keys that name no file, except for limits (`throttling.` and the like).
const KEYS: Words = "aio auto-read-only bus cache cache-size copy-on-read detect-zeroes direct discard firn \
    force-share format id if index l2-cache-size lazy-refcounts locking media no-flush \
    node-name offset pass-discard-request read-only read-zeroes readonly \
    refcount-cache-size rerror serial size throttle-group unit werror writeback";

const LIMITS: Words = "throttling. bps iops";

/// Drivers that open nothing but the file that is checked.
const DRIVERS: Words = "copy-on-read file null-aio null-co qcow2 raw throttle";

pub(super) fn is_plain_disk(name: &str) -> bool {
    has_word(PLAIN, name)
}

/// The findings of `-drive` or `-blockdev`.
pub(super) fn check_disk(name: &str, value: &str, exempt: &Exempt<'_>) -> Vec<Finding> {
    let properties = match read_properties(value, "", name == "blockdev") {
        Ok(properties) => properties,
        Err(finding) => return vec![finding],
    };
    let file = drives::file_key(name, &properties);
    let is_finding = |(key, value): &&(String, String)| {
        Some(&**key) != file && !exempt.covers_key(key) && !is_harmless(name, key, value)
    };
    let all = properties.flattened();
    let others = all.iter().filter(is_finding).map(|(key, value)| describe(key, value));
    let twice = all.iter().filter(|(key, _)| Some(&**key) == file).skip(1);
    let twice = twice.map(|(key, value)| describe(key, value));
    let disk = file.filter(|key| !exempt.covers_key(key)).and_then(|key| of_file(&properties, key));
    disk.into_iter().chain(others).chain(twice).collect()
}

fn of_file(properties: &OptionProperties, key: &str) -> Option<Finding> {
    Some(Finding::of_disk(Some(key), &properties.nested_text(key)?))
}

fn describe(key: &str, value: &str) -> Finding {
    Finding::of_property(key, value)
}

fn is_harmless(option: &str, key: &str, value: &str) -> bool {
    let last = key.rsplit('.').next().unwrap_or(key);
    match last {
        "driver" => has_word(DRIVERS, value),
        // The formats that a restore can put an overlay on; QEMU has others that are protocols.
        "format" => matches!(value, "raw" | "qcow2"),
        // The name of another node.
        "file" | "backing" => option == "blockdev",
        _ => has_word(KEYS, last) || LIMITS.split_whitespace().any(|limit| key.starts_with(limit)),
    }
}
