//! Carries frames between a port and a stream in QEMU's framing, or a device that reads and writes
//! a frame at once.

use std::io;

use firn_cluster::switch::{Decoder, FRAME_BYTES_MAX, head};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, split};

use super::network::Joined;

/// Bytes that are read or written at once.
const PIECE_BYTES: usize = 128 << 10;

/// Carries frames until the stream ends or breaks the framing.
///
/// # Errors
/// If the stream breaks, ends within a frame, or breaks the framing.
pub(super) async fn stream(stream: impl AsyncRead + AsyncWrite, port: &Joined) -> io::Result<()> {
    let (from, to) = split(stream);
    tokio::select! {
        done = read(from, port) => done,
        done = write(to, port) => done,
    }
}

async fn read(mut from: impl AsyncRead + Unpin, port: &Joined) -> io::Result<()> {
    let (mut decoder, mut buffer) = (Decoder::new(), vec![0; PIECE_BYTES]);
    let sleeps = port.sleeps();
    loop {
        let count = from.read(&mut buffer).await?;
        port.check(sleeps)?;
        if count == 0 && decoder.is_between_frames() {
            return Ok(());
        }
        if count == 0 {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it ends within a frame"));
        }
        decoder.push(&buffer[..count], |frame| port.came(frame)).map_err(io::Error::other)?;
    }
}

async fn write(mut to: impl AsyncWrite + Unpin, port: &Joined) -> io::Result<()> {
    let mut piece = Vec::new();
    let sleeps = port.sleeps();
    loop {
        let frames = port.next(PIECE_BYTES).await;
        port.check(sleeps)?;
        piece.clear();
        // No frame in the queue is longer than the framing allows.
        for (head, frame) in frames.iter().filter_map(|frame| Some((head(frame)?, frame))) {
            piece.extend_from_slice(&head);
            piece.extend_from_slice(frame);
        }
        to.write_all(&piece).await?;
        to.flush().await?;
        port.left(frames.len());
    }
}

/// The same with a device of the kernel, which reads and writes one frame with each call.
///
/// # Errors
/// If the device can't be read from any more.
pub(super) async fn device(device: impl AsyncRead + AsyncWrite, port: &Joined) -> io::Result<()> {
    let (mut from, mut to) = split(device);
    let read = async {
        let mut frame = vec![0; FRAME_BYTES_MAX];
        loop {
            let count = from.read(&mut frame).await?;
            port.came(&frame[..count]);
        }
    };
    let write = async {
        loop {
            let sleeps = port.sleeps();
            for frame in port.next(PIECE_BYTES).await {
                port.check(sleeps)?;
                match to.write(&frame).await {
                    Ok(_) => port.left(1),
                    // The frame is too short or too long, or the device is down: as with a cable.
                    Err(_) => port.lost(),
                }
            }
        }
    };
    tokio::select! {
        done = read => done,
        done = write => done,
    }
}
