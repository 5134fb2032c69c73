//! Warm standby: receives a session's state and changes, and takes over in one call.

use super::server::{BackupServer, BackupServerOptions};
use super::settings::FsyncPolicy;
use crate::error::Error;
use crate::session::Session;

/// A backup process inside of the application that would continue the session.
///
/// ```no_run
/// # use firn_app::{BackupServerOptions, Error, FsyncPolicy};
/// # use firn_app::{Session, SessionOptions, TlsIdentity, WarmStandby};
/// # fn wait_until_the_primary_is_gone() {}
/// # fn main() -> Result<(), Error> {
/// # let identity = TlsIdentity { certificate: "".into(), key: "".into(), authority: "".into() };
/// let options = BackupServerOptions::new("0.0.0.0:7700", identity, "/var/lib/ledger");
/// let options = options.fsync(FsyncPolicy::Never);
/// let standby = WarmStandby::start(options)?;
/// let mut session = Session::open(SessionOptions::new("ledger"))?;
/// let accounts = session.allocate("accounts", 1 << 20)?;
/// wait_until_the_primary_is_gone();
/// standby.take_over(&mut session)?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct WarmStandby {
    server: BackupServer,
    fsync: FsyncPolicy,
}

impl WarmStandby {
    /// Listens for the primary.
    ///
    /// # Errors
    /// If the address or the identity cannot be used.
    pub fn start(options: BackupServerOptions) -> Result<Self, Error> {
        let fsync = options.fsync_policy();
        Ok(Self { server: BackupServer::start(options).map_err(Error::backup)?, fsync })
    }

    /// The address it listens on.
    pub fn address(&self) -> std::net::SocketAddr {
        self.server.address()
    }

    /// Refuses the primary from now on, fills the areas of `session` with the last acknowledged
    /// state, and continues the log. Returns that state's number; 0 if the primary never committed.
    ///
    /// # Errors
    /// If the session already has a backup, or an area has another size.
    pub fn take_over(self, session: &mut Session) -> Result<u64, Error> {
        let name = session.name().to_owned();
        let owner = self.server.owner();
        if !owner.is_this_process() {
            return Err(Error::Forked { name, pid: owner.pid() });
        }
        let Some(mut store) = self.server.take_store(&name) else { return Ok(0) };
        store.drop_staged().map_err(Error::backup)?;
        session.adopt_log(store.log, store.image, self.fsync)
    }
}
