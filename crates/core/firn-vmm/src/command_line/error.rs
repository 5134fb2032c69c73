//! The reasons why Firn does not run a QEMU command line, each with a remedy.

use thiserror::Error;

/// A command line that Firn does not support.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum CommandLineError {
    /// There is no program in the command line.
    #[error("the QEMU command line is empty")]
    Empty,
    /// An option that Firn does not support.
    #[error("{option}: {reason}")]
    Refused {
        /// The option as it was given.
        option: String,
        /// The reason, and a remedy.
        reason: &'static str,
    },
    /// A value that cannot be read.
    #[error("{option}: {what} cannot be read")]
    Unreadable {
        /// The option as it was given.
        option: String,
        /// The part that cannot be read.
        what: &'static str,
    },
    /// An option file that cannot be read.
    #[error("-readconfig {file}: {problem}")]
    OptionFile {
        /// The file, as the command line names it.
        file: String,
        /// The line and the reason.
        problem: String,
    },
    /// A backend that is used as guest RAM is missing.
    #[error(
        "memory backend {id:?} is used as guest RAM, but no -object on the command line makes it"
    )]
    NoBackend {
        /// The backend.
        id: String,
    },
    /// A back end needs a resource of the host that another process has.
    #[error("{option}: {held}")]
    Held {
        /// The option as it was given.
        option: String,
        /// The resource, and the process that has it.
        held: String,
    },
    /// The option that an override changes is missing.
    #[error("{given}: the image's command line has no such option; --qemu-arg adds one")]
    NoOption {
        /// The change.
        given: String,
    },
    /// An override matches several options.
    #[error("{given}: the image's command line has more than one such option, and none of this id")]
    ManyOptions {
        /// The change.
        given: String,
    },
    /// A network card is missing.
    #[error("no -netdev firn on the command line has the id {id:?}")]
    NoCard {
        /// Its id.
        id: String,
    },
    /// A disk that Firn would serve is missing.
    #[error("no -drive or -blockdev with firn=on on the command line has the id {id:?}")]
    NoDisk {
        /// Its id.
        id: String,
    },
    /// Firn would have to serve a disk, and no server was given.
    #[error("disk {id:?} is to be served by Firn (firn=on), but nothing serves it here")]
    NotServed {
        /// Its id.
        id: String,
    },
    /// The number of sockets differs from the number of network cards.
    #[error("{sockets} sockets were given for {cards} network cards")]
    Sockets {
        /// The number of sockets.
        sockets: usize,
        /// The number of cards.
        cards: usize,
    },
    /// The number of RAM files differs from the number of regions.
    #[error("{files} RAM files were given for {regions} regions of guest RAM")]
    Files {
        /// The number of files.
        files: usize,
        /// The number of regions.
        regions: usize,
    },
}

impl CommandLineError {
    pub(super) fn refuse_option(option: impl ToString, reason: &'static str) -> Self {
        Self::Refused { option: option.to_string(), reason }
    }

    pub(super) fn override_of_none(given: &str) -> Self {
        Self::NoOption { given: given.to_owned() }
    }

    pub(super) fn override_of_many(given: &str) -> Self {
        Self::ManyOptions { given: given.to_owned() }
    }

    pub(super) fn unreadable_option(option: impl ToString, what: &'static str) -> Self {
        Self::Unreadable { option: option.to_string(), what }
    }
}
