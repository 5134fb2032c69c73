//! A connection to a peer: by TLS, and only to the intended host.

use std::io;
use std::time::Duration;

use bytes::Bytes;
use firn_control::api::{EPOCHS, FRAMES, NETWORKS, STANDBYS};
use firn_control::{HostName, http_client};
use firn_supervisor::{Failure, FailureContext as _, FailureKind, NetworkName, VmName};
use http_body_util::Full;
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper::header::{CONNECTION, HOST, HeaderValue, UPGRADE};
use hyper::upgrade::Upgraded;
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::TokioIo;
use serde::de::DeserializeOwned;
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use crate::identity::HostIdentity;
use crate::tunnel;

/// Maximum time to connect to a peer.
const CONNECT_WAIT: Duration = Duration::from_secs(3);

/// Maximum time to start a standby, up to the last byte of the answer. An older standby of that
/// name may have to be stopped first.
const STANDBY_WAIT: Duration = Duration::from_secs(30);

/// A connection that accepts requests.
#[derive(Debug)]
pub struct PeerConnection {
    name: HostName,
    sender: SendRequest<Full<Bytes>>,
    /// Ends with the connection.
    connection: JoinHandle<()>,
}

impl PeerConnection {
    /// Connects to a peer.
    ///
    /// # Errors
    /// If no host answers, or another host than the intended one.
    pub async fn open(
        identity: &HostIdentity,
        name: &HostName,
        address: &str,
    ) -> Result<Self, Failure> {
        let doing = || format!("connecting to host {name} at {address}");
        let slow = |_| {
            let text = format!("it has not answered within {} s", CONNECT_WAIT.as_secs());
            Failure::new(FailureKind::Other, text).while_doing(doing())
        };
        timeout(CONNECT_WAIT, connect_peer(identity, name, address))
            .await
            .map_err(slow)?
            .map_err(|failure| failure.while_doing(doing()))
    }

    /// Requests JSON.
    ///
    /// # Errors
    /// The failure that the peer reports, or that there is no answer.
    pub async fn get_json<T: DeserializeOwned>(&mut self, path: &str) -> Result<T, Failure> {
        let request =
            http_client::build_request(Method::GET, self.name.as_str(), path, None::<&()>)?;
        let doing = format!("asking host {}", self.name);
        let answer = self.sender.send_request(request).await.while_doing(&doing)?;
        http_client::read_answer(answer).await.map_err(|failure| failure.while_doing(doing))
    }

    /// Waits until the peer has closed the connection, or it has failed.
    pub async fn wait_closed(&mut self) {
        let _ = (&mut self.connection).await;
    }

    /// Whether it accepts no requests any more.
    pub fn is_closed(&self) -> bool {
        self.sender.is_closed()
    }

    /// Sends bytes, and returns the bytes of the answer.
    ///
    /// # Errors
    /// The failure that the peer reports, or that there is no answer.
    pub async fn post_bytes(&mut self, path: &str, bytes: Vec<u8>) -> Result<Bytes, Failure> {
        let request = Request::post(path).header(HOST, self.name.as_str());
        let request =
            request.body(Full::new(Bytes::from(bytes))).while_doing("writing a request")?;
        let doing = format!("asking host {}", self.name);
        let answer = self.sender.send_request(request).await.while_doing(&doing)?;
        http_client::read_answer_bytes(answer).await.map_err(|failure| failure.while_doing(doing))
    }

    /// Has the peer start a standby; the connection carries its epochs from then on.
    ///
    /// # Errors
    /// Why the peer does not.
    pub async fn request_standby(self, vm: &VmName) -> Result<TokioIo<Upgraded>, Failure> {
        let doing = format!("asking host {} for a standby", self.name);
        self.upgrade_connection(&format!("{STANDBYS}{vm}"), EPOCHS, STANDBY_WAIT, doing).await
    }

    /// Links a network of this host to the peer's; the connection carries frames from then on.
    ///
    /// # Errors
    /// Why the peer does not.
    pub async fn link_network(self, network: &NetworkName) -> Result<TokioIo<Upgraded>, Failure> {
        let doing = format!("asking host {} for a link of network {network}", self.name);
        self.upgrade_connection(&format!("{NETWORKS}{network}"), FRAMES, CONNECT_WAIT, doing).await
    }

    async fn upgrade_connection(
        self,
        path: &str,
        protocol: &'static str,
        wait: Duration,
        doing: String,
    ) -> Result<TokioIo<Upgraded>, Failure> {
        let late = |_| {
            let text = format!("it has not answered within {} s", wait.as_secs());
            Err(Failure::new(FailureKind::Other, text))
        };
        let answered = timeout(wait, self.request_upgrade(path, protocol)).await;
        answered.unwrap_or_else(late).map_err(|failure| failure.while_doing(doing))
    }

    async fn request_upgrade(
        mut self,
        path: &str,
        protocol: &'static str,
    ) -> Result<TokioIo<Upgraded>, Failure> {
        let mut request =
            http_client::build_request(Method::POST, self.name.as_str(), path, None::<&()>)?;
        let headers = request.headers_mut();
        headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
        headers.insert(UPGRADE, HeaderValue::from_static(protocol));
        let answer = self.sender.send_request(request).await.while_doing("reading its answer")?;
        if answer.status() != StatusCode::SWITCHING_PROTOCOLS {
            return Err(http_client::read_failure(answer).await);
        }
        let upgraded = hyper::upgrade::on(answer).await.while_doing("upgrading the connection")?;
        Ok(TokioIo::new(upgraded))
    }
}

/// The state of a host's agent as its kernel shows it to who connects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AgentProbe {
    /// Connections are accepted: an agent is there, though it may not answer.
    Accepts,
    /// Connections are refused: the kernel runs, and no agent.
    Refuses,
    /// Neither.
    Unreachable,
}

/// Connects to the agent at this address.
pub async fn probe_agent(address: &str) -> AgentProbe {
    match timeout(CONNECT_WAIT, TcpStream::connect(address)).await {
        Ok(Ok(_)) => AgentProbe::Accepts,
        Ok(Err(error)) if error.kind() == io::ErrorKind::ConnectionRefused => AgentProbe::Refuses,
        Ok(Err(_)) | Err(_) => AgentProbe::Unreachable,
    }
}

async fn connect_peer(
    identity: &HostIdentity,
    name: &HostName,
    address: &str,
) -> Result<PeerConnection, Failure> {
    let stream = TcpStream::connect(address).await.while_doing("connecting")?;
    tunnel::configure_socket(&stream).while_doing("preparing the connection")?;
    let connector = TlsConnector::from(identity.client.clone());
    let greeted = connector.connect(name.server_name(), stream).await;
    let stream = greeted
        .while_doing("greeting by TLS")
        .map_err(|failure| failure.with_hint("`firn-agent check` there checks its certificate"))?;
    let (sender, connection) =
        handshake(TokioIo::new(stream)).await.while_doing("speaking HTTP")?;
    // It ends with the sender, or with the upgraded stream.
    let connection = tokio::spawn(async move { drop(connection.with_upgrades().await) });
    Ok(PeerConnection { name: name.clone(), sender, connection })
}
