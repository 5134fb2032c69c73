//! The check whether this host could restore an image, without starting the VM.

use std::fs::File;
use std::process::{Command, Stdio};

use firn_memory::{KernelFeatures, UserfaultfdAccess};
use firn_vmm::command_line;
use serde::Serialize;

use crate::processes::programs;
use crate::records::cpu::CpuFacts;
use crate::records::failure::Failure;
use crate::records::failure::FailureKind::Host;
use crate::records::meta::ImageMeta;

/// One requirement of a restore.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct HostCheck {
    /// The requirement, in a word or two.
    pub what: &'static str,
    /// Whether this host meets it.
    pub passed: bool,
    /// What was found on this host.
    pub found: String,
}

/// A check's result: what was found, or what is wrong.
type CheckResult = Result<String, String>;

/// Checks all requirements of a restore of this image.
pub fn check_host(meta: &ImageMeta) -> Vec<HostCheck> {
    let check = |what, found: CheckResult| {
        let (passed, found) = found.map_or_else(|wrong| (false, wrong), |found| (true, found));
        HostCheck { what, passed, found }
    };
    vec![
        check("image", check_mark(meta)),
        check("command line", check_command_line(meta)),
        check("QEMU", check_qemu_version(meta)),
        check("machine", check_machine_type(meta)),
        check("accelerator", check_accelerator(meta)),
        check("CPU", check_processor(meta)),
        check("disks", check_disks(meta)),
        check("memory", check_memory(meta)),
        check("userfaultfd", check_userfaultfd()),
    ]
}

fn check_mark(meta: &ImageMeta) -> CheckResult {
    match &meta.unrestorable[..] {
        [] => Ok("not marked as one that cannot be restored".to_owned()),
        reasons => Err(format!("made with --accept-unrestorable: {}", reasons.join("; "))),
    }
}

fn check_command_line(meta: &ImageMeta) -> CheckResult {
    let plan =
        command_line::plan_command(&meta.qemu.user_args).map_err(|error| error.to_string())?;
    let files = plan.boot_files();
    let is_gone = |file: &&String| !meta.qemu.directory.join(file).exists();
    match files.iter().find(is_gone) {
        Some(file) => Err(format!("{file} is not there")),
        None => Ok("can be used".to_owned()),
    }
}

/// Runs the QEMU of the image and returns its output. Refuses a program that a restore would refuse:
/// the image may come from any source.
fn output_of_qemu(meta: &ImageMeta, args: &[&str]) -> CheckResult {
    let name = meta.qemu.user_args.first().map_or("qemu-system-x86_64", String::as_str);
    let program = programs::allowed_program(name, &meta.qemu.directory)
        .map_err(|failure| failure.to_string())?;
    let output = Command::new(&program).args(args).stdin(Stdio::null()).output();
    let output = output.map_err(|error| format!("{}: {error}", program.display()))?;
    match output.status.success() {
        true => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
        false => {
            Err(format!("{} {} failed ({})", program.display(), args.join(" "), output.status))
        }
    }
}

fn check_qemu_version(meta: &ImageMeta) -> CheckResult {
    let output = output_of_qemu(meta, &["--version"])?;
    let line = output.lines().next().unwrap_or_default();
    let version = line.split_once("version ").map_or(line, |(_, version)| version);
    match meta.qemu_mismatch(version) {
        Some(mismatch) => Err(mismatch.to_string()),
        None => Ok(version.to_owned()),
    }
}

fn check_machine_type(meta: &ImageMeta) -> CheckResult {
    let output = output_of_qemu(meta, &["-machine", "help"])?;
    let mut known = output.lines().filter_map(|line| line.split_whitespace().next());
    match known.any(|machine| machine == meta.machine) {
        true => Ok(meta.machine.clone()),
        false => Err(format!("this QEMU has no machine type {}", meta.machine)),
    }
}

fn check_accelerator(meta: &ImageMeta) -> CheckResult {
    let accel = &meta.qemu.accel;
    if accel == "kvm" {
        let device = File::options().read(true).write(true).open("/dev/kvm");
        device.map_err(|error| format!("/dev/kvm: {error}"))?;
    }
    let output = output_of_qemu(meta, &["-accel", "help"])?;
    match output.lines().any(|line| line.trim() == accel) {
        true => Ok(accel.clone()),
        false => Err(format!("this QEMU has no accelerator {accel}")),
    }
}

fn check_processor(meta: &ImageMeta) -> CheckResult {
    let Some(then) = &meta.cpu else {
        return Ok("emulated, or a model that QEMU checks".to_owned());
    };
    let now = CpuFacts::of_host();
    match &then.missing_in(&now)[..] {
        [] => Ok(now.model),
        missing => Err(format!("{} lacks {} of {}", now.model, missing.join(" "), then.model)),
    }
}

fn check_disks(meta: &ImageMeta) -> CheckResult {
    let mismatches: Vec<String> = meta.file_mismatches().iter().map(ToString::to_string).collect();
    match mismatches.is_empty() {
        true => Ok(format!("{} there and unchanged", meta.disks.len() + meta.drives.len())),
        false => Err(mismatches.join("; ")),
    }
}

fn check_memory(meta: &ImageMeta) -> CheckResult {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let available = available_bytes(&text).ok_or("/proc/meminfo does not report MemAvailable")?;
    let (needed, available) = (meta.memory_bytes >> 20, available >> 20);
    match available >= needed {
        true => Ok(format!("{needed} MiB of {available} MiB available")),
        false => Err(format!("{needed} MiB are needed, {available} MiB are available")),
    }
}

fn available_bytes(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? << 10)
}

/// Checks userfaultfd, which an eager restore does not need.
fn check_userfaultfd() -> CheckResult {
    let usable = KernelFeatures::of_kernel().and_then(|_| UserfaultfdAccess::of_this_user());
    Ok(match usable {
        Ok(_) => "usable".to_owned(),
        Err(error) => {
            let why = Failure::from_error(Host, &error);
            format!("not usable: by firn restore --mode eager only ({why})")
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn available_memory_is_read() {
        assert_eq!(available_bytes("MemFree: 1 kB\nMemAvailable:    2048 kB\n"), Some(2 << 20));
        assert_eq!(available_bytes("MemFree: 1 kB\n"), None);
    }

    #[test]
    fn an_image_that_is_marked_does_not_pass() {
        let meta = ImageMeta { unrestorable: vec!["nic1".into()], ..ImageMeta::default() };
        let checks = check_host(&meta);
        let image = checks.iter().find(|check| check.what == "image").unwrap();
        assert!(!image.passed && image.found.contains("nic1"), "{image:?}");
    }
}
