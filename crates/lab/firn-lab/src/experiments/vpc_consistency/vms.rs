//! The VMs: booted once, saved while they wait for clients, and restored for each trial.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use firn_guest::{bank, ring};
use firn_linear::BankModel;

use crate::firn::SaveArgs;
use crate::guest::{GuestControl, GuestImage, QemuArgs, accel};
use crate::lab::Lab;
use crate::site::{HostSite, vm_network};

/// The number of VMs, and the index of the host that is their backup.
pub(super) const COUNT: usize = 2;
pub(super) const BACKUP_HOST: usize = 2;

const MIB: u32 = 128;
const BOOT: Duration = Duration::from_secs(180);
const ACCOUNTS: usize = 12;
const HELD: i64 = 1000;

/// The name of a VM.
pub(super) fn vm_name(number: usize) -> String {
    format!("bank{number}")
}

/// Its number in the network.
fn network_number(number: usize) -> u8 {
    number as u8 + 10
}

fn vm_address(number: usize, port: u16) -> SocketAddr {
    (HostSite::vm_address(network_number(number)), port).into()
}

/// The images of the VMs.
pub(super) struct SavedVms {
    images: Vec<PathBuf>,
}

impl SavedVms {
    /// Boots the VMs, has them wait for clients, and saves them.
    pub(super) fn prepare_images(lab: &Lab, site: &HostSite) -> Result<Self> {
        let images = (0..COUNT).map(|number| Self::prepare_image(lab, site, number));
        Ok(Self { images: images.collect::<Result<_>>()? })
    }

    fn prepare_image(lab: &Lab, site: &HostSite, number: usize) -> Result<PathBuf> {
        let (name, firn) = (vm_name(number), site.host(number).firn());
        let (agent, image) =
            (lab.file(&format!("{name}.agent")), lab.file(&format!("{name}.firn")));
        let (card, ip) = vm_network(network_number(number));
        let args = QemuArgs::new(&GuestImage::small()?, accel::choose_accel().accel)
            .memory_mib(MIB)
            .vcpus(1)
            .append_kernel_arg("no_timer_check")
            .append_kernel_arg(&ip)
            .with_agent_socket(&agent)
            .add_args(&card.each_ref().map(String::as_str));
        firn.run_vm(&name, &args)?;
        let mut control = GuestControl::connect(&agent, BOOT)?;
        for (job, words) in [("bank", bank_words(number)), ("ring", ring_words(number))] {
            let words: Vec<&str> = words.iter().map(String::as_str).collect();
            control.spawn_job(job, &words)?;
            control.wait_output(job, "ready", BOOT).with_context(|| format!("{job} of {name}"))?;
        }
        drop(control);
        firn.checkpoint(&name, &image, &SaveArgs::default().with_option("--strategy", "stop"))?;
        firn.stop(&name);
        lab.log_progress(&format!("{name} is saved"));
        Ok(image)
    }

    /// Restores a VM at its host, with a fault armed in its supervisor if one is given.
    pub(super) fn restore_vm(
        &self,
        site: &HostSite,
        number: usize,
        fault: Option<&str>,
    ) -> Result<()> {
        let image = self.images[number].to_string_lossy();
        let words =
            [&*image, "--name", &vm_name(number), "--mode", "eager", "--no-learn", "--wait"];
        let firn = site.host(number).firn().with_fault(fault);
        ensure!(
            fault.is_none() || firn.has_fault_points()?,
            "{} has no fault points; build one that has: cargo build --release -p firn --features armed",
            firn.program().display()
        );
        firn.run_verb("restore", &words)?;
        Ok(())
    }
}

/// The addresses of the bank's VMs.
pub(super) fn bank_addresses() -> Vec<SocketAddr> {
    (0..COUNT).map(|number| vm_address(number, bank::PORT)).collect()
}

/// The addresses of the ring's VMs.
pub(super) fn ring_addresses() -> Vec<SocketAddr> {
    (0..COUNT).map(|number| vm_address(number, ring::PORT)).collect()
}

/// The bank at the start of a trial.
pub(super) fn initial_bank() -> BankModel {
    BankModel(vec![HELD; ACCOUNTS])
}

fn owned_words(words: &[&str]) -> Vec<String> {
    words.iter().map(|&word| word.to_owned()).collect()
}

fn bank_words(number: usize) -> Vec<String> {
    let vms: Vec<String> = bank_addresses().iter().map(SocketAddr::to_string).collect();
    let [number, accounts] = [number, ACCOUNTS].map(|count| count.to_string());
    let (held, vms) = (HELD.to_string(), vms.join(","));
    owned_words(&[
        "firn-guest",
        "bank",
        "--number",
        &number,
        "--vms",
        &vms,
        "--accounts",
        &accounts,
        "--held",
        &held,
    ])
}

fn ring_words(number: usize) -> Vec<String> {
    let next = vm_address((number + 1) % COUNT, ring::PORT).to_string();
    owned_words(&["firn-guest", "ring", "--vms", &COUNT.to_string(), &next])
}
