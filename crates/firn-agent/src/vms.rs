//! The VMs of this host, as the agent reaches them: by their supervisors. Everything here may wait; callers are on threads of
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

/// How often a standby is tried to be connected to until it listens.
const RETRY: Duration = Duration::from_millis(5);

/// How long it may take until it does: a process has to start.
const LISTEN_WAIT: Duration = Duration::from_secs(20);

/// What becomes of a standby that was started: its hypervisor waits, or why not.
pub type OnReady = Box<dyn FnOnce(Result<Value, Failure>) + Send>;

/// What an agent asks of the VMs of its host.
pub trait Vms: Send + Sync + 'static {
    /// All of them.
    ///
    /// # Errors
    /// If they can't be looked for.
    fn list(&self) -> Result<Vec<Status>, Failure>;

    /// One of them.
    ///
    /// # Errors
    /// If there is none of that name.
    fn status(&self, vm: &VmName) -> Result<Status, Failure>;

    /// Protects it; returns when there is something to fail over to.
    ///
    /// # Errors
    /// Why it is not protected.
    fn protect(
        &self,
        vm: &VmName,
        how: ProtectRequest,
        on_progress: OnProgress<'_>,
    ) -> Result<Value, Failure>;

    /// Asks its supervisor something.
    ///
    /// # Errors
    /// What that says.
    fn ask(&self, vm: &VmName, request: &Request) -> Result<Value, Failure>;

    /// Starts a standby that listens there, and connects to it. It ends with that connection if no primary introduces itself;
    /// `on_ready` hears what becomes of it; it is dropped if nothing does.
    ///
    /// # Errors
    /// Why it was not started.
    fn stand_by(
        &self,
        vm: &VmName,
        listen: &Path,
        on_ready: OnReady,
    ) -> Result<UnixStream, Failure>;

    /// Runs a standby's VM, whose frames leave while the lease of this timeline is held.
    ///
    /// # Errors
    /// Why it does not run.
    fn fail_over(&self, vm: &VmName, generation: u32) -> Result<Value, Failure>;

    /// Protects it no longer, and has it need no lease.
    ///
    /// # Errors
    /// If it can't be told.
    fn release(&self, vm: &VmName) -> Result<(), Failure>;

    /// Lets out what it holds, while its lease is held: nobody else can run it.
    ///
    /// # Errors
    /// If it can't be told.
    fn go_on(&self, vm: &VmName) -> Result<(), Failure>;

    /// Ends one that runs elsewhere.
    ///
    /// # Errors
    /// If it goes on.
    fn fence(&self, vm: &VmName, why: String) -> Result<(), Failure>;

    /// Says until when frames of which timeline may leave.
    fn grant(&self, vm: &VmName, lease: Option<(u32, Duration)>);

    /// Ends a standby that is never run.
    ///
    /// # Errors
    /// If it goes on.
    fn stop(&self, vm: &VmName) -> Result<(), Failure>;
}

/// Those that supervisors look after.
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
            // It has said why.
            Ok(None) => Err(starting.finish(&mut |_| ()).err().unwrap_or_else(silent)),
            // Nobody waits for it any more: it ends by that.
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
        // Its copies of disks are of no use to anybody, and have the names of those to come.
        let stop = StopRequest { discard: true, ..StopRequest::default() };
        ask(&self.0, vm, &Request::Stop(stop), &mut |_| ()).map(drop)
    }
}

/// Connects as soon as somebody listens. `None` if the standby has ended.
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
    Failure::new(FailureKind::Other, "the standby does not listen").hint("its log says why")
}
