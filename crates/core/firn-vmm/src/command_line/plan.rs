//! The plan of a command line: the RAM that it requests, and the command line with Firn's
//! additions.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::arguments::{self, CommandArgument};
use super::backend::{self, RamBackend};
use super::calls;
use super::cards::{self, CardPlan, OtherCard};
use super::disks::{self, DiskPlan};
use super::drives::{self, DriveFile};
use super::endpoints::{self, EndpointRelocation, HostEndpoint};
use super::error::CommandLineError;
use super::network_disks::{self, NetworkDisk};
use super::properties::{OptionProperties, escape_commas};
use super::size;

/// The id of the RAM backend that Firn adds.
pub const RAM_ID: &str = "firn.ram";

/// The id of the monitor that Firn adds.
pub const MONITOR_ID: &str = "firn.qmp";

/// RAM of a machine without `-m`, in bytes (QEMU `hw/core/machine.c`).
const DEFAULT_RAM_BYTES: u64 = 128 << 20;

/// QEMU rounds `-m` up to a multiple of this (`softmmu/vl.c`, `set_memory_options`; later
/// `machine_set_mem`).
const RAM_ALIGN_BYTES: u64 = 8192;

/// One region of guest RAM that a command line requests.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RamPlan {
    /// The backend's id.
    pub id: String,
    /// Its size in bytes.
    pub bytes: u64,
}

/// The paths and descriptors that Firn adds to a command line.
#[derive(Clone, Debug)]
pub struct AddedPaths {
    /// The path at which QEMU will make its monitor socket.
    pub qmp: PathBuf,
    /// One file for each of [`CommandPlan::ram`], in that order, such as `/proc/self/fd/N`.
    pub ram: Vec<PathBuf>,
    /// The path at which QEMU makes the memory of the device for guest calls, if there is one.
    pub calls: PathBuf,
    /// The plugin that records stores of the VM's applications, if it is used.
    pub stores: Option<StorePlugin>,
    /// For each of [`CommandPlan::cards`], in that order, QEMU's number for its socket.
    pub cards: Vec<i32>,
}

/// A plugin of QEMU's TCG that records stores.
#[derive(Clone, Debug)]
pub struct StorePlugin {
    /// The plugin.
    pub library: PathBuf,
    /// The path at which it makes its control socket.
    pub orders: PathBuf,
}

/// A command line for a VM under Firn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AugmentedCommand {
    /// The command line; the program first.
    pub args: Vec<String>,
    /// The changes and their reasons, a sentence each.
    pub notes: Vec<String>,
    /// The VM's RAM.
    pub ram: Vec<RamPlan>,
}

/// A command line that Firn has parsed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommandPlan {
    program: String,
    arguments: Vec<CommandArgument>,
    /// The user's own backends that are guest RAM.
    backends: Vec<RamBackend>,
    ram: Vec<RamPlan>,
    cards: Vec<CardPlan>,
    /// The disks that have no server yet.
    disks: Vec<DiskPlan>,
    /// The changes so far.
    notes: Vec<String>,
}

/// Parses a command line, the program first, and plans its RAM.
///
/// Refuses options that Firn does not support: RAM that is not made of `memory-backend-*` objects
/// or plain `-m`, persistent memory, locked memory, options from a file.
pub fn plan_command(command: &[String]) -> Result<CommandPlan, CommandLineError> {
    let (program, words) = command.split_first().ok_or(CommandLineError::Empty)?;
    let arguments = without_own_monitor(arguments::split_words(words));
    arguments.iter().try_for_each(check_argument)?;
    let machine = merge_options(&arguments, &["machine", "M"], "type")?;
    if machine.get("memory.size").is_some() {
        let option = format!("-machine {}", machine.to_text("type"));
        return Err(CommandLineError::refuse_option(option, "give the size of RAM with -m"));
    }
    let backends = ram_backends(&arguments, &machine)?;
    let mut ram: Vec<RamPlan> = backends.iter().map(RamPlan::from_backend).collect();
    if !has_base_ram(&arguments, &machine)? {
        ram.insert(0, RamPlan { id: RAM_ID.to_owned(), bytes: plain_ram_bytes(&arguments)? });
    }
    let cards = cards::find_cards(&arguments)?;
    let (disks, notes) = (disks::find_disks(&arguments)?, Vec::new());
    Ok(CommandPlan { program: program.clone(), arguments, backends, ram, cards, disks, notes })
}

impl RamPlan {
    fn from_backend(backend: &RamBackend) -> Self {
        Self { id: backend.id.clone(), bytes: backend.bytes }
    }
}

/// Removes the monitor that Firn added to the command line earlier; a new one will be added.
fn without_own_monitor(mut arguments: Vec<CommandArgument>) -> Vec<CommandArgument> {
    arguments.retain(|argument| {
        let named = |key: &str, implied: &str| {
            let properties = OptionProperties::parse_value(argument.value(), implied);
            properties.is_some_and(|properties| properties.get(key).as_deref() == Some(MONITOR_ID))
        };
        match argument.name() {
            "chardev" => !named("id", "backend"),
            "mon" => !named("chardev", "chardev"),
            _ => true,
        }
    });
    arguments
}

fn check_argument(argument: &CommandArgument) -> Result<(), CommandLineError> {
    let value = || OptionProperties::parse_value(argument.value(), "").unwrap_or_default();
    let reason = match argument.name() {
        "mem-path" => "Firn gives the VM a RAM file of its own; leave -mem-path out",
        "readconfig" => "Firn could not read this file; write its options on the command line",
        "preconfig" | "-preconfig" => "Firn starts the VM itself; leave --preconfig out",
        "overcommit" if value().is_on("mem-lock") => {
            "locked memory cannot be tracked or restored lazily; leave mem-lock out"
        }
        "numa" if value().get("mem").is_some() => {
            "give each node its RAM as a memory backend: -numa node,memdev=ID"
        }
        _ => return Ok(()),
    };
    Err(CommandLineError::refuse_option(argument, reason))
}

/// The properties of all options of these names; the later ones override the earlier ones.
pub(super) fn merge_options(
    arguments: &[CommandArgument],
    names: &[&str],
    implied: &str,
) -> Result<OptionProperties, CommandLineError> {
    let mut all = OptionProperties::default();
    for argument in arguments.iter().filter(|argument| names.contains(&argument.name())) {
        all.merge(read_properties(argument, implied)?);
    }
    Ok(all)
}

fn read_properties(
    argument: &CommandArgument,
    implied: &str,
) -> Result<OptionProperties, CommandLineError> {
    OptionProperties::parse_value(argument.value(), implied)
        .ok_or_else(|| CommandLineError::unreadable_option(argument, "its JSON"))
}

/// Whether the user defines the machine's first RAM.
fn has_base_ram(
    arguments: &[CommandArgument],
    machine: &OptionProperties,
) -> Result<bool, CommandLineError> {
    if machine.get("memory-backend").is_some() {
        return Ok(true);
    }
    let mut nodes = arguments.iter().filter(|argument| argument.name() == "numa");
    nodes.try_fold(false, |found, node| {
        Ok(found || read_properties(node, "type")?.get("memdev").is_some())
    })
}

/// The user's backends that are guest RAM, in the order in which the machine maps them.
fn ram_backends(
    arguments: &[CommandArgument],
    machine: &OptionProperties,
) -> Result<Vec<RamBackend>, CommandLineError> {
    let mut known = Vec::new();
    for (at, argument) in arguments.iter().enumerate().filter(|(_, it)| it.name() == "object") {
        known.extend(RamBackend::parse_object(argument, at)?);
    }
    let mut used = Vec::new();
    for id in ram_ids(arguments, machine)? {
        let backend = known.iter().find(|backend| backend.id == id).cloned();
        let backend = backend.ok_or(CommandLineError::NoBackend { id })?;
        backend.check_support(&arguments[backend.at])?;
        used.push(backend);
    }
    Ok(used)
}

/// The ids of the backends of the machine, of its NUMA nodes and of its memory devices. Those of
/// other devices, such as `ivshmem`, are not guest RAM and stay as they are.
fn ram_ids(
    arguments: &[CommandArgument],
    machine: &OptionProperties,
) -> Result<Vec<String>, CommandLineError> {
    let mut ids: Vec<String> = machine.get("memory-backend").map(Into::into).into_iter().collect();
    for argument in arguments.iter().filter(|argument| argument.name() == "numa") {
        ids.extend(read_properties(argument, "type")?.get("memdev").map(String::from));
    }
    for argument in arguments.iter().filter(|argument| argument.name() == "device") {
        ids.extend(memory_device(argument)?);
    }
    Ok(ids)
}

fn memory_device(argument: &CommandArgument) -> Result<Option<String>, CommandLineError> {
    let device = read_properties(argument, "driver")?;
    match device.get("driver").as_deref() {
        Some("nvdimm" | "virtio-pmem-pci" | "virtio-pmem" | "sgx-epc") => {
            let reason = "Firn cannot checkpoint persistent or enclave memory";
            Err(CommandLineError::refuse_option(argument, reason))
        }
        Some("pc-dimm" | "virtio-mem-pci" | "virtio-mem") => {
            Ok(device.get("memdev").map(Into::into))
        }
        _ => Ok(None),
    }
}

/// The value of `-m`: `-m 1G`, `-m 1024` (MiB), `-m size=1G,slots=4,maxmem=8G`; 128 MiB without
/// `-m`.
fn plain_ram_bytes(arguments: &[CommandArgument]) -> Result<u64, CommandLineError> {
    let memory = merge_options(arguments, &["m"], "size")?;
    let Some(said) = memory.get("size") else { return Ok(DEFAULT_RAM_BYTES) };
    size::parse_size(&said, 1 << 20)
        .and_then(|bytes| bytes.checked_next_multiple_of(RAM_ALIGN_BYTES))
        .filter(|&bytes| bytes > 0)
        .ok_or_else(|| CommandLineError::unreadable_option(format!("-m {said}"), "the size of RAM"))
}

impl CommandPlan {
    /// The RAM that the command line requests: each region needs one file of its size.
    pub fn ram(&self) -> &[RamPlan] {
        &self.ram
    }

    /// The network cards whose frames pass through Firn: each needs one socket.
    pub fn cards(&self) -> &[CardPlan] {
        &self.cards
    }

    /// The disks that Firn has to serve, by their ids on one socket: [`Self::with_disks`].
    pub fn disks(&self) -> &[DiskPlan] {
        &self.disks
    }

    /// The same command line, with a socket on which Firn serves its disks.
    pub fn with_disks(mut self, socket: &Path) -> Self {
        for argument in &mut self.arguments {
            if let Some(new) = disks::disk_over_socket(argument, socket) {
                self.notes.push(format!("{argument} is now {new}: Firn serves it"));
                *argument = new;
            }
        }
        self.disks.clear();
        self
    }

    /// The options through which the VM may send frames past Firn.
    pub fn other_cards(&self) -> Vec<OtherCard> {
        cards::find_other_cards(&self.arguments)
    }

    /// The kernel, initial RAM disk and device tree that the command line names, as it names them.
    pub fn boot_files(&self) -> Vec<String> {
        let names = ["kernel", "initrd", "dtb"];
        let boots = self.arguments.iter().filter(|argument| names.contains(&argument.name()));
        // A kernel with several modules names them in one value.
        boots.map(|argument| argument.value().to_owned()).filter(|it| !it.contains(',')).collect()
    }

    /// The files of disks that the command line names, as it names them.
    pub fn disk_files(&self) -> Vec<String> {
        drives::disk_files(&self.arguments)
    }

    /// The disks on the network that the command line names.
    pub fn network_disks(&self) -> Vec<NetworkDisk> {
        network_disks::find_network_disks(&self.arguments)
    }

    /// The command line as it is now, the program first.
    pub fn words(&self) -> Vec<String> {
        [vec![self.program.clone()], arguments::join_arguments(&self.arguments)].concat()
    }

    /// The same command line with other files for its disks.
    pub fn with_drives(mut self, drives: &[DriveFile]) -> Result<Self, CommandLineError> {
        for drive in drives {
            let arguments = &mut self.arguments;
            if !network_disks::replace_network_disk(arguments, drive)
                && !drives::replace_file(arguments, drive)
            {
                let option = format!("disk {}", drive.named);
                return Err(CommandLineError::refuse_option(option, "no option names it"));
            }
        }
        Ok(self)
    }

    /// The same command line with another program.
    pub fn with_program(self, program: &Path) -> Self {
        Self { program: program.to_string_lossy().into_owned(), ..self }
    }

    /// The ports and sockets at which the back ends of network cards listen.
    pub fn network_endpoints(&self) -> Vec<HostEndpoint> {
        endpoints::network_endpoints(&self.arguments)
    }

    /// Relocates the endpoints that another process has: sockets and ports that QEMU listens on,
    /// files that QEMU writes. Returns a note for each as well.
    ///
    /// # Errors
    /// If the back end of a network card needs a port that another process has.
    pub fn relocate_endpoints(
        mut self,
        beside: &EndpointRelocation<'_>,
    ) -> Result<(Self, Vec<String>), CommandLineError> {
        let notes = endpoints::relocate_endpoints(&mut self.arguments, beside)?;
        Ok((self, notes))
    }

    /// The command line for a VM that starts from its boot.
    pub fn augment(&self, paths: &AddedPaths) -> Result<AugmentedCommand, CommandLineError> {
        let incoming = self.arguments.iter().find(|argument| argument.name() == "incoming");
        if let Some(argument) = incoming {
            let reason =
                "a VM that waits for a migration cannot be run; start it without -incoming";
            return Err(CommandLineError::refuse_option(argument, reason));
        }
        if let Some(huge) = self.backends.iter().find(|backend| backend.is_huge()) {
            let reason = "`firn run` gives a VM ordinary pages; use those, or start QEMU with huge pages by yourself and \
                          `firn attach` it";
            return Err(CommandLineError::refuse_option(&self.arguments[huge.at], reason));
        }
        let mut line = self.build_line(paths)?;
        line.drop_all("daemonize", "Firn keeps the VM running by itself, and needs its process");
        Ok(line.into_command(self))
    }

    /// The command line for a VM that waits, stopped, for its device state.
    pub fn for_restore(&self, paths: &AddedPaths) -> Result<AugmentedCommand, CommandLineError> {
        let mut line = self.build_line(paths)?;
        line.drop_all("daemonize", "Firn keeps the VM running by itself, and needs its process");
        line.drop_all("incoming", "the state comes from the image");
        line.drop_all("loadvm", "the state comes from the image");
        line.drop_all("S", "it is added below");
        line.add_argument(CommandArgument::flag("S"), "the VM waits until its state is loaded");
        line.add_argument(
            CommandArgument::new("incoming", "defer"),
            "device state is loaded over the monitor",
        );
        let header = CommandArgument::new("global", "migration.send-configuration=off");
        line.add_argument(header, "device state alone has no configuration header");
        Ok(line.into_command(self))
    }

    fn build_line(&self, paths: &AddedPaths) -> Result<CommandBuilder, CommandLineError> {
        if paths.ram.len() != self.ram.len() {
            let (files, regions) = (paths.ram.len(), self.ram.len());
            return Err(CommandLineError::Files { files, regions });
        }
        if paths.cards.len() != self.cards.len() {
            let (sockets, cards) = (paths.cards.len(), self.cards.len());
            return Err(CommandLineError::Sockets { sockets, cards });
        }
        if let Some(disk) = self.disks.first() {
            return Err(CommandLineError::NotServed { id: disk.id.clone() });
        }
        let mut line =
            CommandBuilder { arguments: self.arguments.clone(), notes: self.notes.clone() };
        for (ram, path) in self.ram.iter().zip(&paths.ram) {
            match self.backends.iter().find(|backend| backend.id == ram.id) {
                Some(backend) => line.put_over(backend, path),
                None => line.add_ram(ram, path),
            }
        }
        line.put_calls(&paths.calls);
        self.cards.iter().zip(&paths.cards).for_each(|(card, socket)| line.put_card(card, *socket));
        line.add_monitor(&paths.qmp);
        paths.stores.iter().for_each(|plugin| line.add_plugin(plugin, &paths.calls));
        Ok(line)
    }
}

/// A command line under construction.
struct CommandBuilder {
    arguments: Vec<CommandArgument>,
    notes: Vec<String>,
}

impl CommandBuilder {
    fn add_argument(&mut self, argument: CommandArgument, why: &str) {
        self.notes.push(format!("added {argument}: {why}"));
        self.arguments.push(argument);
    }

    /// Must run before any argument is removed: a backend refers to its argument by index.
    fn put_over(&mut self, backend: &RamBackend, path: &Path) {
        let new = backend.over_path(&path.to_string_lossy());
        let (id, was) = (&backend.id, backend.describe());
        let pages = if backend.is_huge() { ", in ordinary pages, not in huge pages" } else { "" };
        self.notes.push(format!(
            "memory backend {id} was {was}; it is now {new}, so that Firn can map it{pages}"
        ));
        self.arguments[backend.at] = new;
    }

    /// As [`Self::put_over`].
    fn put_calls(&mut self, path: &Path) {
        for argument in &mut self.arguments {
            if let Some(new) = calls::replace_path(argument, path) {
                self.notes.push(format!("{new}: applications of the guest call Firn there"));
                *argument = new;
            }
        }
    }

    /// As [`Self::put_over`].
    fn put_card(&mut self, card: &CardPlan, socket: i32) {
        for argument in &mut self.arguments {
            if let Some(new) = cards::card_over_descriptor(argument, card, socket) {
                let uplink = &card.uplink;
                self.notes
                    .push(format!("{argument} is now {new}: Firn forwards its frames to {uplink}"));
                *argument = new;
            }
        }
    }

    fn add_ram(&mut self, ram: &RamPlan, path: &Path) {
        let object = backend::plain_backend(&ram.id, ram.bytes, &path.to_string_lossy());
        self.add_argument(object, "RAM in a file that Firn can map too");
        let machine = format!("memory-backend={}", escape_commas(&ram.id));
        self.add_argument(CommandArgument::new("machine", machine), "the machine uses that RAM");
    }

    fn add_monitor(&mut self, path: &Path) {
        let path = path.to_string_lossy();
        let socket =
            format!("socket,id={MONITOR_ID},path={},server=on,wait=off", escape_commas(&path));
        self.add_argument(
            CommandArgument::new("chardev", socket),
            "a socket for Firn's own monitor",
        );
        let monitor = format!("chardev={MONITOR_ID},mode=control");
        self.add_argument(
            CommandArgument::new("mon", monitor),
            "Firn's own monitor, beside any other",
        );
    }

    fn add_plugin(&mut self, plugin: &StorePlugin, calls: &Path) {
        let text = |path: &Path| escape_commas(&path.to_string_lossy()).into_owned();
        let [library, orders, calls] = [&plugin.library, &plugin.orders, calls].map(text);
        let plugin = format!("file={library},window={calls},orders={orders}");
        self.add_argument(
            CommandArgument::new("plugin", plugin),
            "records what applications of the guest write",
        );
    }

    fn drop_all(&mut self, name: &str, why: &str) {
        let (dropped, kept) = std::mem::take(&mut self.arguments)
            .into_iter()
            .partition(|argument: &CommandArgument| argument.name() == name);
        self.arguments = kept;
        let note = |argument: &CommandArgument| format!("left out {argument}: {why}");
        self.notes.extend(dropped.iter().map(note));
    }

    fn into_command(self, plan: &CommandPlan) -> AugmentedCommand {
        let mut args = vec![plan.program.clone()];
        args.extend(arguments::join_arguments(&self.arguments));
        AugmentedCommand { args, notes: self.notes, ram: plan.ram.clone() }
    }
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
