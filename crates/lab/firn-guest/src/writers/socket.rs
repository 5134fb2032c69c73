//! Requests to running writers, over a unix socket: one line in, one JSON line out.

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::thread;

use anyhow::{Context as _, Result};

use super::region::WriterRequest;
use super::report::WritersReport;

/// The default path of the writers' socket.
pub(super) const PATH: &str = "/run/firn/writers.sock";

/// Serves requests as long as the process lives; dropping it removes the socket.
pub(super) struct WritersServer(PathBuf);

impl WritersServer {
    /// Listens at `path`, and forwards each request to every writer.
    pub(super) fn start_server(
        path: &Path,
        writers: Vec<Sender<WriterRequest>>,
        stop: Arc<AtomicBool>,
    ) -> Result<Self> {
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder)?;
        }
        let _ = fs::remove_file(path);
        let listener = UnixListener::bind(path)
            .with_context(|| format!("cannot listen at {}", path.display()))?;
        thread::Builder::new().name("questions".into()).spawn(move || {
            for client in listener.incoming().flatten() {
                if let Err(error) = answer_client(client, &writers, &stop) {
                    eprintln!("writers: {error:#}");
                }
            }
        })?;
        Ok(Self(path.to_owned()))
    }
}

impl Drop for WritersServer {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

fn answer_client(
    client: UnixStream,
    writers: &[Sender<WriterRequest>],
    stop: &AtomicBool,
) -> Result<()> {
    let mut reader = BufReader::new(client);
    let mut line = String::new();
    reader.read_line(&mut line)?;
    let report = collect_reports(writers, line.trim() == "verify")?;
    if line.trim() == "stop" {
        stop.store(true, Ordering::Relaxed);
    }
    let mut client = reader.into_inner();
    Ok(writeln!(client, "{}", serde_json::to_string(&report)?)?)
}

fn collect_reports(writers: &[Sender<WriterRequest>], check: bool) -> Result<WritersReport> {
    let mut answers = Vec::new();
    for writer in writers {
        let (answer, answered) = channel();
        writer.send((check, answer)).context("a writer has ended")?;
        answers.push(answered);
    }
    let regions = answers.iter().map(|answer| answer.recv().context("a writer has ended"));
    Ok(WritersReport::from_regions(regions.collect::<Result<_>>()?))
}

/// Sends a request to the writers that listen at `path`.
pub(super) fn send_request(path: &Path, question: &str) -> Result<WritersReport> {
    let mut stream = UnixStream::connect(path)
        .with_context(|| format!("no writers listen at {}", path.display()))?;
    writeln!(stream, "{question}")?;
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line)?;
    serde_json::from_str(&line).context("the writers' reply cannot be parsed")
}
