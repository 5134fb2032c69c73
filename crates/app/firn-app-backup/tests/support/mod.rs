//! Keys, backup processes, and links between them and applications that can be cut.

use std::fs;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use firn_app::TlsIdentity;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};

/// Makes the keys of a backup and an application that accept each other.
pub fn make_keys(dir: &Path) {
    let mut authority = CertificateParams::new(Vec::new()).unwrap();
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = CertifiedIssuer::self_signed(authority, KeyPair::generate().unwrap()).unwrap();
    for (side, name) in [("backup", "127.0.0.1"), ("application", "application")] {
        let dir = dir.join(side);
        fs::create_dir(&dir).unwrap();
        let key = KeyPair::generate().unwrap();
        let certificate = CertificateParams::new(vec![name.to_owned()]).unwrap();
        let certificate = certificate.signed_by(&key, &authority).unwrap();
        fs::write(dir.join("cert"), certificate.pem()).unwrap();
        fs::write(dir.join("key"), key.serialize_pem()).unwrap();
        fs::set_permissions(dir.join("key"), fs::Permissions::from_mode(0o600)).unwrap();
        fs::write(dir.join("ca"), authority.pem()).unwrap();
    }
}

/// When backups force their logs to disk: at every commit if `FIRN_FSYNC` is set.
fn fsync_word() -> &'static str {
    if std::env::var_os("FIRN_FSYNC").is_some() { "commit" } else { "never" }
}

/// The files of one side.
pub fn identity(dir: &Path) -> TlsIdentity {
    TlsIdentity { certificate: dir.join("cert"), key: dir.join("key"), authority: dir.join("ca") }
}

/// A backup process.
pub struct Backup {
    child: Option<Child>,
    pub address: String,
    keys: PathBuf,
    pub logs: PathBuf,
}

impl Backup {
    pub fn start(keys: &Path, logs: &Path) -> Self {
        let (keys, logs) = (keys.join("backup"), logs.to_owned());
        let mut backup = Self { child: None, address: "127.0.0.1:0".into(), keys, logs };
        fs::create_dir_all(&backup.logs).unwrap();
        backup.restart();
        backup
    }

    pub fn is_running(&self) -> bool {
        self.child.is_some()
    }

    /// Starts it at the address that it had.
    pub fn restart(&mut self) {
        self.kill();
        let mut child = Command::new(env!("CARGO_BIN_EXE_firn-app-backup"))
            .args(["--listen", &self.address, "--fsync", fsync_word()])
            .arg("--directory")
            .arg(&self.logs)
            .arg("--certificate")
            .arg(self.keys.join("cert"))
            .arg("--key")
            .arg(self.keys.join("key"))
            .arg("--authority")
            .arg(self.keys.join("ca"))
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address = line.trim().strip_prefix("listening on ").expect("it prints its address");
        self.address = address.to_owned();
        self.child = Some(child);
    }

    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }
}

impl Drop for Backup {
    fn drop(&mut self) {
        self.kill();
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LinkState {
    Whole,
    /// Connections end, and new ones end at once.
    Cut,
    /// Connections stay, and no byte arrives any more.
    Stalled,
}

struct LinkShared {
    state: LinkState,
    to: String,
    open: Vec<TcpStream>,
}

/// A link to an address.
pub struct Link {
    pub address: String,
    shared: Arc<Mutex<LinkShared>>,
}

impl Link {
    pub fn to(address: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let shared =
            LinkShared { state: LinkState::Whole, to: address.to_owned(), open: Vec::new() };
        let link = Self {
            address: listener.local_addr().unwrap().to_string(),
            shared: Arc::new(Mutex::new(shared)),
        };
        let shared = link.shared.clone();
        thread::spawn(move || {
            for near in listener.incoming().map_while(Result::ok) {
                carry(&shared, near);
            }
        });
        link
    }

    /// Leads new connections to another address.
    #[allow(dead_code, reason = "one of the tests that have this file uses it")]
    pub fn lead_to(&self, address: &str) {
        self.shared.lock().unwrap().to = address.to_owned();
    }

    /// Changes the state. Connections of before end, unless the link is stalled now.
    pub fn set(&self, state: LinkState) {
        let mut shared = self.shared.lock().unwrap();
        shared.state = state;
        if state != LinkState::Stalled {
            for stream in shared.open.drain(..) {
                let _ = stream.shutdown(Shutdown::Both);
            }
        }
    }
}

fn carry(shared: &Arc<Mutex<LinkShared>>, near: TcpStream) {
    let mut now = shared.lock().unwrap();
    if now.state == LinkState::Cut {
        return;
    }
    now.open.push(near.try_clone().unwrap());
    if now.state == LinkState::Stalled {
        return;
    }
    let Ok(far) = TcpStream::connect(&now.to) else {
        let _ = near.shutdown(Shutdown::Both);
        return;
    };
    now.open.push(far.try_clone().unwrap());
    drop(now);
    for (from, to) in [(near.try_clone().unwrap(), far.try_clone().unwrap()), (far, near)] {
        let shared = shared.clone();
        thread::spawn(move || pump(&shared, from, to));
    }
}

fn pump(shared: &Mutex<LinkShared>, mut from: TcpStream, mut to: TcpStream) {
    let mut bytes = vec![0; 1 << 16];
    while let Ok(count @ 1..) = from.read(&mut bytes) {
        while shared.lock().unwrap().state == LinkState::Stalled {
            thread::sleep(Duration::from_millis(10));
        }
        if to.write_all(&bytes[..count]).is_err() {
            break;
        }
    }
    let _ = from.shutdown(Shutdown::Both);
    let _ = to.shutdown(Shutdown::Both);
}
