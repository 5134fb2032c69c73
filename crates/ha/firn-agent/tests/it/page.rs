//! The page at each entrance: what it shows, and which requests may act.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;

use firn_agent::{AgentConfig, DetectorTiming};
use firn_control::AgentPaths;

use crate::door::greet;
use crate::host::{Authority, Host, free_address, write_config};

/// The host `b`, whose page has one client, `ops`.
struct Site {
    authority: Authority,
    host: Host,
    metrics: SocketAddr,
}

impl Site {
    fn start(may_act: bool) -> Self {
        let (authority, metrics) = (Authority::new(), free_address());
        let dir = tempfile::Builder::new().prefix("firn-agent-").tempdir().unwrap();
        let (identity, peers) = (authority.issue(&["b"], |_| ()), [("a", free_address())]);
        let file =
            write_config(dir.path(), &authority.pem(), identity, "b", free_address(), &peers);
        let text = std::fs::read_to_string(&file).unwrap();
        let page = format!(
            "metrics = \"{metrics}\"\npage-clients = [\"ops\"]\npage-actions = {may_act}\n"
        );
        std::fs::write(&file, page + &text).unwrap();
        let config = AgentConfig::load(&file).unwrap();
        let host = Host::with_config(dir, config, DetectorTiming::default()).unwrap();
        Self { authority, host, metrics }
    }

    fn at_metrics(&self, request: &str) -> String {
        send(TcpStream::connect(self.metrics).unwrap(), request)
    }

    fn at_socket(&self, request: &str) -> String {
        let socket = AgentPaths::new(self.host.base.clone()).control_socket();
        send(UnixStream::connect(socket).unwrap(), request)
    }

    fn by_certificate(&self, name: &str, request: &str) -> String {
        let identity = self.authority.issue(&[name], |_| ());
        send(greet(self.host.listen, &self.authority, Some(identity)), request)
    }
}

/// Sends the head of a request, and perhaps a body; returns the whole answer.
fn send(mut stream: impl Read + Write, request: &str) -> String {
    let (head, body) = request.split_once("\n\n").unwrap_or((request, ""));
    let head = head.replace('\n', "\r\n");
    let rest = format!("connection: close\r\ncontent-length: {}\r\n\r\n{body}", body.len());
    stream.write_all(format!("{head}\r\n{rest}").as_bytes()).unwrap();
    let mut answer = Vec::new();
    // A TLS connection may end without a farewell.
    let _ = stream.read_to_end(&mut answer);
    String::from_utf8_lossy(&answer).into_owned()
}

fn token_of(page: &str) -> Option<&str> {
    let (_, rest) = page.split_once("<meta name=\"firn-token\" content=\"")?;
    rest.split_once('"').map(|(token, _)| token)
}

const PAGE: &str = "GET / HTTP/1.1\nhost: localhost:9415";

#[test]
fn the_page_is_served_on_loopback_and_shows_the_vms() {
    let site = Site::start(true);
    let page = site.at_metrics(PAGE);
    assert!(page.starts_with("HTTP/1.1 200"), "{page}");
    for text in ["<title>Firn at b</title>", "web", "no-store", "nosniff", "default-src 'none'"] {
        assert!(page.contains(text), "{text} is not in {page}");
    }
    assert_eq!(token_of(&page), None, "no action is possible there");
    for (part, kind) in [("style.css", "text/css"), ("script.js", "text/javascript")] {
        let text = site.at_metrics(&format!("GET /page/{part} HTTP/1.1\nhost: 127.0.0.1"));
        assert!(text.starts_with("HTTP/1.1 200") && text.contains(kind), "{text}");
        assert!(text.contains("content-security-policy"), "{text}");
    }
    let body = site.at_metrics("GET /page/body HTTP/1.1\nhost: [::1]:9415");
    assert!(body.contains("<main>") && !body.contains("<html"), "{body}");
    assert!(site.at_metrics("GET /page/other HTTP/1.1\nhost: localhost").contains("400"));
    // Another site's name that leads here. Prometheus may call it anything.
    for path in ["/", "/page/body", "/page/script.js"] {
        let other = site.at_metrics(&format!("GET {path} HTTP/1.1\nhost: evil.example"));
        assert!(!other.starts_with("HTTP/1.1 200"), "{other}");
        assert!(other.contains("is not shown under this name"), "{other}");
    }
    let metrics = site.at_metrics("GET /metrics HTTP/1.1\nhost: evil.example");
    assert!(metrics.starts_with("HTTP/1.1 200"), "{metrics}");
}

fn act(action: &str, token: &str, more: &str) -> String {
    let body = match action {
        "failover" => "{\"vm\":\"web\"}",
        "drain" => "{\"host\":\"b\",\"at_once\":1}",
        _ => "{\"vm\":\"none\",\"to\":\"a\"}",
    };
    format!(
        "POST /page/{action} HTTP/1.1\nhost: localhost\ncontent-type: application/json\n\
         x-firn-token: {token}{more}\n\n{body}"
    )
}

#[test]
fn an_action_needs_the_page_that_this_agent_has_served() {
    let site = Site::start(true);
    let page = site.at_socket(PAGE);
    let token = token_of(&page).unwrap().to_owned();
    assert_eq!(token.len(), 64);
    // These are done, and fail for what they request.
    let moved = site.at_socket(&act("move", &token, ""));
    assert!(moved.contains("no host that answers runs a VM none"), "{moved}");
    let drained = site.at_socket(&act("drain", &token, "\norigin: http://localhost"));
    assert!(drained.contains("web (running, not protected) in the way"), "{drained}");
    let run = site.at_socket(&act("failover", &token, ""));
    assert!(run.contains("no record of who runs what"), "{run}");
    let other = site.at_socket(&act("protect", &token, ""));
    assert!(other.contains("there is no POST /page/protect"), "{other}");
    // These are not.
    let wrong = [
        site.at_socket(&act("drain", &"0".repeat(64), "")),
        site.at_socket(&act("drain", "", "")),
        site.at_socket(&act("drain", &token, "\norigin: http://evil.example")),
        site.at_socket(&act("drain", &token, "\nsec-fetch-site: cross-site")),
        site.at_metrics(&act("drain", &token, "")),
        Site::start(true).at_socket(&act("drain", &token, "")),
        Site::start(false).at_socket(&act("drain", &token, "")),
    ];
    for answer in wrong {
        assert!(answer.starts_with("HTTP/1.1 500"), "{answer}");
        assert!(
            answer.contains("no drain: ") || answer.contains("actions of the page are off"),
            "{answer}"
        );
    }
    assert_eq!(token_of(&Site::start(false).at_socket(PAGE)), None);
}

/// A site that a user visits while the socket is forwarded can't use the API of commands.
#[test]
fn scripts_of_browsers_cannot_use_the_api_of_commands() {
    let site = Site::start(true);
    for header in ["origin: http://evil.example", "sec-fetch-site: cross-site", "origin: null"] {
        let request = format!(
            "POST /v1/drain HTTP/1.1\nhost: localhost\n{header}\n\n{{\"host\":\"b\",\"at_once\":1}}"
        );
        let answer = site.at_socket(&request);
        assert!(answer.contains("which no page in a browser may use"), "{answer}");
    }
    // A name of another site that leads here: not all browsers send more.
    let status = site.at_socket("GET /v1/status HTTP/1.1\nhost: evil.example:9415");
    assert!(status.contains("which no page in a browser may use"), "{status}");
    let status = site.at_socket("GET /v1/status HTTP/1.1\nhost: firn-agent");
    assert!(status.starts_with("HTTP/1.1 200"), "{status}");
    let metrics = site.at_socket("GET /metrics HTTP/1.1\nhost: x\nsec-fetch-site: none");
    assert!(metrics.starts_with("HTTP/1.1 200"), "{metrics}");
}

#[test]
fn a_client_of_the_page_gets_the_page_and_nothing_else() {
    let site = Site::start(true);
    let page = site.by_certificate("ops", "GET / HTTP/1.1\nhost: b:7415");
    assert!(page.starts_with("HTTP/1.1 200") && token_of(&page).is_some(), "{page}");
    let token = token_of(&page).unwrap().to_owned();
    let drained = site.by_certificate("ops", &act("drain", &token, ""));
    assert!(drained.contains("in the way"), "{drained}");
    for head in [
        "GET /v1/heartbeat HTTP/1.1",
        "GET /v1/vms HTTP/1.1",
        "POST /v1/drained HTTP/1.1",
        "POST /v1/members HTTP/1.1",
        "POST /v1/vms/web/member HTTP/1.1",
        "POST /v1/standbys/web HTTP/1.1",
        "POST /v1/networks/lan HTTP/1.1",
        "POST /v1/keep/web HTTP/1.1",
        "GET /metrics HTTP/1.1",
    ] {
        let answer = site.by_certificate("ops", &format!("{head}\nhost: b"));
        assert!(answer.starts_with("HTTP/1.1 400"), "{head}: {answer}");
        assert!(answer.contains("there is no "), "{head}: {answer}");
    }
    // A peer gets both.
    let page = site.by_certificate("a", "GET / HTTP/1.1\nhost: b");
    assert!(page.starts_with("HTTP/1.1 200"), "{page}");
    let vms = site.by_certificate("a", "GET /v1/vms HTTP/1.1\nhost: b");
    assert!(vms.starts_with("HTTP/1.1 200"), "{vms}");
    assert_eq!(site.host.refused("name"), 0);
}
