//! Keys wrapped for recipients of age (<https://age-encryption.org>), and opened by its identities.

use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use age::x25519::{Identity, Recipient};
use age::{DecryptError, Decryptor, Encryptor};
use firn_image::{ImageKey, KEY_BYTES, KeyOpener, WrapMethod, WrappedKey};
use zeroize::Zeroizing;

use crate::error::KeyError;

/// The maximum length of a file with recipients or identities, in bytes.
const FILE_BYTES_MAX: u64 = 64 << 10;

/// The characters of a recipient that an image shows.
const NAME_CHARS: usize = 12;

/// Parses a recipient that the user gave.
pub(crate) fn parse_recipient(text: &str) -> Result<Recipient, KeyError> {
    Recipient::from_str(text)
        .map_err(|problem| KeyError::Recipient { text: text.to_owned(), problem })
}

/// The recipients in a file: one a line, with empty lines and comments (`#`), as age has it.
pub(crate) fn read_recipients(path: &Path) -> Result<Vec<Recipient>, KeyError> {
    const EXPECTED: &str = "age recipient (age1...)";
    let text = read_text(path)?;
    let recipients = each_line(&text).map(|(line, text)| {
        let wrong = |_| KeyError::Line { path: path.to_owned(), line, expected: EXPECTED };
        Recipient::from_str(text).map_err(wrong)
    });
    require_some(recipients.collect::<Result<_, _>>()?, path, EXPECTED)
}

/// Wraps a key for recipients, each of which can open it alone.
pub(crate) fn wrap_for(recipients: &[Recipient], key: &ImageKey) -> Result<WrappedKey, KeyError> {
    let failed = |problem: String| KeyError::Wrap(problem);
    let list = recipients.iter().map(|it| it as &dyn age::Recipient);
    let encryptor = Encryptor::with_recipients(list).map_err(|error| failed(error.to_string()))?;
    let mut bytes = Vec::new();
    let wrapped = encryptor.wrap_output(&mut bytes).and_then(|mut writer| {
        writer.write_all(key.expose_bytes())?;
        writer.finish().map(drop)
    });
    wrapped.map_err(|error| failed(error.to_string()))?;
    let names: Vec<_> = recipients.iter().map(short_name).collect();
    Ok(WrappedKey { method: WrapMethod::Age, name: names.join(" "), bytes })
}

/// The beginning of a recipient, by which a user recognizes it.
fn short_name(recipient: &Recipient) -> String {
    let text = recipient.to_string();
    format!("{}...", text.get(..NAME_CHARS).unwrap_or(&text))
}

/// A file with identities of age.
#[derive(Clone, Debug)]
pub struct AgeIdentities {
    path: PathBuf,
}

impl AgeIdentities {
    /// The identities in this file, which is read when an image needs them.
    pub fn new(path: &Path) -> Self {
        Self { path: path.to_owned() }
    }

    /// Reads the file.
    ///
    /// # Errors
    /// If it can't be read, other users can read it, or it has other lines.
    pub fn read(&self) -> Result<Vec<Identity>, KeyError> {
        const EXPECTED: &str = "age identity (AGE-SECRET-KEY-1...)";
        let path = &self.path;
        refuse_exposed(path)?;
        let text = read_text(path)?;
        let identities = each_line(&text).map(|(line, text)| {
            let wrong = |_| KeyError::Line { path: path.clone(), line, expected: EXPECTED };
            Identity::from_str(text).map_err(wrong)
        });
        require_some(identities.collect::<Result<_, _>>()?, path, EXPECTED)
    }

    fn unwrap_one(&self, wrapped: &WrappedKey) -> Result<Option<ImageKey>, KeyError> {
        let failed = |problem: String| KeyError::Unwrap {
            source_name: self.path.display().to_string(),
            problem,
        };
        let identities = self.read()?;
        let list = identities.iter().map(|it| it as &dyn age::Identity);
        let decryptor =
            Decryptor::new(&wrapped.bytes[..]).map_err(|error| failed(error.to_string()))?;
        let mut reader = match decryptor.decrypt(list) {
            Ok(reader) => reader,
            Err(DecryptError::NoMatchingKeys) => return Ok(None),
            Err(error) => return Err(failed(error.to_string())),
        };
        let mut key = Zeroizing::new([0; KEY_BYTES]);
        reader.read_exact(&mut *key).map_err(|error| failed(error.to_string()))?;
        match reader.read(&mut [0]) {
            Ok(0) => Ok(Some(ImageKey::from_bytes(*key))),
            _ => Err(failed("it has more bytes than a key".to_owned())),
        }
    }
}

impl KeyOpener for AgeIdentities {
    fn unwrap_key(&self, wraps: &[WrappedKey]) -> Result<Option<ImageKey>, String> {
        for wrapped in wraps.iter().filter(|it| it.method == WrapMethod::Age) {
            if let Some(key) = self.unwrap_one(wrapped).map_err(|error| error.describe())? {
                return Ok(Some(key));
            }
        }
        Ok(None)
    }
}

/// Refuses a file with a secret that other users can access.
pub(crate) fn refuse_exposed(path: &Path) -> Result<(), KeyError> {
    let failed = |source| KeyError::Read { path: path.to_owned(), source };
    let mode = std::fs::metadata(path).map_err(failed)?.permissions().mode();
    match mode & 0o077 {
        0 => Ok(()),
        _ => Err(KeyError::Exposed { path: path.to_owned() }),
    }
}

pub(crate) fn read_text(path: &Path) -> Result<Zeroizing<String>, KeyError> {
    let text = firn_files::read_text(path, FILE_BYTES_MAX);
    text.map(Zeroizing::new).map_err(|source| KeyError::Read { path: path.to_owned(), source })
}

/// The lines that have something, with their numbers.
fn each_line(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let lines = (1..).zip(text.lines().map(str::trim));
    lines.filter(|(_, line)| !line.is_empty() && !line.starts_with('#'))
}

fn require_some<T>(list: Vec<T>, path: &Path, expected: &'static str) -> Result<Vec<T>, KeyError> {
    match list.is_empty() {
        true => Err(KeyError::Empty { path: path.to_owned(), expected }),
        false => Ok(list),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use age::secrecy::ExposeSecret as _;

    fn identity_file(dir: &Path, name: &str, identity: &Identity) -> AgeIdentities {
        let path = dir.join(name);
        let text = format!("# made by a test\n\n{}\n", identity.to_string().expose_secret());
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        AgeIdentities::new(&path)
    }

    #[test]
    fn each_recipient_opens_the_key_and_no_other_does() {
        let dir = tempfile::tempdir().unwrap();
        let (one, two, other) = (Identity::generate(), Identity::generate(), Identity::generate());
        let key = ImageKey::random().unwrap();
        let wrapped = wrap_for(&[one.to_public(), two.to_public()], &key).unwrap();
        assert!(one.to_public().to_string().starts_with(&wrapped.name[..12]), "{}", wrapped.name);
        let wraps = std::slice::from_ref(&wrapped);
        for identity in [&one, &two] {
            let file = identity_file(dir.path(), "identity", identity);
            assert_eq!(file.unwrap_key(wraps).unwrap().as_ref(), Some(&key));
        }
        let file = identity_file(dir.path(), "other", &other);
        assert_eq!(file.unwrap_key(wraps).unwrap(), None);
        let file = identity_file(dir.path(), "identity", &one);
        for at in 0..wrapped.bytes.len() {
            let mut bad = wrapped.clone();
            bad.bytes[at] ^= 1;
            assert_ne!(file.unwrap_key(&[bad]).ok().flatten().as_ref(), Some(&key), "byte {at}");
        }
    }

    #[test]
    fn wrong_files_are_named_with_their_line() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("keys");
        let write = |text: &str| {
            std::fs::write(&path, text).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        };
        write("# nothing\n");
        assert!(matches!(AgeIdentities::new(&path).read(), Err(KeyError::Empty { .. })));
        assert!(matches!(read_recipients(&path), Err(KeyError::Empty { .. })));
        write("# comment\nAGE-SECRET-KEY-1NONSENSE\n");
        let error = AgeIdentities::new(&path).read().err().unwrap();
        assert!(error.to_string().starts_with("line 2 of "), "{error}");
        assert!(!error.to_string().contains("NONSENSE"), "a secret is not repeated: {error}");
        assert!(parse_recipient("age1x").is_err());
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).unwrap();
        assert!(matches!(AgeIdentities::new(&path).read(), Err(KeyError::Exposed { .. })));
        let missing = AgeIdentities::new(&dir.path().join("missing"));
        assert!(matches!(missing.read(), Err(KeyError::Read { .. })));
    }
}
