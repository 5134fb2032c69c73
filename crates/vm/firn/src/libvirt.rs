//! The options that name a domain of libvirt.

use clap::Args as ClapArgs;
use firn_supervisor::{Failure, FailureKind, MonitorAddress, VmName, find_libvirt_vm};

/// A domain of libvirt.
#[derive(Debug, ClapArgs)]
pub struct LibvirtArgs {
    /// A running domain of libvirt, by its name or its UUID, instead of --pid and --qmp.
    #[arg(long, value_name = "DOMAIN", conflicts_with_all = ["pid", "qmp"])]
    libvirt: Option<String>,
    /// The libvirt of this host that has the domain. By default that of LIBVIRT_DEFAULT_URI, or
    /// qemu:///system for root, or qemu:///session.
    #[arg(long, value_name = "URI", requires = "libvirt")]
    connect: Option<String>,
}

impl LibvirtArgs {
    /// The domain's name, its process and its monitor; `None` if the user names no domain.
    pub fn find_vm(&self) -> Result<Option<(String, i32, MonitorAddress)>, Failure> {
        let Some(wanted) = &self.libvirt else { return Ok(None) };
        let (pid, monitor) = find_libvirt_vm(wanted, self.connect.as_deref())?;
        let domain = monitor.domain().map_or(wanted, |it| &it.domain).clone();
        Ok(Some((domain, pid, monitor)))
    }
}

/// The name of a VM that has the name of its domain.
pub fn name_of_domain(domain: &str) -> Result<VmName, Failure> {
    VmName::new(domain).map_err(|error| {
        Failure::from_error(FailureKind::Usage, &error)
            .while_doing(format!("naming the VM of domain {domain}"))
            .with_hint("give it a name: firn attach NAME --libvirt DOMAIN")
    })
}
