//! Messages by plain TCP: a length and a name, a length and bytes; and back.

use std::collections::BTreeMap;
use std::sync::Arc;

use firn_membership::embedded::{MessageTransport, RaftServer};
use firn_membership::{MembershipError, MembershipFuture};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

/// To servers at these addresses.
pub struct Tcp {
    pub me: String,
    pub addresses: BTreeMap<String, String>,
}

impl MessageTransport for Tcp {
    fn call_server<'a>(&'a self, to: &'a str, message: Vec<u8>) -> MembershipFuture<'a, Vec<u8>> {
        Box::pin(async move {
            let unreachable =
                |error: std::io::Error| MembershipError::Unreachable(error.to_string());
            let unknown = |error: std::io::Error| MembershipError::Unknown(error.to_string());
            let mut stream = TcpStream::connect(&self.addresses[to]).await.map_err(unreachable)?;
            stream.set_nodelay(true).map_err(unreachable)?;
            send(&mut stream, self.me.as_bytes()).await.map_err(unreachable)?;
            send(&mut stream, &message).await.map_err(unknown)?;
            receive(&mut stream).await.map_err(unknown)
        })
    }
}

pub async fn serve(server: Arc<RaftServer>, listener: TcpListener) {
    while let Ok((stream, _)) = listener.accept().await {
        tokio::spawn(answer(Arc::clone(&server), stream));
    }
}

async fn answer(server: Arc<RaftServer>, mut stream: TcpStream) -> std::io::Result<()> {
    let from = String::from_utf8_lossy(&receive(&mut stream).await?).into_owned();
    let message = receive(&mut stream).await?;
    // The test itself has no name.
    let from = (!from.is_empty()).then_some(from.as_str());
    send(&mut stream, &server.answer_message(from, &message).await).await
}

async fn send(stream: &mut TcpStream, bytes: &[u8]) -> std::io::Result<()> {
    stream.write_u32(bytes.len() as u32).await?;
    stream.write_all(bytes).await
}

async fn receive(stream: &mut TcpStream) -> std::io::Result<Vec<u8>> {
    let len = stream.read_u32().await?;
    // Agents accept 64 KiB at most.
    assert!(len <= 64 << 10, "a message of {len} bytes");
    let mut bytes = vec![0; len as usize];
    stream.read_exact(&mut bytes).await?;
    Ok(bytes)
}
