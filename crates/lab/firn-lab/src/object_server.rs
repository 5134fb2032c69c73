//! A real server with the interface of S3, in a process of its own: `s3s-fs`, which `scripts/setup tests` installs. Its
//! objects are files in a directory.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result};

use crate::lab::wait_for;

/// The name of the key of the server.
pub const OBJECT_KEY_ID: &str = "FIRNTESTKEY";

/// The secret key of the server, which nothing may print.
pub const OBJECT_SECRET: &str = "a-secret-that-nothing-prints";

/// A server with the bucket `vms`. Dropping it ends it.
pub struct S3Server {
    address: SocketAddr,
    child: Child,
}

impl S3Server {
    /// Starts a server that keeps its objects in a directory.
    pub fn start(dir: &Path) -> Result<Self> {
        std::fs::create_dir_all(dir.join("vms"))?;
        let program = find_server().context("s3s-fs is not installed (scripts/setup tests)")?;
        let address = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
        let mut command = Command::new(program);
        command.args(["--host", "127.0.0.1", "--port", &address.port().to_string()]);
        command.args(["--access-key", OBJECT_KEY_ID, "--secret-key", OBJECT_SECRET]).arg(dir);
        let child =
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
        let server = Self { address, child };
        let answers = || Ok(TcpStream::connect(address).ok());
        wait_for("the object server", Duration::from_secs(30), answers)?;
        Ok(server)
    }

    /// Its address.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for S3Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The environment of a process that uses the server by this address.
pub fn object_environment(address: SocketAddr) -> Vec<(String, String)> {
    let variables = [
        ("AWS_ENDPOINT_URL", format!("http://{address}")),
        ("AWS_ACCESS_KEY_ID", OBJECT_KEY_ID.to_owned()),
        ("AWS_SECRET_ACCESS_KEY", OBJECT_SECRET.to_owned()),
        ("AWS_REGION", "us-east-1".to_owned()),
    ];
    variables.map(|(name, value)| (name.to_owned(), value)).to_vec()
}

/// The program, where `scripts/setup` installs tools.
pub fn find_server() -> Option<PathBuf> {
    let cache = std::env::var_os("FIRN_CACHE_DIR").map(PathBuf::from);
    let cache =
        cache.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache/firn")))?;
    Some(cache.join("tools/bin/s3s-fs")).filter(|path| path.exists())
}
