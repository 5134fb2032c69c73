//! The monitor of a VM that belongs to libvirt, after a check that the domain is still that VM.
//!
//! ```text
//!   domain name --> libvirt: UUID --> its monitor: thread of a vCPU --> /proc/TID/status: process
//! ```
//!
//! libvirt's calls do not report the process of a domain, and its pid file may be a file of another
//! mount namespace. The threads of the vCPUs are reported by QEMU itself, with the numbers that they
//! have in its PID namespace: in a container, such as a pod of KubeVirt, these are other numbers. A domain that was started
//! again has another process, which is refused as the socket of another process is.

use std::time::Duration;

use firn_libvirt::{
    DaemonAddress, DomainAddress, LibvirtConnection, LibvirtError, find_domain, open_monitor,
};
use firn_vmm::{QemuVm, find_namespaced_process};

use crate::hypervisor::monitor::{CONNECTING, negotiate_qmp};
use crate::hypervisor::qemu::{ANSWER_WAIT, command_line};
use crate::records::failure::{Failure, FailureContext, FailureKind};
use crate::records::monitor_address::MonitorAddress;
use crate::records::restored_domain::LibvirtTarget;

const HINT: &str = "`virsh list --all` lists the domains; --connect URI names another libvirt of this host (qemu:///system, qemu:///session)";

/// Finds a running domain of libvirt, by its name or its UUID: its process and its monitor.
///
/// # Errors
/// If libvirt does not answer, does not have the domain, or does not run it on this host.
pub fn find_libvirt_vm(domain: &str, uri: Option<&str>) -> Result<(i32, MonitorAddress), Failure> {
    let daemon = DaemonAddress::from_uri_or_environment(uri).map_err(libvirt_failure)?;
    let address = find_domain(&daemon, domain, ANSWER_WAIT)
        .map_err(|error| libvirt_failure(error).while_doing(format!("finding domain {domain}")))?;
    let mut vm = open_domain(&address, ANSWER_WAIT)?;
    let pid = find_process(&mut vm, &address)?;
    Ok((pid, MonitorAddress::Domain(address)))
}

/// The libvirt that gets a restored VM, and the domain's name if the user chose one.
///
/// # Errors
/// If the URI names no libvirt of this host.
pub fn restore_target(name: Option<String>, uri: Option<&str>) -> Result<LibvirtTarget, Failure> {
    let daemon = DaemonAddress::from_uri_or_environment(uri).map_err(libvirt_failure)?;
    Ok(LibvirtTarget { daemon, name })
}

/// The process of a domain of this host.
pub(crate) fn open_process(address: &DomainAddress) -> Result<i32, Failure> {
    find_process(&mut open_domain(address, ANSWER_WAIT)?, address)
}

/// Connects to the monitor of the domain that this process runs.
pub(crate) fn connect_domain(
    pid: i32,
    address: &DomainAddress,
    timeout: Duration,
) -> Result<QemuVm, Failure> {
    let mut vm = open_domain(address, timeout)?;
    match find_process(&mut vm, address)? {
        found if found == pid => Ok(vm),
        found => {
            let name = &address.domain;
            let text = format!("domain {name} is process {found} now, not process {pid}");
            let hint = "it was started again: attach to it again";
            Err(Failure::new(FailureKind::Ended, text).with_hint(hint))
        }
    }
}

/// libvirt's XML of the VM, if it is a domain; and its definition, if it is persistent.
pub(crate) fn read_domain_xml(
    monitor: &MonitorAddress,
) -> Result<(Option<String>, Option<String>), Failure> {
    let Some(address) = monitor.domain() else { return Ok((None, None)) };
    let read = || {
        let mut connection = LibvirtConnection::connect(&address.daemon, ANSWER_WAIT)?;
        let domain = connection.domain_at(address)?;
        let definition = connection.domain_definition(&domain)?;
        Ok((Some(connection.domain_xml(&domain)?), definition))
    };
    read().map_err(|error| libvirt_failure(error).while_doing("reading the domain's XML"))
}

fn open_domain(address: &DomainAddress, timeout: Duration) -> Result<QemuVm, Failure> {
    let stream = open_monitor(address, timeout)
        .map_err(|error| libvirt_failure(error).while_doing(CONNECTING))?;
    negotiate_qmp(stream, timeout).while_doing(CONNECTING)
}

fn find_process(vm: &mut QemuVm, address: &DomainAddress) -> Result<i32, Failure> {
    let vcpus = vm.vcpus().while_doing("querying the VM's vCPUs")?;
    let is_of_domain = |pid: i32| {
        let args = command_line(pid).map(|(args, _)| args).unwrap_or_default();
        args.iter().any(|arg| arg.contains(&address.uuid))
    };
    let process = vcpus.first().and_then(|vcpu| {
        let here = process_of(vcpu.tid.0).filter(|pid| is_of_domain(*pid));
        here.or_else(|| find_namespaced_process(vcpu.tid, is_of_domain))
    });
    process.ok_or_else(|| {
        let text = format!("the process of domain {} is not on this host", address.domain);
        let hint = "run firn where its QEMU runs: not in another container";
        Failure::new(FailureKind::NoSuchVm, text).with_hint(hint)
    })
}

/// The process that a thread belongs to.
fn process_of(thread: i32) -> Option<i32> {
    let status = std::fs::read_to_string(format!("/proc/{thread}/status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix("Tgid:"))?.trim().parse().ok()
}

pub(crate) fn libvirt_failure(error: LibvirtError) -> Failure {
    let kind = match &error {
        LibvirtError::Uri { .. } => FailureKind::Usage,
        LibvirtError::NotRunning { .. } => FailureKind::NoSuchVm,
        error if error.is_no_domain() => FailureKind::NoSuchVm,
        LibvirtError::Connect { .. } | LibvirtError::Password => FailureKind::Host,
        _ => FailureKind::Other,
    };
    Failure::from_error(kind, &error).with_hint(HINT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_belongs_to_a_process() {
        let thread = std::thread::spawn(|| rustix::thread::gettid().as_raw_nonzero().get());
        let own = std::process::id() as i32;
        assert_eq!(process_of(own), Some(own));
        assert_eq!(process_of(rustix::thread::gettid().as_raw_nonzero().get()), Some(own));
        assert_eq!(process_of(-1), None);
        drop(thread.join());
    }

    #[test]
    fn a_wrong_uri_is_an_error_of_the_command_line() {
        let failure = find_libvirt_vm("web", Some("xen:///")).unwrap_err();
        assert_eq!(failure.kind, FailureKind::Usage);
        let failure =
            find_libvirt_vm("web", Some("qemu+unix:///system?socket=/nowhere")).unwrap_err();
        assert_eq!(failure.kind, FailureKind::Host);
    }
}
