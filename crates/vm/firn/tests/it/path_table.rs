//! Every argument of `firn` that takes a path, also as a part of a text, and a command line to try it with. A unit test of
//! the program compares this table with the command line that it has: a new argument has to be added here.

/// What a path is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// A file that is read.
    Input,
    /// A disk of a VM: a regular file or a device.
    Disk,
    /// A file that is written.
    Output,
    /// A directory in which files are made.
    Directory,
    /// A socket to connect to.
    Socket,
    /// A socket that is made.
    Listener,
    /// A program that is run.
    Program,
}

/// An argument that takes a path.
pub struct PathArgument {
    /// Its verb, and its name there.
    pub name: &'static str,
    pub role: Role,
    /// A command line that succeeds with the right path; `@` is where the path goes. Words in capitals are replaced by
    /// what `edges.rs` gives for them. `live` is a VM that runs, `vm.firn` an image of it; `good.firn` is an image
    /// without a VM, and `good.ram` its memory.
    pub command: &'static str,
    /// A path with which it succeeds; none where it would wait, or needs another VM or host.
    pub fit: Option<&'static str>,
}

const fn argument(
    name: &'static str,
    role: Role,
    command: &'static str,
    fit: &'static str,
) -> PathArgument {
    PathArgument { name, role, command, fit: Some(fit) }
}

const fn waiting(name: &'static str, role: Role, command: &'static str) -> PathArgument {
    PathArgument { name, role, command, fit: None }
}

use Role::{Directory, Disk, Input, Listener, Output, Program, Socket};

pub const ARGUMENTS: &[PathArgument] = &[
    waiting("identity", Input, "image verify good.firn --identity @"),
    argument("key_file", Input, "image verify good.firn --key-file @", "key.hex"),
    waiting("checkpoint recipient_file", Input, "checkpoint live -o new.firn --recipient-file @"),
    waiting("suspend recipient_file", Input, "suspend live -o new.firn --recipient-file @"),
    waiting("fork recipient_file", Input, "fork live --count 1 --name web --recipient-file @"),
    argument("run calls", Input, "run web --calls @ -- QEMU", "policy.toml"),
    argument("run stores", Input, "run web --calls policy.toml --stores=@ -- QEMU", "PLUGIN"),
    argument(
        "run command",
        Disk,
        "run web -- QEMU -drive file=@,format=raw,if=virtio,readonly=on",
        "disk.raw",
    ),
    argument("attach qmp", Socket, "attach web --pid PID --qmp @", "qmp"),
    argument("doctor qmp", Socket, "doctor --pid PID --qmp @", "qmp"),
    waiting("checkpoint spool", Directory, "checkpoint live -o s3://bucket/web.firn --spool @"),
    waiting("suspend spool", Directory, "suspend live -o s3://bucket/web.firn --spool @"),
    argument("checkpoint output", Output, "checkpoint live -o @", "new.firn"),
    argument(
        "checkpoint disk_dir",
        Directory,
        "checkpoint live -o new.firn --disk-dir @",
        "directory",
    ),
    argument("checkpoint parent", Input, "checkpoint live -o new.firn --parent @", "vm.firn"),
    argument(
        "checkpoint reference",
        Output,
        "checkpoint live -o new.firn --reference @",
        "new.ram",
    ),
    argument("suspend output", Output, "suspend live -o @", "new.firn"),
    argument("suspend disk_dir", Directory, "suspend live -o new.firn --disk-dir @", "directory"),
    argument("suspend parent", Input, "suspend live -o new.firn --parent @", "vm.firn"),
    argument("fork output", Output, "fork live --count 1 --name web -o @", "new.firn"),
    argument(
        "fork disk_dir",
        Directory,
        "fork live --count 1 --name web -o new.firn --disk-dir @",
        "directory",
    ),
    argument("restore image", Input, "restore @ --name web", "vm.firn"),
    argument("restore disk_dir", Directory, "restore vm.firn --name web --disk-dir @", "directory"),
    argument("restore disk", Disk, "restore vm.firn --name web --disk disk.raw=@", "moved.raw"),
    argument("restore set", Disk, "restore vm.firn --name web --set drive.d.file=@", "moved.raw"),
    waiting("restore calls", Input, "restore vm.firn --name web --calls @"),
    waiting("restore stores", Input, "restore vm.firn --name web --calls policy.toml --stores=@"),
    argument("restore qemu", Program, "restore vm.firn --name web --qemu ./@", "qemu"),
    waiting("standby listen", Listener, "standby web --listen unix:@"),
    waiting("protect to", Socket, "protect live --to unix:@"),
    waiting("doctor qemu", Program, "doctor --qemu ./@"),
    waiting("doctor kernel", Input, "doctor --kernel @"),
    argument("image inspect image", Input, "image inspect @", "good.firn"),
    argument("image verify image", Input, "image verify @", "good.firn"),
    argument(
        "image reorder image",
        Input,
        "image reorder @ --by physical -o new.firn",
        "good.firn",
    ),
    argument(
        "image reorder output",
        Output,
        "image reorder good.firn --by physical -o @",
        "new.firn",
    ),
    argument("image chain image", Input, "image chain @", "good.firn"),
    argument("image merge image", Input, "image merge @ -o new.firn", "good.firn"),
    argument("image merge output", Output, "image merge good.firn -o @", "new.firn"),
    argument(
        "image rebase image",
        Input,
        "image rebase @ --parent good.firn -o new.firn",
        "other.firn",
    ),
    argument(
        "image rebase parent",
        Input,
        "image rebase other.firn --parent @ -o new.firn",
        "good.firn",
    ),
    argument(
        "image rebase moved",
        Input,
        "image rebase child.firn --moved @ -o new.firn",
        "vm.firn",
    ),
    argument(
        "image rebase output",
        Output,
        "image rebase other.firn --parent good.firn -o @",
        "new.firn",
    ),
    argument("image compare image", Input, "image compare @ good.ram", "good.firn"),
    argument("image compare reference", Input, "image compare good.firn @", "good.ram"),
    waiting("image push image", Input, "image push @ s3://bucket/web.firn"),
    argument("image rm images", Input, "image rm @", "spare.firn"),
    argument("report runs", Input, "report @", "run.json"),
    argument("report output", Output, "report run.json -o @", "new.html"),
];

/// Arguments of these types whose paths Firn opens later or not at all.
///
/// Disks of a standby are made later, by another process, and never replace a file: `firn-disks` tests that. An uplink
/// of a standby is connected to when its VM runs. QEMU alone reads what is added to its command line.
/// A domain of libvirt has a name, and a URI names its daemon: the module `libvirt` tests both. The directory of
/// manual pages is named by `make install`. A location in object storage is no path, and the file that an image is
/// pulled to needs a server: the module `objects` has one. The shell alone reads a command for snapshots of disks: the
/// module `storage_snapshots` tests it, and the module `hooks` the commands of hooks. The shell alone reads a command for keys, too, and a recipient of age is no
/// path: `firn-keys` tests both.
#[allow(dead_code, reason = "shared with a unit test")]
pub const NOT_OPENED: [&str; 24] = [
    "key_command",
    "checkpoint recipient",
    "suspend recipient",
    "fork recipient",
    "checkpoint disk_snapshot",
    "checkpoint before",
    "checkpoint after",
    "restore after",
    "standby disks",
    "standby uplinks",
    "restore connect",
    "restore netdev",
    "fork netdev",
    "restore qemu_arg",
    "attach libvirt",
    "console device",
    "attach connect",
    "doctor libvirt",
    "doctor connect",
    "__man directory",
    "image push location",
    "image pull location",
    "image pull path",
    "image ls location",
];
