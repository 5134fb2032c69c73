//! The uplink: a socket to connect to, or a tap device. One that does not exist is tried again.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::UnixStream;
use tokio::time::sleep;
use tokio_tun::Tun;

use super::carry;
use super::config::Uplink;
use super::counters::LinkTarget;
use super::network::{ConnectedPort, NetworkSwitch};

/// Time between two tries to connect the uplink.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// Connects a network to its uplink. Never returns.
pub(super) async fn serve_uplink(network: Arc<NetworkSwitch>, uplink: Uplink) {
    loop {
        let why = match connect_once(&network, &uplink).await {
            Ok(()) => "it has closed the connection".to_owned(),
            Err(error) => error.to_string(),
        };
        network.record_trouble(&LinkTarget::Uplink, &format!("{uplink}: {why}"));
        sleep(RETRY_INTERVAL).await;
    }
}

async fn connect_once(network: &Arc<NetworkSwitch>, uplink: &Uplink) -> io::Result<()> {
    match uplink {
        Uplink::Socket(path) => {
            let stream = UnixStream::connect(path).await?;
            carry::carry_stream(stream, &connect_port(network, uplink)?).await
        }
        Uplink::Tap(device) => {
            carry::carry_device(open_tap(device)?, &connect_port(network, uplink)?).await
        }
    }
}

fn connect_port(network: &Arc<NetworkSwitch>, uplink: &Uplink) -> io::Result<ConnectedPort> {
    let port = network
        .connect_port(&LinkTarget::Uplink)
        .ok_or_else(|| io::Error::other("there are too many ports"));
    tracing::info!("network {}: connected to its uplink {uplink}", network.name);
    port
}

fn open_tap(device: &str) -> io::Result<Tun> {
    let made = Tun::builder().name(device).tap().close_on_exec().build();
    let taps = made.map_err(io::Error::other)?;
    taps.into_iter().next().ok_or_else(|| io::ErrorKind::NotFound.into())
}
