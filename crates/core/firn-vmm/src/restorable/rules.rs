//! The rules that derive obstacles from facts, as a pure function.

use std::path::Path;

use super::facts::{DeviceFacts, MachineFacts};
use super::obstacle::{InaccessibleDeviceKind, RestoreObstacle};
use crate::command_line::{self, CommandNeeds};

/// The command lines of a running QEMU, and its start directory.
#[derive(Clone, Copy, Debug)]
pub struct CommandLines<'a> {
    /// The command line that a restore starts from.
    pub user: &'a [String],
    /// The command line that QEMU was started with.
    pub actual: &'a [String],
    /// The directory that relative paths start from.
    pub directory: &'a Path,
}

/// The reasons why a VM could not be restored; none if it could.
pub fn find_obstacles(lines: &CommandLines<'_>, facts: &MachineFacts) -> Vec<RestoreObstacle> {
    let needs = command_line::find_needs(lines.user);
    let mut obstacles = device_obstacles(facts);
    obstacles.extend(backend_obstacles(facts));
    obstacles.extend(removed_devices(&needs, facts));
    obstacles.extend(fewer_vcpus(facts));
    obstacles.extend(changed_media(lines.actual, facts));
    obstacles.extend(descriptor_obstacles(&needs));
    obstacles.extend(secret_obstacles(&needs, lines.directory));
    let confidential = facts.confidential_guest.iter().cloned();
    obstacles.extend(confidential.map(|object| RestoreObstacle::Confidential { object }));
    let unusable = command_line::plan_command(lines.user).err().map(|error| error.to_string());
    let is_explained = || obstacles.iter().any(|it| matches!(it, RestoreObstacle::Unseen { .. }));
    // Planning refuses some of the same devices.
    match unusable {
        Some(reason) if !is_explained() => obstacles.push(RestoreObstacle::CommandLine { reason }),
        _ => {}
    }
    obstacles
}

fn device_name(device: &DeviceFacts) -> String {
    device.id.clone().unwrap_or_else(|| device.path.clone())
}

fn device_obstacles(facts: &MachineFacts) -> Vec<RestoreObstacle> {
    let obstacle = |device: &DeviceFacts| {
        let driver = device.driver.clone();
        match (InaccessibleDeviceKind::of_driver(&driver), device.is_hotplugged) {
            (Some(kind), _) => {
                Some(RestoreObstacle::Unseen { device: device_name(device), driver, kind })
            }
            (None, true) => {
                Some(RestoreObstacle::HotPlugged { device: device_name(device), driver })
            }
            (None, false) => None,
        }
    };
    facts.devices.iter().filter_map(obstacle).collect()
}

fn backend_obstacles(facts: &MachineFacts) -> Vec<RestoreObstacle> {
    let unseen = facts.backends.iter().filter_map(|backend| {
        let kind = InaccessibleDeviceKind::of_backend(&backend.kind)?;
        let (device, driver) = (format!("network back end {}", backend.name), backend.kind.clone());
        Some(RestoreObstacle::Unseen { device, driver, kind })
    });
    unseen.collect()
}

fn removed_devices(needs: &CommandNeeds, facts: &MachineFacts) -> Vec<RestoreObstacle> {
    let exists = |id: &str| facts.devices.iter().any(|device| device.id.as_deref() == Some(id));
    let gone = needs.devices.iter().filter(|device| !exists(&device.id));
    let mut removed: Vec<String> =
        gone.map(|device| format!("device {} ({})", device.id, device.driver)).collect();
    let unnamed = facts.devices.iter().filter(|it| it.id.is_none() && !it.is_hotplugged).count();
    if unnamed < needs.unnamed_devices {
        removed.push(format!("{} devices without an id", needs.unnamed_devices));
    }
    removed.into_iter().map(|devices| RestoreObstacle::Removed { devices }).collect()
}

fn fewer_vcpus(facts: &MachineFacts) -> Option<RestoreObstacle> {
    let (now, initial) = (facts.vcpus, facts.initial_vcpus?);
    (now < initial).then_some(RestoreObstacle::FewerVcpus { now, initial })
}

fn changed_media(actual: &[String], facts: &MachineFacts) -> Vec<RestoreObstacle> {
    let is_named = |file: &str| actual.iter().any(|word| word.contains(&file.replace(',', ",,")));
    let plain = facts.media.iter().filter(|medium| !medium.file.starts_with("json:"));
    let changed = plain.filter(|medium| !is_named(&medium.file));
    let obstacle = |(drive, file)| RestoreObstacle::ChangedMedium { drive, file };
    changed.map(|medium| obstacle((medium.drive.clone(), medium.file.clone()))).collect()
}

fn descriptor_obstacles(needs: &CommandNeeds) -> impl Iterator<Item = RestoreObstacle> {
    let options = needs.descriptors.clone().into_iter();
    options.map(|option| RestoreObstacle::Descriptor { option })
}

fn secret_obstacles(needs: &CommandNeeds, directory: &Path) -> Vec<RestoreObstacle> {
    let is_gone = |path: &str| !directory.join(path).exists();
    let gone = needs.secret_files.iter().filter(|secret| is_gone(&secret.path));
    let gone = gone.map(|secret| (secret.id.clone(), format!("{} is gone", secret.path)));
    let held = needs.keyring_secrets.iter().cloned();
    let held = held.map(|id| (id, "the kernel's keyring holds it".to_owned()));
    gone.chain(held).map(|(id, location)| RestoreObstacle::Secret { id, location }).collect()
}
