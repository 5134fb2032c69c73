//! Options that override what an image records of its VM.

use std::path::{Path, PathBuf};

use clap::Args as ClapArgs;
use firn_supervisor::{CommandOverrides, Failure, absolute_path};

use crate::clones::NUMBER;

/// The changes to the VM of an image.
#[derive(Debug, ClapArgs)]
pub struct OverrideArgs {
    /// The QEMU program to start, in place of the image's.
    #[arg(long, value_name = "PATH")]
    qemu: Option<PathBuf>,
    /// Change a value of QEMU's command line: OPTION.ID.PROPERTY=VALUE, or OPTION.PROPERTY=VALUE or
    /// OPTION=VALUE where the option occurs once; OPTION= removes the option. Can be given more
    /// than once. If the guest would miss a device, the restore fails. For clones, {} in VALUE
    /// stands for the number of the clone; also in --netdev and --qemu-arg.
    #[arg(long, value_name = "OPTION=VALUE", value_parser = parse_pair)]
    set: Vec<(String, String)>,
    /// Give a network card another back end, such as net0=user,hostfwd=tcp::2223-:22. Can be given
    /// more than once.
    #[arg(long, value_name = "ID=BACKEND", value_parser = parse_pair)]
    netdev: Vec<(String, String)>,
    /// Use the file NEW in place of the disk file OLD that the image names. NEW must have the
    /// contents that the disk had at the checkpoint. Can be given more than once.
    #[arg(long, value_name = "OLD=NEW", value_parser = parse_pair)]
    disk: Vec<(String, String)>,
    /// Add a word to the end of QEMU's command line: --qemu-arg=-vnc --qemu-arg=:5
    #[arg(long, value_name = "WORD", allow_hyphen_values = true)]
    qemu_arg: Vec<String>,
}

impl OverrideArgs {
    /// The changes, with absolute paths.
    pub fn to_overrides(&self) -> Result<CommandOverrides, Failure> {
        let moved = |(old, new): &(String, String)| Ok((old.clone(), absolute_text(new.as_ref())?));
        Ok(CommandOverrides {
            program: self.qemu.as_deref().map(resolve_program).transpose()?,
            netdevs: self.netdev.clone(),
            disks: self.disk.iter().map(moved).collect::<Result<_, Failure>>()?,
            values: self.set.clone(),
            words: self.qemu_arg.clone(),
            same_identity: false,
        })
    }
}

/// The changes for the clone with a number.
pub fn number_overrides(overrides: &CommandOverrides, number: u32) -> CommandOverrides {
    let with_number = |text: &String| text.replace(NUMBER, &number.to_string());
    let pair = |(key, value): &(String, String)| (key.clone(), with_number(value));
    CommandOverrides {
        netdevs: overrides.netdevs.iter().map(pair).collect(),
        values: overrides.values.iter().map(pair).collect(),
        words: overrides.words.iter().map(with_number).collect(),
        ..overrides.clone()
    }
}

/// The program; a name without a slash is searched in PATH.
fn resolve_program(path: &Path) -> Result<String, Failure> {
    match path.components().count() {
        1 => Ok(path.to_string_lossy().into_owned()),
        _ => absolute_text(path),
    }
}

/// An absolute path in the form for QEMU's command line.
fn absolute_text(path: &Path) -> Result<String, Failure> {
    Ok(absolute_path(path)?.to_string_lossy().into_owned())
}

/// Splits at the first `=`.
pub fn parse_pair(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err(format!("{text:?} is not of the form NAME=VALUE")),
    }
}
