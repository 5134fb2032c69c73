//! A peer that begins an answer, and does not continue: no task waits for it forever, and the VM's
//! name is free again.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use firn_agent::DetectorTiming;
use firn_control::api::ProtectVmRequest;
use firn_control::client;
use firn_supervisor::{Failure, VmName};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ServerConfig, ServerConnection, StreamOwned};

use crate::host::{Authority, Host, free_address, name};

/// Halves of answers, each sent once; later requests are refused.
const HALVES: [&str; 3] = [
    "HTTP/1.1 101 Swit",
    "HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: firn-ep",
    "HTTP/1.1 409 Conflict\r\ncontent-length: 100\r\n\r\n{",
];
const HEARTBEAT: &str = "HTTP/1.1 200 OK\r\ncontent-length: 12\r\n\r\n{\"host\":\"b\"}";
const REFUSAL: &str = "HTTP/1.1 409 Conflict\r\ncontent-length: 0\r\n\r\n";

/// How long the agent waits, and the limit for that.
const WAIT: Duration = Duration::from_secs(30);

/// The host `b`, of which only its certificate and its heartbeats exist.
fn half_a_peer(authority: &Authority) -> SocketAddr {
    let [certificate, key] = authority.issue(&["b"], |_| ());
    let chain = vec![CertificateDer::from_pem_slice(certificate.as_bytes()).unwrap()];
    let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ServerConfig::builder_with_provider(provider);
    let config = config.with_safe_default_protocol_versions().unwrap().with_no_client_auth();
    let config = Arc::new(config.with_single_cert(chain, key).unwrap());
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let left = Arc::new(Mutex::new(HALVES.to_vec()));
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let (config, left) = (Arc::clone(&config), Arc::clone(&left));
            thread::spawn(move || answer(config, stream, &left));
        }
    });
    address
}

fn answer(config: Arc<ServerConfig>, stream: TcpStream, left: &Mutex<Vec<&str>>) {
    let mut stream = StreamOwned::new(ServerConnection::new(config).unwrap(), stream);
    while let Some(head) = head(&mut stream) {
        let answer = match head.starts_with(b"POST") {
            true => left.lock().unwrap().pop().unwrap_or(REFUSAL),
            false => HEARTBEAT,
        };
        // The agent may have given up by now.
        let _ = stream.write_all(answer.as_bytes());
    }
}

fn head(stream: &mut impl Read) -> Option<Vec<u8>> {
    let (mut head, mut byte) = (Vec::new(), [0]);
    while !head.ends_with(b"\r\n\r\n") {
        stream.read_exact(&mut byte).ok()?;
        head.push(byte[0]);
    }
    Some(head)
}

#[test]
fn half_an_answer_is_not_waited_for() {
    let authority = Authority::new();
    let at_b = half_a_peer(&authority);
    let a = Host::start(&authority, "a", free_address(), &[("b", at_b)], DetectorTiming::default());
    let protect = |vm: String| {
        let base = a.base.clone();
        let wanted = ProtectVmRequest {
            vm: VmName::new(vm).unwrap(),
            backup: name("b"),
            interval_ms: 100,
            predicts: true,
        };
        thread::spawn(move || client::protect_vm(&base, &wanted, &mut |_| ()).unwrap_err())
    };
    let since = Instant::now();
    let asked: Vec<_> = (0..HALVES.len()).map(|n| protect(format!("vm{n}"))).collect();
    let failures: Vec<Failure> = asked.into_iter().map(|it| it.join().unwrap()).collect();
    let took = since.elapsed();
    assert!(took < 2 * WAIT, "{took:?}");
    for failure in failures {
        assert!(failure.to_string().contains("not answered within 30 s"), "{failure}");
    }
    // The names can be used again.
    for n in 0..HALVES.len() {
        let failure = protect(format!("vm{n}")).join().unwrap();
        assert!(failure.to_string().contains("409"), "{failure}");
    }
}
