//! Host agent: a `firn-agent` process on one host of a site.

use std::fs::File;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context as _, Result, ensure};

use super::config::FILE;
use crate::firn::{Firn, QEMU_ALLOW_VARIABLE};
use crate::guest::default_program;

/// An agent process; it ends with this value.
#[derive(Debug)]
pub(super) struct AgentProcess(Child);

/// The agent's log file.
pub(super) fn log_path(dir: &Path) -> PathBuf {
    dir.join("agent.log")
}

impl AgentProcess {
    /// Starts an agent, creates its store where it needs one, and waits until it listens.
    pub(super) fn start(dir: &Path, namespace: &str) -> Result<Self> {
        let program = Firn::new(dir).program().with_file_name("firn-agent");
        let config = dir.join(FILE);
        create_store(&program, &config)?;
        let mut command = Command::new("ip");
        command.args(["netns", "exec", namespace]).arg(&program).arg("run").arg(&config);
        command.env("FIRN_RUNTIME_DIR", dir.join("run")).env_remove("FIRN_FAULT");
        command.env("FIRN_STATE_DIR", dir.join("run/.state"));
        command.env(QEMU_ALLOW_VARIABLE, default_program());
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(File::create(log_path(dir))?);
        let mut child = command.spawn().with_context(|| format!("{}", program.display()))?;
        let mut line = String::new();
        if let Some(said) = child.stdout.take() {
            BufReader::new(said).read_line(&mut line)?;
        }
        ensure!(line.contains("listens at"), "it ended: {}", last_log_line(dir));
        Ok(Self(child))
    }
}

/// Creates the persistent state of a server of embedded consensus, once.
fn create_store(program: &Path, config: &Path) -> Result<()> {
    if !std::fs::read_to_string(config)?.contains("state-dir")
        || config.with_file_name("state").exists()
    {
        return Ok(());
    }
    let done = Command::new(program).arg("found").arg(config).output()?;
    let said = String::from_utf8_lossy(&done.stderr);
    ensure!(done.status.success(), "firn-agent found: {}", said.trim());
    Ok(())
}

fn last_log_line(dir: &Path) -> String {
    let log = std::fs::read_to_string(log_path(dir)).unwrap_or_default();
    log.lines().last().unwrap_or("its log is empty").to_owned()
}

impl Drop for AgentProcess {
    fn drop(&mut self) {
        // It may have been killed with its host.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
