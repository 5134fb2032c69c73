//! Client of the `firn` program: runs its commands as a user does.
//!
//! Experiments start, checkpoint and restore VMs by these commands only, so that they measure what
//! is shipped. Each experiment has its own runtime directory, so its VMs never meet those of the
//! machine's user.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;
use serde_json::Value;
use thiserror::Error;

use crate::disk_profile::{DiskProfile, DiskThrottle};
use crate::guest::{QemuArgs, default_program};

/// Environment variable that names another `firn`.
pub const VARIABLE: &str = "FIRN";

/// Environment variable that lists the hypervisors that `firn` may restore a VM with: an
/// experiment's hypervisor may be anywhere.
pub const QEMU_ALLOW_VARIABLE: &str = "FIRN_QEMU_ALLOW";

/// A `firn` command failed.
#[derive(Debug, Error)]
pub enum FirnError {
    /// The program does not exist or cannot be started.
    #[error("cannot start {}; set {VARIABLE} to the path of firn", .0.display())]
    Start(PathBuf, #[source] io::Error),
    /// The command failed and printed why.
    #[error("firn {verb} failed ({status}): {said}")]
    Failed {
        /// The command.
        verb: String,
        /// Its exit status.
        status: String,
        /// Its output.
        said: String,
    },
    /// The command printed something unexpected.
    #[error("firn {verb} printed unexpected output: {said}")]
    Facts {
        /// The command.
        verb: String,
        /// Its output.
        said: String,
        /// Why the output could not be parsed.
        source: serde_json::Error,
    },
}

/// A `firn` program with a runtime directory.
#[derive(Clone, Debug)]
pub struct Firn {
    program: PathBuf,
    runtime: PathBuf,
    /// The network namespace it runs in, if not this program's.
    namespace: Option<String>,
    /// The fault point that is armed in it and in the processes it starts.
    fault: Option<String>,
    /// Environment variables of its processes.
    variables: Vec<(String, String)>,
    /// The disk profile of the last restore.
    disk: Arc<Mutex<Option<DiskProfile>>>,
}

/// The output of a command, and its duration.
#[derive(Clone, Debug)]
pub struct CommandOutput {
    /// The JSON that it printed.
    pub facts: Value,
    /// When it started.
    pub started: Instant,
    /// How long it ran.
    pub took: Duration,
}

impl CommandOutput {
    /// Parses the facts as a type.
    pub fn parse_as<T: DeserializeOwned>(&self, verb: &str) -> Result<T, FirnError> {
        serde_json::from_value(self.facts.clone()).map_err(|source| FirnError::Facts {
            verb: verb.to_owned(),
            said: self.facts.to_string(),
            source,
        })
    }

    /// A number among the facts, by JSON pointer (`/pause/downtime_ms`).
    pub fn number(&self, pointer: &str) -> Option<f64> {
        self.facts.pointer(pointer)?.as_f64()
    }
}

/// Options of `firn checkpoint`.
#[derive(Clone, Debug, Default)]
pub struct SaveArgs {
    words: Vec<OsString>,
}

impl SaveArgs {
    /// Adds an option and its value.
    pub fn with_option(mut self, option: &str, value: impl AsRef<OsStr>) -> Self {
        self.words.extend([option.into(), value.as_ref().to_owned()]);
        self
    }

    /// Adds an option without a value.
    pub fn with_flag(mut self, option: &str) -> Self {
        self.words.push(option.into());
        self
    }
}

impl Firn {
    /// The `firn` that the environment names, or the one beside this program.
    pub fn new(runtime: &Path) -> Self {
        let beside = || Some(std::env::current_exe().ok()?.parent()?.join("firn"));
        let program = std::env::var_os(VARIABLE).map(PathBuf::from).or_else(beside);
        let program = program.unwrap_or_else(|| "firn".into());
        Self {
            program,
            runtime: runtime.to_owned(),
            namespace: None,
            fault: None,
            variables: Vec::new(),
            disk: Arc::default(),
        }
    }

    /// The same, in a network namespace, in which its VMs run too.
    pub fn in_namespace(runtime: &Path, namespace: &str) -> Self {
        Self { namespace: Some(namespace.to_owned()), ..Self::new(runtime) }
    }

    /// The same with a fault point armed, also in the supervisors that it starts.
    pub fn with_fault(&self, fault: Option<&str>) -> Self {
        Self { fault: fault.map(str::to_owned), ..self.clone() }
    }

    /// The same with environment variables, also of the supervisors that it starts.
    pub fn with_environment(&self, variables: Vec<(String, String)>) -> Self {
        Self { variables, ..self.clone() }
    }

    /// The same with another program, in the same runtime directory.
    pub fn with_program(&self, program: &Path) -> Self {
        Self { program: program.to_owned(), ..self.clone() }
    }

    /// Whether the program was built with fault points. Without them an experiment would break
    /// nothing, and show nothing.
    pub fn has_fault_points(&self) -> io::Result<bool> {
        let mut command = Command::new(&self.program);
        let status = command.arg("--version").env("FIRN_FAULT", "command.started").output()?.status;
        Ok(status.signal() == Some(9))
    }

    /// The path of the program.
    pub fn program(&self) -> &Path {
        &self.program
    }

    /// The directory of its VMs.
    pub fn runtime_dir(&self) -> &Path {
        &self.runtime
    }

    /// `firn run`: starts a guest.
    pub fn run_vm(&self, name: &str, guest: &QemuArgs) -> Result<CommandOutput, FirnError> {
        self.run_with(name, &[], guest)
    }

    /// `firn run` with options.
    pub fn run_with(
        &self,
        name: &str,
        how: &[&OsStr],
        guest: &QemuArgs,
    ) -> Result<CommandOutput, FirnError> {
        let mut command = self.new_command("run");
        command.args(how).args([name, "--"]).arg(guest.program_name()).args(guest.args());
        self.run_command("run", command)
    }

    /// `firn checkpoint`: saves a guest that continues to run.
    pub fn checkpoint(
        &self,
        name: &str,
        image: &Path,
        how: &SaveArgs,
    ) -> Result<CommandOutput, FirnError> {
        let mut command = self.new_command("checkpoint");
        command.arg(name).arg("-o").arg(image).args(&how.words);
        self.run_command("checkpoint", command)
    }

    /// `firn restore` under a disk profile, which applies to the supervisor that reads the image
    /// because it is a child of the command. The restore neither uses what earlier restores of the
    /// image learned nor leaves anything to later ones. It does use the storage profile that
    /// earlier restores measured.
    pub fn restore(
        &self,
        image: &Path,
        name: &str,
        how: &[&str],
        throttle: &DiskThrottle,
    ) -> Result<CommandOutput, FirnError> {
        self.restore_and_learn(image, name, &[how, &["--no-learn"]].concat(), throttle)
    }

    /// Like [`Self::restore`], but learns blocks for later restores.
    pub fn restore_and_learn(
        &self,
        image: &Path,
        name: &str,
        how: &[&str],
        throttle: &DiskThrottle,
    ) -> Result<CommandOutput, FirnError> {
        self.record_disk_change(throttle.profile());
        let mut command = self.throttled_command(throttle, "restore");
        command.arg(image).args(["--name", name]).args(how);
        self.run_command("restore", command)
    }

    /// Forgets what restores have measured about storage when the disk profile changes.
    fn record_disk_change(&self, profile: DiskProfile) {
        let mut disk = self.disk.lock().unwrap_or_else(PoisonError::into_inner);
        if disk.replace(profile) != Some(profile) {
            // There may be nothing to forget.
            let _ = std::fs::remove_dir_all(self.runtime.join(".storage"));
        }
    }

    /// `firn detach`: stops managing a guest, which continues to run.
    pub fn detach(&self, name: &str) -> Result<CommandOutput, FirnError> {
        let mut command = self.new_command("detach");
        command.arg(name);
        self.run_command("detach", command)
    }

    /// `firn attach`: manages a detached guest again.
    pub fn attach(&self, name: &str, how: &[&str]) -> Result<CommandOutput, FirnError> {
        let mut command = self.new_command("attach");
        command.arg(name).args(how);
        self.run_command("attach", command)
    }

    /// `firn stop --force`: ends a guest at once. A missing guest is no error.
    pub fn stop(&self, name: &str) {
        let mut command = self.new_command("stop");
        command.args([name, "--force"]);
        // Used to clean up: whatever is left behind shows up when its name is used again.
        let _ = self.run_command("stop", command);
    }

    /// Ends every VM of this runtime directory at once.
    pub fn stop_all(&self) {
        let vms = self
            .run_command("ls", self.new_command("ls"))
            .map(|said| said.facts)
            .unwrap_or_default();
        let vms = vms.as_array().cloned().unwrap_or_default();
        let names: Vec<&str> = vms.iter().filter_map(|vm| vm["name"].as_str()).collect();
        for vm in vms.iter().filter(|vm| vm["state"] == "detached") {
            // No supervisor could stop it otherwise.
            let _ = vm["name"].as_str().map(|name| self.attach(name, &[]));
        }
        if !names.is_empty() {
            let mut command = self.new_command("stop");
            command.args(names).arg("--force");
            let _ = self.run_command("stop", command);
        }
    }

    /// `firn status`: the facts about a VM.
    pub fn status(&self, name: &str) -> Result<Value, FirnError> {
        let mut command = self.new_command("status");
        command.arg(name);
        Ok(self.run_command("status", command)?.facts)
    }

    /// `firn doctor`: its rows about a VM. It exits with an error if an operation is refused.
    pub fn doctor_rows(&self, name: &str) -> Result<Vec<Value>, FirnError> {
        let mut command = self.new_command("doctor");
        command.arg(name);
        let output = self.capture_output(command)?;
        // Any other failure prints no rows.
        match serde_json::from_slice(&output.stdout) {
            Ok(rows) => Ok(rows),
            Err(_) => Ok(parse_facts("doctor", &output)?.as_array().cloned().unwrap_or_default()),
        }
    }

    /// The path of a VM's run record.
    pub fn run_record(&self, name: &str) -> PathBuf {
        self.runtime.join(name).join("restore.json")
    }

    /// Runs any other command.
    pub fn run_verb(&self, verb: &str, words: &[&str]) -> Result<CommandOutput, FirnError> {
        let mut command = self.new_command(verb);
        command.args(words);
        self.run_command(verb, command)
    }

    /// `firn image VERB`.
    pub fn run_image_verb(&self, verb: &str, words: &[&OsStr]) -> Result<CommandOutput, FirnError> {
        let mut command = self.new_command("image");
        command.arg(verb).args(words);
        self.run_command(&format!("image {verb}"), command)
    }

    /// `firn image compare`: the result, also when the images differ.
    pub fn compare_images(&self, image: &Path, reference: &Path) -> Result<Value, FirnError> {
        let mut command = self.new_command("image");
        command.arg("compare").args([image, reference]);
        let output = self.capture_output(command)?;
        // Any other failure prints no facts.
        match serde_json::from_slice(&output.stdout) {
            Ok(facts) => Ok(facts),
            Err(_) => parse_facts("image compare", &output),
        }
    }

    fn new_command(&self, verb: &str) -> Command {
        let command = match &self.namespace {
            None => Command::new(&self.program),
            Some(namespace) => {
                let mut command = Command::new("ip");
                command.args(["netns", "exec", namespace]).arg(&self.program);
                command
            }
        };
        self.add_common_args(command, verb)
    }

    fn throttled_command(&self, throttle: &DiskThrottle, verb: &str) -> Command {
        self.add_common_args(throttle.command(&self.program), verb)
    }

    fn add_common_args(&self, mut command: Command, verb: &str) -> Command {
        command.arg(verb).arg("--json").env("FIRN_RUNTIME_DIR", &self.runtime);
        command.env("FIRN_STATE_DIR", self.runtime.join(".state"));
        if verb == "restore" {
            // Images of experiments outlive the directory that has the key of their mark.
            command.arg("--trust");
        }
        command.env(QEMU_ALLOW_VARIABLE, default_program());
        command.envs(self.fault.as_ref().map(|fault| ("FIRN_FAULT", fault)));
        command.envs(self.variables.iter().map(|(name, value)| (name, value)));
        command.stdin(Stdio::null());
        command
    }

    fn capture_output(&self, mut command: Command) -> Result<Output, FirnError> {
        command.output().map_err(|error| FirnError::Start(self.program.clone(), error))
    }

    fn run_command(&self, verb: &str, command: Command) -> Result<CommandOutput, FirnError> {
        let started = Instant::now();
        let output = self.capture_output(command)?;
        let took = started.elapsed();
        let facts = parse_facts(verb, &output)?;
        Ok(CommandOutput { facts, started, took })
    }
}

fn parse_facts(verb: &str, output: &Output) -> Result<Value, FirnError> {
    let verb = verb.to_owned();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    if !output.status.success() {
        let said = format!("{} {}", text(&output.stderr), text(&output.stdout));
        return Err(FirnError::Failed { verb, status: output.status.to_string(), said });
    }
    let said = text(&output.stdout);
    if said.is_empty() {
        return Ok(Value::Null);
    }
    serde_json::from_str(&said).map_err(|source| FirnError::Facts { verb, said, source })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::ExitStatusExt;

    fn output(code: i32, stdout: &str, stderr: &str) -> Output {
        let status = std::process::ExitStatus::from_raw(code << 8);
        Output { status, stdout: stdout.into(), stderr: stderr.into() }
    }

    #[test]
    fn facts_are_the_standard_output() {
        let facts = parse_facts("ls", &output(0, "{\"a\":1}\n", "progress")).unwrap();
        assert_eq!(facts["a"], 1);
        assert_eq!(parse_facts("stop", &output(0, "", "")).unwrap(), Value::Null);
    }

    #[test]
    fn a_failure_contains_the_error_of_firn() {
        let error = parse_facts("restore", &output(3, "", "no such image")).unwrap_err();
        assert!(error.to_string().contains("restore") && error.to_string().contains("no such"));
        assert!(matches!(parse_facts("ls", &output(0, "{", "")), Err(FirnError::Facts { .. })));
    }

    #[test]
    fn numbers_are_found_by_pointer() {
        let facts = serde_json::json!({ "pause": { "downtime_ms": 2.5 } });
        let said = CommandOutput { facts, started: Instant::now(), took: Duration::ZERO };
        assert_eq!(said.number("/pause/downtime_ms"), Some(2.5));
        assert_eq!(said.number("/pause/none"), None);
    }
}
