//! The protocol of the agent in a guest: one JSON object per line, one reply line per request.
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
//! Requests run concurrently: a reply is sent when it is ready, so replies may come in another
//! order. A `run` whose client has disconnected when it ends (the guest was checkpointed and
//! restored meanwhile) cannot deliver its reply: a program that spans a restore is started by
//! `spawn`, and polled. Clients start with an empty line, which ends the incomplete line of a
//! former client, and skip replies to ids that they did not use.

use serde::{Deserialize, Serialize};

/// Name of the virtio port on which the agent listens.
pub const AGENT_PORT: &str = "firn.agent";
/// Name of the virtio port to which heartbeats are written.
pub const HEARTBEAT_PORT: &str = "firn.heartbeat";
/// Maximum length of a request or reply line, in bytes.
pub const LINE_BYTES_MAX: usize = 4 << 20;
/// How much of a program's output is kept, in bytes: the last part of it.
pub const OUTPUT_BYTES_MAX: usize = 256 << 10;

/// A request line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentRequest {
    /// Chosen by the client; the reply repeats it.
    pub id: u64,
    /// The requested action.
    #[serde(flatten)]
    pub action: AgentAction,
}

/// The action of a request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case")]
pub enum AgentAction {
    /// Replies that the agent is running.
    Ping,
    /// Runs a program to its end.
    Run {
        /// The program and its arguments.
        argv: Vec<String>,
        /// Given to the program as standard input.
        #[serde(default)]
        stdin: String,
        /// After this many seconds the program is killed and the reply is an error; 0 waits for
        /// ever.
        #[serde(default)]
        timeout_s: u64,
    },
    /// Starts a program and replies at once.
    Spawn {
        /// Name for later requests; a name can be used again once its program has ended.
        job: String,
        /// The program and its arguments.
        argv: Vec<String>,
    },
    /// Returns the state of a spawned program, and its output so far.
    Poll {
        /// Its name from the `spawn`.
        job: String,
    },
    /// Waits for a spawned program to end; the reply is that of `run`.
    Wait {
        /// Its name from the `spawn`.
        job: String,
        /// After this many seconds the reply is an error; 0 waits for ever.
        #[serde(default)]
        timeout_s: u64,
    },
    /// Sends a signal to a spawned program and its children.
    Signal {
        /// Its name from the `spawn`.
        job: String,
        /// The signal's number.
        signal: i32,
    },
}

/// A reply line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentResponse {
    /// The id of the request.
    pub id: u64,
    /// The result of the request.
    #[serde(flatten)]
    pub outcome: AgentOutcome,
}

/// The result of a request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum AgentOutcome {
    /// A program ended.
    Ended(ProgramEnd),
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
    /// The agent is running (`ping`).
    Pong {
        /// Milliseconds since the guest booted, by its own clock.
        uptime_ms: u64,
    },
    /// The request failed.
    Failed {
        /// The reason.
        error: String,
    },
}

/// The exit code and the output of a program that has ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProgramEnd {
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
        let run: AgentRequest =
            serde_json::from_str(r#"{"id":1,"do":"run","argv":["uname","-r"]}"#).unwrap();
        let argv = vec!["uname".to_owned(), "-r".to_owned()];
        assert_eq!(run.action, AgentAction::Run { argv, stdin: String::new(), timeout_s: 0 });
        let ended: AgentResponse =
            serde_json::from_str(r#"{"id":1,"exit":0,"stdout":"x","stderr":""}"#).unwrap();
        assert!(matches!(ended.outcome, AgentOutcome::Ended(ProgramEnd { exit: 0, .. })));
        let running: AgentResponse =
            serde_json::from_str(r#"{"id":3,"running":true,"stdout":"..","stderr":""}"#).unwrap();
        assert!(matches!(running.outcome, AgentOutcome::Running { .. }));
    }

    #[test]
    fn a_decoded_answer_equals_the_encoded_one() {
        let outcomes = [
            AgentOutcome::Started { started: true },
            AgentOutcome::Pong { uptime_ms: 7 },
            AgentOutcome::Failed { error: "no".to_owned() },
        ];
        for outcome in outcomes {
            let response = AgentResponse { id: 4, outcome };
            let line = serde_json::to_string(&response).unwrap();
            assert_eq!(serde_json::from_str::<AgentResponse>(&line).unwrap(), response);
        }
    }
}
