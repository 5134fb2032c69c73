//! A standby before its primary has connected: it can be asked how it is, and stopped.
//!
//! ```text
//!   primary's socket ----.               .--> the connection: the standby begins
//!   control socket -------+--> poll -----+--> status, stop: answered
//!   the command's pipe --'               '--> nobody wants it any more, or for too long: given up
//! ```
//!
//! There is no VM yet, so the supervisor's loop has nothing to look after: this takes its place.

use std::io::{self, BufReader};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};

use firn_epochs::endpoint::{Endpoint, Listener, Stream};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::failure::{Context, Failure, FailureKind};
use crate::protocol::{self, REQUEST_BYTES_MAX, Reply, Request};
use crate::server;
use crate::start::Place;
use crate::status::Status;

/// How long a primary may take to connect.
const CONNECT_WAIT: Duration = Duration::from_secs(300);
/// How long a command may take to say what it wants.
const REQUEST_WAIT: Duration = Duration::from_secs(1);

/// What there is to do.
enum Turn {
    Primary,
    Command,
    Nobody,
}

/// One connection of a primary, within the time, while the command waits that wants it, and unless another stops it.
pub(super) fn accept(place: &Place<'_>, listen: &Endpoint) -> Result<Stream, Failure> {
    firn_fault::point("standby.listen");
    let listener = listen.listen().doing(format!("listening at {listen}"))?;
    let control = server::bind(&place.vm.control()).doing("opening the control socket")?;
    let deadline = Instant::now() + CONNECT_WAIT;
    loop {
        match wait(&listener, &control, deadline).doing("waiting for the primary")? {
            Turn::Primary => return listener.accept().doing("taking the primary's connection"),
            Turn::Command => answer(place, &control)?,
            Turn::Nobody => {
                let text = format!("no primary has connected within {} s", CONNECT_WAIT.as_secs());
                let hint =
                    format!("`firn protect NAME --to {listen}` where the VM runs, soon after");
                return Err(Failure::new(FailureKind::Interrupted, text).hint(hint));
            }
        }
    }
}

fn wait(listener: &Listener, control: &UnixListener, deadline: Instant) -> io::Result<Turn> {
    // Closed, it is told without being asked for.
    let command = io::stdout();
    let mut all = [
        PollFd::new(listener, PollFlags::IN),
        PollFd::new(control, PollFlags::IN),
        PollFd::new(&command, PollFlags::empty()),
    ];
    let left = deadline.saturating_duration_since(Instant::now());
    let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
    rustix::io::retry_on_intr(|| poll(&mut all, Some(&left)))?;
    let is_ready = |at: usize| all[at].revents().contains(PollFlags::IN);
    Ok(match (is_ready(0), is_ready(1)) {
        (true, _) => Turn::Primary,
        (false, true) => Turn::Command,
        (false, false) => Turn::Nobody,
    })
}

/// A command that goes away, or says nothing in time, is not waited for. It is an error to be stopped.
fn answer(place: &Place<'_>, control: &UnixListener) -> Result<(), Failure> {
    let Ok((stream, _)) = control.accept() else { return Ok(()) };
    let Ok(request) = read(&stream) else { return Ok(()) };
    let is_stop = matches!(request, Request::Stop(_));
    let reply = match request {
        Request::Status => Reply::Done { facts: status(place) },
        Request::Stop(_) => {
            // Whoever is told finds it so.
            place.vm.remove().doing("forgetting the standby")?;
            Reply::Done { facts: serde_json::Value::Null }
        }
        _ => {
            let text = "the standby waits for its primary: there is no VM yet";
            let hint = "`firn protect` connects there, where the VM runs";
            Reply::Failed(Failure::new(FailureKind::Busy, text).hint(hint))
        }
    };
    // It may have gone.
    let _ = protocol::write(&mut &stream, &reply);
    if is_stop {
        firn_fault::point("standby.stopped");
    }
    match is_stop {
        true => Err(Failure::new(FailureKind::Interrupted, "it was stopped")),
        false => Ok(()),
    }
}

fn read(stream: &UnixStream) -> Result<Request, Failure> {
    stream.set_read_timeout(Some(REQUEST_WAIT)).doing("preparing to wait")?;
    stream.set_write_timeout(Some(REQUEST_WAIT)).doing("preparing to wait")?;
    let line = protocol::read_line(&mut BufReader::new(stream), REQUEST_BYTES_MAX)?;
    Ok(protocol::decode(&line.unwrap_or_default())?)
}

fn status(place: &Place<'_>) -> serde_json::Value {
    let supervisor_pid = Some(std::process::id() as i32);
    let status = Status { supervisor_pid, ..Status::of(&place.journal.read()) };
    serde_json::to_value(status).unwrap_or_default()
}
