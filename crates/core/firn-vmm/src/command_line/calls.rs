//! The device for guest calls: memory that the guest's applications and Firn share (ivshmem), in a
//! file of the VM's own.
//!
//! It is part of the command line that an image records, so that a restored VM has the device that
//! its guest knows. Only the file is another one each time: two VMs of one image must not share it.

use std::path::Path;

use super::arguments::CommandArgument;
use super::properties::OptionProperties;

/// The id of the memory.
pub const CALLS_ID: &str = "firn.calls";
/// Its size in bytes: a power of two, as for every PCI BAR.
pub const CALLS_BYTES: u64 = 1 << 20;

/// Adds the device to a command line that does not have it.
pub fn with_calls(command: &[String]) -> Vec<String> {
    let has_it = command.iter().any(|word| word.contains(CALLS_ID));
    let memory = format!(
        "memory-backend-file,id={CALLS_ID},size={CALLS_BYTES},share=on,mem-path=firn-calls"
    );
    // With `master` its memory counts as the VM's own, so that a migration, and so a save, includes
    // it.
    let device = format!("ivshmem-plain,memdev={CALLS_ID},master=on");
    let added = ["-object", &memory, "-device", &device].map(str::to_owned);
    command.iter().cloned().chain(added.into_iter().filter(|_| !has_it)).collect()
}

/// The same memory over a file of the VM's own, if this option is that memory.
pub(super) fn replace_path(argument: &CommandArgument, path: &Path) -> Option<CommandArgument> {
    if argument.name() != "object" {
        return None;
    }
    let mut properties = OptionProperties::parse_value(argument.value(), "qom-type")?;
    if properties.get("id").as_deref() != Some(CALLS_ID) {
        return None;
    }
    properties.set("mem-path", &path.to_string_lossy());
    Some(CommandArgument::new("object", properties.to_text("qom-type")))
}
