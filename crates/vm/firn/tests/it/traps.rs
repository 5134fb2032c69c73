//! Images that would do something to a host: each with a trap that springs when QEMU, or Firn, does it.
//!
//! ```text
//!   a good image --> a changed command line or description --> restore --> is the trap sprung?
//!
//!   file     something made this file                a log, a socket, a pid file
//!   opened   something opened the secret file        a disk, a kernel, a ROM        (inotify)
//!   called   something connected to the socket       a server of disks, a console
//! ```

use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::fs::inotify;
use serde_json::{Value, json};

use crate::forge::{Forge, METADATA};
use crate::session::{Session, text};

/// What shows that a trap is sprung.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trace {
    File,
    Opened,
    Called,
}

/// Whether the trap springs when the image is restored with `--trust`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Control {
    /// QEMU does it at its start.
    Springs,
    /// It needs what this host may not have, or the guest has to do something first.
    Maybe,
    /// Firn never does it.
    Never,
}

use Control::{Maybe, Never, Springs};
use Trace::{Called, File, Opened};

/// A change to the command line. `TRAP` is the file that must not be made, `SECRET` the one that must not be opened,
/// `LINK` a link to it, `SOCKET` the socket that must not be connected to.
pub struct Attack {
    pub options: &'static str,
    pub trace: Trace,
    pub control: Control,
}

const fn attack(options: &'static str, trace: Trace, control: Control) -> Attack {
    Attack { options, trace, control }
}

pub const ATTACKS: &[Attack] = &[
    attack("-incoming exec:touch${IFS}TRAP", File, Never),
    attack("-chardev file,id=x,path=TRAP", File, Springs),
    attack("-chardev socket,id=x,path=TRAP,server=on,wait=off", File, Springs),
    attack("-chardev socket,id=x,path=SOCKET", Called, Springs),
    attack("-chardev null,id=x,logfile=TRAP", File, Springs),
    attack("-serial file:TRAP", File, Springs),
    attack("-parallel file:TRAP", File, Springs),
    attack("-debugcon file:TRAP", File, Springs),
    attack("-monitor unix:TRAP,server=on,wait=off", File, Springs),
    attack("--qmp unix:TRAP,server=on,wait=off", File, Springs),
    attack("-gdb unix:TRAP,server=on,wait=off", File, Springs),
    attack("-vnc unix:TRAP", File, Springs),
    attack("-pidfile TRAP", File, Springs),
    attack("-D TRAP -d unimp,guest_errors", File, Maybe),
    attack("-readconfig CONFIG", File, Never),
    attack("-netdev stream,id=n,server=on,addr.type=unix,addr.path=TRAP", File, Springs),
    attack("-netdev tap,id=n,script=SCRIPT,downscript=no", File, Maybe),
    attack("-netdev bridge,id=n,helper=SCRIPT", File, Maybe),
    attack("-netdev user,id=n,guestfwd=tcp:10.0.2.9:7-cmd:SCRIPT", File, Maybe),
    attack(
        "-netdev hubport,id=n,hubid=0 -object filter-dump,id=f,netdev=n,file=TRAP",
        File,
        Springs,
    ),
    attack("-object memory-backend-file,id=m,size=1M,share=on,mem-path=TRAP", File, Springs),
    attack(r#"-object {"qom-type":"secret","id":"s","file":"SECRET"}"#, Opened, Springs),
    attack("-object rng-random,id=r,filename=SECRET", Opened, Maybe),
    attack("-audiodev wav,id=a,path=TRAP", File, Maybe),
    attack("-plugin SECRET", Opened, Maybe),
    attack("-kernel SECRET", Opened, Springs),
    attack("-bios SECRET", Opened, Springs),
    attack("-fw_cfg name=opt/x,file=SECRET", Opened, Springs),
    attack("-acpitable file=SECRET", Opened, Springs),
    attack("-smbios type=11,path=SECRET", Opened, Maybe),
    attack("-device loader,file=SECRET,addr=0x1000,force-raw=on", Opened, Springs),
    attack("-device e1000,romfile=SECRET", Opened, Springs),
    attack("-drive file=SECRET,format=raw,if=none,id=d", Opened, Springs),
    attack("-drive file=LINK,format=raw,if=none,id=d", Opened, Springs),
    attack("-hda LINK", Opened, Springs),
    attack("LINK", Opened, Springs),
    attack(
        r#"-blockdev {"driver":"raw","node-name":"d","file":{"driver":"file","filename":"SECRET"}}"#,
        Opened,
        Springs,
    ),
    attack("-drive driver=nbd,server.type=unix,server.path=SOCKET,if=none,id=d", Called, Springs),
    attack("-machine pc,kernel=SECRET", Opened, Springs),
    attack("-global e1000.romfile=SECRET -device e1000", Opened, Springs),
];

/// A directory with what attacks are after.
pub struct Bait {
    directory: PathBuf,
    watch: OwnedFd,
    calls: Arc<AtomicUsize>,
}

impl Bait {
    pub fn put_out(session: &Session) -> Self {
        let directory = session.path("bait");
        fs::create_dir(&directory).unwrap();
        let bait = Self {
            watch: inotify::init(inotify::CreateFlags::NONBLOCK).unwrap(),
            calls: Arc::default(),
            directory,
        };
        fs::write(bait.path("SECRET"), vec![7; 1 << 20]).unwrap();
        symlink(bait.path("SECRET"), bait.path("LINK")).unwrap();
        fs::write(
            bait.path("CONFIG"),
            format!(
                "[chardev \"x\"]\n  backend = \"file\"\n  path = \"{}\"\n",
                text(&bait.path("TRAP"))
            ),
        )
        .unwrap();
        let script = format!("#!/bin/sh\ntouch {}\n", text(&bait.path("TRAP")));
        fs::write(bait.path("SCRIPT"), script).unwrap();
        fs::set_permissions(bait.path("SCRIPT"), fs::Permissions::from_mode(0o755)).unwrap();
        inotify::add_watch(&bait.watch, bait.path("SECRET"), inotify::WatchFlags::OPEN).unwrap();
        bait.answer_calls();
        bait
    }

    /// Closes each connection at once: the caller ends, or continues without.
    fn answer_calls(&self) {
        let listener = UnixListener::bind(self.path("SOCKET")).unwrap();
        let calls = Arc::clone(&self.calls);
        std::thread::spawn(move || {
            for _caller in listener.incoming().flatten() {
                calls.fetch_add(1, Ordering::SeqCst);
            }
        });
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    /// The words of an attack, with the paths in this directory.
    pub fn words(&self, attack: &Attack) -> Vec<String> {
        let path = |line: String, name: &&str| line.replace(name, text(&self.path(name)));
        let names = ["TRAP", "SECRET", "LINK", "SOCKET", "CONFIG", "SCRIPT"];
        let line = names.iter().fold(attack.options.to_owned(), path);
        line.split(' ').map(str::to_owned).collect()
    }

    /// Whether a trap is sprung.
    pub fn is_sprung(&self, trace: Trace) -> bool {
        match trace {
            File => fs::symlink_metadata(self.path("TRAP")).is_ok(),
            Opened => self.was_opened(),
            Called => self.calls.load(Ordering::SeqCst) > 0,
        }
    }

    /// Whether any trap is sprung.
    pub fn is_untouched(&self) -> bool {
        ![File, Opened, Called].iter().any(|trace| self.is_sprung(*trace))
    }

    fn was_opened(&self) -> bool {
        let mut bytes = [0; 256];
        rustix::io::read(&self.watch, &mut bytes).is_ok_and(|read| read > 0)
    }

    /// Sets all traps again.
    pub fn reset(&self) {
        let _ = fs::remove_file(self.path("TRAP"));
        while self.was_opened() {}
        self.calls.store(0, Ordering::SeqCst);
    }
}

/// The JSON of an image's description of its VM, changed.
pub fn with_meta(good: &Forge, change: impl FnOnce(&mut Value)) -> Forge {
    let mut forge = good.clone();
    let section = forge.section(METADATA);
    let mut meta: Value = serde_json::from_slice(section).unwrap();
    change(&mut meta);
    *section = serde_json::to_vec(&meta).unwrap();
    forge
}

/// The image with more words in its command line.
pub fn with_words(good: &Forge, words: &[String]) -> Forge {
    with_meta(good, |meta| {
        let args = meta["qemu"]["user_args"].as_array_mut().unwrap();
        args.extend(words.iter().map(|word| json!(word)));
    })
}

/// A disk of the description: the command line names `named`, and its contents are in a file.
pub fn drive(named: &str, file: &Path) -> Value {
    json!({
        "named": named, "file": file, "format": "raw", "bytes": 1 << 20, "is_clone": false,
        "identity": identity(file),
    })
}

/// The file's identity, as an image records it.
fn identity(file: &Path) -> Value {
    serde_json::to_value(firn_vmm::FileIdentity::from_path(file).unwrap()).unwrap()
}
