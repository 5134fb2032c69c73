//! Signatures of images by keys that this host lists.
//!
//! ```text
//!   ssh-keygen -Y sign -f KEY -n firn web.firn      by the one who gives the image away: web.firn.sig
//!   /etc/firn/allowed_signers                       PRINCIPAL KEYTYPE KEY, as in ssh-keygen(1)
//! ```
//!
//! A signature is of the whole file, memory as well. So a check reads the whole file, and is made only
//! where an image would be refused without it. `ssh-keygen` checks; no shell is involved.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use firn_image::Image;

use crate::records::failure::{Failure, FailureContext, FailureKind, image_failure};

/// The administrator's list of keys, and the environment variable that names another one.
const ALLOWED_SIGNERS: &str = "/etc/firn/allowed_signers";
const VARIABLE: &str = "FIRN_ALLOWED_SIGNERS";

/// The program, and the namespace of Firn's signatures: one that was made for something else is not
/// accepted.
const PROGRAM: &str = "ssh-keygen";
const NAMESPACE: &str = "firn";

/// The maximum size of a list of keys, and of a signature.
const LIST_BYTES_MAX: u64 = 1 << 20;
const SIGNATURE_BYTES_MAX: u64 = 64 << 10;

/// The listed signer of an image. `None` if it has no signature, or this host lists no keys.
///
/// # Errors
/// If the signature is not valid or not by a listed key, or can't be checked.
pub(crate) fn find_signer(image: &Image) -> Result<Option<String>, Failure> {
    let signature = signature_path(image.path());
    let list = std::env::var_os(VARIABLE).filter(|it| !it.is_empty());
    let list = list.map_or_else(|| PathBuf::from(ALLOWED_SIGNERS), PathBuf::from);
    if !signature.exists() || !list.exists() {
        return Ok(None);
    }
    let checking = format!("checking {}", signature.display());
    check_signer(image, &signature, &list)
        .map_err(|failure| failure.while_doing(checking))
        .map(Some)
}

fn signature_path(image: &Path) -> PathBuf {
    let mut path = OsString::from(image);
    path.push(".sig");
    PathBuf::from(path)
}

fn check_signer(image: &Image, signature: &Path, list: &Path) -> Result<String, Failure> {
    // Only the owner of the list may add keys.
    firn_files::read_permissions(list, LIST_BYTES_MAX)
        .while_doing_as(FailureKind::Host, format!("reading {}", list.display()))?;
    firn_files::read_input(signature, SIGNATURE_BYTES_MAX)
        .while_doing_as(FailureKind::Refused, "reading the signature")?;
    let principals = run_tool("find-principals", signature, list, &[], Stdio::null())?;
    let text = String::from_utf8_lossy(&principals.stdout).into_owned();
    let unlisted = || {
        let text = format!("it is by no key that {} lists", list.display());
        let hint = "add the key of the one who signed the image, or restore it with --trust";
        Failure::new(FailureKind::Refused, text).with_hint(hint)
    };
    let principal = text.lines().next().filter(|_| principals.status.success());
    let principal = principal.filter(|it| !it.is_empty()).ok_or_else(unlisted)?;
    let words = ["-I", principal, "-n", NAMESPACE];
    // Of an image in object storage only what was needed is there.
    image.fetch_own_file().map_err(|error| image_failure(&error))?;
    let content = open_again(image).while_doing("reading the image")?;
    match run_tool("verify", signature, list, &words, content.into())?.status.success() {
        true => Ok(principal.to_owned()),
        false => {
            let text = "it is no signature of this image for Firn";
            let hint =
                format!("sign the image with `{PROGRAM} -Y sign -f KEY -n {NAMESPACE} IMAGE`");
            Err(Failure::new(FailureKind::Refused, text).with_hint(hint))
        }
    }
}

/// The open file of the image once more, from its beginning: not another file that has its name now.
fn open_again(image: &Image) -> Result<File, Failure> {
    let files = image.try_clone_files().map_err(|error| image_failure(&error))?;
    let ended = || io::Error::from(io::ErrorKind::NotFound);
    let opened = files
        .first()
        .ok_or_else(ended)
        .and_then(|file| File::open(format!("/proc/self/fd/{}", file.as_raw_fd())));
    opened.while_doing("opening it again")
}

fn run_tool(
    verb: &str,
    signature: &Path,
    list: &Path,
    words: &[&str],
    input: Stdio,
) -> Result<Output, Failure> {
    let mut command = Command::new(PROGRAM);
    command.args(["-Y", verb]).args(words).arg("-s").arg(signature).arg("-f").arg(list);
    let output = command.stdin(input).output();
    output.map_err(|error| {
        let failure = Failure::from_error(FailureKind::Host, &error);
        failure
            .while_doing(format!("running {PROGRAM}"))
            .with_hint("install OpenSSH's client, or restore the image with --trust")
    })
}
