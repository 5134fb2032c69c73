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
//! direction is passed on as such, and the other direction goes on as long as its own side is there. Anything else, also a
//! connection that ends without saying so, ends both at once: a supervisor sees what it would see if its own connection had broken.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, split};
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::{Notify, watch};
use tokio::time::sleep;

use crate::detect::Health;

/// What is read at once, and waits at most, in each direction.
const BUFFER_BYTES: usize = 256 << 10;

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

/// Carries until one of the ends has ended, or the peer is lost. Then both are closed.
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
    let said = Notify::new();
    let forth = async {
        pass(near_in, far_out).await?;
        said.notify_one();
        io::Result::Ok(())
    };
    let has_left = async {
        said.notified().await;
        gone(&socket).await
    };
    tokio::select! {
        done = async { tokio::try_join!(forth, pass(far_in, near_out)) } => match done {
            Ok(_) => End::Said,
            Err(error) => End::Broken(error),
        },
        () = has_left => End::Said,
        () = loss(peer) => End::Lost,
    }
}

/// One direction, up to its end, which is passed on.
async fn pass(mut from: impl AsyncRead + Unpin, mut to: impl AsyncWrite + Unpin) -> io::Result<()> {
    let mut buffer = vec![0; BUFFER_BYTES];
    loop {
        let count = from.read(&mut buffer).await?;
        if count == 0 {
            return to.shutdown().await;
        }
        to.write_all(&buffer[..count]).await?;
        to.flush().await?;
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

/// Returns when the peer becomes lost. What was believed before does not count: it has just been reached.
async fn loss(mut peer: watch::Receiver<Health>) {
    peer.mark_unchanged();
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
