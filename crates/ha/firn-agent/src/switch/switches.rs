//! The switches of this host, one for each network.

use std::collections::BTreeMap;
use std::sync::Arc;

use firn_control::AgentPaths;
use firn_control::api::NetworkView;
use firn_supervisor::{Failure, NetworkName};

use super::network::NetworkSwitch;
use crate::config::AgentConfig;
use crate::sockets::{ListeningSocket, listen_at};

/// The switches of this host.
#[derive(Debug, Default)]
pub(crate) struct NetworkSwitches(pub(super) BTreeMap<NetworkName, Arc<NetworkSwitch>>);

impl NetworkSwitches {
    /// Opens a switch for each network of the configuration, and the sockets that VMs connect to.
    pub(crate) fn open(
        config: &AgentConfig,
        paths: &AgentPaths,
    ) -> Result<(Self, Vec<ListeningSocket>), Failure> {
        let mut networks = BTreeMap::new();
        let mut sockets = Vec::new();
        for (name, settings) in &config.networks {
            let socket = paths.network_socket(name)?;
            let network = NetworkSwitch::new(name.clone(), socket.clone(), config, settings);
            sockets.push(listen_at(socket)?);
            networks.insert(name.clone(), Arc::new(network));
        }
        Ok((Self(networks), sockets))
    }

    /// The networks as the agent reports them.
    pub(crate) fn network_views(&self) -> Vec<NetworkView> {
        self.0.values().map(|network| network.network_view()).collect()
    }

    pub(super) fn find_network(&self, name: &str) -> Option<&Arc<NetworkSwitch>> {
        self.0.iter().find(|(it, _)| it.as_str() == name).map(|(_, network)| network)
    }
}
