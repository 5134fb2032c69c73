//! A guest whose applications may call Firn on the host.

use std::ffi::OsStr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use firn_guest::transactions::MeasuredRun;
use firn_transactions::TrackerSystem;

use crate::guest::{GuestControl, GuestImage, QemuArgs, accel};
use crate::lab::Lab;

const VM: &str = "transactions";
const BOOT: Duration = Duration::from_secs(120);
/// The maximum time of all runs of one workload.
const LIMIT: Duration = Duration::from_secs(900);
/// The name of the application that calls.
const NAME: &str = "ledger";
/// Its key, which is used only here.
const KEY: &str = "5a17c3e09b2d4f6881a0b3c7d5e9f2146b8d0a2c4e6f8193a5b7c9d1e3f50729";

/// The size of a guest.
#[derive(Clone, Copy, Debug)]
pub(super) struct GuestSize {
    /// Its memory.
    pub(super) mib: u32,
    /// The maximum count of pages that its application may have followed.
    pub(super) pages: u32,
}

impl GuestSize {
    /// For areas of a few MiB.
    pub(super) const SMALL: Self = Self { mib: 512, pages: 4096 };
}

/// The guest; dropping it stops the VM.
pub(super) struct TransactionGuest<'a> {
    lab: &'a Lab,
    agent: PathBuf,
    systems: &'static [TrackerSystem],
}

impl<'a> TransactionGuest<'a> {
    /// Boots the guest with one vCPU: the host's side of calls needs a processor too. The plugin
    /// notes its stores if a system needs that.
    pub(super) fn boot_guest(
        lab: &'a Lab,
        systems: &'static [TrackerSystem],
        size: GuestSize,
    ) -> Result<Self> {
        let (agent, policy) = (lab.file("agent"), lab.file("policy.toml"));
        let entry = format!("[applications.{NAME}]\nkey = \"{KEY}\"\npages = {}\n", size.pages);
        firn_files::replace_private(&policy, entry.as_bytes())?;
        let args = QemuArgs::new(&GuestImage::small()?, accel::choose_accel().accel)
            .memory_mib(size.mib)
            .vcpus(1)
            .with_console(&lab.file("console"))
            .with_agent_socket(&agent);
        let mut options: Vec<&OsStr> = vec!["--calls".as_ref(), policy.as_os_str()];
        options.extend(
            systems.contains(&TrackerSystem::PagesRecorded).then_some(OsStr::new("--stores")),
        );
        lab.firn().run_with(VM, &options, &args)?;
        let guest = Self { lab, agent, systems };
        GuestControl::connect(&guest.agent, BOOT)?;
        Ok(guest)
    }

    /// Runs a workload, or a shape, with each system in turn.
    pub(super) fn measure_systems(
        &self,
        what: &[&str],
        opt: &[usize],
        operations: usize,
        rounds: usize,
    ) -> Result<Vec<MeasuredRun>> {
        let list = |words: Vec<String>| words.join(",");
        let systems = list(self.systems.iter().map(|system| system.name().to_owned()).collect());
        let opt = list(opt.iter().map(usize::to_string).collect());
        let [operations, rounds] = [operations, rounds].map(|number| number.to_string());
        let how = ["--systems", &systems, "--opt", &opt, "--operations", &operations];
        let identity = ["--rounds", &rounds, "--name", NAME, "--key", KEY];
        let words = [&["firn-guest", "transactions"], what, &how, &identity].concat();
        let ended = GuestControl::connect(&self.agent, BOOT)?.run_within(&words, "", LIMIT)?;
        ensure!(ended.exit == 0, "{what:?} in the guest: {}", ended.stderr.trim());
        let parse = |line| serde_json::from_str(line).with_context(|| format!("{line:?}"));
        ended.stdout.lines().map(parse).collect()
    }
}

impl Drop for TransactionGuest<'_> {
    fn drop(&mut self) {
        self.lab.firn().stop(VM);
    }
}
