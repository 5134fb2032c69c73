//! The QEMU plugin that records stores, as the supervisor controls it (see `firn_calls::Order`).

use std::io::{self, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use firn_calls::PluginOrder;

/// The maximum time that the plugin may take. It blocks the guest's vCPUs only briefly.
const PLUGIN_WAIT: Duration = Duration::from_secs(2);

/// The plugin of a VM, if it has one.
pub(crate) struct StorePluginClient {
    socket: PathBuf,
    line: Option<UnixStream>,
    /// A failure to reach it has been logged.
    is_lost: bool,
}

impl StorePluginClient {
    /// The plugin that listens on this socket, now or later, or never.
    pub(crate) fn at_socket(socket: PathBuf) -> Self {
        Self { socket, line: None, is_lost: false }
    }

    /// Sends an order. If that fails, stores are not recorded for any application any more.
    pub(crate) fn send_order(&mut self, order: &PluginOrder) -> bool {
        let ordered = self.try_order(order);
        if let Err(error) = &ordered {
            let is_there = error.kind() != io::ErrorKind::NotFound;
            if is_there && !std::mem::replace(&mut self.is_lost, true) {
                tracing::warn!("stores are not recorded: {error}");
            }
        } else {
            self.is_lost = false;
        }
        ordered.is_ok()
    }

    fn try_order(&mut self, order: &PluginOrder) -> io::Result<()> {
        let mut line = match self.line.take() {
            Some(line) => line,
            None => connect_plugin(&self.socket)?,
        };
        let bytes = order.to_bytes();
        line.write_all(&[&(bytes.len() as u32).to_le_bytes(), &bytes[..]].concat())?;
        line.read_exact(&mut [0])?;
        self.line = Some(line);
        Ok(())
    }
}

fn connect_plugin(socket: &Path) -> io::Result<UnixStream> {
    let line = UnixStream::connect(socket)?;
    line.set_read_timeout(Some(PLUGIN_WAIT))?;
    line.set_write_timeout(Some(PLUGIN_WAIT))?;
    Ok(line)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;
    use std::thread;

    #[test]
    fn a_plugin_that_is_gone_is_looked_for_again() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("s");
        let mut plugin = StorePluginClient::at_socket(socket.clone());
        assert!(!plugin.send_order(&PluginOrder::End { slot: 1 }) && !plugin.is_lost);
        let listener = UnixListener::bind(&socket).unwrap();
        let orders = [3, 4].map(|slot| PluginOrder::End { slot });
        let wanted = orders.clone();
        let obeyed = thread::spawn(move || {
            // One order for each connection.
            for wanted in wanted {
                let (mut line, _) = listener.accept().unwrap();
                let mut len = [0; 4];
                line.read_exact(&mut len).unwrap();
                let mut bytes = vec![0; u32::from_le_bytes(len) as usize];
                line.read_exact(&mut bytes).unwrap();
                assert_eq!(PluginOrder::from_bytes(&bytes), Some(wanted));
                line.write_all(&[1]).unwrap();
            }
        });
        assert!(plugin.send_order(&orders[0]));
        // The plugin's end of the connection is closed by now, or soon.
        while !plugin.send_order(&orders[1]) {}
        obeyed.join().unwrap();
    }
}
