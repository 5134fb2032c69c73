//! `firn fork`

use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use clap::Args as ClapArgs;
use firn_restore::{FillChoices, ReadFailurePolicy, RestoreMode};
use firn_supervisor::{
    CommandOverrides, Failure, FailureContext, FailureKind, FamilyRecord, RestoreDisks, RuntimeDir,
    SaveChoices, SaveRequest, SupervisorPlan, SupervisorRequest, VmName, absolute_path,
    make_private,
};
use serde_json::Value;

use crate::checkpoint::{describe_checkpoint, request_save};
use crate::clones::{
    self, COUNT_MAX, CloneOrder, NamePattern, check_names, describe_clones, wait_for_clones,
};
use crate::keys::{SealArgs, keys_of};
use crate::output::{FactPrinter, check_directory, check_output};
use crate::overrides::parse_pair;
use crate::units;

/// Start clones of a running VM, which continues to run.
///
/// Firn makes a checkpoint of the VM, with a pause of milliseconds, and starts clones of that
/// checkpoint, as `firn restore --count` does: they share each page of memory that none of them has
/// written, and have names, monitors and disk overlays of their own.
///
/// The VM may listen at ports that lead to its guest (`hostfwd`). Its clones can't have the same
/// ports: --netdev gives each clone another one, or none. For other changes, use `firn checkpoint`
/// and `firn restore --count`.
///
/// The image of the checkpoint stays, because the clones' disks may build on its disk files. Without
/// --output it is in the runtime directory, which is usually in memory. `firn image rm` removes it.
#[derive(Debug, ClapArgs)]
#[command(after_long_help = r"Examples:
  firn fork web --count 3
  firn fork web --count 20 --name 'worker-{}' -o web.firn \
    --netdev 'net0=user,hostfwd=tcp::300{}-:22'")]
pub struct ForkArgs {
    /// The VM.
    name: VmName,
    /// The number of clones.
    #[arg(long, value_name = "N", value_parser = units::parse_number::<u32>(1..=COUNT_MAX))]
    count: u32,
    /// The names of the clones, in which {} stands for a number from 1 on; by default NAME-{}.
    #[arg(long = "name", value_name = "PATTERN")]
    pattern: Option<NamePattern>,
    /// The image to write; by default one in the runtime directory.
    #[arg(long, short, value_name = "IMAGE")]
    output: Option<PathBuf>,
    /// The directory for overlays; by default that of the VM's disks.
    #[arg(long, value_name = "DIR")]
    disk_dir: Option<PathBuf>,
    /// Give a network card of the clones another back end, in which {} stands for the number of the
    /// clone. Can be given more than once.
    #[arg(long, value_name = "ID=BACKEND", value_parser = parse_pair)]
    netdev: Vec<(String, String)>,
    /// Return only when all memory of the clones is loaded.
    #[arg(long)]
    wait: bool,
    #[command(flatten)]
    seal: SealArgs,
}

impl ForkArgs {
    /// Runs the verb.
    pub fn run(&self, out: FactPrinter) -> Result<(), Failure> {
        let base = crate::hidden::runtime_dir()?;
        let facts = self
            .fork_vm(&base)
            .map_err(|failure| failure.while_doing(format!("can't fork {}", self.name)))?;
        out.print_facts(&facts, || {
            describe_checkpoint(&facts["checkpoint"]) + &describe_clones(&facts)
        })
    }

    fn fork_vm(&self, base: &RuntimeDir) -> Result<Value, Failure> {
        let pattern = self.pattern.clone();
        let pattern = pattern.unwrap_or_else(|| NamePattern::for_clones_of(&self.name));
        let names = pattern.list_names(self.count)?;
        check_names(base, &names)?;
        let disk_dir = self.disk_dir.as_deref();
        disk_dir.map_or(Ok(()), check_directory)?;
        let disk_dir = disk_dir.map(absolute_path).transpose()?;
        let overrides =
            CommandOverrides { netdevs: self.netdev.clone(), ..CommandOverrides::default() };
        let image = self.choose_image(base)?;
        let request = SaveRequest {
            image: image.clone(),
            choices: SaveChoices {
                seal: self.seal.make_seal()?,
                disks_in_clear: self.seal.disks_in_clear(),
                ..SaveChoices::default()
            },
            keys: Vec::new(),
            store: None,
            cancel_with_client: false,
        };
        let saved = request_save(base, &self.name, &SupervisorRequest::for_checkpoint(request))?;
        let make_plan = |overrides: CommandOverrides, family| {
            clone_plan(&image, disk_dir.clone(), overrides, family)
        };
        let (names, overrides) = (&*names, &overrides);
        let order = CloneOrder {
            image: &image,
            learn: true,
            fill: FillChoices::default(),
            trust: false,
            names,
            overrides,
        };
        let mut facts = clones::start_clones(base, &order, &make_plan).map_err(|failure| {
            failure.with_hint(format!("the checkpoint is {}", image.display()))
        })?;
        facts["checkpoint"] = saved;
        if self.wait {
            wait_for_clones(base, names)?;
        }
        Ok(facts)
    }

    fn choose_image(&self, base: &RuntimeDir) -> Result<PathBuf, Failure> {
        const CREATING: &str = "creating a directory for the image";
        if let Some(output) = &self.output {
            check_output(output)?;
            return absolute_path(output);
        }
        let directory = base.path().join(".forks");
        base.create_private()
            .and_then(|()| make_private(&directory))
            .while_doing_as(FailureKind::Host, CREATING)?;
        let since = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs());
        let file = format!("{}-{since:x}-{}.firn", self.name, std::process::id());
        absolute_path(&directory.join(file))
    }
}

fn clone_plan(
    image: &Path,
    disk_dir: Option<PathBuf>,
    overrides: CommandOverrides,
    family: FamilyRecord,
) -> Result<SupervisorPlan, Failure> {
    Ok(SupervisorPlan::Restore {
        image: image.to_owned(),
        keys: keys_of(image)?,
        mode: RestoreMode::default(),
        on_error: ReadFailurePolicy::default(),
        fill: FillChoices::default(),
        force: false,
        trust: false,
        account_use: false,
        learn: true,
        run: false,
        disks: RestoreDisks::Own,
        disk_dir,
        access_bits: None,
        calls: None,
        stores: None,
        overrides,
        libvirt: None,
        family: Some(Box::new(family)),
    })
}
