//! `firn-guest agent`: performs requests of the host in the guest, over a virtio port.
//!
//! [`crate::protocol`] describes the protocol. Each request has a thread of its own, so a long
//! `run` delays no other request; only writing a reply line is serialized. The agent remembers
//! spawned programs (`job`) as long as it lives, and it survives checkpoint and restore like any
//! other program of the guest.

mod job;

use std::collections::HashMap;
use std::fs::File;
use std::io::Write as _;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use clap::Args;

use crate::port::{self, PortLines};
use crate::protocol::{
    AGENT_PORT, AgentAction, AgentOutcome, AgentRequest, AgentResponse, LINE_BYTES_MAX,
};
use job::AgentJob;

/// Performs requests of the host, over a virtio port.
#[derive(Args, Debug)]
pub struct AgentArgs {
    /// Name of the virtio port, or path of a device.
    #[arg(long, default_value = AGENT_PORT)]
    port: String,
}

struct RequestHandler {
    answers: Mutex<File>,
    jobs: Mutex<HashMap<String, Arc<AgentJob>>>,
}

/// Serves requests for ever, from when there is a port.
pub fn run(args: &AgentArgs) -> Result<()> {
    port::await_port(&args.port);
    let port = port::open_port(&args.port, true)?;
    let answers = Mutex::new(port.try_clone().context("cannot share the port")?);
    let shared = Arc::new(RequestHandler { answers, jobs: Mutex::default() });
    let mut lines = PortLines::new(port, LINE_BYTES_MAX);
    loop {
        let line = lines.next_line().context("cannot read the port")?;
        // A line that is not a request is the incomplete line of a client that has disconnected.
        if let Ok(request) = serde_json::from_slice::<AgentRequest>(&line) {
            let shared = Arc::clone(&shared);
            thread::Builder::new()
                .name(format!("request {}", request.id))
                .spawn(move || shared.answer_request(request))
                .context("cannot start a thread")?;
        }
    }
}

impl RequestHandler {
    fn answer_request(&self, request: AgentRequest) {
        let outcome = self
            .perform_action(request.action)
            .unwrap_or_else(|error| AgentOutcome::Failed { error: format!("{error:#}") });
        let response = AgentResponse { id: request.id, outcome };
        if let Err(error) = self.send_response(&response) {
            eprintln!("agent: cannot answer request {}: {error:#}", response.id);
        }
    }

    fn send_response(&self, response: &AgentResponse) -> Result<()> {
        let mut line = serde_json::to_vec(response)?;
        line.push(b'\n');
        let mut port = self.answers.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(port.write_all(&line)?)
    }

    fn perform_action(&self, action: AgentAction) -> Result<AgentOutcome> {
        match action {
            AgentAction::Ping => Ok(AgentOutcome::Pong { uptime_ms: uptime_ms() }),
            AgentAction::Run { argv, stdin, timeout_s } => Ok(AgentOutcome::Ended(
                AgentJob::start_program(&argv, stdin)?.wait_end(time_limit(timeout_s), true)?,
            )),
            AgentAction::Spawn { job, argv } => self.spawn_job(job, &argv),
            AgentAction::Poll { job } => Ok(self.find_job(&job)?.current_state()),
            AgentAction::Wait { job, timeout_s } => Ok(AgentOutcome::Ended(
                self.find_job(&job)?.wait_end(time_limit(timeout_s), false)?,
            )),
            AgentAction::Signal { job, signal } => {
                self.find_job(&job)?.signal_group(signal)?;
                Ok(AgentOutcome::Started { started: true })
            }
        }
    }

    fn spawn_job(&self, name: String, argv: &[String]) -> Result<AgentOutcome> {
        let mut jobs = self.jobs.lock().unwrap_or_else(PoisonError::into_inner);
        if jobs
            .get(&name)
            .is_some_and(|job| matches!(job.current_state(), AgentOutcome::Running { .. }))
        {
            bail!("job {name} is still running");
        }
        jobs.insert(name, AgentJob::start_program(argv, String::new())?);
        Ok(AgentOutcome::Started { started: true })
    }

    fn find_job(&self, name: &str) -> Result<Arc<AgentJob>> {
        let jobs = self.jobs.lock().unwrap_or_else(PoisonError::into_inner);
        jobs.get(name).cloned().with_context(|| format!("there is no job {name}"))
    }
}

fn time_limit(timeout_s: u64) -> Option<Duration> {
    (timeout_s > 0).then(|| Duration::from_secs(timeout_s))
}

fn uptime_ms() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    (time.tv_sec * 1000 + time.tv_nsec / 1_000_000).unsigned_abs()
}
