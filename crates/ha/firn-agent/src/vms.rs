//! The VMs of this host, through their supervisors. Every call may block, so callers use threads of
//! their own.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use firn_supervisor::{
    FailoverRequest, Failure, FailureContext as _, FailureKind, OnProgress, ProtectRequest,
    RuntimeDir, StopRequest, SupervisorPlan, SupervisorRequest, SupervisorStart, VmName, VmStatus,
    quick_status, quick_statuses, send_request,
};
use serde_json::Value;

/// Time between two tries to connect to a standby, until it listens.
const CONNECT_RETRY_INTERVAL: Duration = Duration::from_millis(5);

/// How long a standby may take until it listens: a process has to start.
const LISTEN_WAIT: Duration = Duration::from_secs(20);

/// Receives the result of starting a standby: its hypervisor waits, or why it does not.
pub type OnReady = Box<dyn FnOnce(Result<Value, Failure>) + Send>;

/// The requests of an agent to the VMs of its host.
pub trait LocalVms: Send + Sync + 'static {
    /// Lists all VMs.
    ///
    /// # Errors
    /// If they can't be listed.
    fn list_vms(&self) -> Result<Vec<VmStatus>, Failure>;

    /// The status of one VM.
    ///
    /// # Errors
    /// If there is no VM of that name.
    fn vm_status(&self, vm: &VmName) -> Result<VmStatus, Failure>;

    /// Protects a VM; returns when a failover is possible.
    ///
    /// # Errors
    /// Why it is not protected.
    fn protect_vm(
        &self,
        vm: &VmName,
        how: ProtectRequest,
        on_progress: OnProgress<'_>,
    ) -> Result<Value, Failure>;

    /// Sends a request to the VM's supervisor.
    ///
    /// # Errors
    /// The failure that the supervisor reports.
    fn ask_supervisor(&self, vm: &VmName, request: &SupervisorRequest) -> Result<Value, Failure>;

    /// Starts a standby that listens at `listen`, and connects to it. The standby ends with that
    /// connection if no primary introduces itself. `on_ready` receives the result of the start; it
    /// is dropped if there is none.
    ///
    /// # Errors
    /// Why it was not started.
    fn start_standby(
        &self,
        vm: &VmName,
        listen: &Path,
        on_ready: OnReady,
    ) -> Result<UnixStream, Failure>;

    /// Runs a standby's VM. Its frames leave while the lease of this generation is held.
    ///
    /// # Errors
    /// Why it does not run.
    fn fail_over_vm(&self, vm: &VmName, generation: u32) -> Result<Value, Failure>;

    /// Ends the protection of a VM, which then obeys no lease.
    ///
    /// # Errors
    /// If the supervisor does not do so.
    fn release_vm(&self, vm: &VmName) -> Result<(), Failure>;

    /// Releases the VM's buffered output while its lease is held: no other host can run the VM.
    ///
    /// # Errors
    /// If the supervisor does not do so.
    fn resume_output(&self, vm: &VmName) -> Result<(), Failure>;

    /// Ends a VM that runs elsewhere.
    ///
    /// # Errors
    /// If it continues to run.
    fn fence_vm(&self, vm: &VmName, why: String) -> Result<(), Failure>;

    /// Publishes until when frames may leave, and in which generation.
    fn grant_lease(&self, vm: &VmName, lease: Option<(u32, Duration)>);

    /// Takes the lease from a VM for a planned move: no frame leaves from now on.
    ///
    /// # Errors
    /// If the old lease may still count.
    fn revoke_lease(&self, vm: &VmName) -> Result<(), Failure> {
        self.grant_lease(vm, None);
        Ok(())
    }

    /// Ends a standby that is never run.
    ///
    /// # Errors
    /// If it continues to run.
    fn stop_standby(&self, vm: &VmName) -> Result<(), Failure>;
}

/// VMs that are managed by supervisors.
#[derive(Clone, Debug)]
pub struct SupervisedVms(pub RuntimeDir);

impl LocalVms for SupervisedVms {
    fn list_vms(&self) -> Result<Vec<VmStatus>, Failure> {
        Ok(quick_statuses(&self.0.list_vms().while_doing("looking for VMs")?))
    }

    fn vm_status(&self, vm: &VmName) -> Result<VmStatus, Failure> {
        quick_status(&self.0.vm_dir(vm))
    }

    fn protect_vm(
        &self,
        vm: &VmName,
        how: ProtectRequest,
        on_progress: OnProgress<'_>,
    ) -> Result<Value, Failure> {
        send_request(&self.0, vm, &SupervisorRequest::Protect(how), on_progress)
    }

    fn ask_supervisor(&self, vm: &VmName, request: &SupervisorRequest) -> Result<Value, Failure> {
        send_request(&self.0, vm, request, &mut |_| ())
    }

    fn start_standby(
        &self,
        vm: &VmName,
        listen: &Path,
        on_ready: OnReady,
    ) -> Result<UnixStream, Failure> {
        let address = format!("unix:{}", listen.display());
        let listens =
            address.parse().while_doing_as(FailureKind::Usage, "naming the standby's socket")?;
        let (uplinks, disks) = Default::default();
        let plan = SupervisorPlan::Standby { listen: listens, uplinks, disks };
        let starting = SupervisorStart::begin_start(&self.0, vm, &plan)?;
        match connect_standby(listen, &starting) {
            Ok(Some(stream)) => {
                let finish = move || on_ready(starting.wait_until_started(&mut |_| ()));
                let builder = thread::Builder::new().name("standby".into());
                builder.spawn(finish).while_doing("starting a standby")?;
                Ok(stream)
            }
            // Its failure is the reason why the standby ended.
            Ok(None) => {
                Err(starting.wait_until_started(&mut |_| ()).err().unwrap_or_else(silent_standby))
            }
            // No connection is open any more, and so the standby ends.
            Err(failure) => Err(failure),
        }
    }

    fn fail_over_vm(&self, vm: &VmName, generation: u32) -> Result<Value, Failure> {
        let how = FailoverRequest { lease: Some(generation), ..FailoverRequest::default() };
        send_request(&self.0, vm, &SupervisorRequest::Failover(how), &mut |_| ())
    }

    fn release_vm(&self, vm: &VmName) -> Result<(), Failure> {
        send_request(&self.0, vm, &SupervisorRequest::Release, &mut |_| ()).map(drop)
    }

    fn resume_output(&self, vm: &VmName) -> Result<(), Failure> {
        send_request(&self.0, vm, &SupervisorRequest::GoOn, &mut |_| ()).map(drop)
    }

    fn fence_vm(&self, vm: &VmName, why: String) -> Result<(), Failure> {
        send_request(&self.0, vm, &SupervisorRequest::Fence { why }, &mut |_| ()).map(drop)
    }

    fn grant_lease(&self, vm: &VmName, lease: Option<(u32, Duration)>) {
        if let Err(error) = self.0.vm_dir(vm).write_lease(lease) {
            tracing::debug!("the lease of {vm} is not written: {error}");
        }
    }

    fn revoke_lease(&self, vm: &VmName) -> Result<(), Failure> {
        self.0.vm_dir(vm).write_lease(None).while_doing(format!("giving up the lease of {vm}"))
    }

    fn stop_standby(&self, vm: &VmName) -> Result<(), Failure> {
        // Its disk files are of no use, and have the names that the next standby's files will have.
        let stop = StopRequest { discard: true, ..StopRequest::default() };
        send_request(&self.0, vm, &SupervisorRequest::Stop(stop), &mut |_| ()).map(drop)
    }
}

/// Connects as soon as the standby listens. `None` if the standby has ended.
fn connect_standby(
    listen: &Path,
    starting: &SupervisorStart,
) -> Result<Option<UnixStream>, Failure> {
    let deadline = Instant::now() + LISTEN_WAIT;
    while Instant::now() < deadline {
        if let Ok(stream) = UnixStream::connect(listen) {
            return Ok(Some(stream));
        }
        if starting.is_over() {
            return Ok(None);
        }
        thread::sleep(CONNECT_RETRY_INTERVAL);
    }
    Err(silent_standby())
}

fn silent_standby() -> Failure {
    Failure::new(FailureKind::Other, "the standby does not listen").with_hint("its log shows why")
}
