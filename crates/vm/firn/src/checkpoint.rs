//! `firn checkpoint`

use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args as ClapArgs;
use clap::builder::TypedValueParser as _;
use firn_checkpoint::{SaveStrategy, WorkingSetEstimator};
use firn_image::Codec;
use firn_supervisor::{
    Failure, FailureContext as _, FailureKind, RuntimeDir, SaveChoices, SaveDisks, SaveRequest,
    StorageCommand, SupervisorRequest, VmName, absolute_path, send_request,
};
use firn_types::{BlockSize, make_printable};

use crate::bar::TerminalBar;
use crate::choices::{Choice, accept_words, parse_choice};
use crate::every::PeriodicCheckpoints;
use crate::hooks::CheckpointHooks;
use crate::image::stored::refuse_location;
use crate::keys::{SealArgs, keys_of};
use crate::output::{FactPrinter, check_directory, check_input, check_output, check_output_kind};
use crate::spool::{find_location, plan_upload, remove_unused};
use crate::units;

const STRATEGIES: &[Choice] = &[
    (
        "trace",
        "copy-on-access: memory that the guest touches is copied first. The image records which \
         memory that is, and a restore reads it first",
    ),
    (
        "cow",
        "copy-on-write: only memory that the guest writes is copied first. Slows the guest less, \
         and works with memory that is private to QEMU; a restore does not know what to read first",
    ),
    (
        "pre-copy",
        "memory is copied while the guest runs, and what the guest writes meanwhile is copied again, \
         until little is left. Only the pause slows the guest: it is longer, the more the guest \
         writes. Firn tracks the guest's writes afterwards, so that the next checkpoint can be fast",
    ),
    ("stop", "the guest is paused until all of its memory is copied"),
];

const ESTIMATORS: &[Choice] = &[
    ("trace", "what the guest touches after the checkpoint"),
    ("access-bits", "what the guest used before the checkpoint"),
];

const DISK_METHODS: &[Choice] = &[
    ("copy", "QEMU copies them while the guest runs"),
    ("clone", "their files are cloned"),
    ("overlay", "the VM writes to overlays on them from now on"),
    (
        "reference",
        "the image only names them, and a restore works as long as they have not changed",
    ),
];

/// Save a VM to an image; the VM continues to run.
///
/// The guest is paused for some milliseconds, whatever its size. Then it runs, and Firn copies each
/// page before the guest changes it. The image has all that `firn restore` needs except the disks.
/// Only you can read the image (mode 0600), because it is a copy of the VM's memory. Its file gets
/// its name when the image is complete; until then an older image of that name stays.
///
/// With --parent the image holds only what changed since another image, its parent, and needs that
/// image from then on. The first such checkpoint compares all of memory with the parent. A later
/// checkpoint whose parent is the image before saves only the pages that were written since that
/// image. The strategy is then pre-copy, unless you choose another one. See `firn image chain`,
/// `merge` and `rebase`.
///
/// With --every the command makes such checkpoints until you end it. Each has the image before it
/// as parent, and each can be restored: --output web.firn names web-000001.firn and so on. The
/// command keeps only the newest images, as many as --keep: it merges the oldest of them with its
/// parents, and then removes the parents.
///
/// Firn makes a snapshot of each disk that the guest writes to, as it is in the pause (--disks). If
/// the file system can share blocks, Firn clones the disk's file. If it can't, a VM that Firn
/// started writes to an overlay (qcow2) from then on, and the disk's file is not written any more.
/// The disks of any other VM are copied to files beside the image, and the VM keeps its files; with
/// --parent or --every only the blocks that were written since the parent are copied. With
/// --disk-snapshot the storage of the disks makes the snapshots. If a disk permits none of these
/// methods, the command names the disk and fails, before it does anything.
///
/// With --recipient, --recipient-file, --key-file or --key-command the image is sealed: all of it is
/// encrypted with a key of its own. The disks are not, so a VM whose disks need snapshots is refused
/// without --disks-in-clear. An image and its parent are both sealed, or neither is.
///
/// Firn inspects the VM first. It refuses a checkpoint that could not be restored, and gives all
/// reasons: devices that the VM's command line does not describe (hot-plugged ones, or ones with
/// open descriptors), and devices whose writes to memory Firn can't trace (VFIO, vhost-user).
/// --accept-unrestorable makes the image nevertheless, and records the reasons in it.
///
/// With --output s3://BUCKET/KEY the image goes to object storage. It is saved to a file first (--spool),
/// while the VM runs; the file is pushed as `firn image push` does that, and removed. The command
/// succeeds when the object is there. If the upload fails, the file stays, and the error has the command
/// that pushes it. The image has no parent, and a VM whose disks need snapshots is refused.
///
/// With --before and --after commands run on the host, and with --freeze the guest's file systems are
/// frozen for the cut. A guest that is restored from such an image is thawed when it runs.
///
/// If this command is interrupted the checkpoint continues; `firn status` shows it. Then --after does not run.
#[derive(Debug, ClapArgs)]
#[command(after_long_help = "Examples:
  firn checkpoint web -o web.firn
  firn checkpoint web -o web.firn --codec zstd --json
  firn checkpoint web -o web.firn --strategy cow
  firn checkpoint web -o web-2.firn --parent web.firn
  firn checkpoint web -o web.firn --recipient-file ops.age
  firn checkpoint web -o web.firn --every 30s --keep 20
  firn checkpoint web -o s3://vms/prod/web.firn
  firn checkpoint web -o web.firn --freeze --before ./flush-database
  firn checkpoint web -o web.firn --disk-snapshot /etc/firn/lvm-snapshot")]
pub struct CheckpointArgs {
    /// The VM.
    name: VmName,
    #[command(flatten)]
    image: ImageArgs,
    /// Have the storage of each disk make a snapshot of it, by this command: for LVM, ZFS, Ceph and
    /// others. The shell runs `COMMAND path` before the pause, which prints the path of the snapshot
    /// that it will make, `COMMAND create` in the pause, `COMMAND finish` after it, and `COMMAND
    /// remove` if there is no image. It has FIRN_VM, FIRN_DRIVE, FIRN_DISK (the file or device),
    /// FIRN_SNAPSHOT (a new name) and FIRN_SNAPSHOT_PATH in its environment.
    #[arg(long, value_name = "COMMAND", conflicts_with_all = ["disks", "disk_dir", "every"])]
    disk_snapshot: Option<String>,
    /// Do not throttle the copying: the checkpoint ends sooner, and slows the guest more.
    #[arg(long)]
    no_throttle: bool,
    /// Write at most this much per second to the image and to copies of disks: 50M, 1G. Memory that
    /// the guest writes meanwhile is still saved at once.
    #[arg(long, value_name = "SIZE", value_parser = units::parse_bandwidth)]
    bandwidth: Option<NonZeroU64>,
    /// Copy the memory within this time, if the host can: 30s, 5m. Firn yields to the guest only
    /// while it is ahead of that. With --strategy trace or cow.
    #[arg(long, value_name = "TIME", value_parser = parse_time_limit)]
    #[arg(conflicts_with_all = ["bandwidth", "no_throttle"])]
    finish_within: Option<Duration>,
    /// Abort the checkpoint if this command is interrupted.
    #[arg(long)]
    cancel: bool,
    /// The strategy that keeps memory consistent while it is copied. By default trace, and cow where
    /// memory is private to QEMU.
    #[arg(long, value_name = "HOW", value_parser = parse_choice::<SaveStrategy>(STRATEGIES))]
    strategy: Option<SaveStrategy>,
    /// With --strategy cow: copy the dirty pages of the N address spaces that were used last before
    /// all other memory, so that their programs need not wait when they write there again.
    #[arg(long, value_name = "N", requires = "strategy")]
    #[arg(value_parser = units::parse_number::<u16>(1..=1024))]
    first_spaces: Option<u16>,
    /// The memory that a restore reads first. By default trace, and access-bits with --strategy
    /// stop.
    #[arg(long, value_name = "HOW", value_parser = parse_choice::<WorkingSetEstimator>(ESTIMATORS))]
    working_set: Option<WorkingSetEstimator>,
    /// Make an image even if it cannot be restored; `firn image inspect` shows the reasons.
    #[arg(long)]
    accept_unrestorable: bool,
    /// Make a checkpoint at this interval: 30s, 5m, 2h; 100ms at least.
    #[arg(long, value_name = "TIME", value_parser = parse_interval)]
    #[arg(conflicts_with_all = ["parent", "reference"])]
    every: Option<Duration>,
    /// With --every: the number of images to keep.
    #[arg(long, value_name = "N", requires = "every", default_value_t = 20)]
    #[arg(value_parser = units::parse_number::<u16>(1..=128))]
    keep: u16,
    /// With --every: end after this number of checkpoints.
    #[arg(long, value_name = "N", requires = "every")]
    #[arg(value_parser = units::parse_number::<u32>(1..=u32::MAX.into()))]
    times: Option<u32>,
    #[command(flatten)]
    hooks: CheckpointHooks,
    /// For tests: while the guest is paused, also copy its memory to this file.
    #[arg(long, value_name = "FILE", hide = true)]
    reference: Option<PathBuf>,
}

/// The options of both `checkpoint` and `suspend`.
#[derive(Debug, ClapArgs)]
pub struct ImageArgs {
    /// The image to write: a file, or a location in object storage, s3://BUCKET/KEY.
    #[arg(long, short, value_name = "IMAGE")]
    output: PathBuf,
    /// For an image in object storage: the directory in which its file is until it is uploaded. By
    /// default /var/lib/firn/spool for root, and ~/.local/state/firn/spool.
    #[arg(long, value_name = "DIR")]
    spool: Option<PathBuf>,
    /// The compression of memory: none, lz4, zstd[:LEVEL] or zlib[:LEVEL].
    #[arg(long)]
    codec: Option<Codec>,
    /// Pages in a memory block: 1, 2, 4, 8 or 16.
    #[arg(long, value_name = "PAGES", value_parser = parse_block_size)]
    block_pages: Option<BlockSize>,
    /// Size of a locality block: a power of two from 16K to 1M.
    #[arg(long, value_name = "SIZE", value_parser = parse_locality_block)]
    locality_block: Option<u32>,
    /// How to make snapshots of the disks that the guest writes to. By default Firn clones them if
    /// the file system supports that. If not, a VM that `firn run` or `firn restore` started gets
    /// overlays, and the disks of any other VM are copied.
    #[arg(long, value_name = "HOW", value_parser = accept_words(DISK_METHODS).map(find_disk_method))]
    disks: Option<SaveDisks>,
    /// The directory for disk files; by default that of the disks, and for copies that of the
    /// image.
    #[arg(long, value_name = "DIR")]
    disk_dir: Option<PathBuf>,
    /// Save only what changed since this image was made. The new image builds on this image, which
    /// must stay at its path.
    #[arg(long, value_name = "IMAGE")]
    parent: Option<PathBuf>,
    /// The number of threads that compress.
    #[arg(long, value_name = "N", value_parser = units::parse_number::<u16>(1..=256))]
    threads: Option<u16>,
    #[command(flatten)]
    pub seal: SealArgs,
}

fn parse_time_limit(text: &str) -> Result<Duration, String> {
    let time = units::parse_duration(text)?;
    if time.is_zero() { Err("give a time above 0".to_owned()) } else { Ok(time) }
}

/// The minimum time between two checkpoints of a series: each one pauses the guest.
const INTERVAL_MIN: Duration = Duration::from_millis(100);

fn parse_interval(text: &str) -> Result<Duration, String> {
    let interval = units::parse_duration(text)?;
    match interval >= INTERVAL_MIN {
        true => Ok(interval),
        false => {
            Err(format!("checkpoints cannot be less than {} ms apart", INTERVAL_MIN.as_millis()))
        }
    }
}

/// The disk method of an accepted word.
fn find_disk_method(word: String) -> SaveDisks {
    match word.as_str() {
        "copy" => SaveDisks::Copy,
        "clone" => SaveDisks::Clone,
        "overlay" => SaveDisks::Overlay,
        _ => SaveDisks::Reference,
    }
}

fn parse_block_size(text: &str) -> Result<BlockSize, String> {
    let pages: u8 = text.parse().map_err(|_| format!("{text:?} is not a number of pages"))?;
    BlockSize::new(pages).map_err(|error| error.to_string())
}

fn parse_locality_block(text: &str) -> Result<u32, String> {
    let bytes = units::parse_bytes(text)?;
    let fits = (16 << 10..=1 << 20).contains(&bytes) && bytes.is_power_of_two();
    match fits {
        true => Ok(bytes as u32),
        false => Err("a locality block has a power of two from 16K to 1M bytes".to_owned()),
    }
}

impl ImageArgs {
    /// The request with these options.
    ///
    /// # Errors
    /// If no image can be written there. Then nothing was sent to the VM's supervisor.
    pub fn save_request(&self) -> Result<SaveRequest, Failure> {
        let location = find_location(&self.output);
        match location {
            Some(_) => self.check_upload()?,
            None => self.check_file_output()?,
        }
        self.parent.as_deref().map_or(Ok(()), check_parent)?;
        self.disk_dir.as_deref().map_or(Ok(()), check_directory)?;
        let choices = SaveChoices {
            codec: self.codec,
            block_size: self.block_pages,
            locality_block_bytes: self.locality_block,
            compressors: self.threads.map(usize::from),
            parent: self.parent.as_deref().map(absolute_path).transpose()?,
            disks: self.disks,
            disk_dir: self.disk_dir.as_deref().map(absolute_path).transpose()?,
            seal: self.seal.make_seal()?,
            disks_in_clear: self.seal.disks_in_clear(),
            ..SaveChoices::default()
        };
        let keys = self.parent.as_deref().map_or(Ok(Vec::new()), keys_of)?;
        let (image, store) = match location {
            Some(location) => {
                let (image, store) = plan_upload(location, self.spool.as_deref())?;
                (image, Some(store))
            }
            None => (absolute_path(&self.output)?, None),
        };
        Ok(SaveRequest {
            image,
            choices,
            keys,
            store: store.map(Box::new),
            cancel_with_client: false,
        })
    }

    fn check_file_output(&self) -> Result<(), Failure> {
        if self.spool.is_some() {
            let text = "--spool is for images in object storage";
            let hint = "name an object: --output s3://BUCKET/KEY";
            return Err(Failure::new(FailureKind::Usage, text).with_hint(hint));
        }
        check_output(&self.output)
    }

    /// Refuses what a save to object storage can't do.
    fn check_upload(&self) -> Result<(), Failure> {
        if self.parent.is_none() {
            return Ok(());
        }
        let text = "an image in object storage is saved whole, without a parent";
        let hint = "save it to a file beside its parent, and push both: firn image push --chain";
        Err(Failure::new(FailureKind::Usage, text).with_hint(hint))
    }
}

/// Checks in advance that an image can be built on.
fn check_parent(parent: &Path) -> Result<(), Failure> {
    refuse_location(parent, "pull")?;
    check_input(parent)
}

impl CheckpointArgs {
    /// Refuses a series in object storage: its images build on each other.
    fn refuse_stored_series(&self) -> Result<(), Failure> {
        if self.every.is_none() || find_location(&self.image.output).is_none() {
            return Ok(());
        }
        let text = "--every makes images that build on each other, in files of one directory";
        let hint = "save them to files, and push the newest: firn image push --chain";
        Err(Failure::new(FailureKind::Usage, text).with_hint(hint))
    }

    /// Refuses limits that the strategy can't keep.
    fn check_limits(&self) -> Result<(), Failure> {
        // The default with a parent.
        let is_incremental = self.image.parent.is_some() || self.every.is_some();
        let strategy = self.strategy.or(is_incremental.then_some(SaveStrategy::PreCopy));
        let option = match (strategy, self.bandwidth, self.finish_within) {
            (Some(SaveStrategy::Stop), Some(_), _) => "--bandwidth",
            (Some(SaveStrategy::Stop | SaveStrategy::PreCopy), _, Some(_)) => "--finish-within",
            _ => return Ok(()),
        };
        let text = format!("{option} does not apply to the strategy of this checkpoint");
        Err(Failure::new(FailureKind::Usage, text).with_hint("use --strategy trace or cow"))
    }

    /// Runs the verb.
    pub fn run(&self, out: FactPrinter) -> Result<(), Failure> {
        self.refuse_stored_series()?;
        let mut request = self.image.save_request()?;
        request.cancel_with_client = self.cancel;
        request.choices.strategy = self.strategy;
        request.choices.first_spaces = self.first_spaces.map(usize::from);
        request.choices.working_set = self.working_set;
        request.choices.accept_unrestorable = self.accept_unrestorable;
        request.choices.disk_snapshot = self.storage_command()?;
        request.choices.throttle = self.no_throttle.then_some(false);
        request.choices.bandwidth = self.bandwidth;
        request.choices.finish_within_ms =
            self.finish_within.map(|time| u64::try_from(time.as_millis()).unwrap_or(u64::MAX));
        request.choices.freeze_ms = self.hooks.freeze_ms();
        self.check_limits()?;
        self.reference.as_deref().map_or(Ok(()), check_output_kind)?;
        request.choices.reference = self.reference.as_deref().map(absolute_path).transpose()?;
        let base = crate::hidden::runtime_dir()?;
        if let Some(interval) = self.every {
            return self.periodic_checkpoints(request, interval).run(&base, &self.image.seal, out);
        }
        let image = match &request.store {
            Some(store) => store.location.clone(),
            None => request.image.display().to_string(),
        };
        let request = SupervisorRequest::for_checkpoint(request);
        let save = || request_save(&base, &self.name, &request);
        let saved = self.hooks.run_around(&self.name, &image, save);
        if saved.is_err() {
            remove_unused_spool(&request);
        }
        let explain =
            |failure: Failure| failure.while_doing(format!("no checkpoint of {}", self.name));
        let (facts, failed_hook) = saved.map_err(explain)?;
        out.print_facts(&facts, || describe_checkpoint(&facts))?;
        failed_hook.map_or(Ok(()), Err)
    }
}

impl CheckpointArgs {
    /// The command that makes snapshots of disks; it runs where the user is.
    fn storage_command(&self) -> Result<Option<StorageCommand>, Failure> {
        let Some(command) = self.disk_snapshot.clone() else { return Ok(None) };
        let directory = std::env::current_dir().while_doing("finding the current directory")?;
        Ok(Some(StorageCommand { command, directory }))
    }

    /// A series of checkpoints. The first of them has no parent, and is made so that the next one
    /// is fast.
    fn periodic_checkpoints(
        &self,
        mut request: SaveRequest,
        interval: Duration,
    ) -> PeriodicCheckpoints {
        request.choices.strategy.get_or_insert(SaveStrategy::PreCopy);
        let (name, keep) = (self.name.clone(), usize::from(self.keep));
        PeriodicCheckpoints { name, request, interval, keep, times: self.times }
    }
}

/// Requests a save, and shows its progress. If it fails, no empty directory is left.
pub fn request_save(
    base: &RuntimeDir,
    name: &VmName,
    request: &SupervisorRequest,
) -> Result<serde_json::Value, Failure> {
    let mut bar = TerminalBar::new();
    let saved = send_request(base, name, request, &mut |progress| bar.show_progress(progress));
    remove_unused_spool(request);
    saved
}

fn remove_unused_spool(request: &SupervisorRequest) {
    if let SupervisorRequest::StoredCheckpoint(save) | SupervisorRequest::StoredSuspend(save) =
        request
    {
        remove_unused(save);
    }
}

/// The outcome of a checkpoint, in a line.
pub fn describe_checkpoint(facts: &serde_json::Value) -> String {
    if let Some(notice) = recovery_notice(facts) {
        return notice;
    }
    let report = &facts["report"];
    let number = |value: &serde_json::Value| value.as_f64().unwrap_or(0.0);
    let what = if facts["parent"].is_string() { " of changes" } else { "" };
    let drives: String =
        facts["drives"].as_array().into_iter().flatten().map(describe_drive).collect();
    format!(
        "{}: {}{what} in {}, pause {}{}{}\n{drives}",
        make_printable(facts["image"].as_str().unwrap_or("?")),
        units::format_bytes(report["image_bytes"].as_u64().unwrap_or(0)),
        units::format_ms(number(&report["total_ms"])),
        units::format_ms(number(&report["pause"]["downtime_ms"])),
        describe_round_pauses(report),
        describe_upload(facts),
    ) + &describe_freeze(&facts["freeze"])
        + &describe_obstacles(facts)
        + &describe_missing_mark(facts)
}

/// How long the upload to object storage took, if there was one.
fn describe_upload(facts: &serde_json::Value) -> String {
    let ms = facts["upload"]["ms"].as_f64();
    ms.map_or(String::new(), |ms| format!(", uploaded in {}", units::format_ms(ms)))
}

/// How long the guest was frozen.
fn describe_freeze(freeze: &serde_json::Value) -> String {
    let (Some(ms), Some(count)) = (freeze["ms"].as_f64(), freeze["file_systems"].as_u64()) else {
        return String::new();
    };
    let end = match freeze["thawed"].as_bool() {
        Some(true) => "",
        _ => ", and still are: Firn thaws them when the guest agent answers (`firn status`)",
    };
    format!("{count} file systems of the guest were frozen for {}{end}\n", units::format_ms(ms))
}

fn describe_missing_mark(facts: &serde_json::Value) -> String {
    let reason = facts["unmarked"].as_str().map(make_printable);
    let line =
        |reason| format!("a restore needs --trust, because the image has no mark: {reason}\n");
    reason.map(line).unwrap_or_default()
}

fn describe_obstacles(facts: &serde_json::Value) -> String {
    let reasons = facts["unrestorable"].as_array().into_iter().flatten();
    let reasons = reasons.filter_map(serde_json::Value::as_str);
    reasons.map(|reason| format!("cannot be restored: {}\n", make_printable(reason))).collect()
}

/// The pauses of the pre-copy rounds before the cut, if there were any.
fn describe_round_pauses(report: &serde_json::Value) -> String {
    let pauses = report["round_pauses_ms"].as_array().into_iter().flatten();
    let pauses: Vec<f64> = pauses.filter_map(serde_json::Value::as_f64).collect();
    match pauses.iter().copied().reduce(f64::max) {
        Some(longest) => {
            format!(", {} before it of up to {}", pauses.len(), units::format_ms(longest))
        }
        None => String::new(),
    }
}

fn describe_drive(drive: &serde_json::Value) -> String {
    let text = |key: &str| make_printable(drive[key].as_str().unwrap_or("?"));
    if text("how").starts_with("copy") {
        let (name, kept, file) = (text("drive"), text("kept"), text("goes_on_with"));
        return format!("disk {name}: {kept} is a {} of {file}\n", text("how"));
    }
    format!(
        "disk {}: {} is kept unchanged; the VM continues with {}\n",
        text("drive"),
        text("kept"),
        text("goes_on_with")
    )
}

/// The report of the next supervisor, if the supervisor died after its work and before its reply.
pub fn recovery_notice(facts: &serde_json::Value) -> Option<String> {
    facts["recovered"].as_bool().filter(|&recovered| recovered)?;
    let notice = facts["status"]["last"]["text"].as_str().unwrap_or("the VM runs");
    Some(format!("{notice} (the supervisor died meanwhile; a new one has recovered the VM)\n"))
}
