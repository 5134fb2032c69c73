//! The VMs: booted once, saved while they wait for clients, and restored for each trial.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result};
use firn_guest::{bank, ring};
use firn_linear::Bank;

use crate::firn::SaveArgs;
use crate::guest::{Control, GuestImage, QemuArgs, accel};
use crate::lab::Lab;
use crate::site::{Site, vm_network};

/// The number of VMs, and the index of the host that is their backup.
pub(super) const COUNT: usize = 2;
pub(super) const KEEPER: usize = 2;

const MIB: u32 = 128;
const BOOT: Duration = Duration::from_secs(180);
const ACCOUNTS: usize = 12;
const HELD: i64 = 1000;

/// The name of a VM.
pub(super) fn name(number: usize) -> String {
    format!("bank{number}")
}

/// Its number in the network.
fn place(number: usize) -> u8 {
    number as u8 + 10
}

fn address(number: usize, port: u16) -> SocketAddr {
    (Site::vm_address(place(number)), port).into()
}

/// The images of the VMs.
pub(super) struct Vms {
    images: Vec<PathBuf>,
}

impl Vms {
    /// Boots the VMs, has them wait for clients, and saves them.
    pub(super) fn prepare(lab: &Lab, site: &Site) -> Result<Self> {
        let images = (0..COUNT).map(|number| Self::image(lab, site, number));
        Ok(Self { images: images.collect::<Result<_>>()? })
    }

    fn image(lab: &Lab, site: &Site, number: usize) -> Result<PathBuf> {
        let (name, firn) = (name(number), site.host(number).firn());
        let (agent, image) =
            (lab.file(&format!("{name}.agent")), lab.file(&format!("{name}.firn")));
        let (card, ip) = vm_network(place(number));
        let args = QemuArgs::new(&GuestImage::small()?, accel::decide().accel)
            .memory_mib(MIB)
            .vcpus(1)
            .append("no_timer_check")
            .append(&ip)
            .agent(&agent)
            .more(&card.each_ref().map(String::as_str));
        firn.run(&name, &args)?;
        let mut control = Control::connect(&agent, BOOT)?;
        for (job, words) in [("bank", bank_words(number)), ("ring", ring_words(number))] {
            let words: Vec<&str> = words.iter().map(String::as_str).collect();
            control.spawn(job, &words)?;
            control.wait_output(job, "ready", BOOT).with_context(|| format!("{job} of {name}"))?;
        }
        drop(control);
        firn.checkpoint(&name, &image, &SaveArgs::default().with("--strategy", "stop"))?;
        firn.stop(&name);
        lab.say(&format!("{name} is saved"));
        Ok(image)
    }

    /// Restores a VM at its host, with a fault armed in its supervisor if one is given.
    pub(super) fn restore(&self, site: &Site, number: usize, fault: Option<&str>) -> Result<()> {
        let image = self.images[number].to_string_lossy();
        let words = [&*image, "--name", &name(number), "--mode", "eager", "--no-learn", "--wait"];
        site.host(number).firn().armed(fault).call("restore", &words)?;
        Ok(())
    }
}

/// The addresses of the bank's VMs.
pub(super) fn bank_addresses() -> Vec<SocketAddr> {
    (0..COUNT).map(|number| address(number, bank::PORT)).collect()
}

/// The addresses of the ring's VMs.
pub(super) fn ring_addresses() -> Vec<SocketAddr> {
    (0..COUNT).map(|number| address(number, ring::PORT)).collect()
}

/// The bank at the start of a trial.
pub(super) fn start() -> Bank {
    Bank(vec![HELD; ACCOUNTS])
}

fn words(words: &[&str]) -> Vec<String> {
    words.iter().map(|&word| word.to_owned()).collect()
}

fn bank_words(number: usize) -> Vec<String> {
    let vms: Vec<String> = bank_addresses().iter().map(SocketAddr::to_string).collect();
    let [number, accounts] = [number, ACCOUNTS].map(|count| count.to_string());
    let (held, vms) = (HELD.to_string(), vms.join(","));
    words(&[
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
    let next = address((number + 1) % COUNT, ring::PORT).to_string();
    words(&["firn-guest", "ring", "--vms", &COUNT.to_string(), &next])
}
