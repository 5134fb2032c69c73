//! The options with which sealed images are opened, and new images are sealed.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use clap::Args as ClapArgs;
use firn_image::{ImageError, ImageKey, ImageSeal, key_ring};
use firn_keys::{KeyError, KeySources, SealTargets};
use firn_supervisor::{Failure, FailureKind};

/// The sources that the command line names: a checkpoint is sealed with them, too.
static NAMED: OnceLock<KeySources> = OnceLock::new();

/// The options that name keys. They work for each verb that opens an image.
#[derive(Debug, ClapArgs)]
#[command(next_help_heading = "Keys of sealed images")]
pub struct KeyArgs {
    /// Open sealed images with the age identities in this file. Can be given more than once.
    #[arg(long, global = true, value_name = "FILE")]
    identity: Vec<PathBuf>,
    /// Open sealed images, and seal a checkpoint, with the key in this file (64 hexadecimal digits).
    #[arg(long, global = true, value_name = "FILE")]
    key_file: Option<PathBuf>,
    /// Open sealed images, and seal a checkpoint, with this command. The shell runs `COMMAND wrap`
    /// and `COMMAND unwrap`, which read one form of a key and print the other.
    #[arg(long, global = true, value_name = "COMMAND")]
    key_command: Option<String>,
}

/// The options of `checkpoint`, `suspend` and `fork` that seal the image.
#[derive(Debug, ClapArgs)]
pub struct SealArgs {
    /// Seal the image: encrypt it for this recipient of age (age1...), who opens it with --identity.
    /// Can be given more than once. --key-file and --key-command seal it too.
    #[arg(long, value_name = "RECIPIENT")]
    recipient: Vec<String>,
    /// As --recipient, for all recipients in this file. Can be given more than once.
    #[arg(long, value_name = "FILE")]
    recipient_file: Vec<PathBuf>,
    /// Seal the image although the snapshots of its disks are not encrypted.
    #[arg(long)]
    disks_in_clear: bool,
}

impl KeyArgs {
    /// Has this process open sealed images with these sources, and with those of the environment.
    ///
    /// # Errors
    /// If a file that the command line names has no key.
    pub fn use_sources(&self) -> Result<(), Failure> {
        let named = KeySources {
            identities: self.identity.clone(),
            key_file: self.key_file.clone(),
            key_command: self.key_command.clone(),
        };
        named.check().map_err(|error| key_failure(&error))?;
        named.add_to(key_ring());
        KeySources::from_variables(&|name| std::env::var_os(name)).add_to(key_ring());
        // Set once, by `main`.
        let _ = NAMED.set(named);
        Ok(())
    }
}

impl SealArgs {
    /// A new seal, if the image is to be sealed.
    ///
    /// # Errors
    /// If a recipient or a file is wrong, or the key command fails.
    pub fn make_seal(&self) -> Result<Option<ImageSeal>, Failure> {
        let named = NAMED.get().cloned().unwrap_or_default();
        let targets = SealTargets {
            recipients: self.recipient.clone(),
            recipient_files: self.recipient_file.clone(),
            key_file: named.key_file,
            key_command: named.key_command,
        };
        let seal = targets.make_seal().map_err(|error| key_failure(&error))?;
        // This command may open the image again: a series merges it, `fork` starts clones of it.
        seal.iter().for_each(|seal| key_ring().add_key(seal.key.clone()));
        Ok(seal)
    }

    /// Whether snapshots of disks may be in clear beside a sealed image.
    pub fn disks_in_clear(&self) -> bool {
        self.disks_in_clear
    }
}

/// The keys of an image and of those it builds on, for a supervisor: none if they are not sealed. The
/// supervisor reports what else is wrong with the image.
pub fn keys_of(image: &Path) -> Result<Vec<ImageKey>, Failure> {
    // A chain is sealed as a whole.
    if firn_image::is_unsealed_image(image) {
        return Ok(Vec::new());
    }
    match firn_image::unlock_chain(image) {
        Err(error @ ImageError::Locked { .. }) => {
            Err(crate::image::open::open_failure(image, &error))
        }
        keys => Ok(keys.unwrap_or_default()),
    }
}

fn key_failure(error: &KeyError) -> Failure {
    let kind = match error {
        KeyError::Read { .. }
        | KeyError::Exposed { .. }
        | KeyError::Line { .. }
        | KeyError::Empty { .. }
        | KeyError::Recipient { .. }
        | KeyError::NoKeyFile { .. } => FailureKind::Usage,
        _ => FailureKind::Other,
    };
    Failure::from_error(kind, error)
}
