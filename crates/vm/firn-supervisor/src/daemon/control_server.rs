//! The control socket's server: it turns requests on connections into events.
//!
//! One thread accepts connections, and one for each connection reads lines and turns them into
//! events. Only the event loop writes replies, so that two never mix. The loop does not wait for a
//! client that does not read its replies: such a client misses progress, and its connection is
//! closed when a last reply does not fit into its socket's buffer.

use std::collections::HashMap;
use std::fs;
use std::io::{self, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use crossbeam_channel::Sender;
use rustix::net::SendFlags;

use crate::daemon::decisions::{ClientId, SupervisorEvent};
use crate::records::control_protocol::{
    self, MessageError, REQUEST_BYTES_MAX, SupervisorReply, SupervisorRequest,
};
use crate::records::failure::{Failure, FailureKind};

/// The maximum number of connections; another one is refused.
const CLIENTS_MAX: usize = 32;

/// The connections whose requests may still be answered.
#[derive(Clone, Debug, Default)]
pub struct ClientConnections {
    streams: Arc<Mutex<HashMap<ClientId, UnixStream>>>,
}

impl ClientConnections {
    /// Sends a reply to a client. The connection of a client that has disconnected is removed.
    pub fn send_reply(&self, to: ClientId, reply: &SupervisorReply) {
        let mut streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(stream) = streams.get(&to) else { return };
        match send_whole(stream, &control_protocol::encode_message(reply)) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && !reply.is_last() => {}
            Err(_) => {
                let _ = stream.shutdown(std::net::Shutdown::Both);
                streams.remove(&to);
            }
        }
    }

    fn add_client(&self, id: ClientId, stream: &UnixStream) -> io::Result<()> {
        let stream = stream.try_clone()?;
        self.streams.lock().unwrap_or_else(PoisonError::into_inner).insert(id, stream);
        Ok(())
    }

    fn remove_client(&self, id: ClientId) {
        self.streams.lock().unwrap_or_else(PoisonError::into_inner).remove(&id);
    }
}

/// Sends a message completely or not at all: a message is far smaller than the socket's buffer.
fn send_whole(stream: &UnixStream, line: &[u8]) -> io::Result<()> {
    let sent = rustix::net::send(stream, line, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)?;
    match sent == line.len() {
        true => Ok(()),
        false => Err(io::ErrorKind::WriteZero.into()),
    }
}

/// Opens the control socket and serves it on threads of its own, until the process ends.
pub fn serve_control_socket(
    path: &Path,
    events: Sender<SupervisorEvent>,
) -> io::Result<ClientConnections> {
    let listener = bind_private(path)?;
    let clients = ClientConnections::default();
    let accepted = clients.clone();
    thread::Builder::new()
        .name("control".into())
        .spawn(move || accept_clients(&listener, &accepted, &events))?;
    Ok(clients)
}

/// Binds a socket with mode 0600. The directory is private already; this is for the case that a
/// user moves the socket.
pub(crate) fn bind_private(path: &Path) -> io::Result<UnixListener> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(path)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
    Ok(listener)
}

fn accept_clients(
    listener: &UnixListener,
    clients: &ClientConnections,
    events: &Sender<SupervisorEvent>,
) {
    let connected = Arc::new(AtomicUsize::new(0));
    for (number, stream) in listener.incoming().enumerate() {
        let Ok(stream) = stream else { continue };
        if connected.load(Ordering::Relaxed) >= CLIENTS_MAX {
            let busy =
                Failure::new(FailureKind::Busy, "too many commands are connected to this VM");
            let _ = send_whole(
                &stream,
                &control_protocol::encode_message(&SupervisorReply::Failed(busy)),
            );
            continue;
        }
        let connection = ClientConnection { id: ClientId(number as u64), clients: clients.clone() };
        connected.fetch_add(1, Ordering::Relaxed);
        let (events, count) = (events.clone(), Arc::clone(&connected));
        let served = thread::Builder::new().name("client".into()).spawn(move || {
            connection.serve_client(&stream, &events);
            count.fetch_sub(1, Ordering::Relaxed);
        });
        if served.is_err() {
            connected.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

struct ClientConnection {
    id: ClientId,
    clients: ClientConnections,
}

impl ClientConnection {
    fn serve_client(&self, stream: &UnixStream, events: &Sender<SupervisorEvent>) {
        if self.clients.add_client(self.id, stream).is_err() {
            return;
        }
        let mut from = BufReader::new(stream);
        while let Some(event) = self.read_event(&mut from) {
            if events.send(event).is_err() {
                break;
            }
        }
        self.clients.remove_client(self.id);
        let _ = events.send(SupervisorEvent::ClientGone(self.id));
    }

    /// Reads the next event; `None` when no more can arrive.
    fn read_event(&self, from: &mut impl io::BufRead) -> Option<SupervisorEvent> {
        match control_protocol::read_line(from, REQUEST_BYTES_MAX) {
            Ok(Some(line)) => Some(self.to_event(control_protocol::decode_message(&line))),
            Ok(None) | Err(MessageError::Io(_)) => None,
            Err(error) => {
                // The end of this line is not known, so nothing after it can be parsed.
                self.clients.send_reply(self.id, &SupervisorReply::Failed(error.into()));
                None
            }
        }
    }

    fn to_event(&self, request: Result<SupervisorRequest, MessageError>) -> SupervisorEvent {
        match request {
            Ok(request) => SupervisorEvent::Request(self.id, request),
            Err(error) => SupervisorEvent::Garbled(self.id, error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crossbeam_channel::Receiver;
    use std::io::{BufRead, Write};
    use std::time::Duration;

    use crate::records::control_protocol::OperationProgress;

    struct Session {
        _dir: tempfile::TempDir,
        clients: ClientConnections,
        events: Receiver<SupervisorEvent>,
        stream: UnixStream,
    }

    impl Session {
        fn open() -> Self {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("control.sock");
            let (sender, events) = crossbeam_channel::unbounded();
            let clients = serve_control_socket(&path, sender).unwrap();
            let stream = UnixStream::connect(&path).unwrap();
            stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
            Self { _dir: dir, clients, events, stream }
        }

        fn say(&mut self, text: &str) {
            self.stream.write_all(text.as_bytes()).unwrap();
        }

        fn event(&self) -> SupervisorEvent {
            self.events.recv_timeout(Duration::from_secs(10)).unwrap()
        }

        fn reply(&self) -> SupervisorReply {
            let mut from = BufReader::new(&self.stream);
            let line = control_protocol::read_line(&mut from, 1 << 20).unwrap().unwrap();
            control_protocol::decode_message(&line).unwrap()
        }
    }

    #[test]
    fn a_request_is_received_and_its_reply_sent() {
        let mut session = Session::open();
        session.say("{\"v\":1,\"request\":\"status\"}\n");
        let SupervisorEvent::Request(client, SupervisorRequest::Status) = session.event() else {
            panic!()
        };
        let reply = SupervisorReply::Done { facts: serde_json::json!({ "state": "running" }) };
        session.clients.send_reply(client, &reply);
        assert_eq!(session.reply(), reply);
    }

    #[test]
    fn a_bad_line_is_answered_and_the_next_one_understood() {
        let mut session = Session::open();
        session.say("make me a checkpoint\n{\"v\":1,\"request\":\"detach\"}\n");
        let SupervisorEvent::Garbled(client, failure) = session.event() else { panic!() };
        session.clients.send_reply(client, &SupervisorReply::Failed(failure));
        assert!(
            matches!(session.reply(), SupervisorReply::Failed(failure) if failure.chain[0] == "not a message")
        );
        assert_eq!(session.event(), SupervisorEvent::Request(client, SupervisorRequest::Detach));
    }

    #[test]
    fn a_line_without_end_is_cut_off() {
        let mut session = Session::open();
        session.say(&"x".repeat(REQUEST_BYTES_MAX + 1));
        assert!(matches!(session.reply(), SupervisorReply::Failed(_)));
        assert!(matches!(session.event(), SupervisorEvent::ClientGone(_)));
        let mut rest = String::new();
        assert_eq!(BufReader::new(&session.stream).read_line(&mut rest).unwrap_or(0), 0);
    }

    #[test]
    fn a_client_that_goes_away_is_noticed() {
        let session = Session::open();
        session.stream.shutdown(std::net::Shutdown::Both).unwrap();
        assert_eq!(session.event(), SupervisorEvent::ClientGone(ClientId(0)));
    }

    #[test]
    fn a_client_that_does_not_read_is_dropped_not_waited_for() {
        let mut session = Session::open();
        session.say("{\"v\":1,\"request\":\"watch\"}\n");
        let SupervisorEvent::Request(client, _) = session.event() else { panic!() };
        let long = SupervisorReply::Done { facts: serde_json::json!("x".repeat(100_000)) };
        for _ in 0..100 {
            session.clients.send_reply(client, &long);
        }
        assert_eq!(session.event(), SupervisorEvent::ClientGone(client));
    }

    #[test]
    fn a_slow_client_misses_progress_and_no_more() {
        let mut session = Session::open();
        session.say("{\"v\":1,\"request\":\"watch\"}\n");
        let SupervisorEvent::Request(client, _) = session.event() else { panic!() };
        let progress = OperationProgress::new("saving", 1, 2);
        for _ in 0..100_000 {
            session.clients.send_reply(client, &SupervisorReply::Progress(progress.clone()));
        }
        let mut from = BufReader::new(&session.stream);
        assert!(control_protocol::read_line(&mut from, 1000).unwrap().is_some());
        let stop = session.stream.try_clone().unwrap();
        let reader = thread::spawn(move || {
            let mut from = BufReader::new(stop);
            while let Ok(Some(line)) = control_protocol::read_line(&mut from, 1000) {
                if let Ok(SupervisorReply::Done { .. }) = control_protocol::decode_message(&line) {
                    return true;
                }
            }
            false
        });
        thread::sleep(Duration::from_millis(50));
        session
            .clients
            .send_reply(client, &SupervisorReply::Done { facts: serde_json::json!(null) });
        assert!(reader.join().unwrap());
    }

    #[test]
    fn the_socket_is_for_its_owner_alone() {
        let session = Session::open();
        let path = session._dir.path().join("control.sock");
        assert_eq!(fs::metadata(path).unwrap().permissions().mode() & 0o777, 0o600);
    }
}
