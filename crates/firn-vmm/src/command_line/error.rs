//! Why Firn will not run a QEMU command line, and what to do instead.

use thiserror::Error;

/// A command line that Firn cannot work with.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum CommandLineError {
    /// There is nothing to run.
    #[error("the QEMU command line is empty")]
    Empty,
    /// An option that Firn cannot work with.
    #[error("{option}: {reason}")]
    Refused {
        /// The option as it was given.
        option: String,
        /// Why, and what to do instead.
        reason: &'static str,
    },
    /// A value that cannot be read.
    #[error("{option}: {what} cannot be read")]
    Unreadable {
        /// The option as it was given.
        option: String,
        /// Which part of it.
        what: &'static str,
    },
    /// A backend that is used as guest RAM is not there.
    #[error(
        "memory backend {id:?} is used as guest RAM, but no -object on the command line makes it"
    )]
    NoBackend {
        /// The backend.
        id: String,
    },
    /// A back end needs something of the host that another process has.
    #[error("{option}: {held}")]
    Held {
        /// The option as it was given.
        option: String,
        /// What, and which process has it.
        held: String,
    },
    /// An option that is to be changed is not there.
    #[error("{given}: the image's command line has no such option; --qemu-arg adds one")]
    NoOption {
        /// The change.
        given: String,
    },
    /// It is not clear which option is to be changed.
    #[error("{given}: the image's command line has more than one such option, and none of this id")]
    ManyOptions {
        /// The change.
        given: String,
    },
    /// A network card is not there.
    #[error("no -netdev firn on the command line has the id {id:?}")]
    NoCard {
        /// Its id.
        id: String,
    },
    /// A disk that Firn serves is not there.
    #[error("no -drive with firn=on on the command line has the id {id:?}")]
    NoDisk {
        /// Its id.
        id: String,
    },
    /// A disk is to be served, and nobody does.
    #[error("disk {id:?} is one that Firn serves (firn=on), which it does not here")]
    NotServed {
        /// Its id.
        id: String,
    },
    /// The caller brought another number of sockets than there are network cards.
    #[error("{sockets} sockets were given for {cards} network cards")]
    Sockets {
        /// Sockets.
        sockets: usize,
        /// Cards.
        cards: usize,
    },
    /// The caller brought another number of RAM files than there are regions.
    #[error("{files} RAM files were given for {regions} regions of guest RAM")]
    Files {
        /// Files.
        files: usize,
        /// Regions.
        regions: usize,
    },
}

impl CommandLineError {
    pub(super) fn refused(option: impl ToString, reason: &'static str) -> Self {
        Self::Refused { option: option.to_string(), reason }
    }

    pub(super) fn override_of_none(given: &str) -> Self {
        Self::NoOption { given: given.to_owned() }
    }

    pub(super) fn override_of_many(given: &str) -> Self {
        Self::ManyOptions { given: given.to_owned() }
    }

    pub(super) fn unreadable(option: impl ToString, what: &'static str) -> Self {
        Self::Unreadable { option: option.to_string(), what }
    }
}
