//! The value of an option: `key=value,...` with doubled commas, or a JSON object. It is written in
//! the form in which it was read, because QEMU accepts lists in the second form only.
//!
//! Source: QEMU `util/qemu-option.c` and `util/keyval.c` for the first form, `-object`, `-device`
//! and `-netdev` in `qemu-options.hx` for the second.

use std::borrow::Cow;

use serde_json::{Map, Value};

/// The properties of an option.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum OptionProperties {
    /// In their order; a first part without a key has the option's implied key.
    Text(Vec<(String, String)>),
    Json(Map<String, Value>),
}

impl Default for OptionProperties {
    fn default() -> Self {
        Self::Text(Vec::new())
    }
}

impl OptionProperties {
    /// Parses either form. `implied` is the key of a first part that has none. `None` for JSON that
    /// is not an object.
    pub(super) fn parse_value(text: &str, implied: &str) -> Option<Self> {
        if text.starts_with('{') {
            return serde_json::from_str(text).ok().map(Self::Json);
        }
        let parts = split_at_commas(text).into_iter().filter(|part| !part.is_empty());
        let parts = parts.enumerate().map(|(at, part)| parse_property(&part, at, implied));
        Some(Self::Text(parts.collect()))
    }

    /// The value of a key as text; the last one counts. `None` for a list or an object.
    pub(super) fn get(&self, key: &str) -> Option<Cow<'_, str>> {
        match self {
            Self::Text(parts) => {
                parts.iter().rev().find(|(name, _)| name == key).map(|(_, value)| value.into())
            }
            Self::Json(object) => as_text(object.get(key)?),
        }
    }

    /// All keys with their values as text; the keys of nested objects and lists are joined by dots.
    pub(super) fn flattened(&self) -> Vec<(String, String)> {
        match self {
            Self::Text(parts) => parts.clone(),
            Self::Json(object) => {
                let mut flat = Vec::new();
                object.iter().for_each(|(key, value)| flatten_into(key, value, &mut flat));
                flat
            }
        }
    }

    /// The value of a key as text, which JSON may have in nested objects: `file.file.filename`.
    pub(super) fn nested_text(&self, key: &str) -> Option<String> {
        match (self.get(key), self, key.rsplit_once('.')) {
            (Some(value), ..) => Some(value.into_owned()),
            (None, Self::Json(object), Some((outer, inner))) => {
                let nested = outer
                    .split('.')
                    .try_fold(object, |object, key| object.get(key).and_then(Value::as_object));
                as_text(nested?.get(inner)?).map(Cow::into_owned)
            }
            (None, ..) => None,
        }
    }

    /// Sets a key, in JSON in the nested object that has it.
    pub(super) fn set_nested(&mut self, key: &str, value: &str) {
        match self.nested_object(key) {
            Some((object, inner)) => drop(object.insert(inner.to_owned(), value.into())),
            None => self.set(key, value),
        }
    }

    /// Removes a key with all that is below it, in JSON from the nested object that has it.
    pub(super) fn remove_nested(&mut self, key: &str) {
        if let Some((object, inner)) = self.nested_object(key) {
            object.remove(inner);
        }
        self.remove(key);
        self.remove_prefix(&format!("{key}."));
    }

    /// The nested object that a key with dots is in, and the last part of the key.
    fn nested_object<'k>(&mut self, key: &'k str) -> Option<(&mut Map<String, Value>, &'k str)> {
        let (Self::Json(object), Some((outer, inner))) = (self, key.rsplit_once('.')) else {
            return None;
        };
        let nested = outer
            .split('.')
            .try_fold(object, |object, key| object.get_mut(key).and_then(Value::as_object_mut));
        nested.map(|object| (object, inner))
    }

    /// All values of a key that may occur more than once; in JSON, a list of objects with one text
    /// each.
    pub(super) fn list_values(&self, key: &str) -> Vec<String> {
        match self {
            Self::Text(parts) => {
                let named = parts.iter().filter(|(name, _)| name == key);
                named.map(|(_, value)| value.clone()).collect()
            }
            Self::Json(object) => {
                let list = object.get(key).and_then(Value::as_array).into_iter().flatten();
                list.filter_map(|item| Some(item.get("str")?.as_str()?.to_owned())).collect()
            }
        }
    }

    /// Sets a key to a value from the user: in JSON the value gets the type that its text suggests.
    pub(super) fn set_typed(&mut self, key: &str, value: &str) {
        let json = serde_json::from_str(value).unwrap_or_else(|_| Value::String(value.to_owned()));
        self.set_value(key, value, json);
    }

    /// Whether a switch is on.
    pub(super) fn is_on(&self, key: &str) -> bool {
        self.get(key).is_some_and(|value| matches!(&*value, "on" | "yes" | "true" | "y"))
    }

    /// Sets a key, at its position or at the end.
    pub(super) fn set(&mut self, key: &str, value: &str) {
        self.set_value(key, value, Value::String(value.to_owned()));
    }

    /// Turns a switch on.
    pub(super) fn turn_on(&mut self, key: &str) {
        self.set_value(key, "on", Value::Bool(true));
    }

    fn set_value(&mut self, key: &str, text: &str, json: Value) {
        match self {
            Self::Json(object) => drop(object.insert(key.to_owned(), json)),
            Self::Text(parts) => {
                let at = parts.iter().position(|(name, _)| name == key).unwrap_or(parts.len());
                parts.retain(|(name, _)| name != key);
                parts.insert(at, (key.to_owned(), text.to_owned()));
            }
        }
    }

    /// Removes a key.
    pub(super) fn remove(&mut self, key: &str) {
        match self {
            Self::Json(object) => drop(object.remove(key)),
            Self::Text(parts) => parts.retain(|(name, _)| name != key),
        }
    }

    /// Removes the keys with this prefix.
    pub(super) fn remove_prefix(&mut self, beginning: &str) {
        match self {
            Self::Json(object) => object.retain(|key, _| !key.starts_with(beginning)),
            Self::Text(parts) => parts.retain(|(key, _)| !key.starts_with(beginning)),
        }
    }

    /// Removes the keys that are not to be kept. In JSON a nested object counts as one key.
    pub(super) fn retain_keys(&mut self, is_kept: impl Fn(&str) -> bool) {
        match self {
            Self::Json(object) => object.retain(|key, _| is_kept(key)),
            Self::Text(parts) => parts.retain(|(key, _)| is_kept(key)),
        }
    }

    /// Replaces a key, with all that is below it, by an object with these keys.
    pub(super) fn set_object(&mut self, key: &str, values: &[(&str, &str)]) {
        self.remove_nested(key);
        let object =
            || Value::Object(values.iter().map(|(k, v)| ((*k).into(), (*v).into())).collect());
        if let Some((outer, inner)) = self.nested_object(key) {
            outer.insert(inner.to_owned(), object());
            return;
        }
        match self {
            Self::Json(outer) => drop(outer.insert(key.to_owned(), object())),
            Self::Text(_) => {
                values.iter().for_each(|(inner, value)| self.set(&format!("{key}.{inner}"), value));
            }
        }
    }

    /// Adds the properties of a later option of the same kind: QEMU merges repeated `-machine` and
    /// `-m`.
    pub(super) fn merge(&mut self, later: Self) {
        match later {
            Self::Text(parts) => parts.iter().for_each(|(key, value)| self.set(key, value)),
            Self::Json(object) => {
                let parts = object.iter().filter_map(|(key, value)| Some((key, as_text(value)?)));
                parts.for_each(|(key, value)| self.set(key, &value));
            }
        }
    }

    /// The text in the form in which it was read; the property with the key `implied` is its value
    /// alone.
    pub(super) fn to_text(&self, implied: &str) -> String {
        let part = |(key, value): &(String, String)| match key == implied {
            true => escape_commas(value).into_owned(),
            false => format!("{key}={}", escape_commas(value)),
        };
        match self {
            Self::Text(parts) => parts.iter().map(part).collect::<Vec<_>>().join(","),
            Self::Json(object) => Value::Object(object.clone()).to_string(),
        }
    }
}

fn flatten_into(key: &str, value: &Value, flat: &mut Vec<(String, String)>) {
    match value {
        Value::Object(object) => {
            object
                .iter()
                .for_each(|(inner, value)| flatten_into(&format!("{key}.{inner}"), value, flat));
        }
        Value::Array(list) => {
            let items = list.iter().enumerate();
            items.for_each(|(at, value)| flatten_into(&format!("{key}.{at}"), value, flat));
        }
        value => flat.extend(as_text(value).map(|text| (key.to_owned(), text.into_owned()))),
    }
}

fn as_text(value: &Value) -> Option<Cow<'_, str>> {
    match value {
        Value::String(text) => Some(text.into()),
        Value::Bool(true) => Some("on".into()),
        Value::Bool(false) => Some("off".into()),
        Value::Number(number) => Some(number.to_string().into()),
        Value::Null | Value::Array(_) | Value::Object(_) => None,
    }
}

/// Doubles commas.
pub(super) fn escape_commas(value: &str) -> Cow<'_, str> {
    if value.contains(',') { value.replace(',', ",,").into() } else { value.into() }
}

/// Splits at single commas; doubled ones become one.
fn split_at_commas(text: &str) -> Vec<String> {
    let mut parts = vec![];
    let mut part = String::new();
    let mut chars = text.chars().peekable();
    while let Some(char) = chars.next() {
        match char {
            ',' if chars.next_if_eq(&',').is_none() => parts.push(std::mem::take(&mut part)),
            char => part.push(char),
        }
    }
    parts.push(part);
    parts
}

/// Parses `key=value`; the implied key for a first part without one; elsewhere `key` is `key=on`
/// and `nokey` is `key=off`.
fn parse_property(part: &str, at: usize, implied: &str) -> (String, String) {
    match part.split_once('=') {
        Some((key, value)) => (key.to_owned(), value.to_owned()),
        None if at == 0 => (implied.to_owned(), part.to_owned()),
        None => match part.strip_prefix("no") {
            Some(key) if !key.is_empty() => (key.to_owned(), "off".to_owned()),
            _ => (part.to_owned(), "on".to_owned()),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn read(text: &str) -> OptionProperties {
        OptionProperties::parse_value(text, "type").unwrap()
    }

    #[test]
    fn reads_text_with_an_implied_key_and_doubled_commas() {
        let properties = read("q35,memory-backend=a,,b,usb,nosmm");
        assert_eq!(properties.get("type").unwrap(), "q35");
        assert_eq!(properties.get("memory-backend").unwrap(), "a,b");
        assert!(properties.is_on("usb") && !properties.is_on("smm"));
        assert_eq!(properties.to_text("type"), "q35,memory-backend=a,,b,usb=on,smm=off");
    }

    #[test]
    fn json_stays_json_with_its_lists() {
        let mut properties =
            read(r#"{"type": "x", "size": 1073741824, "share": false, "host-nodes": [0, 2]}"#);
        assert_eq!(properties.get("size").unwrap(), "1073741824");
        assert!(!properties.is_on("share"));
        assert_eq!(properties.get("host-nodes"), None);
        properties.turn_on("share");
        properties.remove("size");
        let expected = r#"{"host-nodes":[0,2],"share":true,"type":"x"}"#;
        assert_eq!(read(&properties.to_text("type")), read(expected));
        assert_eq!(OptionProperties::parse_value("{", "type"), None);
    }

    #[test]
    fn a_later_option_wins_over_an_earlier_one() {
        let mut machine = read("pc,accel=tcg");
        machine.merge(read("type=q35,memory-backend=ram"));
        assert_eq!(machine.to_text("type"), "q35,accel=tcg,memory-backend=ram");
    }

    proptest! {
        #[test]
        fn parsed_text_is_printed_unchanged(values in proptest::collection::vec("[a-z,=]{0,8}", 1..5)) {
            let mut properties = OptionProperties::default();
            for (at, value) in values.iter().enumerate() {
                properties.set(&format!("k{at}"), value);
            }
            prop_assert_eq!(OptionProperties::parse_value(&properties.to_text("type"), "type"), Some(properties));
        }

        #[test]
        fn any_text_is_read(text in ".*") {
            let _ = OptionProperties::parse_value(&text, "type");
        }
    }
}
