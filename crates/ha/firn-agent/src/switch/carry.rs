//! Carries frames between a port and a stream in QEMU's framing, or a device that reads and writes
//! a frame at once.

use std::io;

use firn_cluster::switch::{FRAME_BYTES_MAX, FrameDecoder, length_prefix};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, split};

use super::network::ConnectedPort;

/// Bytes that are read or written at once.
const PIECE_BYTES: usize = 128 << 10;

/// Carries frames until the stream ends or breaks the framing.
///
/// # Errors
/// If the stream breaks, ends within a frame, or breaks the framing.
pub(super) async fn carry_stream(
    stream: impl AsyncRead + AsyncWrite,
    port: &ConnectedPort,
) -> io::Result<()> {
    let (from, to) = split(stream);
    tokio::select! {
        done = read_frames(from, port) => done,
        done = write_frames(to, port) => done,
    }
}

async fn read_frames(mut from: impl AsyncRead + Unpin, port: &ConnectedPort) -> io::Result<()> {
    let (mut decoder, mut buffer) = (FrameDecoder::new(), vec![0; PIECE_BYTES]);
    let sleeps = port.count_suspends();
    loop {
        let count = from.read(&mut buffer).await?;
        port.check_suspends(sleeps)?;
        if count == 0 && decoder.is_between_frames() {
            return Ok(());
        }
        if count == 0 {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it ends within a frame"));
        }
        decoder
            .push_bytes(&buffer[..count], |frame| port.forward_frame(frame))
            .map_err(io::Error::other)?;
    }
}

async fn write_frames(mut to: impl AsyncWrite + Unpin, port: &ConnectedPort) -> io::Result<()> {
    let mut piece = Vec::new();
    let sleeps = port.count_suspends();
    loop {
        let frames = port.next_frames(PIECE_BYTES).await;
        port.check_suspends(sleeps)?;
        piece.clear();
        // No frame in the queue is longer than the framing allows.
        for (head, frame) in frames.iter().filter_map(|frame| Some((length_prefix(frame)?, frame)))
        {
            piece.extend_from_slice(&head);
            piece.extend_from_slice(frame);
        }
        to.write_all(&piece).await?;
        to.flush().await?;
        port.count_sent(frames.len());
    }
}

/// The same with a device of the kernel, which reads and writes one frame with each call.
///
/// # Errors
/// If the device can't be read from any more.
pub(super) async fn carry_device(
    device: impl AsyncRead + AsyncWrite,
    port: &ConnectedPort,
) -> io::Result<()> {
    let (mut from, mut to) = split(device);
    let read = async {
        let mut frame = vec![0; FRAME_BYTES_MAX];
        loop {
            let count = from.read(&mut frame).await?;
            port.forward_frame(&frame[..count]);
        }
    };
    let write = async {
        loop {
            let sleeps = port.count_suspends();
            for frame in port.next_frames(PIECE_BYTES).await {
                port.check_suspends(sleeps)?;
                match to.write(&frame).await {
                    Ok(_) => port.count_sent(1),
                    // The frame is too short or too long, or the device is down: as with a cable.
                    Err(_) => port.count_dropped(),
                }
            }
        }
    };
    tokio::select! {
        done = read => done,
        done = write => done,
    }
}
