//! What the agent in a guest understands: one JSON object per line, one answer line per request.
//!
//! ```text
//!   -> {"id":1,"do":"run","argv":["uname","-r"]}
//!   <- {"id":1,"exit":0,"stdout":"6.1.0-40-cloud-amd64\n","stderr":""}
//!   -> {"id":2,"do":"spawn","job":"load","argv":["firn-guest","writers"]}
//!   <- {"id":2,"started":true}
//!   -> {"id":3,"do":"poll","job":"load"}
//!   <- {"id":3,"running":true,"stdout":"...","stderr":""}
//! ```
//!
//! Requests run side by side: an answer comes when it is ready, so answers may change places. A `run` whose client has
//! gone when it ends (the guest was checkpointed and restored meanwhile) has nobody to answer to: what must span a
//! restore is a `spawn`, and polled. Clients start with an empty line, which ends whatever a former client left half
//! said, and skip answers to ids they did not use.

use serde::{Deserialize, Serialize};

/// Name of the virtio port the agent listens on.
pub const AGENT_PORT: &str = "firn.agent";
/// Name of the virtio port heartbeats are written to.
pub const HEARTBEAT_PORT: &str = "firn.heartbeat";
/// Longest request or answer line, in bytes.
pub const LINE_BYTES_MAX: usize = 4 << 20;
/// How much of a program's output is kept, in bytes: the last part of it.
pub const OUTPUT_BYTES_MAX: usize = 256 << 10;

/// A request line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// Chosen by the client; the answer carries it.
    pub id: u64,
    /// What to do.
    #[serde(flatten)]
    pub action: Action,
}

/// What a request asks for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case")]
pub enum Action {
    /// Says that the agent is there.
    Ping,
    /// Runs a program to its end.
    Run {
        /// The program and its arguments.
        argv: Vec<String>,
        /// Given to the program as standard input.
        #[serde(default)]
        stdin: String,
        /// After so many seconds it is killed and the answer is an error; 0 waits for ever.
        #[serde(default)]
        timeout_s: u64,
    },
    /// Starts a program and answers at once.
    Spawn {
        /// Name for later requests; a name can be used again once its program has ended.
        job: String,
        /// The program and its arguments.
        argv: Vec<String>,
    },
    /// How a spawned program is doing, and its output so far.
    Poll {
        /// The name it was given.
        job: String,
    },
    /// Waits for a spawned program to end; answered like `run`.
    Wait {
        /// The name it was given.
        job: String,
        /// After so many seconds the answer is an error; 0 waits for ever.
        #[serde(default)]
        timeout_s: u64,
    },
    /// Sends a signal to a spawned program and its children.
    Signal {
        /// The name it was given.
        job: String,
        /// The signal's number.
        signal: i32,
    },
}

/// An answer line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Response {
    /// The id of the request.
    pub id: u64,
    /// What came of it.
    #[serde(flatten)]
    pub outcome: Outcome,
}

/// What came of a request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Outcome {
    /// A program ended.
    Ended(Ended),
    /// A program still runs (`poll`).
    Running {
        /// Always true.
        running: bool,
        /// Its output so far.
        stdout: String,
        /// Its errors so far.
        stderr: String,
    },
    /// A program was started (`spawn`) or signalled (`signal`).
    Started {
        /// Always true.
        started: bool,
    },
    /// The agent is there (`ping`).
    Pong {
        /// Milliseconds since the guest booted, by its own clock.
        uptime_ms: u64,
    },
    /// It could not be done.
    Failed {
        /// Why.
        error: String,
    },
}

/// How a program ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ended {
    /// Its exit code, or 128 + the signal that killed it.
    pub exit: i32,
    /// The last [`OUTPUT_BYTES_MAX`] bytes of its standard output.
    pub stdout: String,
    /// The same of its standard error.
    pub stderr: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_its_documentation_shows() {
        let run: Request =
            serde_json::from_str(r#"{"id":1,"do":"run","argv":["uname","-r"]}"#).unwrap();
        let argv = vec!["uname".to_owned(), "-r".to_owned()];
        assert_eq!(run.action, Action::Run { argv, stdin: String::new(), timeout_s: 0 });
        let ended: Response =
            serde_json::from_str(r#"{"id":1,"exit":0,"stdout":"x","stderr":""}"#).unwrap();
        assert!(matches!(ended.outcome, Outcome::Ended(Ended { exit: 0, .. })));
        let running: Response =
            serde_json::from_str(r#"{"id":3,"running":true,"stdout":"..","stderr":""}"#).unwrap();
        assert!(matches!(running.outcome, Outcome::Running { .. }));
    }

    #[test]
    fn answers_come_back_as_they_were() {
        let outcomes = [
            Outcome::Started { started: true },
            Outcome::Pong { uptime_ms: 7 },
            Outcome::Failed { error: "no".to_owned() },
        ];
        for outcome in outcomes {
            let response = Response { id: 4, outcome };
            let line = serde_json::to_string(&response).unwrap();
            assert_eq!(serde_json::from_str::<Response>(&line).unwrap(), response);
        }
    }
}
