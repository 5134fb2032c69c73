//! Every argument of `firn` that takes a path, and a command line to try it with. A unit test of the program compares this
//! table with the command line that it has: a new argument has to be added here.

/// What a path is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// A file that is read.
    Input,
    /// A file that is written.
    Output,
    /// A directory in which files are made.
    Directory,
    /// A socket to connect to.
    Socket,
    /// A program that is run.
    Program,
}

/// An argument that takes a path.
pub struct PathArgument {
    /// Its verb, and its name there.
    pub name: &'static str,
    pub role: Role,
    /// A command line; `@` is where the path goes. `good.firn` is an image, `good.ram` its memory.
    pub command: &'static str,
}

const fn argument(name: &'static str, role: Role, command: &'static str) -> PathArgument {
    PathArgument { name, role, command }
}

use Role::{Directory, Input, Output, Program, Socket};

pub const ARGUMENTS: &[PathArgument] = &[
    argument("run calls", Input, "run web --calls @ -- qemu-system-x86_64"),
    argument("run stores", Input, "run web --stores=@ -- qemu-system-x86_64"),
    argument("attach qmp", Socket, "attach web --pid 999999999 --qmp @"),
    argument("checkpoint output", Output, "checkpoint web -o @"),
    argument("checkpoint disk_dir", Directory, "checkpoint web -o new.firn --disk-dir @"),
    argument("checkpoint parent", Input, "checkpoint web -o new.firn --parent @"),
    argument("checkpoint reference", Output, "checkpoint web -o new.firn --reference @"),
    argument("suspend output", Output, "suspend web -o @"),
    argument("suspend disk_dir", Directory, "suspend web -o new.firn --disk-dir @"),
    argument("suspend parent", Input, "suspend web -o new.firn --parent @"),
    argument("restore image", Input, "restore @ --name web"),
    argument("restore disk_dir", Directory, "restore good.firn --name web --disk-dir @"),
    argument("restore calls", Input, "restore good.firn --name web --calls @"),
    argument("restore stores", Input, "restore good.firn --name web --stores=@"),
    argument("restore qemu", Program, "restore good.firn --name web --qemu ./@"),
    argument("doctor kernel", Input, "doctor --kernel @"),
    argument("image inspect image", Input, "image inspect @"),
    argument("image verify image", Input, "image verify @"),
    argument("image reorder image", Input, "image reorder @ --by physical -o new.firn"),
    argument("image reorder output", Output, "image reorder good.firn --by physical -o @"),
    argument("image chain image", Input, "image chain @"),
    argument("image merge image", Input, "image merge @ -o new.firn"),
    argument("image merge output", Output, "image merge good.firn -o @"),
    argument("image rebase image", Input, "image rebase @ --parent good.firn -o new.firn"),
    argument("image rebase parent", Input, "image rebase good.firn --parent @ -o new.firn"),
    argument("image rebase moved", Input, "image rebase good.firn --moved @ -o new.firn"),
    argument("image rebase output", Output, "image rebase good.firn --parent good.firn -o @"),
    argument("image compare image", Input, "image compare @ good.ram"),
    argument("image compare reference", Input, "image compare good.firn @"),
    argument("image rm images", Input, "image rm @"),
    argument("report runs", Input, "report @"),
    argument("report output", Output, "report good.json -o @"),
];

/// Arguments whose files are made later, by another process, and never replace any: `firn-disks` tests that. And the
/// directory of manual pages, which only `make install` names.
#[allow(dead_code, reason = "shared with a unit test")]
pub const NOT_OPENED: [&str; 2] = ["standby disks", "__man directory"];
