//! The agent's directory, which one agent locks, and the sockets in it, which only their owner can
//! access. The paths are those of [`AgentPaths`].

use std::fs::{self, File, OpenOptions, Permissions};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use firn_control::paths::remove_if_present;
use firn_control::{AgentPaths, HostName};
use firn_supervisor::{Failure, FailureContext as _, FailureKind, make_private};
use rustix::fs::{FlockOperation, flock};
use tokio::net::UnixListener;

/// Maximum length of a unix socket's path: `sun_path` of unix(7), less its final zero.
const SOCKET_PATH_BYTES_MAX: usize = 107;

/// The lock of the agent of a runtime directory, until it is dropped or the process ends.
#[derive(Debug)]
pub struct AgentLock(#[expect(dead_code, reason = "it is locked while it is open")] File);

/// A socket that listens.
#[derive(Debug)]
pub struct ListeningSocket {
    /// Accepts connections.
    pub listener: UnixListener,
    /// Its file.
    pub file: SocketFile,
}

/// The file of a socket, which is removed with this value.
#[derive(Debug)]
pub struct SocketFile(PathBuf);

impl Drop for SocketFile {
    fn drop(&mut self) {
        // Another process may have removed it.
        let _ = fs::remove_file(&self.0);
    }
}

/// Creates the directories of the agent, and locks them for this process.
///
/// # Errors
/// If they can't be created, or another agent has locked them.
pub fn lock_directory<'a>(
    paths: &AgentPaths,
    peers: impl Iterator<Item = &'a HostName>,
) -> Result<AgentLock, Failure> {
    paths
        .runtime_dir()
        .create_private()
        .while_doing_as(FailureKind::Host, "making the runtime directory")?;
    let directory = paths.agent_dir();
    let of_peers = peers.map(|peer| directory.join(peer.as_str()));
    for path in [directory.clone()].into_iter().chain(of_peers) {
        make_private(&path).while_doing_as(FailureKind::Host, "making the agent's directory")?;
    }
    lock_file(&directory.join("lock"))
}

/// Listens at a socket, for its owner alone. A socket that a dead agent has left is removed.
///
/// # Errors
/// If the system refuses.
pub fn listen_at(path: PathBuf) -> Result<ListeningSocket, Failure> {
    let doing = || format!("listening at {}", path.display());
    check_length(&path)?;
    remove_if_present(&path).while_doing(doing())?;
    let listener = UnixListener::bind(&path).while_doing(doing())?;
    fs::set_permissions(&path, Permissions::from_mode(0o600)).while_doing(doing())?;
    Ok(ListeningSocket { listener, file: SocketFile(path) })
}

fn lock_file(path: &Path) -> Result<AgentLock, Failure> {
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(false).mode(0o600);
    let file = options.open(path).while_doing(format!("opening {}", path.display()))?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(AgentLock(file)),
        Err(rustix::io::Errno::WOULDBLOCK) => {
            let text = format!("another agent runs here: it has locked {}", path.display());
            Err(Failure::new(FailureKind::Busy, text))
        }
        Err(error) => Err(error).while_doing(format!("locking {}", path.display())),
    }
}

/// Checks the length of a socket's path.
pub fn check_length(path: &Path) -> Result<(), Failure> {
    let len = path.as_os_str().len();
    if len <= SOCKET_PATH_BYTES_MAX {
        return Ok(());
    }
    let path = path.display();
    let text = format!("{path} is too long for a socket: {len} of {SOCKET_PATH_BYTES_MAX} bytes");
    Err(Failure::new(FailureKind::Usage, text).with_hint("give the VM or the host a shorter name"))
}

#[cfg(test)]
mod tests {
    use std::fs::DirBuilder;
    use std::os::unix::fs::DirBuilderExt as _;

    use firn_supervisor::RuntimeDir;

    use super::*;

    fn host(name: &str) -> HostName {
        HostName::new(name).unwrap()
    }

    #[test]
    fn there_is_one_agent() {
        let dir = tempfile::tempdir().unwrap();
        let paths = AgentPaths::new(RuntimeDir::from_path(dir.path().join("run")));
        let sole = lock_directory(&paths, [host("b")].iter()).unwrap();
        let second = lock_directory(&paths, [].iter()).unwrap_err();
        assert_eq!(second.kind, FailureKind::Busy);
        drop(sole);
        lock_directory(&paths, [].iter()).unwrap();
        let mode = fs::metadata(dir.path().join("run/.agent/b")).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o700);
    }

    #[test]
    fn a_directory_that_others_can_enter_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let run = dir.path().join("run");
        fs::create_dir(&run).unwrap();
        fs::set_permissions(&run, Permissions::from_mode(0o755)).unwrap();
        let paths = AgentPaths::new(RuntimeDir::from_path(&run));
        let refused = lock_directory(&paths, [].iter()).unwrap_err();
        assert!(refused.to_string().contains("mode 0755: it must be yours"), "{refused}");
    }

    /// The user who made the directory could replace each socket in it.
    #[test]
    fn a_directory_of_another_user_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let [run, own] = ["run", "own"].map(|name| dir.path().join(name));
        for path in [&run, &own, &own.join(".agent")] {
            DirBuilder::new().mode(0o700).create(path).unwrap();
        }
        if !rustix::process::geteuid().is_root() {
            return firn_skip::skip_test("only root can give a directory away");
        }
        for path in [&run, &own.join(".agent")] {
            std::os::unix::fs::chown(path, Some(65_534), None).unwrap();
        }
        for run in [run, own] {
            let paths = AgentPaths::new(RuntimeDir::from_path(&run));
            let refused = lock_directory(&paths, [].iter()).unwrap_err();
            assert!(refused.to_string().contains("is owned by user 65534"), "{refused}");
        }
    }

    #[tokio::test]
    async fn a_socket_replaces_what_was_left_and_goes_with_its_listener() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.sock");
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        assert!(path.exists());
        let socket = listen_at(path.clone()).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        drop(socket);
        assert!(!path.exists());
        let long = listen_at(dir.path().join("x".repeat(100))).unwrap_err();
        assert_eq!(long.kind, FailureKind::Usage);
    }
}
