//! The VMs of this host, through their supervisors. Every call may block, so callers use threads of
//! their own.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use firn_supervisor::{
    Context as _, FailoverRequest, Failure, FailureKind, OnProgress, Plan, ProtectRequest, Request,
    RuntimeDir, Starting, Status, StopRequest, VmName, ask, glance, glances,
};
use serde_json::Value;

/// Time between two tries to connect to a standby, until it listens.
const RETRY: Duration = Duration::from_millis(5);

/// How long a standby may take until it listens: a process has to start.
const LISTEN_WAIT: Duration = Duration::from_secs(20);

/// Receives the result of starting a standby: its hypervisor waits, or why it does not.
pub type OnReady = Box<dyn FnOnce(Result<Value, Failure>) + Send>;

/// The requests of an agent to the VMs of its host.
pub trait Vms: Send + Sync + 'static {
    /// Lists all VMs.
    ///
    /// # Errors
    /// If they can't be listed.
    fn list(&self) -> Result<Vec<Status>, Failure>;

    /// The status of one VM.
    ///
    /// # Errors
    /// If there is no VM of that name.
    fn status(&self, vm: &VmName) -> Result<Status, Failure>;

    /// Protects a VM; returns when a failover is possible.
    ///
    /// # Errors
    /// Why it is not protected.
    fn protect(
        &self,
        vm: &VmName,
        how: ProtectRequest,
        on_progress: OnProgress<'_>,
    ) -> Result<Value, Failure>;

    /// Sends a request to the VM's supervisor.
    ///
    /// # Errors
    /// The failure that the supervisor reports.
    fn ask(&self, vm: &VmName, request: &Request) -> Result<Value, Failure>;

    /// Starts a standby that listens at `listen`, and connects to it. The standby ends with that
    /// connection if no primary introduces itself. `on_ready` receives the result of the start; it
    /// is dropped if there is none.
    ///
    /// # Errors
    /// Why it was not started.
    fn stand_by(
        &self,
        vm: &VmName,
        listen: &Path,
        on_ready: OnReady,
    ) -> Result<UnixStream, Failure>;

    /// Runs a standby's VM. Its frames leave while the lease of this generation is held.
    ///
    /// # Errors
    /// Why it does not run.
    fn fail_over(&self, vm: &VmName, generation: u32) -> Result<Value, Failure>;

    /// Ends the protection of a VM, which then obeys no lease.
    ///
    /// # Errors
    /// If the supervisor does not do so.
    fn release(&self, vm: &VmName) -> Result<(), Failure>;

    /// Releases the VM's buffered output while its lease is held: no other host can run the VM.
    ///
    /// # Errors
    /// If the supervisor does not do so.
    fn go_on(&self, vm: &VmName) -> Result<(), Failure>;

    /// Ends a VM that runs elsewhere.
    ///
    /// # Errors
    /// If it continues to run.
    fn fence(&self, vm: &VmName, why: String) -> Result<(), Failure>;

    /// Publishes until when frames may leave, and in which generation.
    fn grant(&self, vm: &VmName, lease: Option<(u32, Duration)>);

    /// Ends a standby that is never run.
    ///
    /// # Errors
    /// If it continues to run.
    fn stop(&self, vm: &VmName) -> Result<(), Failure>;
}

/// VMs that are managed by supervisors.
#[derive(Clone, Debug)]
pub struct Supervised(pub RuntimeDir);

impl Vms for Supervised {
    fn list(&self) -> Result<Vec<Status>, Failure> {
        Ok(glances(&self.0.vms().doing("looking for VMs")?))
    }

    fn status(&self, vm: &VmName) -> Result<Status, Failure> {
        glance(&self.0.vm(vm))
    }

    fn protect(
        &self,
        vm: &VmName,
        how: ProtectRequest,
        on_progress: OnProgress<'_>,
    ) -> Result<Value, Failure> {
        ask(&self.0, vm, &Request::Protect(how), on_progress)
    }

    fn ask(&self, vm: &VmName, request: &Request) -> Result<Value, Failure> {
        ask(&self.0, vm, request, &mut |_| ())
    }

    fn stand_by(
        &self,
        vm: &VmName,
        listen: &Path,
        on_ready: OnReady,
    ) -> Result<UnixStream, Failure> {
        let address = format!("unix:{}", listen.display());
        let listens =
            address.parse().doing_or(FailureKind::Usage, "naming the standby's socket")?;
        let (uplinks, disks) = Default::default();
        let plan = Plan::Standby { listen: listens, uplinks, disks };
        let starting = Starting::begin(&self.0, vm, &plan)?;
        match connect(listen, &starting) {
            Ok(Some(stream)) => {
                let finish = move || on_ready(starting.finish(&mut |_| ()));
                let builder = thread::Builder::new().name("standby".into());
                builder.spawn(finish).doing("starting a standby")?;
                Ok(stream)
            }
            // Its failure is the reason why the standby ended.
            Ok(None) => Err(starting.finish(&mut |_| ()).err().unwrap_or_else(silent)),
            // No connection is open any more, and so the standby ends.
            Err(failure) => Err(failure),
        }
    }

    fn fail_over(&self, vm: &VmName, generation: u32) -> Result<Value, Failure> {
        let how = FailoverRequest { lease: Some(generation), ..FailoverRequest::default() };
        ask(&self.0, vm, &Request::Failover(how), &mut |_| ())
    }

    fn release(&self, vm: &VmName) -> Result<(), Failure> {
        ask(&self.0, vm, &Request::Release, &mut |_| ()).map(drop)
    }

    fn go_on(&self, vm: &VmName) -> Result<(), Failure> {
        ask(&self.0, vm, &Request::GoOn, &mut |_| ()).map(drop)
    }

    fn fence(&self, vm: &VmName, why: String) -> Result<(), Failure> {
        ask(&self.0, vm, &Request::Fence { why }, &mut |_| ()).map(drop)
    }

    fn grant(&self, vm: &VmName, lease: Option<(u32, Duration)>) {
        if let Err(error) = self.0.vm(vm).grant(lease) {
            tracing::debug!("the lease of {vm} is not written: {error}");
        }
    }

    fn stop(&self, vm: &VmName) -> Result<(), Failure> {
        // Its disk files are of no use, and have the names that the next standby's files will have.
        let stop = StopRequest { discard: true, ..StopRequest::default() };
        ask(&self.0, vm, &Request::Stop(stop), &mut |_| ()).map(drop)
    }
}

/// Connects as soon as the standby listens. `None` if the standby has ended.
fn connect(listen: &Path, starting: &Starting) -> Result<Option<UnixStream>, Failure> {
    let deadline = Instant::now() + LISTEN_WAIT;
    while Instant::now() < deadline {
        if let Ok(stream) = UnixStream::connect(listen) {
            return Ok(Some(stream));
        }
        if starting.is_over() {
            return Ok(None);
        }
        thread::sleep(RETRY);
    }
    Err(silent())
}

fn silent() -> Failure {
    Failure::new(FailureKind::Other, "the standby does not listen").hint("its log shows why")
}
