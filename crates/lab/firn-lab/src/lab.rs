//! The lab that every experiment runs in: a directory on a real disk, a `firn`, options that say
//! how much to do.

use std::fs;
use std::io;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context as _, Result};
use serde_json::{Value, json};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use tempfile::TempDir;

use crate::disk_profile::{
    DiskProfile, DiskThrottle, ThrottleError, make_cold_when_ready, measure_throttle, warm_file,
};
use crate::firn::Firn;
use crate::guest::{GuestImage, accel, default_program};
use crate::report::Report;

/// Environment variable that names the directory for images. It should be on a disk that can be
/// throttled.
pub const VARIABLE: &str = "FIRN_LAB_DIR";

/// Arguments that start the hypervisor paused, with its firmware and a device that has a ROM.
const IDLE_QEMU_ARGS: [&str; 9] =
    ["-S", "-display", "none", "-serial", "none", "-monitor", "stdio", "-device", "virtio-net-pci"];

/// How much an experiment does.
#[derive(Clone, Debug, Default)]
pub struct ExperimentOptions {
    /// Produce all figures, in at most five minutes.
    pub quick: bool,
    /// Seed of the random numbers.
    pub seed: u64,
    /// Number of repetitions; `None` lets the experiment choose.
    pub runs: Option<usize>,
    /// Words that select among the experiment's guests and disks, where it has several. An empty
    /// list selects all.
    pub only: Vec<String>,
}

impl ExperimentOptions {
    /// Returns the values whose names the user gave. When the words name none of them, the words
    /// select something else, and all values are returned.
    pub fn select_wanted<T: Copy>(&self, kind: &[T], name: impl Fn(T) -> String) -> Vec<T> {
        let is_named = |&&one: &&T| self.only.contains(&name(one));
        let named: Vec<T> = kind.iter().filter(is_named).copied().collect();
        if named.is_empty() { kind.to_vec() } else { named }
    }

    /// Number of repetitions: the user's, or one of two defaults.
    pub fn runs(&self, quick: usize, full: usize) -> usize {
        self.runs.unwrap_or(if self.quick { quick } else { full }).max(1)
    }

    /// One of two values, by `quick`.
    pub fn pick<T>(&self, quick: T, full: T) -> T {
        if self.quick { quick } else { full }
    }
}

/// The directory, VMs and `firn` of a run. Dropping it stops the VMs, then removes the directory.
/// The same happens when the program is interrupted.
pub struct Lab {
    /// How much to do.
    pub extent: ExperimentOptions,
    firn: Firn,
    dir: TempDir,
    since: Instant,
    ends: CleanupActions,
}

/// Further cleanup that runs when the program is interrupted.
type CleanupActions = Arc<Mutex<Vec<Box<dyn Fn() + Send>>>>;

impl Lab {
    /// Makes a directory for images and runtime files.
    pub fn new(extent: ExperimentOptions) -> Result<Self> {
        let base = std::env::var_os(VARIABLE).map_or_else(|| "/var/tmp".into(), PathBuf::from);
        let dir = tempfile::Builder::new()
            .prefix("firn-lab-")
            .tempdir_in(&base)
            .with_context(|| format!("cannot make a directory in {}", base.display()))?;
        let runtime = dir.path().join("run");
        create_private_dir(&runtime)?;
        let firn = Firn::new(&runtime);
        let ends = CleanupActions::default();
        clean_up_when_interrupted(firn.clone(), dir.path().to_owned(), Arc::clone(&ends))?;
        Ok(Self { extent, firn, dir, since: Instant::now(), ends })
    }

    /// Registers cleanup for an interrupt: an experiment that leaves something outside the lab's
    /// directory and VMs removes it there.
    pub fn when_interrupted(&self, end: impl Fn() + Send + 'static) {
        self.ends.lock().unwrap_or_else(PoisonError::into_inner).push(Box::new(end));
    }

    /// The directory for images.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// The path of a file in the lab's directory.
    pub fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The `firn` program.
    pub fn firn(&self) -> &Firn {
        &self.firn
    }

    /// Prints progress to standard error, with the time since the start.
    pub fn log_progress(&self, text: &str) {
        let seconds = self.since.elapsed().as_secs_f64();
        eprintln!("[{seconds:6.1} s] {text}");
    }

    /// An empty report that describes this machine and the accelerator of its guests.
    pub fn vm_report(&self, experiment: &str) -> Report {
        let mut report = self.report(experiment);
        let accel = accel::choose_accel();
        report.set_host_fact("accel", accel.accel.to_string());
        report.set_host_fact("accel_why", accel.why.clone());
        report
    }

    /// An empty report that describes this machine.
    pub fn report(&self, experiment: &str) -> Report {
        let mut report = Report::new(experiment, self.extent.quick);
        report.set_host_fact("kernel", kernel_release());
        report.set_host_fact("cores", std::thread::available_parallelism().map_or(0, usize::from));
        report.set_host_fact("seed", self.extent.seed);
        report.set_host_fact("commit", source_commit());
        report.set_host_fact("day", current_day());
        report
    }

    /// Evicts an image from the page cache once the disk is as fast as this profile requires. What
    /// a hypervisor reads beside the image stays cached or is read again. Logs it if the disk did
    /// not become fast enough in time.
    pub fn make_cold(&self, image: &Path, profile: DiskProfile) -> Result<(), ThrottleError> {
        if !make_cold_when_ready(image, profile)? {
            self.log_progress(&format!("the disk is slower than {profile} now"));
        }
        // Evicting the image may have dropped all caches.
        let guests = GuestImage::requested_guests();
        guests
            .iter()
            .flat_map(|guest| [&guest.kernel, &guest.initrd])
            .try_for_each(|it| warm_file(it))?;
        if let Err(error) = start_and_quit() {
            self.log_progress(&format!(
                "the hypervisor may have to be read from the disk: {error}"
            ));
        }
        Ok(())
    }

    /// Throttles the disk of this lab's directory as a profile requires, measures the result, and
    /// adds it to the report.
    ///
    /// `None` where this machine can't imitate the disk: the report says so, and the caller leaves
    /// its figures missing.
    pub fn throttle_disk(&self, profile: DiskProfile, report: &mut Report) -> Option<DiskThrottle> {
        match self.try_throttle_disk(profile) {
            Ok((throttle, facts)) => {
                report.set_host_fact(&format!("disk.{profile}"), facts);
                Some(throttle)
            }
            Err(error) => {
                let why = format!("disk profile {profile} is not available: {error:#}");
                self.log_progress(&why);
                report.add_remark(why);
                None
            }
        }
    }

    fn try_throttle_disk(&self, profile: DiskProfile) -> Result<(DiskThrottle, Value)> {
        let throttle = DiskThrottle::new(profile, self.dir())?;
        let achieved = measure_throttle(&throttle, self.dir(), &std::env::current_exe()?)?;
        let facts = json!({ "random_4k_iops": achieved.iops.round(), "read_ms": achieved.read_ms });
        Ok((throttle, facts))
    }
}

impl Drop for Lab {
    /// Stops every VM, so that an experiment that fails leaves none: the VMs use the directory that
    /// is removed next.
    fn drop(&mut self) {
        self.firn.stop_all();
    }
}

/// On SIGINT or SIGTERM, cleans up and ends the program. A guest must not outlive its experiment.
fn clean_up_when_interrupted(firn: Firn, dir: PathBuf, ends: CleanupActions) -> io::Result<()> {
    let mut signals = Signals::new([SIGINT, SIGTERM])?;
    std::thread::Builder::new().name("signals".into()).spawn(move || {
        if let Some(signal) = signals.forever().next() {
            ends.lock().unwrap_or_else(PoisonError::into_inner).iter().for_each(|end| end());
            firn.stop_all();
            let _ = fs::remove_dir_all(&dir);
            std::process::exit(128 + signal);
        }
    })?;
    Ok(())
}

/// The commit of the sources in the current directory, marked if they have changed since.
fn source_commit() -> String {
    let git = Command::new("git").args(["describe", "--always", "--dirty", "--abbrev=10"]).output();
    let text = git.ok().filter(|it| it.status.success()).map(|it| it.stdout).unwrap_or_default();
    match String::from_utf8_lossy(&text).trim() {
        "" => "unknown".to_owned(),
        commit => commit.to_owned(),
    }
}

/// The day, as 2026-11-27.
fn current_day() -> String {
    let now = humantime::format_rfc3339_seconds(SystemTime::now()).to_string();
    now.split('T').next().unwrap_or_default().to_owned()
}

fn kernel_release() -> String {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    release.trim().to_owned()
}

fn create_private_dir(path: &Path) -> io::Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    fs::DirBuilder::new().mode(0o700).create(path)
}

/// Runs rounds of all systems alternately, A B C A B C: drift of the machine affects all of them
/// alike.
pub fn run_interleaved<S>(
    rounds: usize,
    systems: &[S],
    mut run: impl FnMut(usize, &S) -> Result<()>,
) -> Result<()> {
    (0..rounds).try_for_each(|round| systems.iter().try_for_each(|system| run(round, system)))
}

/// Polls until there is an answer, or the limit has passed.
pub fn wait_for<T>(
    what: &str,
    limit: Duration,
    mut ask: impl FnMut() -> Result<Option<T>>,
) -> Result<T> {
    let start = Instant::now();
    loop {
        if let Some(answer) = ask()? {
            return Ok(answer);
        }
        anyhow::ensure!(start.elapsed() < limit, "{what}: nothing after {} s", limit.as_secs());
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Starts and ends an idle hypervisor, so that the files every hypervisor reads are in the page
/// cache.
fn start_and_quit() -> io::Result<()> {
    let mut command = Command::new(default_program());
    command.args(IDLE_QEMU_ARGS).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut hypervisor = command.spawn()?;
    let write_result =
        hypervisor.stdin.take().map_or(Ok(()), |mut monitor| monitor.write_all(b"quit\n"));
    if write_result.is_err() {
        hypervisor.kill()?;
    }
    hypervisor.wait()?;
    write_result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn systems_take_turns() {
        let mut seen = Vec::new();
        let note = |round, system: &char| {
            seen.push((round, *system));
            Ok(())
        };
        run_interleaved(2, &['a', 'b'], note).unwrap();
        assert_eq!(seen, [(0, 'a'), (0, 'b'), (1, 'a'), (1, 'b')]);
    }

    #[test]
    fn an_error_ends_the_rounds() {
        let mut runs = 0;
        let fail = |_, _: &char| {
            runs += 1;
            anyhow::bail!("no")
        };
        assert!(run_interleaved(3, &['a', 'b'], fail).is_err());
        assert_eq!(runs, 1);
    }

    #[test]
    fn asking_ends() {
        let mut left = 3;
        let found = wait_for("it", Duration::from_secs(5), || {
            left -= 1;
            Ok((left == 0).then_some("there"))
        });
        assert_eq!(found.unwrap(), "there");
        let never = wait_for("it", Duration::ZERO, || Ok(None::<()>));
        assert_eq!(never.unwrap_err().to_string(), "it: nothing after 0 s");
    }

    #[test]
    fn words_choose_among_the_kind_they_name() {
        let only = vec!["jvm".to_owned(), "netssd".to_owned()];
        let extent = ExperimentOptions { only, ..ExperimentOptions::default() };
        let name = |name: &str| name.to_owned();
        assert_eq!(extent.select_wanted(&["idle", "jvm"], name), ["jvm"]);
        assert_eq!(extent.select_wanted(&["hdd7200", "netssd"], name), ["netssd"]);
        assert_eq!(extent.select_wanted(&["eager", "lazy"], name), ["eager", "lazy"]);
    }

    #[test]
    fn the_users_options_have_priority() {
        let extent =
            |quick, runs| ExperimentOptions { quick, runs, ..ExperimentOptions::default() };
        assert_eq!(extent(true, None).runs(2, 10), 2);
        assert_eq!(extent(false, None).runs(2, 10), 10);
        assert_eq!(extent(true, Some(5)).runs(2, 10), 5);
    }
}
