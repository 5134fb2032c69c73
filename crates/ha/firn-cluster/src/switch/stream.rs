//! Frame stream: the framing of QEMU's `-netdev stream`, each frame behind its length.
//!
//! ```text
//!   | length: u32, big endian | frame ... | length | frame ... |
//! ```

use thiserror::Error;

/// The maximum length of a frame: what QEMU passes at a time, 64 KiB of payload offloaded to the
/// network and its headers.
pub const FRAME_BYTES_MAX: usize = 69_632;

const LENGTH_BYTES: usize = 4;

/// An invalid stream. The next frame in it can't be found, so the stream has to be closed.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error(
    "a frame of {bytes} bytes is announced at byte {at} of the stream; the most is {FRAME_BYTES_MAX}"
)]
pub struct FrameStreamError {
    /// The length that was read.
    pub bytes: u32,
    /// The position in the stream.
    pub at: u64,
}

/// The length prefix of a frame; `None` for a frame that is too long.
pub fn length_prefix(frame: &[u8]) -> Option<[u8; LENGTH_BYTES]> {
    let length = u32::try_from(frame.len()).ok()?;
    (frame.len() <= FRAME_BYTES_MAX).then(|| length.to_be_bytes())
}

/// Finds the frames in a stream that arrives in pieces of any size. Stores at most one frame.
#[derive(Clone, Debug, Default)]
pub struct FrameDecoder {
    /// The incomplete frame: its length, then its bytes.
    partial: Vec<u8>,
    at: u64,
    broken: Option<FrameStreamError>,
}

impl FrameDecoder {
    /// A decoder at the start of a stream.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes the next bytes, and passes each complete frame to `frame`. Empty frames are left out.
    /// After an error it takes no more bytes.
    pub fn push_bytes(
        &mut self,
        mut bytes: &[u8],
        mut frame: impl FnMut(&[u8]),
    ) -> Result<(), FrameStreamError> {
        loop {
            let missing = self.missing_bytes()?;
            if missing == 0 {
                self.emit_frame(&mut frame);
                continue;
            }
            if bytes.is_empty() {
                return Ok(());
            }
            let (now, rest) = bytes.split_at(missing.min(bytes.len()));
            self.partial.extend_from_slice(now);
            bytes = rest;
        }
    }

    /// Whether the stream may end here without splitting a frame.
    pub fn is_between_frames(&self) -> bool {
        self.partial.is_empty() && self.broken.is_none()
    }

    /// The number of bytes missing from the length, or else from the frame.
    fn missing_bytes(&mut self) -> Result<usize, FrameStreamError> {
        if let Some(broken) = self.broken {
            return Err(broken);
        }
        let Some(length) = self.partial.first_chunk::<LENGTH_BYTES>() else {
            return Ok(LENGTH_BYTES - self.partial.len());
        };
        let bytes = u32::from_be_bytes(*length);
        if bytes as usize > FRAME_BYTES_MAX {
            let broken = FrameStreamError { bytes, at: self.at };
            (self.broken, self.partial) = (Some(broken), Vec::new());
            return Err(broken);
        }
        Ok(LENGTH_BYTES + bytes as usize - self.partial.len())
    }

    fn emit_frame(&mut self, frame: &mut impl FnMut(&[u8])) {
        self.at += self.partial.len() as u64;
        if self.partial.len() > LENGTH_BYTES {
            frame(&self.partial[LENGTH_BYTES..]);
        }
        self.partial.clear();
    }
}
