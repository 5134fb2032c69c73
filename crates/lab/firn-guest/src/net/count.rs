//! A counter: replies to each datagram with the next number, and gives each number once.
//!
//! ```text
//!   | question: u64 | ...                request
//!   | question: u64 | number: u64 |      reply; little-endian, counted from 1
//! ```
//!
//! The number is in this program's memory alone. A client that receives a lower number than before
//! has detected that the guest went back.

use std::net::{Ipv4Addr, UdpSocket};

use anyhow::{Context as _, Result};
use serde_json::json;

/// Replies for ever.
pub(super) fn serve_counts(port: u16) -> Result<()> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, port))
        .with_context(|| format!("cannot bind UDP port {port}"))?;
    println!("{}", json!({"ready": true, "port": port}));
    let (mut number, mut datagram) = (0_u64, [0; 2048]);
    loop {
        // Errors are those of earlier replies whose receiver has closed its socket.
        let Ok((bytes, from)) = socket.recv_from(&mut datagram) else { continue };
        let Some(question) = datagram[..bytes].first_chunk::<8>() else { continue };
        number += 1;
        let _ = socket.send_to(&[*question, number.to_le_bytes()].concat(), from);
    }
}
