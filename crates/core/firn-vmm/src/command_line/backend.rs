//! RAM backends (`-object memory-backend-*`): those that the user requested, and the same over a
//! file of Firn's.

use std::borrow::Cow;

use super::arguments::CommandArgument;
use super::error::CommandLineError;
use super::properties::OptionProperties;
use super::size;

/// The prefix of the kinds of backends.
const KINDS: &str = "memory-backend-";

/// Properties that only `memory-backend-memfd` has, and one that would make QEMU empty Firn's file
/// when it exits.
const NOT_FOR_FIRNS_FILE: &[&str] = &["seal", "hugetlb", "hugetlbsize", "discard-data"];

/// Properties with which QEMU reserves huge pages at its start, and that would only cost time in
/// ordinary memory.
const FOR_HUGE_PAGES: &[&str] = &["prealloc", "prealloc-threads", "prealloc-context", "align"];

/// A memory backend of the command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RamBackend {
    pub(super) id: String,
    pub(super) bytes: u64,
    /// The index of its `-object` among the arguments.
    pub(super) at: usize,
    properties: OptionProperties,
}

impl RamBackend {
    /// Parses an `-object`; `None` if it is not a memory backend.
    pub(super) fn parse_object(
        argument: &CommandArgument,
        at: usize,
    ) -> Result<Option<Self>, CommandLineError> {
        let unreadable = |what| CommandLineError::unreadable_option(argument, what);
        let properties = OptionProperties::parse_value(argument.value(), "qom-type")
            .ok_or_else(|| unreadable("its JSON"))?;
        if !backend_kind(&properties).starts_with(KINDS) {
            return Ok(None);
        }
        let id = properties.get("id").ok_or_else(|| unreadable("its id"))?.into_owned();
        let bytes = properties.get("size").and_then(|size| size::parse_size(&size, 1));
        let bytes = bytes.ok_or_else(|| unreadable("its size"))?;
        Ok(Some(Self { id, bytes, at, properties }))
    }

    /// Refuses kinds of memory that Firn cannot put into a file of its own.
    pub(super) fn check_support(&self, argument: &CommandArgument) -> Result<(), CommandLineError> {
        let refuse = |reason| Err(CommandLineError::refuse_option(argument, reason));
        let properties = &self.properties;
        match &*backend_kind(properties) {
            "memory-backend-ram"
            | "memory-backend-memfd"
            | "memory-backend-shm"
            | "memory-backend-file" => {}
            _ => return refuse("Firn can work with memory-backend-ram, -memfd, -shm and -file"),
        }
        if properties.is_on("pmem") || properties.is_on("readonly") || properties.is_on("rom") {
            return refuse("persistent or read-only memory cannot be guest RAM under Firn");
        }
        if properties.get("offset").is_some() {
            return refuse("Firn gives each backend a file of its own, so offset= has no meaning");
        }
        Ok(())
    }

    /// Whether its memory is in huge pages, as far as its options show it.
    pub(super) fn is_huge(&self) -> bool {
        let properties = &self.properties;
        properties.is_on("hugetlb") || properties.get("mem-path").is_some_and(names_huge_pages)
    }

    /// The user's backend, in a few words.
    pub(super) fn describe(&self) -> String {
        match self.properties.get("mem-path") {
            Some(path) => format!("{} over {path}", backend_kind(&self.properties)),
            None => backend_kind(&self.properties).into_owned(),
        }
    }

    /// The same backend over `path`.
    pub(super) fn over_path(&self, path: &str) -> CommandArgument {
        let mut properties = self.properties.clone();
        NOT_FOR_FIRNS_FILE.iter().for_each(|key| properties.remove(key));
        if self.is_huge() {
            // They reserve huge pages for the whole of RAM, and here would make QEMU fill it.
            FOR_HUGE_PAGES.iter().for_each(|key| properties.remove(key));
        }
        properties.set("qom-type", "memory-backend-file");
        properties.set("mem-path", path);
        properties.turn_on("share");
        CommandArgument::new("object", properties.to_text("qom-type"))
    }
}

fn backend_kind(properties: &OptionProperties) -> Cow<'_, str> {
    properties.get("qom-type").unwrap_or_default()
}

fn names_huge_pages(path: Cow<'_, str>) -> bool {
    path.contains("hugepages") || path.contains("hugetlb")
}

/// The backend for the plain RAM of `-m`, over `path`.
pub(super) fn plain_backend(id: &str, bytes: u64, path: &str) -> CommandArgument {
    let mut properties = OptionProperties::default();
    properties.set("qom-type", "memory-backend-file");
    properties.set("id", id);
    properties.set("size", &bytes.to_string());
    properties.set("mem-path", path);
    properties.turn_on("share");
    CommandArgument::new("object", properties.to_text("qom-type"))
}
