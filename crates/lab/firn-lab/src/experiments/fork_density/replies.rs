//! The first replies of several guests.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow};

use crate::traffic::ConnectionProbes;

/// The pause between two checks of one guest.
const PAUSE: Duration = Duration::from_millis(40);

/// Runs `start`, which starts guests at these addresses, and waits until each of them replies to a
/// PING, at most for `limit` in all. Returns the value of `start`, and the seconds until the reply
/// of each guest, from the call on.
pub(super) fn await_first_replies<T>(
    addresses: &[SocketAddr],
    limit: Duration,
    start: impl FnOnce() -> Result<T>,
) -> Result<(T, Vec<f64>)> {
    let (since, has_failed) = (Instant::now(), AtomicBool::new(false));
    let await_reply = |address: SocketAddr| {
        let mut probes = ConnectionProbes::default();
        while since.elapsed() < limit && !has_failed.load(Ordering::Relaxed) {
            if probes.poll_reply(address) {
                return Some(since.elapsed().as_secs_f64());
            }
            thread::sleep(PAUSE);
        }
        None
    };
    thread::scope(|scope| {
        let await_reply = &await_reply;
        let spawn = |&address: &SocketAddr| {
            thread::Builder::new().spawn_scoped(scope, move || await_reply(address))
        };
        let clients = addresses.iter().map(spawn).collect::<Result<Vec<_>, _>>()?;
        let started = start().inspect_err(|_| has_failed.store(true, Ordering::Relaxed))?;
        let replies: Vec<_> =
            clients.into_iter().map(|client| client.join().unwrap_or(None)).collect();
        let silent = replies.iter().filter(|reply| reply.is_none()).count();
        let all: Option<Vec<f64>> = replies.into_iter().collect();
        let silence = || anyhow!("{silent} of {} guests do not reply", addresses.len());
        Ok((started, all.with_context(silence)?))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write as _;
    use std::net::TcpListener;

    #[test]
    fn each_reply_counts_from_the_start() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let start = || {
            thread::sleep(Duration::from_millis(50));
            let (mut first, _) = listener.accept()?;
            first.write_all(b"+PONG\r\n")?;
            Ok(first)
        };
        let (_, replies) = await_first_replies(&[address], Duration::from_secs(20), start).unwrap();
        assert!(replies[0] >= 0.05, "{replies:?}");
    }

    #[test]
    fn a_guest_without_a_reply_is_an_error() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let silent = await_first_replies(&[address], Duration::from_millis(100), || Ok(()));
        assert!(silent.unwrap_err().to_string().starts_with("1 of 1 guests"));
        let failed = await_first_replies(&[address], Duration::from_secs(60), || {
            Err::<(), _>(anyhow!("no memory"))
        });
        assert_eq!(failed.unwrap_err().to_string(), "no memory");
    }
}
