//! The echo server.

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, TcpListener, TcpStream, UdpSocket};
use std::thread;

use anyhow::{Context as _, Result};
use serde_json::json;

/// Echoes for ever.
pub(super) fn serve_echoes(port: u16) -> Result<()> {
    let any = (Ipv4Addr::UNSPECIFIED, port);
    let udp = UdpSocket::bind(any).with_context(|| format!("cannot bind UDP port {port}"))?;
    let tcp = TcpListener::bind(any).with_context(|| format!("cannot bind TCP port {port}"))?;
    println!("{}", json!({"ready": true, "port": port}));
    thread::spawn(move || echo_datagrams(&udp));
    for stream in tcp.incoming().flatten() {
        thread::spawn(move || echo_stream(stream));
    }
    Ok(())
}

fn echo_datagrams(socket: &UdpSocket) {
    let mut datagram = vec![0; 65536];
    loop {
        // Errors are those of earlier sends whose receiver has closed its socket.
        if let Ok((bytes, from)) = socket.recv_from(&mut datagram) {
            let _ = socket.send_to(&datagram[..bytes], from);
        }
    }
}

fn echo_stream(mut stream: TcpStream) {
    let _ = stream.set_nodelay(true);
    let mut chunk = vec![0; 65536];
    while let Ok(bytes @ 1..) = stream.read(&mut chunk) {
        if stream.write_all(&chunk[..bytes]).is_err() {
            return;
        }
    }
}
