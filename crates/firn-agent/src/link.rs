//! A connection to a peer: made by TLS, and only to the host that is meant.

use std::time::Duration;

use bytes::Bytes;
use firn_supervisor::{Context as _, Failure, FailureKind, NetworkName, VmName};
use http_body_util::Full;
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper::header::{CONNECTION, HOST, HeaderValue, UPGRADE};
use hyper::upgrade::Upgraded;
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::TokioIo;
use serde::de::DeserializeOwned;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use crate::api::{EPOCHS, FRAMES, NETWORKS, STANDBYS};
use crate::host::HostName;
use crate::http;
use crate::identity::Identity;
use crate::tunnel;

/// How long a peer may take to be connected to.
const CONNECT_WAIT: Duration = Duration::from_secs(3);

/// How long a standby may take to be started, up to the last byte of the answer. An older one of that name may have to be stopped first.
const STANDBY_WAIT: Duration = Duration::from_secs(30);

/// A connection that can be asked.
#[derive(Debug)]
pub struct Link {
    name: HostName,
    sender: SendRequest<Full<Bytes>>,
}

impl Link {
    /// Connects.
    ///
    /// # Errors
    /// If nobody is there, or somebody else is.
    pub async fn open(
        identity: &Identity,
        name: &HostName,
        address: &str,
    ) -> Result<Self, Failure> {
        let doing = || format!("connecting to host {name} at {address}");
        let slow = |_| {
            let text = format!("it has not answered within {} s", CONNECT_WAIT.as_secs());
            Failure::new(FailureKind::Other, text).while_doing(doing())
        };
        timeout(CONNECT_WAIT, connect(identity, name, address))
            .await
            .map_err(slow)?
            .map_err(|failure| failure.while_doing(doing()))
    }

    /// Asks for something that is told by JSON.
    ///
    /// # Errors
    /// What the peer tells instead, or that it tells nothing.
    pub async fn get<T: DeserializeOwned>(&mut self, path: &str) -> Result<T, Failure> {
        let request = http::request(Method::GET, self.name.as_str(), path, None::<&()>)?;
        let doing = format!("asking host {}", self.name);
        let answer = self.sender.send_request(request).await.doing(&doing)?;
        http::told(answer).await.map_err(|failure| failure.while_doing(doing))
    }

    /// Whether it can't be asked any more.
    pub fn is_closed(&self) -> bool {
        self.sender.is_closed()
    }

    /// Sends bytes, and brings those that are answered.
    ///
    /// # Errors
    /// What the peer tells instead, or that it tells nothing.
    pub async fn post(&mut self, path: &str, bytes: Vec<u8>) -> Result<Bytes, Failure> {
        let request = Request::post(path).header(HOST, self.name.as_str());
        let request = request.body(Full::new(Bytes::from(bytes))).doing("writing a request")?;
        let doing = format!("asking host {}", self.name);
        let answer = self.sender.send_request(request).await.doing(&doing)?;
        http::told_bytes(answer).await.map_err(|failure| failure.while_doing(doing))
    }

    /// Has the peer start a standby; the connection carries its epochs from then on.
    ///
    /// # Errors
    /// Why it does not.
    pub async fn stand_by(self, vm: &VmName) -> Result<TokioIo<Upgraded>, Failure> {
        let doing = format!("asking host {} to stand by", self.name);
        self.upgrade(&format!("{STANDBYS}{vm}"), EPOCHS, STANDBY_WAIT, doing).await
    }

    /// Links a network of this host to the peer's; the connection carries frames from then on.
    ///
    /// # Errors
    /// Why it does not.
    pub async fn network(self, network: &NetworkName) -> Result<TokioIo<Upgraded>, Failure> {
        let doing = format!("asking host {} for a link of network {network}", self.name);
        self.upgrade(&format!("{NETWORKS}{network}"), FRAMES, CONNECT_WAIT, doing).await
    }

    async fn upgrade(
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
        let answered = timeout(wait, self.ask_to_upgrade(path, protocol)).await;
        answered.unwrap_or_else(late).map_err(|failure| failure.while_doing(doing))
    }

    async fn ask_to_upgrade(
        mut self,
        path: &str,
        protocol: &'static str,
    ) -> Result<TokioIo<Upgraded>, Failure> {
        let mut request = http::request(Method::POST, self.name.as_str(), path, None::<&()>)?;
        let headers = request.headers_mut();
        headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
        headers.insert(UPGRADE, HeaderValue::from_static(protocol));
        let answer = self.sender.send_request(request).await.doing("hearing its answer")?;
        if answer.status() != StatusCode::SWITCHING_PROTOCOLS {
            return Err(http::told_failure(answer).await);
        }
        let upgraded = hyper::upgrade::on(answer).await.doing("taking the stream over")?;
        Ok(TokioIo::new(upgraded))
    }
}

async fn connect(identity: &Identity, name: &HostName, address: &str) -> Result<Link, Failure> {
    let stream = TcpStream::connect(address).await.doing("connecting")?;
    tunnel::prepare(&stream).doing("preparing the connection")?;
    let connector = TlsConnector::from(identity.client.clone());
    let greeted = connector.connect(name.server_name(), stream).await;
    let stream = greeted.doing("greeting by TLS").map_err(|failure| {
        failure.hint("`firn-agent check` there says whether its certificate is what it should be")
    })?;
    let (sender, connection) = handshake(TokioIo::new(stream)).await.doing("speaking HTTP")?;
    // It ends with the sender, or with the stream that it has become.
    tokio::spawn(connection.with_upgrades());
    Ok(Link { name: name.clone(), sender })
}
