//! The wait of a standby for its primary, during which commands can query its status and stop it.
//!
//! ```text
//!   primary's socket ----.               .--> the connection: the standby begins
//!   control socket -------+--> poll -----+--> status, stop: answered
//!   the command's pipe --'               '--> the command has exited, or a timeout: the standby ends
//! ```
//!
//! There is no VM yet that the event loop could manage: this loop takes its place.

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

/// The maximum time that a primary may take to connect.
const CONNECT_WAIT: Duration = Duration::from_secs(300);
/// The maximum time that a command may take to send its request.
const REQUEST_WAIT: Duration = Duration::from_secs(1);

/// The event that ends one wait.
enum Turn {
    Primary,
    Command,
    Nobody,
}

/// Accepts one connection of a primary, within the time limit, while the command that started the
/// standby waits, and unless another command stops the standby.
pub(super) fn accept(place: &Place<'_>, listen: &Endpoint) -> Result<Stream, Failure> {
    firn_fault::point("standby.listen");
    let listener = listen.listen().doing(format!("listening at {listen}"))?;
    let control = server::bind(&place.vm.control()).doing("opening the control socket")?;
    let deadline = Instant::now() + CONNECT_WAIT;
    loop {
        match wait(&listener, &control, deadline).doing("waiting for the primary")? {
            Turn::Primary => return listener.accept().doing("accepting the primary's connection"),
            Turn::Command => answer(place, &control)?,
            Turn::Nobody => {
                let text = format!("no primary has connected within {} s", CONNECT_WAIT.as_secs());
                let hint =
                    format!("run `firn protect NAME --to {listen}` where the VM runs, soon after");
                return Err(Failure::new(FailureKind::Interrupted, text).hint(hint));
            }
        }
    }
}

fn wait(listener: &Listener, control: &UnixListener, deadline: Instant) -> io::Result<Turn> {
    // Its closing is reported even if no event is requested.
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

/// Answers a command. One that disconnects, or sends nothing in time, is ignored. A stop is an
/// error.
fn answer(place: &Place<'_>, control: &UnixListener) -> Result<(), Failure> {
    let Ok((stream, _)) = control.accept() else { return Ok(()) };
    let Ok(request) = read(&stream) else { return Ok(()) };
    let is_stop = matches!(request, Request::Stop(_));
    let reply = match request {
        Request::Status => Reply::Done { facts: status(place) },
        Request::Stop(_) => {
            // Removed first, so that a client that gets the reply finds it removed.
            place.vm.remove().doing("removing the standby's directory")?;
            Reply::Done { facts: serde_json::Value::Null }
        }
        _ => {
            let text = "the standby waits for its primary: there is no VM yet";
            let hint = "run `firn protect` where the VM runs, to connect to the standby";
            Reply::Failed(Failure::new(FailureKind::Busy, text).hint(hint))
        }
    };
    // The client may have disconnected.
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
