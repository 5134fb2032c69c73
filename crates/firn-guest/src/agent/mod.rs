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

use crate::port::{self, Lines};
use crate::protocol::{AGENT_PORT, Action, LINE_BYTES_MAX, Outcome, Request, Response};
use job::Job;

/// Performs requests of the host, over a virtio port.
#[derive(Args, Debug)]
pub struct Agent {
    /// Name of the virtio port, or path of a device.
    #[arg(long, default_value = AGENT_PORT)]
    port: String,
}

struct Shared {
    answers: Mutex<File>,
    jobs: Mutex<HashMap<String, Arc<Job>>>,
}

/// Serves requests for ever.
pub fn run(args: &Agent) -> Result<()> {
    let port = port::open(&args.port, true)?;
    let answers = Mutex::new(port.try_clone().context("cannot share the port")?);
    let shared = Arc::new(Shared { answers, jobs: Mutex::default() });
    let mut lines = Lines::new(port, LINE_BYTES_MAX);
    loop {
        let line = lines.next_line().context("cannot read the port")?;
        // A line that is not a request is the incomplete line of a client that has disconnected.
        if let Ok(request) = serde_json::from_slice::<Request>(&line) {
            let shared = Arc::clone(&shared);
            thread::Builder::new()
                .name(format!("request {}", request.id))
                .spawn(move || shared.answer(request))
                .context("cannot start a thread")?;
        }
    }
}

impl Shared {
    fn answer(&self, request: Request) {
        let outcome = self
            .perform(request.action)
            .unwrap_or_else(|error| Outcome::Failed { error: format!("{error:#}") });
        let response = Response { id: request.id, outcome };
        if let Err(error) = self.send(&response) {
            eprintln!("agent: cannot answer request {}: {error:#}", response.id);
        }
    }

    fn send(&self, response: &Response) -> Result<()> {
        let mut line = serde_json::to_vec(response)?;
        line.push(b'\n');
        let mut port = self.answers.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(port.write_all(&line)?)
    }

    fn perform(&self, action: Action) -> Result<Outcome> {
        match action {
            Action::Ping => Ok(Outcome::Pong { uptime_ms: uptime_ms() }),
            Action::Run { argv, stdin, timeout_s } => {
                Ok(Outcome::Ended(Job::start(&argv, stdin)?.wait(limit(timeout_s), true)?))
            }
            Action::Spawn { job, argv } => self.spawn(job, &argv),
            Action::Poll { job } => Ok(self.job(&job)?.state()),
            Action::Wait { job, timeout_s } => {
                Ok(Outcome::Ended(self.job(&job)?.wait(limit(timeout_s), false)?))
            }
            Action::Signal { job, signal } => {
                self.job(&job)?.signal(signal)?;
                Ok(Outcome::Started { started: true })
            }
        }
    }

    fn spawn(&self, name: String, argv: &[String]) -> Result<Outcome> {
        let mut jobs = self.jobs.lock().unwrap_or_else(PoisonError::into_inner);
        if jobs.get(&name).is_some_and(|job| matches!(job.state(), Outcome::Running { .. })) {
            bail!("job {name} is still running");
        }
        jobs.insert(name, Job::start(argv, String::new())?);
        Ok(Outcome::Started { started: true })
    }

    fn job(&self, name: &str) -> Result<Arc<Job>> {
        let jobs = self.jobs.lock().unwrap_or_else(PoisonError::into_inner);
        jobs.get(name).cloned().with_context(|| format!("there is no job {name}"))
    }
}

fn limit(timeout_s: u64) -> Option<Duration> {
    (timeout_s > 0).then(|| Duration::from_secs(timeout_s))
}

fn uptime_ms() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    (time.tv_sec * 1000 + time.tv_nsec / 1_000_000).unsigned_abs()
}
