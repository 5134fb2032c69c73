//! The uplink: a socket to connect to, or a tap device. One that does not exist is tried again.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::UnixStream;
use tokio::time::sleep;
use tokio_tun::Tun;

use super::carry;
use super::config::Uplink;
use super::lane::To;
use super::network::{Joined, Network};

/// Time between two tries to connect the uplink.
const RETRY: Duration = Duration::from_secs(1);

/// Connects a network to its uplink. Never returns.
pub(super) async fn serve(network: Arc<Network>, uplink: Uplink) {
    loop {
        let why = match once(&network, &uplink).await {
            Ok(()) => "it has closed the connection".to_owned(),
            Err(error) => error.to_string(),
        };
        network.trouble(&To::World, &format!("{uplink}: {why}"));
        sleep(RETRY).await;
    }
}

async fn once(network: &Arc<Network>, uplink: &Uplink) -> io::Result<()> {
    match uplink {
        Uplink::Socket(path) => {
            let stream = UnixStream::connect(path).await?;
            carry::stream(stream, &join(network, uplink)?).await
        }
        Uplink::Tap(device) => carry::device(tap(device)?, &join(network, uplink)?).await,
    }
}

fn join(network: &Arc<Network>, uplink: &Uplink) -> io::Result<Joined> {
    let port = network.join(&To::World).ok_or_else(|| io::Error::other("there are too many ports"));
    tracing::info!("network {}: connected to its uplink {uplink}", network.name);
    port
}

fn tap(device: &str) -> io::Result<Tun> {
    let made = Tun::builder().name(device).tap().close_on_exec().build();
    let taps = made.map_err(io::Error::other)?;
    taps.into_iter().next().ok_or_else(|| io::ErrorKind::NotFound.into())
}
