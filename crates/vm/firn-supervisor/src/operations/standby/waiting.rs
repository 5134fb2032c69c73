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

use firn_epochs::endpoint::{BackupEndpoint, BackupListener, EpochStream};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::daemon::control_server;
use crate::daemon::status::VmStatus;
use crate::operations::vm_start::StartContext;
use crate::records::control_protocol::{
    self, REQUEST_BYTES_MAX, SupervisorReply, SupervisorRequest,
};
use crate::records::failure::{Failure, FailureContext, FailureKind};

/// The maximum time that a primary may take to connect.
const CONNECT_WAIT: Duration = Duration::from_secs(300);
/// The maximum time that a command may take to send its request.
const REQUEST_WAIT: Duration = Duration::from_secs(1);

/// The event that ends one wait.
enum WaitEvent {
    Primary,
    Command,
    Nobody,
}

/// Accepts one connection of a primary, within the time limit, while the command that started the
/// standby waits, and unless another command stops the standby.
pub(super) fn accept_primary(
    context: &StartContext<'_>,
    listen: &BackupEndpoint,
) -> Result<EpochStream, Failure> {
    firn_fault::pass_point("standby.listen");
    let listener = listen.listen().while_doing(format!("listening at {listen}"))?;
    let control = control_server::bind_private(&context.vm.control_socket())
        .while_doing("opening the control socket")?;
    let deadline = Instant::now() + CONNECT_WAIT;
    loop {
        match wait_for_event(&listener, &control, deadline)
            .while_doing("waiting for the primary")?
        {
            WaitEvent::Primary => {
                return listener.accept().while_doing("accepting the primary's connection");
            }
            WaitEvent::Command => answer_command(context, &control)?,
            WaitEvent::Nobody => {
                let text = format!("no primary has connected within {} s", CONNECT_WAIT.as_secs());
                let hint =
                    format!("run `firn protect NAME --to {listen}` where the VM runs, soon after");
                return Err(Failure::new(FailureKind::Interrupted, text).with_hint(hint));
            }
        }
    }
}

fn wait_for_event(
    listener: &BackupListener,
    control: &UnixListener,
    deadline: Instant,
) -> io::Result<WaitEvent> {
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
        (true, _) => WaitEvent::Primary,
        (false, true) => WaitEvent::Command,
        (false, false) => WaitEvent::Nobody,
    })
}

/// Answers a command. One that disconnects, or sends nothing in time, is ignored. A stop is an
/// error.
fn answer_command(context: &StartContext<'_>, control: &UnixListener) -> Result<(), Failure> {
    let Ok((stream, _)) = control.accept() else { return Ok(()) };
    let Ok(request) = read_request(&stream) else { return Ok(()) };
    let is_stop = matches!(request, SupervisorRequest::Stop(_));
    let reply = match request {
        SupervisorRequest::Status => SupervisorReply::Done { facts: standby_status(context) },
        SupervisorRequest::Stop(_) => {
            // Removed first, so that a client that gets the reply finds it removed.
            context.vm.remove_dir().while_doing("removing the standby's directory")?;
            SupervisorReply::Done { facts: serde_json::Value::Null }
        }
        _ => {
            let text = "the standby waits for its primary: there is no VM yet";
            let hint = "run `firn protect` where the VM runs, to connect to the standby";
            SupervisorReply::Failed(Failure::new(FailureKind::Busy, text).with_hint(hint))
        }
    };
    // The client may have disconnected.
    let _ = control_protocol::write_message(&mut &stream, &reply);
    if is_stop {
        firn_fault::pass_point("standby.stopped");
    }
    match is_stop {
        true => Err(Failure::new(FailureKind::Interrupted, "it was stopped")),
        false => Ok(()),
    }
}

fn read_request(stream: &UnixStream) -> Result<SupervisorRequest, Failure> {
    stream.set_read_timeout(Some(REQUEST_WAIT)).while_doing("preparing to wait")?;
    stream.set_write_timeout(Some(REQUEST_WAIT)).while_doing("preparing to wait")?;
    let line = control_protocol::read_line(&mut BufReader::new(stream), REQUEST_BYTES_MAX)?;
    Ok(control_protocol::decode_message(&line.unwrap_or_default())?)
}

fn standby_status(context: &StartContext<'_>) -> serde_json::Value {
    let supervisor_pid = Some(std::process::id() as i32);
    let status =
        VmStatus { supervisor_pid, ..VmStatus::from_journal(&context.journal.current_journal()) };
    serde_json::to_value(status).unwrap_or_default()
}
