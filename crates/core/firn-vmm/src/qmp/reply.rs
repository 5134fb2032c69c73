//! Parsing of one line of QMP as untrusted input.
//!
//! QEMU is the monitor's server, but a guest that escaped from its sandbox can write to the monitor
//! too, and the socket path of an attached VM may belong to any process. So a line is bytes until
//! it has been parsed as one of four messages:
//!
//! ```text
//!   {"QMP": {"version": ...}}                              greeting
//!   {"return": VALUE, "id": N}                             success of command N
//!   {"error": {"class": C, "desc": D}, "id": N}            failure of command N
//!   {"event": NAME, "data": VALUE, "timestamp": ...}       event
//! ```
//!
//! Source: QEMU `docs/interop/qmp-spec`, sections 2.2 to 2.5.

use std::time::Duration;

use serde_json::{Map, Value};
use thiserror::Error;

/// A message from QEMU, in one line.
#[derive(Clone, Debug, PartialEq)]
pub enum QmpReply {
    /// The first line after connecting.
    Greeting {
        /// The capabilities that QEMU offers, such as `oob`.
        capabilities: Vec<String>,
    },
    /// A command succeeded.
    Return {
        /// The command's id; `None` if the command was sent without one.
        id: Option<u64>,
        /// The returned value.
        value: Value,
    },
    /// A command failed.
    Error {
        /// The command's id; `None` if the command was sent without one or could not be read.
        id: Option<u64>,
        /// QEMU's error class, such as `GenericError` or `CommandNotFound`.
        class: String,
        /// QEMU's error message.
        desc: String,
    },
    /// An event, which no command requested.
    Event(QmpEvent),
}

/// An event, such as `STOP` or `MIGRATION`.
#[derive(Clone, Debug, PartialEq)]
pub struct QmpEvent {
    /// Its name, in capitals.
    pub name: String,
    /// Its data; `Null` if it has none.
    pub data: Value,
    /// Its time by QEMU's clock, since 1970.
    pub at: Option<Duration>,
}

/// The reason why a line is not QMP.
#[derive(Debug, Error)]
pub enum ReplyError {
    /// It is not a JSON value.
    #[error("line of {bytes} bytes is not JSON")]
    Json {
        /// Length of the line.
        bytes: usize,
        /// The error of the JSON parser.
        #[source]
        source: serde_json::Error,
    },
    /// It is JSON, but none of the four forms.
    #[error("line of {bytes} bytes is neither a greeting, a reply nor an event")]
    Shape {
        /// Length of the line.
        bytes: usize,
    },
}

/// Parses one line, without its newline.
pub fn parse_reply(line: &[u8]) -> Result<QmpReply, ReplyError> {
    let bytes = line.len();
    let value =
        serde_json::from_slice(line).map_err(|source| ReplyError::Json { bytes, source })?;
    let Value::Object(object) = value else { return Err(ReplyError::Shape { bytes }) };
    classify_object(object).ok_or(ReplyError::Shape { bytes })
}

fn classify_object(mut object: Map<String, Value>) -> Option<QmpReply> {
    let id = object.get("id").and_then(Value::as_u64);
    if let Some(value) = object.remove("return") {
        return Some(QmpReply::Return { id, value });
    }
    if let Some(error) = object.get("error") {
        return Some(QmpReply::Error {
            id,
            class: text_of(error, "class")?,
            desc: text_of(error, "desc")?,
        });
    }
    if let Some(name) = object.get("event") {
        let name = name.as_str()?.to_owned();
        let data = object.remove("data").unwrap_or(Value::Null);
        let at = object.get("timestamp").and_then(parse_time);
        return Some(QmpReply::Event(QmpEvent { name, data, at }));
    }
    Some(QmpReply::Greeting { capabilities: list_capabilities(object.get("QMP")?) })
}

fn list_capabilities(greeting: &Value) -> Vec<String> {
    let offered = greeting.get("capabilities").and_then(Value::as_array);
    offered.into_iter().flatten().filter_map(|name| Some(name.as_str()?.to_owned())).collect()
}

/// Parses a timestamp. Both numbers are -1 if QEMU could not read its clock.
fn parse_time(stamp: &Value) -> Option<Duration> {
    let part = |key: &str| stamp.get(key)?.as_u64();
    let micros = u32::try_from(part("microseconds")?).ok().filter(|&micros| micros < 1_000_000)?;
    Some(Duration::new(part("seconds")?, micros * 1000))
}

fn text_of(value: &Value, key: &str) -> Option<String> {
    Some(value.get(key)?.as_str()?.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    #[test]
    fn reads_the_four_forms() {
        let line = br#"{"QMP": {"version": {"qemu": {"major": 7}}, "capabilities": ["oob"]}}"#;
        let capabilities = vec!["oob".to_owned()];
        assert_eq!(parse_reply(line).unwrap(), QmpReply::Greeting { capabilities });

        let line = br#"{"return": {"running": true}, "id": 7}"#;
        let value = json!({"running": true});
        assert_eq!(parse_reply(line).unwrap(), QmpReply::Return { id: Some(7), value });

        let line = br#"{"error": {"class": "GenericError", "desc": "no"}}"#;
        let failed = QmpReply::Error { id: None, class: "GenericError".into(), desc: "no".into() };
        assert_eq!(parse_reply(line).unwrap(), failed);

        let line = br#"{"timestamp": {"seconds": 1, "microseconds": 20}, "event": "STOP"}"#;
        let at = Some(Duration::from_micros(1_000_020));
        let stop = QmpEvent { name: "STOP".into(), data: Value::Null, at };
        assert_eq!(parse_reply(line).unwrap(), QmpReply::Event(stop));
    }

    #[test]
    fn a_time_that_is_none_is_none() {
        for stamp in ["{\"seconds\": -1, \"microseconds\": -1}", "{\"seconds\": 1}", "7"] {
            let line = format!("{{\"timestamp\": {stamp}, \"event\": \"STOP\"}}");
            let Ok(QmpReply::Event(stop)) = parse_reply(line.as_bytes()) else { panic!("{line}") };
            assert_eq!(stop.at, None, "{line}");
        }
    }

    #[test]
    fn a_malformed_line_is_described() {
        let message = |line: &[u8]| parse_reply(line).unwrap_err().to_string();
        assert_eq!(message(b"nonsense"), "line of 8 bytes is not JSON");
        assert_eq!(message(b"[1]"), "line of 3 bytes is neither a greeting, a reply nor an event");
        assert_eq!(
            message(br#"{"error": 1}"#),
            "line of 12 bytes is neither a greeting, a reply nor an event"
        );
    }

    #[test]
    fn deep_nesting_is_an_error_and_not_a_stack_overflow() {
        let line = "[".repeat(1 << 20);
        assert!(matches!(parse_reply(line.as_bytes()), Err(ReplyError::Json { .. })));
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_reply_or_an_error(line in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = parse_reply(&line);
        }

        #[test]
        fn an_error_is_returned_verbatim(desc in ".*", id in any::<u64>()) {
            let line = json!({"error": {"class": "GenericError", "desc": desc}, "id": id}).to_string();
            let expected = QmpReply::Error { id: Some(id), class: "GenericError".into(), desc };
            prop_assert_eq!(parse_reply(line.as_bytes()).unwrap(), expected);
        }
    }
}
