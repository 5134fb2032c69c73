//! Carrying a stream of epochs: bytes from a socket of this host to a connection between hosts, and back.
//!
//! ```text
//!   supervisor of web                                                                      supervisor of its standby
//!     |  .agent/b/web.sock                                                                   ^  .agent/a/web.sock
//!     v                                                                                      |
//!   agent of a  ========================= TLS, both certificates ========================>  agent of b
//! ```
//!
//! What is not taken at one end is not read at the other: no more than one buffer for each direction waits in an agent. An end of one
//! direction is passed on as such, and the other direction goes on as long as its own side is there.
//!
//! | what happens | what follows |
//! |---|---|
//! | a supervisor ends, also with bytes unread | what it said is carried on to its end, what comes for it is taken and dropped |
//! | its socket takes no more, and it still speaks | the same: its last words get through |
//! | nothing can be written to the other host | what comes from there is still given to the supervisor |
//! | the connection ends without saying so, or its host is lost | both sides end at once |
//!
//! A connection that is closed with something unread is reset, and what is still on its way may be lost by that (RFC 2525, 2.17; the
//! kernel does so, tcp_close). So it is read to its end, or until it has been silent for 5 s.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, split};
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::{Notify, watch};
use tokio::time::{sleep, timeout};

use crate::detect::Health;

/// What is read at once, and waits at most, in each direction.
const BUFFER_BYTES: usize = 256 << 10;

/// How long the other host may be silent before a connection is closed that nobody listens to any more here.
const LINGER: Duration = Duration::from_secs(5);

/// How often it is looked whether a supervisor that has said all is still there to hear.
const GONE_EVERY: Duration = Duration::from_millis(100);

/// How long what was sent may stay without an answer, or the other host silent, before the kernel gives the connection up. It counts
/// also while the other end takes nothing (tcp(7), `TCP_USER_TIMEOUT`), so it is longer than a supervisor waits for that. An agent
/// that loses its peer ends the connection earlier.
const SILENCE_MAX: Duration = Duration::from_secs(30);

/// Why nothing is carried any more.
#[derive(Debug)]
pub enum End {
    /// Both sides had said all, or the near one had and is gone.
    Said,
    /// One side broke.
    Broken(io::Error),
    /// The peer counts as lost.
    Lost,
}

/// Carries until both ends have ended, the connection has broken, or the peer is lost. Then both are closed.
///
/// `peer` is to be had before the connection is made: a loss since then counts.
pub async fn carry(
    near: UnixStream,
    far: impl AsyncRead + AsyncWrite,
    peer: watch::Receiver<Health>,
) -> End {
    let socket = match near.as_fd().try_clone_to_owned() {
        Ok(socket) => socket,
        Err(error) => return End::Broken(error),
    };
    let ((near_in, near_out), (far_in, far_out)) = (near.into_split(), split(far));
    let (said, heard) = (Notify::new(), Notify::new());
    let forth = async {
        let carried = send(near_in, far_out).await;
        said.notify_one();
        Ok(carried)
    };
    let both = async {
        let (carried, ()) = tokio::try_join!(forth, receive(far_in, near_out, &heard))?;
        carried
    };
    let has_left = async {
        said.notified().await;
        gone(&socket).await;
        while timeout(LINGER, heard.notified()).await.is_ok() {}
    };
    tokio::select! {
        done = both => done.map_or_else(End::Broken, |()| End::Said),
        () = has_left => End::Said,
        () = loss(peer) => End::Lost,
    }
}

/// What the supervisor says, up to its end, however that comes: all that it had said before is read first.
async fn send(
    mut near: impl AsyncRead + Unpin,
    mut far: impl AsyncWrite + Unpin,
) -> io::Result<()> {
    let mut buffer = vec![0; BUFFER_BYTES];
    while let Ok(count @ 1..) = near.read(&mut buffer).await {
        far.write_all(&buffer[..count]).await?;
        far.flush().await?;
    }
    far.shutdown().await
}

/// What the other host says, up to its end. What the supervisor does not take is dropped.
async fn receive(
    mut far: impl AsyncRead + Unpin,
    mut near: impl AsyncWrite + Unpin,
    heard: &Notify,
) -> io::Result<()> {
    let (mut buffer, mut is_taken) = (vec![0; BUFFER_BYTES], true);
    loop {
        let count = far.read(&mut buffer).await?;
        heard.notify_one();
        if count == 0 {
            // It may have gone.
            let _ = near.shutdown().await;
            return Ok(());
        }
        is_taken = is_taken && near.write_all(&buffer[..count]).await.is_ok();
    }
}

/// Returns when nobody has the other end of a socket any more. Who has only ended one direction still has it: poll(2), `POLLHUP`.
async fn gone(socket: &OwnedFd) {
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    loop {
        let mut polled = [PollFd::new(socket, PollFlags::empty())];
        if poll(&mut polled, Some(&now)).is_ok() && polled[0].revents().contains(PollFlags::HUP) {
            return;
        }
        sleep(GONE_EVERY).await;
    }
}

/// Returns when the peer becomes lost, or has since this was to be watched. What was believed before does not count.
pub(crate) async fn loss(mut peer: watch::Receiver<Health>) {
    while peer.changed().await.is_ok() {
        if *peer.borrow_and_update() == Health::Lost {
            return;
        }
    }
    std::future::pending().await
}

/// Makes a connection between hosts quick, and has the kernel give it up when the other host is gone.
///
/// # Errors
/// If the system refuses.
pub fn prepare(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, Duration::from_secs(2))?;
    sockopt::set_tcp_keepintvl(stream, Duration::from_secs(2))?;
    sockopt::set_tcp_keepcnt(stream, 3)?;
    Ok(sockopt::set_tcp_user_timeout(stream, SILENCE_MAX.as_millis() as u32)?)
}
