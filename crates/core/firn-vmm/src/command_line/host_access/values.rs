//! The check of an option's properties against lists of known ones.

use super::finding::{Exempt, Finding, shorten};
use crate::command_line::properties::OptionProperties;

/// The maximum number of properties of an option that are examined.
const PROPERTIES_MAX: usize = 1000;

/// Names, with spaces between them.
pub(super) type Words = &'static str;

/// Whether a list has a word.
pub(super) fn has_word(list: Words, word: &str) -> bool {
    list.split_whitespace().any(|it| it == word)
}

/// Reads the properties of an option; the finding if that is impossible.
///
/// QEMU reads JSON for some options only. A value in braces of any other option would be a text for
/// QEMU, with other properties than the JSON has.
pub(super) fn read_properties(
    value: &str,
    implied: &str,
    takes_json: bool,
) -> Result<OptionProperties, Finding> {
    let unreadable = || Finding::of_option("has a value that Firn can't read");
    let is_json = value.starts_with('{');
    if (is_json && !takes_json) || value.starts_with(',') {
        return Err(unreadable());
    }
    let properties = OptionProperties::parse_value(value, implied).ok_or_else(unreadable)?;
    match properties.flattened().len() > PROPERTIES_MAX {
        true => Err(Finding::of_option("has too many properties to be examined")),
        false => Ok(properties),
    }
}

/// The properties that are in none of the lists, and not the user's.
pub(super) fn check_keys(
    properties: &OptionProperties,
    lists: &[Words],
    exempt: &Exempt<'_>,
) -> Vec<Finding> {
    let is_known = |key: &str| lists.iter().any(|keys| has_word(keys, base_key(key)));
    let is_finding = |key: &str| !is_known(key) && !exempt.covers_key(key);
    let properties = properties.flattened();
    let unknown = properties.iter().filter(|(key, _)| is_finding(key));
    unknown.map(|(key, value)| Finding::of_property(key, value)).collect()
}

/// The check of an option whose properties are all of one list.
pub(super) fn check_listed(
    value: &str,
    implied: &str,
    keys: Words,
    exempt: &Exempt<'_>,
) -> Vec<Finding> {
    match read_properties(value, implied, false) {
        Ok(properties) => check_keys(&properties, &[keys], exempt),
        Err(finding) => vec![finding],
    }
}

/// The type of an option (a driver, a back end), if it is in a list or the user's.
pub(super) fn known_type<'t, T>(
    properties: &OptionProperties,
    key: &str,
    types: &'t [(&str, T)],
    exempt: &Exempt<'_>,
) -> Result<Option<&'t T>, Finding> {
    let kind = only_value(properties, key).unwrap_or_default();
    match types.iter().find(|(name, _)| *name == kind) {
        Some((_, found)) => Ok(Some(found)),
        None if exempt.covers_key(key) => Ok(None),
        None => Err(unknown_type(key, &kind)),
    }
}

/// The finding for a type that is in no list.
pub(super) fn unknown_type(key: &str, kind: &str) -> Finding {
    let kind = shorten(kind);
    let effect = format!("has the {key} {kind:?}, which Firn does not know to be harmless");
    Finding { key: Some(key.to_owned()), effect, disk: None }
}

/// The value of a key that occurs once. Which of several counts is not the same for all options.
pub(super) fn only_value(properties: &OptionProperties, key: &str) -> Option<String> {
    let all = properties.flattened().into_iter().filter(|(name, _)| name == key);
    match &mut all.collect::<Vec<_>>()[..] {
        [(_, value)] => Some(std::mem::take(value)),
        _ => None,
    }
}

/// A key without the numbers of list items at its end.
fn base_key(key: &str) -> &str {
    match key.rsplit_once('.') {
        Some((list, number)) if number.bytes().all(|byte| byte.is_ascii_digit()) => list,
        _ => key,
    }
}
