//! Clients that are no peers are refused, counted, and cost nothing.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use firn_agent::DetectorTiming;
use firn_control::HostHealth;
use rcgen::ExtendedKeyUsagePurpose;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::version::{TLS12, TLS13};
use rustls::{
    ClientConfig, ClientConnection, RootCertStore, StreamOwned, SupportedProtocolVersion,
};

use crate::host::{Authority, Host, PATIENCE, eventually, free_address, pair};

pub type Stream = StreamOwned<ClientConnection, TcpStream>;

const HEARTBEAT: &str = "GET /v1/heartbeat HTTP/1.1\r\nhost: b\r\n";

/// Connects to the host `b` with this certificate, or without one.
pub fn greet(to: SocketAddr, authority: &Authority, identity: Option<[String; 2]>) -> Stream {
    greet_in(&TLS13, to, authority, identity)
}

/// The same, in this version of TLS only.
fn greet_in(
    version: &'static SupportedProtocolVersion,
    to: SocketAddr,
    authority: &Authority,
    identity: Option<[String; 2]>,
) -> Stream {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(authority.pem().as_bytes()).unwrap()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider);
    let config = config.with_protocol_versions(&[version]).unwrap().with_root_certificates(roots);
    let config = match identity {
        Some([certificate, key]) => {
            let chain = vec![CertificateDer::from_pem_slice(certificate.as_bytes()).unwrap()];
            let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap();
            config.with_client_auth_cert(chain, key).unwrap()
        }
        None => config.with_no_client_auth(),
    };
    let name = ServerName::try_from("b").unwrap();
    let socket = TcpStream::connect(to).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    StreamOwned::new(ClientConnection::new(Arc::new(config), name).unwrap(), socket)
}

fn request(stream: &mut Stream, head: &str) -> io::Result<String> {
    stream.write_all(head.as_bytes())?;
    stream.write_all(b"connection: close\r\n\r\n")?;
    let mut answer = Vec::new();
    match stream.read_to_end(&mut answer) {
        Err(error) if answer.is_empty() => Err(error),
        _ => Ok(String::from_utf8_lossy(&answer).into_owned()),
    }
}

/// A host `b` with the peers `a` and `c`, neither of which runs.
fn lonely() -> (Authority, Host) {
    let authority = Authority::new();
    let peers = [("a", free_address()), ("c", free_address())];
    let host = Host::start(&authority, "b", free_address(), &peers, DetectorTiming::default());
    (authority, host)
}

#[test]
fn a_configured_peer_is_accepted() {
    let (authority, b) = lonely();
    let mut stream = greet(b.listen, &authority, Some(authority.issue(&["a"], |_| ())));
    let answer = request(&mut stream, HEARTBEAT).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200") && answer.ends_with("{\"host\":\"b\"}"), "{answer}");
    let mut stream =
        greet(b.listen, &authority, Some(authority.issue(&["c", "c.example"], |_| ())));
    let answer = request(&mut stream, "GET /v1/nothing HTTP/1.1\r\nhost: b\r\n").unwrap();
    assert!(answer.starts_with("HTTP/1.1 400"), "{answer}");
    assert!(b.cluster().refused.is_empty());
}

#[test]
fn a_peer_without_a_configured_certificate_is_refused() {
    let (authority, b) = lonely();
    let stranger = Authority::new();
    let expired = |params: &mut rcgen::CertificateParams| {
        params.not_before = rcgen::date_time_ymd(2020, 1, 1);
        params.not_after = rcgen::date_time_ymd(2021, 1, 1);
    };
    let future = |params: &mut rcgen::CertificateParams| {
        params.not_before = rcgen::date_time_ymd(3000, 1, 1);
        params.not_after = rcgen::date_time_ymd(3001, 1, 1);
    };
    let server_only = |params: &mut rcgen::CertificateParams| {
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    };
    let strangers = [
        ("authority", Some(stranger.issue(&["a"], |_| ()))),
        ("name", Some(authority.issue(&["d"], |_| ()))),
        // This host itself is no peer of its own.
        ("name", Some(authority.issue(&["b"], |_| ()))),
        // It could be either.
        ("name", Some(authority.issue(&["a", "c"], |_| ()))),
        ("name", Some(authority.issue(&[], |_| ()))),
        ("no-certificate", None),
        ("time", Some(authority.issue(&["a"], expired))),
        ("time", Some(authority.issue(&["a"], future))),
        ("certificate", Some(authority.issue(&["a"], server_only))),
    ];
    for (reason, identity) in strangers {
        let before = b.refused(reason);
        let error = request(&mut greet(b.listen, &authority, identity), HEARTBEAT).unwrap_err();
        eventually(reason, || b.refused(reason) == before + 1);
        eprintln!("{reason}: {error}");
        assert!(error.to_string().starts_with("received fatal alert"), "{error}");
    }
    let counted: u64 = b.cluster().refused.values().sum();
    assert_eq!(counted, 9);
}

/// Docs/design/012 promises TLS 1.3: a peer with a good certificate is refused in TLS 1.2.
#[test]
fn a_peer_that_speaks_tls_1_2_is_refused() {
    let (authority, b) = lonely();
    let identity = || Some(authority.issue(&["a"], |_| ()));
    let error = request(&mut greet_in(&TLS12, b.listen, &authority, identity()), HEARTBEAT);
    let error = error.unwrap_err().to_string();
    assert!(error.contains("ProtocolVersion"), "{error}");
    eventually("it is counted", || b.refused("protocol") == 1);
    let answer = request(&mut greet(b.listen, &authority, identity()), HEARTBEAT).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
}

/// An agent sends nothing to a server that is not the intended host, whichever answers at its
/// address.
#[test]
fn a_host_connects_only_to_the_peer_that_it_named() {
    let authority = Authority::new();
    let stranger = Authority::new();
    let [at_a, at_b, at_c] = [free_address(), free_address(), free_address()];
    let peers = [("b", at_b), ("c", at_c)];
    let a = Host::start(&authority, "a", at_a, &peers, DetectorTiming::default());
    // At b's address there is c; at c's a server with a certificate of another authority.
    let _c = Host::start(&authority, "c", at_b, &[("a", at_a)], DetectorTiming::default());
    let _x = Host::start(&stranger, "c", at_c, &[("a", at_a)], DetectorTiming::default());
    for (peer, why) in [("b", "not valid for name"), ("c", "UnknownIssuer")] {
        let trouble = || a.peer(peer).trouble.unwrap_or_default();
        eventually(why, || trouble().contains(why));
        assert_ne!(a.peer(peer).health, HostHealth::Alive);
        let failure = a.protect("web", peer).unwrap_err();
        assert!(failure.to_string().contains("greeting by TLS"), "{failure}");
    }
    // Those two notice first, and close the connection.
    eventually("counted", || a.refused("mutual") > 0);
}

/// A host with a certificate that its peers would refuse does not even begin.
#[test]
fn an_unusable_certificate_is_reported() {
    let authority = Authority::new();
    let dir = tempfile::tempdir().unwrap();
    let cases = [
        (authority.issue(&["b"], |_| ()), "not valid for name"),
        (Authority::new().issue(&["a"], |_| ()), "UnknownIssuer"),
        (authority.issue(&["a"], |it| it.not_after = rcgen::date_time_ymd(2021, 1, 1)), "expired"),
        (
            [
                authority.issue(&["a"], |_| ())[0].clone(),
                authority.issue(&["a"], |_| ())[1].clone(),
            ],
            "does not belong to the key",
        ),
        ([String::new(), authority.issue(&["a"], |_| ())[1].clone()], "no certificate"),
        ([authority.issue(&["a"], |_| ())[0].clone(), "x".to_owned()], "key: "),
    ];
    for (identity, why) in cases {
        let file = crate::host::write_config(
            dir.path(),
            &authority.pem(),
            identity,
            "a",
            free_address(),
            &[],
        );
        let config = firn_agent::AgentConfig::load(&file).unwrap();
        let error = firn_agent::HostIdentity::load(&config).unwrap_err();
        assert!(error.to_string().contains(why), "{error}");
    }
}

#[test]
fn garbage_is_refused_and_the_peers_stay() {
    let [a, b] = pair();
    let long = "x".repeat(20_000);
    for garbage in
        ["GET / HTTP/1.1\r\n\r\n", "\0\0\0\0", "\u{16}\u{3}\u{1}\u{1}\u{0}garbage", &long]
    {
        let before = b.refused("protocol");
        let mut stream = TcpStream::connect(b.listen).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        // It may close before all has been written.
        let _ = stream.write_all(garbage.as_bytes());
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let _ = stream.read_to_end(&mut Vec::new());
        eventually("it is counted", || b.refused("protocol") == before + 1);
    }
    // Asked after all those connections.
    let since = Instant::now();
    eventually("it answers", || a.peer("b").heard_s.unwrap() < since.elapsed().as_secs_f64());
    assert_eq!(a.peer("b").health, HostHealth::Alive);
}

/// A client that sends nothing, or one byte from time to time, is disconnected.
#[test]
fn a_greeting_that_takes_for_ever_does_not() {
    let (_, b) = lonely();
    let mut silent = TcpStream::connect(b.listen).unwrap();
    let mut slow = TcpStream::connect(b.listen).unwrap();
    slow.set_nodelay(true).unwrap();
    let since = Instant::now();
    // The beginning of a handshake, a byte at a time.
    let mut bytes = [&[0x16, 3, 1, 2, 0, 1, 0, 1, 0xfc, 3, 3][..], &[0; 400]].concat().into_iter();
    while since.elapsed() < PATIENCE
        && bytes.next().is_some_and(|byte| slow.write_all(&[byte]).is_ok())
    {
        std::thread::sleep(Duration::from_millis(100));
    }
    silent.set_read_timeout(Some(PATIENCE)).unwrap();
    assert!(!matches!(silent.read(&mut [0]), Ok(1..)));
    eprintln!("both were closed after {:?}", since.elapsed());
    assert!(since.elapsed() > Duration::from_secs(4) && since.elapsed() < Duration::from_secs(30));
    eventually("counted", || b.refused("slow") == 2);
}

#[test]
fn a_crowd_at_the_door_keeps_no_peer_out() {
    let (authority, b) = lonely();
    let since = Instant::now();
    let crowd: Vec<TcpStream> = (0..300).map(|_| TcpStream::connect(b.listen).unwrap()).collect();
    let mut stream = greet(b.listen, &authority, Some(authority.issue(&["a"], |_| ())));
    let answer = request(&mut stream, HEARTBEAT).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    let (took, refused) = (since.elapsed(), b.cluster().refused);
    eprintln!("let in after {took:?}; refused: {refused:?}");
    // 64 at once; the others were disconnected before their time.
    assert!(refused["crowd"] >= 200, "{refused:?}");
    drop(crowd);
}

#[test]
fn a_peer_that_sends_too_much_receives_an_error() {
    let (authority, b) = lonely();
    let get = |head: &str| {
        let mut stream = greet(b.listen, &authority, Some(authority.issue(&["a"], |_| ())));
        request(&mut stream, head).unwrap()
    };
    let long = format!("{HEARTBEAT}x: {}\r\n", "x".repeat(20_000));
    assert!(get(&long).starts_with("HTTP/1.1 431"));
    let many: String = (0..60).map(|n| format!("x{n}: x\r\n")).collect();
    assert!(get(&format!("{HEARTBEAT}{many}")).starts_with("HTTP/1.1 431"));
    // Without a request to upgrade.
    let post = "POST /v1/standbys/web HTTP/1.1\r\nhost: b\r\ncontent-length: 0\r\n";
    assert!(get(post).contains("firn-epochs"));
    let strange = "POST /v1/standbys/..%2fx HTTP/1.1\r\nhost: b\r\nupgrade: firn-epochs\r\nconnection: upgrade\r\n";
    let mut stream = greet(b.listen, &authority, Some(authority.issue(&["a"], |_| ())));
    stream.write_all(format!("{strange}\r\n").as_bytes()).unwrap();
    let mut answer = [0; 12];
    stream.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"HTTP/1.1 400");
}

#[test]
fn the_socket_for_commands_has_bounds_too() {
    use std::os::unix::fs::PermissionsExt as _;
    use std::os::unix::net::UnixStream;
    let (_, b) = lonely();
    let path = b.dir.path().join("run/.agent/agent.sock");
    let mode =
        |path: &std::path::Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(&path), mode(path.parent().unwrap())), (0o600, 0o700));
    let ask = |request: &str| {
        let mut stream = UnixStream::connect(&path).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let _ = stream.write_all(request.as_bytes());
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        String::from_utf8_lossy(&answer).into_owned()
    };
    let post = |body: &str| {
        let length = body.len();
        ask(&format!(
            "POST /v1/protect HTTP/1.1\r\nhost: agent\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{body}"
        ))
    };
    assert!(post("{}").contains("missing field"));
    assert!(post("{\"vm\":\"../x\"}").contains("a VM name is"));
    assert!(post(&" ".repeat(70_000)).contains("length limit exceeded"));
    let metrics = ask("GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
    assert!(metrics.contains("firn_peer_up{peer=\"a\"} 0.0"), "{metrics}");
    // A body that never arrives.
    let since = Instant::now();
    let slow = ask(
        "POST /v1/protect HTTP/1.1\r\nhost: agent\r\nconnection: close\r\ncontent-length: 9\r\n\r\n",
    );
    assert!(slow.contains("does not come to its end"), "{slow}");
    assert!(since.elapsed() < Duration::from_secs(30));
}
