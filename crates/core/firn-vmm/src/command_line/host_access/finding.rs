//! A part of an option that may open something of the host.

use crate::command_line::overrides::NamedByUser;

/// The maximum number of characters of an option that are shown.
pub(super) const SHOWN_CHARS_MAX: usize = 200;

/// A part of an option that is no known harmless one.
pub(super) struct Finding {
    /// Its property; `None` for the whole option.
    pub(super) key: Option<String>,
    pub(super) effect: String,
    pub(super) disk: Option<String>,
}

impl Finding {
    /// The whole option.
    pub(super) fn of_option(effect: impl Into<String>) -> Self {
        Self { key: None, effect: effect.into(), disk: None }
    }

    pub(super) fn of_property(key: &str, value: &str) -> Self {
        let effect = format!("has {}", shorten(&format!("{key}={value}")));
        Self { key: Some(key.to_owned()), effect, disk: None }
    }

    pub(super) fn of_disk(key: Option<&str>, file: &str) -> Self {
        let effect = format!("gives the guest a disk: {}", shorten(file));
        Self { key: key.map(str::to_owned), effect, disk: Some(file.to_owned()) }
    }
}

/// Which properties of an option need no check.
pub(super) struct Exempt<'a> {
    pub(super) named: &'a NamedByUser,
    /// It is an object of guest RAM, which Firn puts over a file of its own.
    pub(super) is_ram: bool,
}

impl Exempt<'_> {
    pub(super) fn covers_key(&self, key: &str) -> bool {
        matches!(self.named, NamedByUser::Properties(keys) if keys.iter().any(|it| it == key))
    }
}

/// The beginning of a text.
pub(super) fn shorten(text: &str) -> String {
    match text.char_indices().nth(SHOWN_CHARS_MAX) {
        None => text.to_owned(),
        Some((end, _)) => format!("{}...", &text[..end]),
    }
}
