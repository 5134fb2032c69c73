//! Card socket: where a port gets the frames that a VM sends.
//!
//! ```text
//!   Pair     -netdev firn:  QEMU <==== a pair of datagram sockets ====> port          both directions
//!
//!   Filter   any netdev:    card --> filter "captured" == stream ==> port
//!                                                                     | output buffer
//!                           netdev <-- filter "released" <== stream ==+               what the VM sends
//!                           netdev ----------------------------------------> card     what it receives
//! ```
//!
//! A filter writes each frame to its socket before QEMU does anything else (`filter_send`,
//! net/filter-mirror.c): while the socket is full, QEMU's main loop, its monitor and the vCPUs'
//! devices wait. So a port reads this socket at all times, and drops frames at its bound, as a
//! switch does. If no process reads, QEMU drops the frames: it does not transmit them.
//!
//! With a tap, a frame is behind the header that virtio has for it (`vnet_hdr`: 10 or 12 bytes with
//! checksum and segmentation offloads). Both filters handle header and frame as one, and so does the
//! port. The option `vnet_hdr_support` of filters would only add the length of the header, which
//! nothing here needs.

use std::io::{self, ErrorKind, Read};
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use firn_cluster::output::InputFlow;
use firn_cluster::switch::FrameDecoder;

/// A card's socket.
#[derive(Debug)]
pub(crate) enum CardSocket {
    /// One end of a pair of sockets; a datagram is a frame.
    Pair(UnixDatagram),
    /// The sockets of two filters.
    Filter(FilterStream),
}

impl CardSocket {
    /// Gives the VM a frame. `false` if it can't be given one now, or with filters: it receives
    /// frames without Firn.
    pub(crate) fn give_frame(&self, frame: &[u8]) -> bool {
        match self {
            Self::Pair(socket) => socket.send(frame).is_ok(),
            Self::Filter(_) => false,
        }
    }

    /// Whether to wait for frames while the output buffer accepts them, or does not.
    pub(crate) fn is_read_at(&self, flow: InputFlow) -> bool {
        match self {
            Self::Pair(_) => flow == InputFlow::Go,
            Self::Filter(filter) => !filter.is_lost.load(Ordering::Relaxed),
        }
    }
}

impl AsFd for CardSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Pair(socket) => socket.as_fd(),
            Self::Filter(filter) => filter.captured.as_fd(),
        }
    }
}

/// The connections to the two filters of a card.
#[derive(Debug)]
pub(crate) struct FilterStream {
    captured: UnixStream,
    decoder: Mutex<FrameDecoder>,
    /// A second handle of the connection to the other filter, to learn when all of it was read.
    released: UnixStream,
    /// The filter has closed its socket, or has written what are no frames.
    is_lost: AtomicBool,
    dropped_frames: AtomicU64,
}

impl FilterStream {
    pub(crate) fn new(captured: UnixStream, released: UnixStream) -> Self {
        let decoder = Mutex::new(FrameDecoder::new());
        let (is_lost, dropped_frames) = Default::default();
        Self { captured, decoder, released, is_lost, dropped_frames }
    }

    /// Reads what is there, up to the size of `buffer`, and gives complete frames to `take`, which
    /// returns whether it took the frame. Returns whether there may be more to read.
    pub(crate) fn read_frames(
        &self,
        buffer: &mut [u8],
        mut take: impl FnMut(&[u8]) -> bool,
    ) -> bool {
        if self.is_lost.load(Ordering::Relaxed) {
            return false;
        }
        let bytes = match (&self.captured).read(buffer) {
            Ok(0) => return self.note_loss("it is closed"),
            Ok(bytes) => bytes,
            Err(error) if error.kind() == ErrorKind::Interrupted => return true,
            Err(error) if error.kind() == ErrorKind::WouldBlock => return false,
            Err(error) => return self.note_loss(&error.to_string()),
        };
        let mut decoder = self.decoder.lock().unwrap_or_else(PoisonError::into_inner);
        let decoded = decoder.push_bytes(&buffer[..bytes], |frame| {
            if !take(frame) {
                self.count_drop();
            }
        });
        drop(decoder);
        match decoded {
            Ok(()) => true,
            Err(error) => self.note_loss(&error.to_string()),
        }
    }

    /// Whether nothing is left to read.
    pub(crate) fn is_read(&self) -> bool {
        self.is_lost.load(Ordering::Relaxed)
            || rustix::io::ioctl_fionread(&self.captured).is_ok_and(|bytes| bytes == 0)
    }

    /// Ends the stream to the second filter, and waits until that has read it to its end, because
    /// QEMU then closes its socket. Returns whether it has.
    pub(crate) fn finish(&self, limit: Duration) -> bool {
        let wait = || -> io::Result<bool> {
            self.released.shutdown(Shutdown::Write)?;
            self.released.set_nonblocking(false)?;
            self.released.set_read_timeout(Some(limit.max(Duration::from_millis(1))))?;
            Ok((&self.released).read(&mut [0; 1])? == 0)
        };
        wait().unwrap_or(false)
    }

    fn note_loss(&self, why: &str) -> bool {
        self.is_lost.store(true, Ordering::Relaxed);
        tracing::warn!("a filter of a network card gives no more frames: {why}");
        false
    }

    fn count_drop(&self) {
        if self.dropped_frames.fetch_add(1, Ordering::Relaxed) == 0 {
            tracing::warn!("the output buffer of a network card is full: it drops frames");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn filter() -> (UnixStream, FilterStream, UnixStream) {
        let (qemu_out, captured) = UnixStream::pair().unwrap();
        let (released, qemu_in) = UnixStream::pair().unwrap();
        captured.set_nonblocking(true).unwrap();
        (qemu_out, FilterStream::new(captured, released), qemu_in)
    }

    fn read(filter: &FilterStream, takes: bool) -> Vec<Vec<u8>> {
        let (mut frames, mut buffer) = (Vec::new(), [0; 7]);
        while filter.read_frames(&mut buffer, |frame| {
            frames.push(frame.to_vec());
            takes
        }) {}
        frames
    }

    #[test]
    fn frames_come_whole_and_in_order() {
        let (mut qemu, filter, _in) = filter();
        qemu.write_all(b"\0\0\0\x02ab\0\0\0\x03cd").unwrap();
        assert_eq!(read(&filter, true), [b"ab"]);
        assert!(filter.is_read());
        qemu.write_all(b"e").unwrap();
        assert!(!filter.is_read());
        assert_eq!(read(&filter, true), [b"cde"]);
    }

    #[test]
    fn a_full_buffer_drops_and_reads_on() {
        let (mut qemu, filter, _in) = filter();
        qemu.write_all(b"\0\0\0\x02ab\0\0\0\x02cd").unwrap();
        assert_eq!(read(&filter, false).len(), 2);
        assert_eq!(filter.dropped_frames.load(Ordering::Relaxed), 2);
        assert!(filter.is_read());
    }

    #[test]
    fn a_lost_filter_is_not_polled() {
        let (qemu, filter, _in) = filter();
        drop(qemu);
        assert_eq!(read(&filter, true).len(), 0);
        assert!(!CardSocket::Filter(filter).is_read_at(InputFlow::Go));
        let (mut qemu, filter, _in) = self::filter();
        qemu.write_all(&[0xff; 8]).unwrap();
        assert_eq!(read(&filter, true).len(), 0);
        assert!(!CardSocket::Filter(filter).is_read_at(InputFlow::Go));
    }

    #[test]
    fn the_end_waits_for_what_was_not_read() {
        let (_out, filter, mut qemu) = filter();
        (&filter.released).write_all(b"frame").unwrap();
        assert!(!filter.finish(Duration::from_millis(20)), "it is not read");
        let reader = std::thread::spawn(move || {
            let mut all = Vec::new();
            qemu.read_to_end(&mut all).unwrap();
            all
        });
        assert!(filter.finish(Duration::from_secs(20)));
        assert_eq!(reader.join().unwrap(), b"frame");
    }
}
