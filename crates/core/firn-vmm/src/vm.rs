//! Control of one VM over its monitor.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU64;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use firn_types::{GuestPhys, ThreadId, VcpuId};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::backup::{self, CopyError, DriveCopy};
use crate::commit::{self, BlockCommit, JobState};
use crate::connection_probe::probe_connections;
use crate::device_state::{self, DeviceStateError, StateFile};
use crate::devices::{self, DevicePath};
use crate::disks::{self, DiskImage, FileView};
use crate::drives::{self, CutError, Drive, DriveCut, Overlay};
use crate::filters::{self, FilterSide};
use crate::hmp::{self, ConnectedCard, UserConnection};
use crate::layout::{self, LayoutError, MemoryLayout};
use crate::mirror::{self, MirrorExtent, MirrorState};
use crate::namespace_threads::translate_threads;
use crate::pause_pipe::{PausePipe, PausedVm, WaitMode};
use crate::qmp::{QmpClient, QmpError};
use crate::restorable::{self, MachineFacts};
use crate::version::QemuVersion;

/// The maximum number of lost connections that a guest is shown.
const PROBES_MAX: usize = 4096;

/// The default timeout of a monitor command. `stop` waits for disks to be flushed.
pub const TIMEOUT: Duration = Duration::from_secs(30);

/// Five announcements within a second, at growing intervals. In milliseconds, QEMU's own defaults
/// (`qapi/migration.json`).
fn announce_parameters() -> Value {
    serde_json::json!({ "initial": 50, "max": 550, "rounds": 5, "step": 100 })
}

/// A running QEMU.
#[derive(Debug)]
pub struct QemuVm {
    qmp: QmpClient,
    version: QemuVersion,
    state_file: Option<StateFile>,
    pause_pipe: Option<PausePipe>,
    /// The VM's process, once it is known.
    process: Option<i32>,
}

/// Whether the VM runs, in QEMU's words.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunState {
    /// Whether vCPUs run.
    pub running: bool,
    /// QEMU's name for the state, such as `running`, `paused`, `inmigrate`.
    pub status: String,
}

const QUERY_VCPUS: &str = "query-cpus-fast";

/// A vCPU and the thread that runs it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub struct Vcpu {
    /// Its number.
    #[serde(rename = "cpu-index")]
    pub id: VcpuId,
    /// Its thread, in this PID namespace if the VM's process is known ([`QemuVm::of_process`]), and
    /// in QEMU's otherwise.
    #[serde(rename = "thread-id")]
    pub tid: ThreadId,
}

/// The root of a page table that a vCPU used when Firn read its registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PageTableRoot {
    /// The vCPU.
    pub vcpu: VcpuId,
    /// The address of the top-level table.
    pub gpa: GuestPhys,
    /// The number of levels, 4 or 5.
    pub levels: u8,
}

/// The accelerator that runs the vCPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AcceleratorKind {
    /// KVM, the kernel's virtual machine monitor.
    Kvm,
    /// TCG, QEMU's own translator.
    Tcg,
}

/// The state of the memory balloon.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub struct BalloonInfo {
    /// RAM that is left to the guest, in bytes.
    #[serde(rename = "actual")]
    pub actual_bytes: u64,
}

#[derive(Debug, Deserialize)]
struct MigrationInfo {
    #[serde(rename = "blocked-reasons", default)]
    blocked_reasons: Vec<String>,
}

/// The vCPUs of a process with the numbers that their threads have in this PID namespace.
fn translate_vcpus(process: i32, vcpus: Vec<Vcpu>) -> Result<Vec<Vcpu>, QmpError> {
    let unexpected = |what: String| QmpError::unexpected(QUERY_VCPUS, what);
    let threads: Vec<ThreadId> = vcpus.iter().map(|vcpu| vcpu.tid).collect();
    let here = translate_threads(process, &threads)
        .map_err(|error| unexpected(format!("the threads of process {process}: {error}")))?;
    let translate = |(vcpu, tid): (Vcpu, Option<ThreadId>)| {
        let missing = || unexpected(format!("process {process} has no thread {}", vcpu.tid.0));
        tid.map(|tid| Vcpu { tid, ..vcpu }).ok_or_else(missing)
    };
    vcpus.into_iter().zip(here).map(translate).collect()
}

impl QemuVm {
    /// Connects to the monitor at `qmp_path`.
    pub fn connect(qmp_path: &Path) -> Result<Self, QmpError> {
        Self::with_qmp(QmpClient::connect(qmp_path, TIMEOUT)?)
    }

    /// Connects to a QEMU that has just been started and may not have made its socket yet. Fails
    /// early when `alive` is false: QEMU has died then, and its log has the reason.
    pub fn connect_started(qmp_path: &Path, alive: impl FnMut() -> bool) -> Result<Self, QmpError> {
        Self::with_qmp(QmpClient::connect_started(qmp_path, TIMEOUT, alive)?)
    }

    /// Uses a monitor connection that is open already.
    pub fn with_qmp(mut qmp: QmpClient) -> Result<Self, QmpError> {
        let version = qmp.query("query-version")?;
        Ok(Self { qmp, version, state_file: None, pause_pipe: None, process: None })
    }

    /// Sets the VM's process, so that its threads get their numbers in this PID namespace.
    #[must_use]
    pub fn of_process(mut self, process: i32) -> Self {
        self.process = Some(process);
        self
    }

    /// The monitor connection, for commands that this type has no method for.
    pub fn qmp(&mut self) -> &mut QmpClient {
        &mut self.qmp
    }

    /// QEMU's version.
    pub fn version(&self) -> &QemuVersion {
        &self.version
    }

    /// Whether the VM runs.
    pub fn status(&mut self) -> Result<RunState, QmpError> {
        self.qmp.query("query-status")
    }

    /// Stops all vCPUs. On return none runs, and block devices are drained and flushed.
    pub fn stop(&mut self) -> Result<(), QmpError> {
        self.qmp.execute("stop", Value::Null).map(drop)
    }

    /// Starts the vCPUs.
    pub fn cont(&mut self) -> Result<(), QmpError> {
        self.qmp.execute("cont", Value::Null).map(drop)
    }

    /// Makes the VM's network cards send reverse ARP requests, so that switches learn their
    /// addresses. The VM must run.
    pub fn announce_self(&mut self) -> Result<(), QmpError> {
        self.qmp.execute("announce-self", announce_parameters()).map(drop)
    }

    /// The MAC address of the network card with this back end.
    pub fn mac_address(&mut self, netdev: &str) -> Result<Option<[u8; 6]>, QmpError> {
        Ok(hmp::parse_card_address(&self.qmp.execute_hmp("info network")?, netdev))
    }

    /// The network cards that are connected to a back end.
    pub fn connected_cards(&mut self) -> Result<Vec<ConnectedCard>, QmpError> {
        Ok(hmp::parse_connected_cards(&self.qmp.execute_hmp("info network")?))
    }

    /// The TCP connections that the guest has made by QEMU's user networking.
    pub fn user_connections(&mut self) -> Result<Vec<UserConnection>, QmpError> {
        Ok(hmp::parse_user_connections(&self.qmp.execute_hmp("info usernet")?))
    }

    /// Has the guest find out which of these connections have ended. Those of cards that the VM does
    /// not have are left out, and those beyond the first 4096.
    pub fn probe_connections(&mut self, connections: &[UserConnection]) -> Result<(), QmpError> {
        let mut by_card: BTreeMap<&str, Vec<&UserConnection>> = BTreeMap::new();
        for connection in connections.iter().take(PROBES_MAX) {
            by_card.entry(&connection.netdev).or_default().push(connection);
        }
        for (netdev, connections) in by_card {
            let Some(card) = self.mac_address(netdev)? else { continue };
            probe_connections(&mut self.qmp, (netdev, card), &connections)?;
        }
        Ok(())
    }

    /// Hands over the socket at which QEMU listens for a filter that is added later.
    pub fn add_filter_socket(
        &mut self,
        number: u32,
        side: FilterSide,
        listener: BorrowedFd<'_>,
    ) -> Result<(), QmpError> {
        filters::add_socket(&mut self.qmp, (number, side), listener)
    }

    /// Adds a filter to a back end, whose socket was handed over. QEMU refuses it if it does not see
    /// the frames of the back end.
    pub fn add_filter(
        &mut self,
        netdev: &str,
        number: u32,
        side: FilterSide,
    ) -> Result<(), QmpError> {
        filters::add_filter(&mut self.qmp, netdev, (number, side))
    }

    /// Whether a filter is there.
    pub fn has_filter(&mut self, number: u32, side: FilterSide) -> Result<bool, QmpError> {
        filters::has_filter(&mut self.qmp, (number, side))
    }

    /// Removes a filter, if it is there.
    pub fn remove_filter(&mut self, number: u32, side: FilterSide) -> Result<(), QmpError> {
        filters::remove_filter(&mut self.qmp, (number, side))
    }

    /// Closes the socket of a filter that was removed, if it is there.
    pub fn remove_filter_socket(&mut self, number: u32, side: FilterSide) -> Result<(), QmpError> {
        filters::remove_socket(&mut self.qmp, (number, side))
    }

    /// Ends the VM. A QEMU that dies before it has answered counts as ended.
    pub fn quit(&mut self) -> Result<(), QmpError> {
        match self.qmp.execute("quit", Value::Null) {
            Ok(_) | Err(QmpError::Closed { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// The vCPUs and their threads.
    pub fn vcpus(&mut self) -> Result<Vec<Vcpu>, QmpError> {
        let vcpus: Vec<Vcpu> = self.qmp.query(QUERY_VCPUS)?;
        match self.process {
            Some(process) => translate_vcpus(process, vcpus),
            None => Ok(vcpus),
        }
    }

    /// The accelerator that runs the vCPUs.
    pub fn accel(&mut self) -> Result<AcceleratorKind, QmpError> {
        let kvm = self.qmp.execute("query-kvm", Value::Null)?;
        let enabled = kvm.get("enabled").and_then(Value::as_bool).unwrap_or(false);
        Ok(if enabled { AcceleratorKind::Kvm } else { AcceleratorKind::Tcg })
    }

    /// The machine type with its version, such as `pc-q35-7.2`.
    pub fn machine_type(&mut self) -> Result<String, QmpError> {
        let arguments = serde_json::json!({ "path": "/machine", "property": "type" });
        let class = self.qmp.execute("qom-get", arguments)?;
        let class = class.as_str().ok_or_else(|| QmpError::unexpected("qom-get", "no text"))?;
        Ok(class.strip_suffix("-machine").unwrap_or(class).to_owned())
    }

    /// The balloon; `None` if the VM has none.
    pub fn balloon(&mut self) -> Result<Option<BalloonInfo>, QmpError> {
        match self.qmp.query("query-balloon") {
            Ok(balloon) => Ok(Some(balloon)),
            Err(error) if error.has_class("DeviceNotActive") => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The devices that a user added, on the command line or later.
    pub fn device_paths(&mut self) -> Result<BTreeSet<DevicePath>, QmpError> {
        devices::list_devices(&mut self.qmp)
    }

    /// The process at the other end of the monitor socket. `None` if that process has none of the
    /// vCPU threads: then another process made the socket and handed it over.
    pub fn pid(&mut self) -> Result<Option<i32>, QmpError> {
        let peer = rustix::net::sockopt::socket_peercred(self.qmp.socket());
        let Ok(pid) = peer.map(|peer| peer.pid.as_raw_nonzero().get()) else { return Ok(None) };
        let vcpus: Vec<Vcpu> = self.qmp.query(QUERY_VCPUS)?;
        let Ok(vcpus) = translate_vcpus(pid, vcpus) else { return Ok(None) };
        let is_thread =
            |vcpu: &Vcpu| Path::new(&format!("/proc/{pid}/task/{}", vcpu.tid.0)).exists();
        Ok(vcpus.iter().any(is_thread).then_some(pid))
    }

    /// The images the VM has open, and what identifies them.
    pub fn disks(&mut self) -> Result<Vec<DiskImage>, QmpError> {
        let process = FileView::of_process(self.pid()?);
        disks::find_disks(&mut self.qmp, &process)
    }

    /// Whether data of a request may be written into guest memory later without a page fault: by a
    /// disk that is read without the page cache.
    pub fn reads_past_page_cache(&mut self) -> Result<bool, QmpError> {
        disks::is_any_read_past_page_cache(&mut self.qmp)
    }

    /// The drives that the guest can write to.
    pub fn drives(&mut self) -> Result<Vec<Drive>, QmpError> {
        let process = FileView::of_process(self.pid()?);
        drives::find_drives(&mut self.qmp, &process)
    }

    /// Opens an overlay that will be put on a drive. The VM may run.
    pub fn open_overlay(&mut self, drive: &Drive, overlay: &Overlay) -> Result<(), QmpError> {
        drives::open_overlay(&mut self.qmp, drive, overlay)
    }

    /// Closes an overlay, if QEMU has it open. `false` if it is in use: the guest writes to it.
    pub fn close_overlay(&mut self, overlay: &Overlay) -> Result<bool, QmpError> {
        drives::close_overlay(&mut self.qmp, overlay)
    }

    /// Opens the file of a copy of a drive. The VM may run.
    pub fn open_copy(&mut self, copy: &DriveCopy) -> Result<(), CopyError> {
        backup::open_copy(&mut self.qmp, copy)
    }

    /// Gives copies the speed that all of them may have together, in bytes per second. In the pause
    /// in which they begin they are slower. `None`: as fast as they can.
    pub fn limit_copies(
        &mut self,
        copies: &[DriveCopy],
        bytes_per_s: Option<NonZeroU64>,
    ) -> Result<(), QmpError> {
        backup::limit_copies(&mut self.qmp, copies, bytes_per_s)
    }

    /// Waits until copies that were begun are complete, and closes their files.
    pub fn finish_copies(
        &mut self,
        copies: &[DriveCopy],
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<(), CopyError> {
        backup::finish_copies(&mut self.qmp, copies, is_cancelled)
    }

    /// Ends copies, complete or not, closes their files and removes their dirty bitmaps. Returns
    /// whether any was not complete.
    pub fn discard_copies(&mut self, copies: &[DriveCopy]) -> Result<bool, QmpError> {
        backup::discard_copies(&mut self.qmp, copies)
    }

    /// The approximate number of bytes that the guest has written since a copy. `None` if QEMU does
    /// not know.
    pub fn changed_bytes(&mut self, copy: &DriveCopy) -> Result<Option<u64>, QmpError> {
        backup::query_changed_bytes(&mut self.qmp, copy)
    }

    /// Connects to an NBD server at a socket with an abstract name, as the target of a mirror: the
    /// socket and the export.
    pub fn add_mirror_target(&mut self, name: &str, at: (&str, &str)) -> Result<(), QmpError> {
        mirror::add_target(&mut self.qmp, name, at)
    }

    /// Starts the job that mirrors a node to a target that was added. The VM may run.
    pub fn begin_mirror(
        &mut self,
        name: &str,
        source: &str,
        extent: MirrorExtent,
    ) -> Result<(), QmpError> {
        mirror::begin_mirror(&mut self.qmp, name, source, extent)
    }

    /// The state of the job of a mirror.
    pub fn query_mirror(&mut self, name: &str) -> Result<MirrorState, QmpError> {
        mirror::query_mirror(&mut self.qmp, name)
    }

    /// Ends the job of a mirror, if there is one. The drive stays as it is.
    pub fn end_mirror(&mut self, name: &str) -> Result<(), QmpError> {
        mirror::end_mirror(&mut self.qmp, name)
    }

    /// Removes the target of a mirror whose job has ended, if it is there.
    pub fn remove_mirror_target(&mut self, name: &str) -> Result<(), QmpError> {
        mirror::remove_target(&mut self.qmp, name)
    }

    /// The names of all mirrors of which this QEMU has a job or a target.
    pub fn list_mirrors(&mut self) -> Result<Vec<String>, QmpError> {
        mirror::list_mirrors(&mut self.qmp)
    }

    /// Removes the dirty bitmaps that Firn added, except those that began with these copies.
    pub fn remove_bitmaps(&mut self, keep: &[DriveCopy]) -> Result<(), QmpError> {
        backup::remove_bitmaps(&mut self.qmp, keep)
    }

    /// Starts a job that merges layers of a drive, and that ends as `concluded`. The VM may run.
    pub fn begin_commit(&mut self, drive: &Drive, commit: &BlockCommit) -> Result<(), QmpError> {
        let process = FileView::of_process(self.pid()?);
        commit::begin_commit(&mut self.qmp, &process, drive, commit)
    }

    /// The merges that have begun and have not been dismissed.
    pub fn commit_jobs(&mut self) -> Result<Vec<JobState>, QmpError> {
        commit::query_commit_jobs(&mut self.qmp)
    }

    /// Makes a merge that is `ready` switch the drive to its lower file.
    pub fn complete_commit(&mut self, job: &str) -> Result<(), QmpError> {
        commit::complete_job(&mut self.qmp, job)
    }

    /// Ends a merge early.
    pub fn cancel_commit(&mut self, job: &str) -> Result<(), QmpError> {
        commit::cancel_job(&mut self.qmp, job)
    }

    /// Makes QEMU forget a merge that is `concluded`.
    pub fn dismiss_commit(&mut self, job: &str) -> Result<(), QmpError> {
        commit::dismiss_job(&mut self.qmp, job)
    }

    /// Closes layers that were merged, the topmost first.
    pub fn close_layers(&mut self, files: &[PathBuf]) -> Result<(), QmpError> {
        let process = FileView::of_process(self.pid()?);
        commit::close_layers(&mut self.qmp, &process, files)
    }

    /// The reasons why QEMU would not migrate this VM: devices whose state it cannot save, CPU
    /// features it must not migrate. Such a VM cannot be checkpointed either, whether or not saving
    /// device state succeeds.
    pub fn migration_blockers(&mut self) -> Result<Vec<String>, QmpError> {
        let migration: MigrationInfo = self.qmp.query("query-migrate")?;
        Ok(migration.blocked_reasons)
    }

    /// The properties of the machine that the command line of a restore has to reproduce.
    pub fn machine_facts(&mut self) -> Result<MachineFacts, QmpError> {
        restorable::collect_facts(&mut self.qmp)
    }

    /// The addresses of all memory of the VM.
    pub fn layout(&mut self) -> Result<MemoryLayout, LayoutError> {
        layout::find_layout(&mut self.qmp)
    }

    /// The page tables that the vCPUs in long mode use now.
    pub fn page_table_roots(&mut self) -> Result<Vec<PageTableRoot>, QmpError> {
        let vcpus = hmp::parse_registers(&self.qmp.execute_hmp("info registers -a")?);
        let root = |(vcpu, registers): (VcpuId, hmp::VcpuRegisters)| {
            Some(PageTableRoot {
                vcpu,
                gpa: registers.table_root(),
                levels: registers.table_levels()?,
            })
        };
        Ok(vcpus.into_iter().filter_map(root).collect())
    }

    /// Gives QEMU the file to which it will save device state, so that [`Self::save_device_state`]
    /// has less to do while the VM is paused. A second call does nothing.
    pub fn prepare_save(&mut self) -> Result<(), DeviceStateError> {
        if self.state_file.is_none() {
            self.finish_save()?;
            self.state_file = Some(StateFile::hand_over(&mut self.qmp)?);
        }
        Ok(())
    }

    /// Gives QEMU the pipe by which [`Self::begin_pause`] keeps the VM paused.
    pub fn prepare_pause(&mut self) -> Result<(), DeviceStateError> {
        self.prepare_late_pause(0)
    }

    /// The same for a VM whose devices are known to take at least `least` bytes: QEMU saves some of
    /// them before it waits for Firn, which shortens the pause. If they suddenly took far less,
    /// [`PausedVm::resume_vm`] would return an error.
    pub fn prepare_late_pause(&mut self, least: usize) -> Result<(), DeviceStateError> {
        if self.pause_pipe.as_mut().is_some_and(|holder| holder.try_reset(least)) {
            return Ok(());
        }
        self.finish_save()?;
        self.pause_pipe = Some(PausePipe::hand_over(&mut self.qmp, least)?);
        Ok(())
    }

    /// Pauses a VM that runs, its disks drained and flushed, until the [`PausedVm`] is resumed,
    /// which returns the device state. The pause is shorter than with [`Self::stop`] and
    /// [`Self::cont`]. The monitor does not reply meanwhile.
    ///
    /// `None` if this QEMU does not support it; the VM runs then. After an error it runs as well,
    /// if it did before.
    pub fn begin_pause(&mut self) -> Result<Option<PausedVm<'_>>, DeviceStateError> {
        self.begin_pause_with(&mut || (), WaitMode::Spin)
    }

    /// The same. `asked` is called when the command has been sent; QEMU then waits for its disks'
    /// requests.
    pub fn begin_pause_with(
        &mut self,
        asked: &mut dyn FnMut(),
        wait_mode: WaitMode,
    ) -> Result<Option<PausedVm<'_>>, DeviceStateError> {
        if self.pause_pipe.is_none() {
            self.prepare_pause()?;
        }
        PausedVm::pause_vm(&mut self.qmp, &mut self.pause_pipe, asked, wait_mode)
    }

    /// The length of the last pause by QEMU's own clock: from when its vCPUs had stopped until just
    /// before they started. `None` unless the VM is known to have both stopped and started.
    pub fn last_pause(&self) -> Option<Duration> {
        self.qmp.last_event_time("RESUME")?.checked_sub(self.qmp.last_event_time("STOP")?)
    }

    /// Saves the state of every device and vCPU, without RAM. The VM must be stopped, and remains
    /// so.
    pub fn save_device_state(&mut self) -> Result<Vec<u8>, DeviceStateError> {
        self.with_state_file(|qmp, file| {
            let save = file.send_save(qmp)?;
            qmp.wait_reply(save)?;
            file.read_state()
        })
    }

    /// [`Self::stop`] and [`Self::save_device_state`] in one round trip. On an error the VM may be
    /// stopped.
    pub fn stop_and_save_device_state(&mut self) -> Result<Vec<u8>, DeviceStateError> {
        self.with_state_file(|qmp, file| {
            let stop = qmp.send("stop", Value::Null)?;
            let save = file.send_save(qmp)?;
            qmp.wait_reply(stop)?;
            qmp.wait_reply(save)?;
            file.read_state()
        })
    }

    /// [`Self::stop`], [`Self::save_device_state`], and the overlays and copies of `drives`, in one
    /// round trip. After an error the VM may be stopped, the overlays may have been put on, and the
    /// copies begun.
    ///
    /// Saving devices flushes disks once more, so the copies begin after it.
    ///
    /// Checks the drives again after the stop, when nothing can change them any more.
    pub fn stop_and_cut(&mut self, drives: &DriveCut) -> Result<Vec<u8>, CutError> {
        if drives.is_empty() {
            return Ok(self.stop_and_save_device_state()?);
        }
        let mut problem = Ok(());
        let fails_alone = self.version.is_at_least(10, 1);
        let saved = self.with_state_file(|qmp, file| {
            let stop = qmp.send("stop", Value::Null)?;
            let disks = qmp.send("query-block", Value::Null)?;
            let jobs = qmp.send("query-block-jobs", Value::Null)?;
            let save = file.send_save(qmp)?;
            let put = drives.build_transaction(fails_alone).map(|all| qmp.send("transaction", all));
            let put = put.transpose()?;
            qmp.wait_reply(stop)?;
            let (disks, jobs) = (qmp.wait_reply(disks), qmp.wait_reply(jobs));
            let save = qmp.wait_reply(save);
            let put = put.map(|put| qmp.wait_reply(put)).transpose();
            problem = disks
                .and_then(|disks| Ok((disks, jobs?)))
                .map_err(CutError::Drives)
                .and_then(|(disks, jobs)| drives.check_unchanged(disks, jobs))
                .and(put.map(drop).map_err(CutError::Drives));
            save?;
            file.read_state()
        });
        problem?;
        Ok(saved?)
    }

    fn with_state_file(
        &mut self,
        save: impl FnOnce(&mut QmpClient, &StateFile) -> Result<Vec<u8>, DeviceStateError>,
    ) -> Result<Vec<u8>, DeviceStateError> {
        self.prepare_save()?;
        let Some(file) = self.state_file.take() else {
            return Err(DeviceStateError::Size { bytes: 0 });
        };
        drop(self.qmp.take_events());
        let state = save(&mut self.qmp, &file);
        self.state_file = Some(file);
        state
    }

    /// Removes the descriptors that [`Self::prepare_save`] and [`Self::prepare_pause`] gave QEMU,
    /// which keeps them otherwise for the next save. Call it while the VM runs; otherwise QEMU
    /// keeps its copy until the connection ends.
    pub fn finish_save(&mut self) -> Result<(), DeviceStateError> {
        if let Some(holder) = self.pause_pipe.take() {
            holder.remove_from_qemu(&mut self.qmp)?;
        }
        match self.state_file.take() {
            Some(file) => file.remove_from_qemu(&mut self.qmp),
            None => Ok(()),
        }
    }

    /// Closes descriptors that another connection of Firn gave to QEMU and did not remove.
    pub fn remove_left_descriptors(&mut self) -> Result<(), QmpError> {
        device_state::remove_left_fdsets(&mut self.qmp)
    }

    /// Loads device state into a QEMU that was started with `-S -incoming defer` and
    /// `-global migration.send-configuration=off`. On return the VM is loaded and stopped.
    pub fn load_device_state(&mut self, state: &[u8]) -> Result<(), DeviceStateError> {
        let says_why = self.version.is_at_least(9, 1);
        device_state::load_state(&mut self.qmp, state, says_why)
    }

    /// Loads device state into a QEMU that was started with `-S -incoming defer` alone, as libvirt
    /// starts it: such a QEMU expects the name of its machine type first.
    pub fn load_device_state_of(
        &mut self,
        machine: &str,
        state: &[u8],
    ) -> Result<(), DeviceStateError> {
        self.load_device_state(&device_state::with_configuration(state, machine))
    }
}
