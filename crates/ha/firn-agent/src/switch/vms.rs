//! VMs of this host: the processes that connect to a network's socket, which only its owner can.

use std::sync::Arc;
use std::time::Duration;

use tokio::net::UnixStream;
use tokio::time::{MissedTickBehavior, interval, sleep};

use super::carry;
use super::counters::LinkTarget;
use super::network::NetworkSwitch;
use crate::sockets::ListeningSocket;

/// How long to wait when the system has no more descriptors.
const EXHAUSTED_WAIT: Duration = Duration::from_millis(100);

/// How often old addresses are forgotten.
const AGE_INTERVAL: Duration = Duration::from_secs(60);

/// Connects VMs. Never returns.
pub(super) async fn serve_vms(network: Arc<NetworkSwitch>, socket: ListeningSocket) {
    let ListeningSocket { listener, file: _file } = socket;
    let mut ages = interval(AGE_INTERVAL);
    ages.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = ages.tick() => network.forget_old_addresses(),
            came = listener.accept() => match came {
                Ok((stream, _)) => drop(tokio::spawn(connect_vm(Arc::clone(&network), stream))),
                Err(error) => {
                    tracing::warn!("network {}: can't take a connection: {error}", network.name);
                    sleep(EXHAUSTED_WAIT).await;
                }
            },
        }
    }
}

async fn connect_vm(network: Arc<NetworkSwitch>, stream: UnixStream) {
    let name = &network.name;
    let pid = stream.peer_cred().ok().and_then(|credentials| credentials.pid()).unwrap_or_default();
    let Some(port) = network.connect_port(&LinkTarget::Vms) else {
        return tracing::warn!("network {name}: process {pid} is refused: there are too many");
    };
    tracing::info!("network {name}: process {pid} is connected");
    match carry::carry_stream(stream, &port).await {
        Ok(()) => tracing::info!("network {name}: process {pid} has left"),
        Err(error) => tracing::warn!("network {name}: process {pid} is disconnected: {error}"),
    }
}
