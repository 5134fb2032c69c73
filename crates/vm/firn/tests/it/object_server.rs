//! A real server with the interface of S3, in a process of its own: `s3s-fs`, which `scripts/setup`
//! installs. Its objects are files, so a test can change their bytes.
//!
//! ```text
//!   DIR/vms/web.firn               the object s3://vms/web.firn
//!   DIR/.upload_id-UUID.part-N     a part of an upload that is not complete
//! ```

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use firn_cache::StoreEnvironment;
use firn_lab::object_server::{OBJECT_KEY_ID, find_server, object_environment};

use crate::session::{Answer, Session, eventually};
use crate::store_proxy::StoreProxy;

const PATIENCE: Duration = Duration::from_secs(30);

pub use firn_lab::object_server::OBJECT_SECRET as SECRET;

/// A server, and a session whose commands use it.
pub struct ObjectServer<'a> {
    session: &'a Session,
    dir: PathBuf,
    port: u16,
    child: Option<Child>,
    has_keys: bool,
    /// Its clients use this address.
    front: SocketAddr,
    /// The session token of its clients.
    token: Option<String>,
}

impl<'a> ObjectServer<'a> {
    /// Starts a server with the empty bucket `vms`. `None`, and a note, if it is not installed.
    pub fn start(session: &'a Session) -> Option<Self> {
        Self::start_at(session, session.path("objects"))
    }

    /// The same, with its objects in this directory.
    pub fn start_at(session: &'a Session, dir: PathBuf) -> Option<Self> {
        std::fs::create_dir_all(dir.join("vms")).unwrap();
        Self::start_in(session, dir, true)
    }

    /// Has its clients connect to a proxy.
    pub fn put_behind(&mut self, proxy: &StoreProxy) {
        self.front = proxy.address();
    }

    /// Starts another server with the same objects, which anybody may read.
    pub fn start_open(&self) -> Self {
        Self::start_in(self.session, self.dir.clone(), false).unwrap()
    }

    fn start_in(session: &'a Session, dir: PathBuf, has_keys: bool) -> Option<Self> {
        if find_server().is_none() {
            firn_skip::skip_test("s3s-fs is not installed (scripts/setup tests)");
            return None;
        }
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let front = ([127, 0, 0, 1], port).into();
        let mut server = Self { session, dir, port, child: None, has_keys, front, token: None };
        server.restart();
        Some(server)
    }

    /// Starts it again, at the same port.
    pub fn restart(&mut self) {
        self.kill();
        let port = self.port.to_string();
        let mut command = Command::new(find_server().unwrap());
        command.args(["--host", "127.0.0.1", "--port", &port]);
        if self.has_keys {
            command.args(["--access-key", OBJECT_KEY_ID, "--secret-key", SECRET]);
        }
        command.arg(&self.dir).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        self.child = Some(command.spawn().unwrap());
        let address = self.address();
        eventually("the server listens", PATIENCE, || TcpStream::connect(&address).is_ok());
    }

    /// Its process, for a test that ends it while it also uses the server.
    pub fn process(&self) -> i64 {
        self.child.as_ref().map_or(0, |child| i64::from(child.id()))
    }

    /// Ends it with SIGKILL.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            child.wait().unwrap();
        }
    }

    pub fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// A command that has the credentials of the server.
    pub fn command(&self, args: &[&str]) -> Command {
        self.with_credentials(self.session.command(args))
    }

    /// The same of another program.
    pub fn command_of(&self, program: &Path, args: &[&str]) -> Command {
        let like = self.session.command(&[]);
        let mut command = Command::new(program);
        command.args(args).stdin(Stdio::null()).env_remove("FIRN_FAULT");
        command.envs(like.get_envs().filter_map(|(name, value)| Some((name, value?))));
        self.with_credentials(command)
    }

    /// The variables of a process that uses it.
    pub fn environment(&self) -> StoreEnvironment {
        let token = self.token.iter().map(|token| ("AWS_SESSION_TOKEN".into(), token.clone()));
        object_environment(self.front).into_iter().chain(token).collect()
    }

    /// Has its clients use credentials with this session token.
    pub fn set_token(&mut self, token: &str) {
        self.token = Some(token.to_owned());
    }

    fn with_credentials(&self, mut command: Command) -> Command {
        for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("AWS_")) {
            command.env_remove(name);
        }
        command.envs(self.environment());
        command
    }

    pub fn firn(&self, args: &[&str]) -> Answer {
        let answer = Answer::of(self.command(args).output().unwrap());
        assert!(!format!("{}{}", answer.out, answer.err).contains(SECRET));
        answer
    }

    /// As [`Self::firn`], with a fault point.
    pub fn firn_with_fault(&self, fault: &str, args: &[&str]) -> Answer {
        let output = self.command(args).env("FIRN_FAULT", fault).output().unwrap();
        let (out, err) = (output.stdout, output.stderr);
        let [out, err] = [out, err].map(|it| String::from_utf8(it).unwrap());
        Answer { code: output.status.code().unwrap_or(-1), out, err }
    }

    /// Runs a command that must succeed; returns the facts it prints.
    pub fn json(&self, args: &[&str]) -> serde_json::Value {
        let answer = self.firn(&[&["--json"], args].concat()).succeeds();
        serde_json::from_str(&answer.out).unwrap()
    }

    /// The names of the images in the bucket.
    pub fn list(&self) -> Vec<String> {
        let images = self.json(&["image", "ls", "s3://vms"]);
        let name = |image: &serde_json::Value| {
            image["location"].as_str().unwrap().trim_start_matches("s3://vms/").to_owned()
        };
        images.as_array().unwrap().iter().map(name).collect()
    }

    /// The file of an object in the bucket.
    pub fn object(&self, key: &str) -> PathBuf {
        self.dir.join("vms").join(key)
    }

    /// Parts of uploads that are not complete, and the records of such uploads.
    pub fn leftovers(&self) -> Vec<String> {
        let names = |dir: PathBuf| {
            let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
            entries.map(|entry| entry.file_name().into_string().unwrap()).collect::<Vec<_>>()
        };
        let mut parts = names(self.dir.clone());
        parts.retain(|name| name.starts_with(".upload"));
        parts.extend(names(self.object(".firn-uploads")));
        parts
    }
}

impl Drop for ObjectServer<'_> {
    fn drop(&mut self) {
        self.kill();
    }
}
