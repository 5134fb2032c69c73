//! `firn restore`

use std::fmt::Write;
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};

use clap::Args as ClapArgs;
use clap::builder::TypedValueParser as _;
use firn_report::ReportedRun;
use firn_restore::{BackgroundFill, FillChoices, ReadFailurePolicy, RestoreMode};
use firn_supervisor::{
    CommandOverrides, Failure, FailureKind, FamilyRecord, ImageMeta, LibvirtTarget, RestoreDisks,
    RuntimeDir, SupervisorPlan, SupervisorRequest, VmName, absolute_path, restore_target,
    send_request, start_supervisor,
};
use firn_types::make_printable;

use crate::bar::TerminalBar;
use crate::calls::CallsArgs;
use crate::checkpoint::recovery_notice;
use crate::choices::{Choice, accept_words, parse_choice};
use crate::clones::{
    COUNT_MAX, CloneOrder, NamePattern, check_names, describe_clones, start_clones, wait_for_clones,
};
use crate::hooks::{RestoreHooks, describe_guest_end};
use crate::image::stored::find_stored;
use crate::keys::keys_of;
use crate::live::RestoreView;
use crate::output::{FactPrinter, check_directory};
use crate::overrides::OverrideArgs;
use crate::run::{summarize_vm, supervisor_remarks};
use crate::units;
use crate::working_set::WorkingSetArgs;

const MODES: &[Choice] = &[
    (
        "auto",
        "first loads at full speed the memory that the guest used last (the working set), then the \
         rest as in the mode locality. The guest runs meanwhile. On high-latency storage it starts \
         when the working set is loaded",
    ),
    ("locality", "one locality block per page fault, which brings what was used together"),
    ("lazy", "one memory block per page fault"),
    ("working-set", "the working set before the guest runs, then the rest as in the mode locality"),
    ("eager", "all memory before the guest runs"),
];

const DISK_USES: &[Choice] = &[
    ("own", "new overlays on top of the image's disk files"),
    (
        "in-place",
        "the image's disk files themselves. After that neither this image nor any other that needs \
         these files can be restored",
    ),
];

const FILLS: &[Choice] = &[
    ("at-once", "from the beginning, while the guest seldom waits for storage"),
    (
        "when-responsive",
        "when the guest hardly waits for memory any more (TTR(1 s, 0.9)), or a minute after its start: \
         half of the time. Or at full speed when it has waited as long as that takes",
    ),
    (
        "after-learning",
        "the same, ten seconds after its start at the earliest: what the guest uses until then is remembered \
         beside the image, and loaded first by later restores",
    ),
];

const OUTAGES: &[Choice] = &[
    ("stop", "it waits until storage is back; `firn status` shows the reason"),
    ("kill", "it is ended"),
];

/// Start a VM from an image.
///
/// The command returns once the guest runs. Firn loads memory while the guest runs. If the guest
/// touches a page that is missing, Firn loads that page before all others. When the guest is idle,
/// Firn loads the rest. `firn status --watch` waits until all memory is loaded. So does --wait,
/// which then shows how soon the guest was responsive.
///
/// When all memory is loaded, Firn writes a run record of the restore: `firn report` draws it.
///
/// Firn refuses an image of another version of QEMU. It also refuses an image if one of its disks
/// was written to after the checkpoint: the guest's memory would not match the disk. --force
/// restores such an image nevertheless.
///
/// A VM that was paused when it was saved stays paused after the restore, until you continue it;
/// --run starts it at once. Its memory is loaded meanwhile.
///
/// The VM reads the disks of the image, and writes to overlays of its own. So you can restore an
/// image any number of times, and run the VMs side by side. `firn stop --discard` removes the
/// overlays with the VM.
///
/// The VM may run beside the one that was saved. If another process uses a socket, port, log or pid
/// file of the command line, the new VM gets another one in its runtime directory, and the output
/// names it. A used `hostfwd` port is an error: --netdev sets other ports. Firn starts only these
/// QEMU programs: those of the system, those that /etc/firn/qemu.allow lists, and the program that
/// --qemu names.
///
/// An image names a command line of QEMU, so restoring the image of another user runs options of
/// that user. Firn marks the images that it saves for you. Any other image is restored only if its
/// command line opens no file, socket, port or program of this host except what you name anew:
/// --disk, --netdev, --set. Else the command fails and lists what the image would open. `firn image
/// inspect` lists it too. --trust restores the image all the same, and so does a signature, IMAGE.sig,
/// by a key in /etc/firn/allowed_signers.
///
/// --count starts several clones of the image at once. They share each page of memory that none of
/// them has written: it is loaded once. Each clone has a name, a monitor and overlays of its own. A
/// `hostfwd` port can't be shared: give each clone its own, as in the example. All or none of the
/// names must be free.
///
/// An image in object storage, s3://BUCKET/KEY, is restored as one on this host: what the guest needs
/// is fetched when it needs it, and kept in a cache. The rest follows when the guest is responsive
/// (--fill). If the store is away, the guest waits. Credentials come from the environment, as for `firn
/// image push`.
///
/// With --guest-exec the guest agent runs a program in the guest, and with --after a command runs on the host,
/// when the VM runs. They give a clone a name or keys of its own. If one fails, the VM continues to run, and the
/// command fails.
///
/// --libvirt restores an image of a libvirt domain as a new domain. libvirt starts QEMU from the
/// XML in the image and manages the new domain like any other. Firn is attached to the new domain.
/// The new domain has the name of the saved domain, which must not run meanwhile. With --name the
/// new domain gets another name.
#[derive(Debug, ClapArgs)]
#[command(after_long_help = r"Examples:
  firn restore web.firn
  firn restore web.firn --name web2 --mode eager --json
  firn restore web.firn --libvirt
  firn restore s3://vms/prod/web.firn
  firn restore web.firn --guest-exec '/bin/hostname web2' --after ./update-dns
  firn restore web.firn --name web2 --set vnc=:5 \
    --netdev net0=user,hostfwd=tcp::2223-:22
  firn restore web.firn --count 20 --name 'web-{}' \
    --netdev 'net0=user,hostfwd=tcp::300{}-:22'")]
pub struct RestoreArgs {
    /// The image: a file, or a location in object storage.
    image: PathBuf,
    /// The name to give the VM; by default that in the image. With --count, {} in it stands for a
    /// number from 1 on; by default NAME-{}.
    #[arg(long)]
    name: Option<NamePattern>,
    /// Start this many clones, which share all memory that none of them has written.
    #[arg(long, value_name = "N", value_parser = units::parse_number::<u32>(1..=COUNT_MAX))]
    #[arg(conflicts_with_all = ["libvirt", "watch", "account_use"])]
    count: Option<u32>,
    /// How memory is loaded.
    #[arg(long, value_name = "HOW", default_value_t, value_parser = parse_choice::<RestoreMode>(MODES))]
    mode: RestoreMode,
    /// When the memory that the guest has not requested is loaded. By default at-once, and
    /// when-responsive if the image is in object storage and not in the cache.
    #[arg(long, value_name = "WHEN", value_parser = parse_choice::<BackgroundFill>(FILLS))]
    fill: Option<BackgroundFill>,
    /// Read at most this much of the image per second: 50M, 1G. The background fill waits; what the
    /// guest requests is read at once. Not with --mode eager.
    #[arg(long, value_name = "SIZE", value_parser = units::parse_bandwidth)]
    bandwidth: Option<NonZeroU64>,
    /// The files that the VM's disks are written to.
    #[arg(long, value_name = "HOW", default_value = "own")]
    #[arg(value_parser = accept_words(DISK_USES).map(find_disk_use))]
    disks: RestoreDisks,
    /// The directory for overlays; by default that of the image's disks.
    #[arg(long, value_name = "DIR")]
    disk_dir: Option<PathBuf>,
    /// What to do with the VM if a page that it needs cannot be read.
    #[arg(long, value_name = "HOW", default_value_t, value_parser = parse_choice::<ReadFailurePolicy>(OUTAGES))]
    on_error: ReadFailurePolicy,
    #[command(flatten)]
    working_set: WorkingSetArgs,
    #[command(flatten)]
    calls: CallsArgs,
    #[command(flatten)]
    overrides: OverrideArgs,
    /// Have libvirt start the VM, as the domain that was saved, or with --name as a domain with
    /// another name. The XML of the domain determines QEMU's command line.
    #[arg(long, conflicts_with_all = ["qemu", "set", "netdev", "qemu_arg", "calls"])]
    libvirt: bool,
    /// The libvirt of this host that gets the domain. By default that of LIBVIRT_DEFAULT_URI, or
    /// qemu:///system for root, or qemu:///session.
    #[arg(long, value_name = "URI", requires = "libvirt")]
    connect: Option<String>,
    /// Return only when all memory is loaded.
    #[arg(long)]
    wait: bool,
    /// As --wait, and show the guest's utilization on the terminal meanwhile.
    #[arg(long)]
    watch: bool,
    /// Restore with another version of QEMU, or with changed disks.
    #[arg(long)]
    force: bool,
    /// Keep the VM generation ID. By default each restored VM gets a new one (where QEMU has the
    /// device vmgenid), so that its guest draws other random numbers than its copies.
    #[arg(long)]
    same_identity: bool,
    /// Restore the image although Firn does not know its origin, and whatever it opens on this host.
    /// Firn records this: the next restore of the same image does not need it.
    #[arg(long)]
    trust: bool,
    /// Start the VM even if it was paused when it was saved.
    #[arg(long)]
    run: bool,
    /// Do not use learned blocks, and record none: the blocks that restores of this image had to
    /// read on demand. By default they are stored beside the image, in IMAGE.learned. (The latency
    /// of the image's storage is recorded in either case.)
    #[arg(long)]
    no_learn: bool,
    #[command(flatten)]
    hooks: RestoreHooks,
    /// For experiments: count in the run record which prefetched pages the guest uses. Each of them
    /// costs the guest a page fault.
    #[arg(long, hide = true)]
    account_use: bool,
}

impl RestoreArgs {
    /// Runs the verb.
    pub fn run(&self, out: FactPrinter) -> Result<(), Failure> {
        let base = crate::hidden::runtime_dir()?;
        let explain = |failure: Failure| {
            failure.while_doing(format!("can't restore {}", self.image.display()))
        };
        let has_prefetch = self.mode != RestoreMode::Lazy;
        let image = find_stored(&self.image, has_prefetch).map_err(explain)?;
        if let Some(count) = self.count {
            let mut facts = self.start_clones(&base, &image, count).map_err(explain)?;
            let failed = self.run_clone_hooks(&base, &image, &mut facts);
            out.print_facts(&facts, || describe_clones(&facts))?;
            return failed.map_or(Ok(()), Err);
        }
        let mut facts = self.start_restore(&base, &image).map_err(explain)?;
        let failed = self.run_hooks(&base, None, &image, &mut facts);
        out.print_facts(&facts, || describe_restore(&facts))?;
        failed.map_or(Ok(()), Err)
    }

    /// Runs the hooks of a VM that these facts describe, and adds theirs. Returns what failed.
    fn run_hooks(
        &self,
        base: &RuntimeDir,
        number: Option<usize>,
        image: &Path,
        facts: &mut serde_json::Value,
    ) -> Option<Failure> {
        let name = VmName::new(facts["name"].as_str().unwrap_or_default()).ok()?;
        let image = match self.image.to_str() {
            Some(location) if location.contains("://") => location.to_owned(),
            _ => absolute_path(image).ok()?.display().to_string(),
        };
        let (ended, failed) = self.hooks.run(base, (&name, number), (&image, facts));
        facts["guest_exec"] = ended;
        failed
    }

    /// The same for each clone. Returns the first failure.
    fn run_clone_hooks(
        &self,
        base: &RuntimeDir,
        image: &Path,
        facts: &mut serde_json::Value,
    ) -> Option<Failure> {
        let clones = facts["clones"].as_array_mut()?.iter_mut();
        let run = |(at, facts)| self.run_hooks(base, Some(at + 1), image, facts);
        let failed: Vec<Failure> = clones.enumerate().filter_map(run).collect();
        let count = failed.len();
        let first = failed.into_iter().next()?;
        match count {
            1 => Some(first),
            _ => Some(first.while_doing(format!("the hooks of {count} clones failed"))),
        }
    }

    /// Starts several clones; waits for all of their memory if the user wants that.
    fn start_clones(
        &self,
        base: &RuntimeDir,
        image: &Path,
        count: u32,
    ) -> Result<serde_json::Value, Failure> {
        let image = absolute_path(image)?;
        let pattern = match &self.name {
            Some(pattern) => pattern.clone(),
            None => NamePattern::for_clones_of(&read_name(&image)?),
        };
        if count > 1 && self.disks == RestoreDisks::InPlace {
            let text = "clones can't write to the same disks";
            let failure = Failure::new(FailureKind::Usage, text);
            return Err(failure.with_hint("omit --disks in-place: each clone gets overlays"));
        }
        let names = pattern.list_names(count)?;
        check_names(base, &names)?;
        self.disk_dir.as_deref().map_or(Ok(()), check_directory)?;
        let overrides = self.find_overrides()?;
        let make_plan = |overrides, family| self.make_plan(image.clone(), overrides, Some(family));
        let (learn, fill, names, overrides) =
            (!self.no_learn, self.fill_choices()?, &names, &overrides);
        let trust = self.trust;
        let order = CloneOrder { image: &image, learn, fill, trust, names, overrides };
        let facts = start_clones(base, &order, &make_plan)?;
        if self.wait {
            wait_for_clones(base, names)?;
        }
        Ok(facts)
    }

    fn start_restore(&self, base: &RuntimeDir, image: &Path) -> Result<serde_json::Value, Failure> {
        let image = absolute_path(image)?;
        let name = match &self.name {
            Some(name) => name.single_name()?,
            None => read_name(&image)?,
        };
        self.disk_dir.as_deref().map_or(Ok(()), check_directory)?;
        let plan = self.make_plan(image, self.find_overrides()?, None)?;
        let mut facts = {
            let mut bar = TerminalBar::new();
            start_supervisor(base, &name, &plan, &mut |progress| bar.show_progress(progress))?
        };
        match (self.watch, self.wait) {
            (true, _) => watch_restore(base, &name)?,
            (false, true) => wait_for_memory(base, &name)?,
            (false, false) => return Ok(facts),
        }
        // If a new supervisor has recovered the restore, its record may be lost.
        if let Ok(run) = ReportedRun::read_file(&base.vm_dir(&name).run_record()) {
            let run = ReportedRun { name: name.to_string(), ..run };
            facts["run"] = serde_json::to_value(run.compute_facts()).unwrap_or_default();
        }
        Ok(facts)
    }

    fn fill_choices(&self) -> Result<FillChoices, Failure> {
        if self.bandwidth.is_some() && self.mode == RestoreMode::Eager {
            let text = "--bandwidth limits the background fill, and --mode eager has none";
            let failure = Failure::new(FailureKind::Usage, text);
            return Err(failure.with_hint("omit --mode: the guest runs while its memory is loaded"));
        }
        Ok(FillChoices { when: self.fill, bandwidth: self.bandwidth })
    }

    fn make_plan(
        &self,
        image: PathBuf,
        overrides: CommandOverrides,
        family: Option<FamilyRecord>,
    ) -> Result<SupervisorPlan, Failure> {
        Ok(SupervisorPlan::Restore {
            keys: keys_of(&image)?,
            image,
            mode: self.mode,
            on_error: self.on_error,
            fill: self.fill_choices()?,
            force: self.force,
            trust: self.trust,
            account_use: self.account_use,
            learn: !self.no_learn,
            run: self.run,
            disks: self.disks,
            disk_dir: self.disk_dir.as_deref().map(absolute_path).transpose()?,
            access_bits: self.working_set.access_bits(),
            calls: self.calls.policy_path()?,
            stores: self.calls.plugin_path()?,
            overrides,
            libvirt: self.find_libvirt()?,
            family: family.map(Box::new),
        })
    }
}

impl RestoreArgs {
    fn find_overrides(&self) -> Result<CommandOverrides, Failure> {
        let same_identity = self.same_identity;
        Ok(CommandOverrides { same_identity, ..self.overrides.to_overrides()? })
    }

    /// The libvirt that gets the VM, if one does.
    fn find_libvirt(&self) -> Result<Option<LibvirtTarget>, Failure> {
        if !self.libvirt {
            return Ok(None);
        }
        let name = self.name.as_ref().map(NamePattern::single_name).transpose()?;
        restore_target(name.map(String::from), self.connect.as_deref()).map(Some)
    }
}

/// The use of disks of an accepted word.
fn find_disk_use(word: String) -> RestoreDisks {
    match word.as_str() {
        "own" => RestoreDisks::Own,
        _ => RestoreDisks::InPlace,
    }
}

/// Waits until all memory is loaded. A VM that has ended by now was ended because some memory
/// cannot be read.
fn wait_for_memory(base: &RuntimeDir, name: &VmName) -> Result<(), Failure> {
    let mut bar = TerminalBar::new();
    send_request(base, name, &SupervisorRequest::Watch, &mut |progress| bar.show_progress(progress))
        .map(drop)
}

/// Shows the guest's utilization until all memory is loaded.
fn watch_restore(base: &RuntimeDir, name: &VmName) -> Result<(), Failure> {
    let mut live = RestoreView::new();
    send_request(base, name, &SupervisorRequest::Watch, &mut |progress| {
        live.show_progress(progress)
    })
    .map(drop)
}

fn read_name(image: &Path) -> Result<VmName, Failure> {
    let image = crate::image::open::open_image(image)?;
    let meta: Option<ImageMeta> = serde_json::from_value(image.meta().clone()).ok();
    let name = meta.and_then(|meta| VmName::new(meta.name).ok());
    name.ok_or_else(|| {
        let text = "the image does not record the name of its VM";
        Failure::new(FailureKind::Usage, text).with_hint("give a name: --name NAME")
    })
}

/// How a user starts a VM that is paused after its restore.
fn describe_continuation(facts: &serde_json::Value) -> String {
    match (facts["domain"].as_str(), facts["qmp"].as_str()) {
        (Some(domain), _) => format!("`virsh resume {}`", make_printable(domain)),
        (None, qmp) => format!("`cont` on its monitor {}", make_printable(qmp.unwrap_or("?"))),
    }
}

fn describe_restore(facts: &serde_json::Value) -> String {
    if let Some(notice) = recovery_notice(facts) {
        return notice;
    }
    let mut text = String::new();
    for note in supervisor_remarks(facts) {
        let _ = writeln!(text, "{}", make_printable(note));
    }
    let _ = writeln!(text, "{}", summarize_vm(facts));
    for overlay in facts["overlays"].as_array().into_iter().flatten() {
        let _ = writeln!(text, "it writes to {}", make_printable(overlay.as_str().unwrap_or("?")));
    }
    let total = facts["timings_ms"]["total"].as_f64().unwrap_or(0.0);
    match facts["paused"].as_str() {
        Some(state) => {
            let (total, start) = (units::format_ms(total), describe_continuation(facts));
            let _ = writeln!(
                text,
                "paused after {total}, as it was saved ({state}): {start} starts it, or `firn restore --run`"
            );
        }
        None => {
            let _ = writeln!(text, "running after {}", units::format_ms(total));
        }
    }
    text += &describe_guest_end(&facts["guest_exec"]);
    if let Some(run) = facts.get("run") {
        let ms =
            |seconds: &serde_json::Value| units::format_ms(seconds.as_f64().unwrap_or(0.0) * 1e3);
        if run["responsive_s"].is_number() {
            let responsive = ms(&run["responsive_s"]);
            let _ = write!(text, "back to 90 % of its speed after {responsive} (TTR(1 s, 0.9)), ");
        }
        let _ = writeln!(text, "all memory loaded after {}", ms(&run["complete_s"]));
    }
    text
}
