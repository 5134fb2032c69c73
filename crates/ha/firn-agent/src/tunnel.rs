//! Carries a stream of epochs: bytes from a socket of this host to a connection between hosts, and
//! back.
//!
//! ```text
//!   supervisor of web                                                 supervisor of its standby
//!     |  .agent/b/web.sock                                              ^  .agent/a/web.sock
//!     v                                                                 |
//!   agent of a  =============== TLS, both certificates ==============>  agent of b
//! ```
//!
//! The tunnel reads at one end only what the other end accepts: at most one buffer for each
//! direction waits in an agent. The end of one direction is passed on, and the other direction
//! continues as long as its own side does.
//!
//! | event | consequence |
//! |---|---|
//! | a supervisor ends, even with unread bytes | its last bytes arrive; bytes for it are dropped |
//! | its socket accepts no more, and it still sends | the same: its last bytes arrive |
//! | nothing can be written to the other host | bytes from there still go to the supervisor |
//! | the connection breaks, or its host is lost | both sides end at once |
//!
//! If a connection is closed with bytes unread, the kernel resets it, and bytes that are still
//! under way may be lost (RFC 2525, 2.17; tcp_close). So the tunnel reads a connection to its end,
//! or until it has been silent for 5 s.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use firn_control::HostHealth;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, split};
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::{Notify, watch};
use tokio::time::{sleep, timeout};

/// Bytes that are read at once, and the most that wait, in each direction.
const BUFFER_BYTES: usize = 256 << 10;

/// How long the other host may be silent before the tunnel closes a connection whose supervisor on
/// this host is gone.
const CLOSE_WAIT_MAX: Duration = Duration::from_secs(5);

/// Time between two checks whether a supervisor that has sent everything still has its socket open.
const HANGUP_POLL_INTERVAL: Duration = Duration::from_millis(100);

/// How long sent data may stay unacknowledged, or the other host silent, before the kernel ends the
/// connection. It counts also while the other end accepts nothing (tcp(7), `TCP_USER_TIMEOUT`), so
/// it is longer than a supervisor waits for that. An agent that loses its peer ends the connection
/// earlier.
const SILENCE_MAX: Duration = Duration::from_secs(30);

/// Why a tunnel has ended.
#[derive(Debug)]
pub enum TunnelEnd {
    /// Both sides had sent everything, or the supervisor on this host had, and is gone.
    Finished,
    /// One side broke.
    Broken(io::Error),
    /// The peer is lost.
    Lost,
}

/// Carries until both ends have ended, the connection has broken, or the peer is lost. Then both
/// are closed.
///
/// Subscribe to `peer` before the connection is opened: a loss since then counts.
pub async fn carry_stream(
    local: UnixStream,
    remote: impl AsyncRead + AsyncWrite,
    peer: watch::Receiver<HostHealth>,
) -> TunnelEnd {
    let socket = match local.as_fd().try_clone_to_owned() {
        Ok(socket) => socket,
        Err(error) => return TunnelEnd::Broken(error),
    };
    let ((local_in, local_out), (remote_in, remote_out)) = (local.into_split(), split(remote));
    let (sent, received) = (Notify::new(), Notify::new());
    let forth = async {
        let carried = send_to_host(local_in, remote_out).await;
        sent.notify_one();
        Ok(carried)
    };
    let both = async {
        let (carried, ()) =
            tokio::try_join!(forth, receive_from_host(remote_in, local_out, &received))?;
        carried
    };
    let has_left = async {
        sent.notified().await;
        wait_for_hangup(&socket).await;
        while timeout(CLOSE_WAIT_MAX, received.notified()).await.is_ok() {}
    };
    tokio::select! {
        done = both => done.map_or_else(TunnelEnd::Broken, |()| TunnelEnd::Finished),
        () = has_left => TunnelEnd::Finished,
        () = wait_for_loss(peer) => TunnelEnd::Lost,
    }
}

/// Sends the supervisor's bytes to the other host, up to their end, whatever ends them: bytes that
/// were sent before are read first.
async fn send_to_host(
    mut local: impl AsyncRead + Unpin,
    mut remote: impl AsyncWrite + Unpin,
) -> io::Result<()> {
    let mut buffer = vec![0; BUFFER_BYTES];
    while let Ok(count @ 1..) = local.read(&mut buffer).await {
        remote.write_all(&buffer[..count]).await?;
        remote.flush().await?;
    }
    remote.shutdown().await
}

/// Passes the other host's bytes to the supervisor, up to their end. Bytes that the supervisor does
/// not accept are dropped.
async fn receive_from_host(
    mut remote: impl AsyncRead + Unpin,
    mut local: impl AsyncWrite + Unpin,
    received: &Notify,
) -> io::Result<()> {
    let (mut buffer, mut is_taken) = (vec![0; BUFFER_BYTES], true);
    loop {
        let count = remote.read(&mut buffer).await?;
        received.notify_one();
        if count == 0 {
            // The supervisor may be gone.
            let _ = local.shutdown().await;
            return Ok(());
        }
        is_taken = is_taken && local.write_all(&buffer[..count]).await.is_ok();
    }
}

/// Returns when no process has the other end of a socket open any more. A process that has closed
/// one direction only still has it open: poll(2), `POLLHUP`.
async fn wait_for_hangup(socket: &OwnedFd) {
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    loop {
        let mut polled = [PollFd::new(socket, PollFlags::empty())];
        if poll(&mut polled, Some(&now)).is_ok() && polled[0].revents().contains(PollFlags::HUP) {
            return;
        }
        sleep(HANGUP_POLL_INTERVAL).await;
    }
}

/// Returns when the peer becomes lost, or has become lost since the subscription. Earlier health
/// does not count.
pub(crate) async fn wait_for_loss(mut peer: watch::Receiver<HostHealth>) {
    while peer.changed().await.is_ok() {
        if *peer.borrow_and_update() == HostHealth::Lost {
            return;
        }
    }
    std::future::pending().await
}

/// Configures a connection between hosts for low latency, and has the kernel end it when the other
/// host is gone.
///
/// # Errors
/// If the system refuses.
pub fn configure_socket(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, Duration::from_secs(2))?;
    sockopt::set_tcp_keepintvl(stream, Duration::from_secs(2))?;
    sockopt::set_tcp_keepcnt(stream, 3)?;
    Ok(sockopt::set_tcp_user_timeout(stream, SILENCE_MAX.as_millis() as u32)?)
}
