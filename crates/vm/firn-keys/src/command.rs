//! Keys wrapped by the user's command: a KMS, Vault, a TPM.
//!
//! ```text
//!   sh -c 'COMMAND wrap'      standard input: 32 bytes      standard output: the wrapped key, 1 to 8192 bytes
//!   sh -c 'COMMAND unwrap'    standard input: wrapped key   standard output: the 32 bytes
//! ```

use std::io::{Read, Write};
use std::process::{Command, Stdio};

use firn_image::{ImageKey, KEY_BYTES, KeyOpener, WrapMethod, WrappedKey};
use zeroize::Zeroizing;

use crate::error::KeyError;

/// The maximum length of a wrapped key in bytes.
const WRAPPED_BYTES_MAX: usize = 8 << 10;

/// The end of what a failed command wrote to standard error that an error repeats, in characters.
const OUTPUT_CHARS_MAX: usize = 400;

/// The characters of the command that an image shows.
const NAME_CHARS_MAX: usize = 100;

/// The name of a command whose program is not shown.
const UNNAMED: &str = "(unnamed)";

/// A command of the user that wraps and unwraps keys.
#[derive(Clone, Debug)]
pub struct KeyCommand {
    command: String,
}

impl KeyCommand {
    /// This command, for the shell.
    pub fn new(command: &str) -> Self {
        Self { command: command.to_owned() }
    }

    /// Wraps the key of an image.
    pub(crate) fn wrap(&self, key: &ImageKey) -> Result<WrappedKey, KeyError> {
        let wrapped = self.run("wrap", key.expose_bytes())?;
        if wrapped.is_empty() || wrapped.len() > WRAPPED_BYTES_MAX {
            return Err(self.output_error("wrap", wrapped.len(), "1 to 8192"));
        }
        let name = program_name(&self.command).chars().take(NAME_CHARS_MAX).collect();
        Ok(WrappedKey { method: WrapMethod::Command, name, bytes: wrapped.to_vec() })
    }

    fn unwrap_one(&self, wrapped: &WrappedKey) -> Result<ImageKey, KeyError> {
        let key = self.run("unwrap", &wrapped.bytes)?;
        let bytes: Result<[u8; KEY_BYTES], _> = key.as_slice().try_into();
        bytes.map(ImageKey::from_bytes).map_err(|_| self.output_error("unwrap", key.len(), "32"))
    }

    fn output_error(&self, action: &'static str, found: usize, expected: &'static str) -> KeyError {
        KeyError::Output { command: self.command.clone(), action, found, expected }
    }

    fn run(&self, action: &'static str, input: &[u8]) -> Result<Zeroizing<Vec<u8>>, KeyError> {
        let failed = |source| KeyError::Run { command: self.command.clone(), source };
        let mut child = Command::new("/bin/sh")
            .arg("-c")
            .arg(format!("{} {action}", self.command))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(failed)?;
        let mut errors = child.stderr.take();
        let reader = std::thread::spawn(move || {
            let mut text = Vec::new();
            // A command that prints without end is cut off, and then fails.
            let _ = errors.as_mut().map(|it| it.take(64 << 10).read_to_end(&mut text));
            String::from_utf8_lossy(&text).into_owned()
        });
        if let Some(mut to) = child.stdin.take() {
            // A command that does not read its input reports why by its exit code.
            let _ = to.write_all(input);
        }
        let mut output = Zeroizing::new(Vec::new());
        if let Some(from) = child.stdout.take() {
            let limit = WRAPPED_BYTES_MAX as u64 + 1;
            from.take(limit).read_to_end(&mut output).map_err(failed)?;
        }
        let status = child.wait().map_err(failed)?;
        let text = reader.join().unwrap_or_default();
        match status.success() {
            true => Ok(output),
            false => {
                let (command, output) = (self.command.clone(), describe_output(&text));
                Err(KeyError::Failed { command, action, status, output })
            }
        }
    }
}

/// The file name of a command's program, which anybody can read in the image. Everything else may be
/// secret: directories, arguments, and variables that are set before the program (`TOKEN=...`). Of a
/// command that needs a shell to know its program, nothing is shown.
fn program_name(command: &str) -> &str {
    let is_plain =
        |word: &str| !word.contains(['\'', '"', '\\', '$', '`', ';', '&', '|', '<', '>', '(']);
    let mut words =
        command.split_whitespace().skip_while(|word| is_plain(word) && sets_variable(word));
    let program = words.next().filter(|word| is_plain(word) && !word.contains('='));
    program.and_then(|word| word.rsplit('/').next()).filter(|it| !it.is_empty()).unwrap_or(UNNAMED)
}

fn sets_variable(word: &str) -> bool {
    let is_name = |name: &str| name.chars().all(|it| it.is_ascii_alphanumeric() || it == '_');
    word.split_once('=').is_some_and(|(name, _)| is_name(name))
}

/// The end of what a command wrote to standard error, for an error.
fn describe_output(text: &str) -> String {
    let text = text.trim();
    let skipped = text.chars().count().saturating_sub(OUTPUT_CHARS_MAX);
    let end: String = text.chars().skip(skipped).collect();
    if end.is_empty() { end } else { format!(": {end}") }
}

impl KeyOpener for KeyCommand {
    fn unwrap_key(&self, wraps: &[WrappedKey]) -> Result<Option<ImageKey>, String> {
        let wrapped = wraps.iter().find(|it| it.method == WrapMethod::Command);
        let unwrap = |wrapped| self.unwrap_one(wrapped).map_err(|error| error.describe());
        wrapped.map(unwrap).transpose()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A command that "encrypts" by swapping digits: it has both directions.
    const SWAP: &str = r#"f() { od -An -v -tx1 | tr -d ' \n' | tr 0-9a-f a-f0-9; }; f"#;
    const SWAP_BACK: &str = r#"f() { tr a-f0-9 0-9a-f | { fold -w2; echo; } | while read -r b; do printf "\\$(printf %03o 0x$b)"; done; }; f"#;

    #[test]
    fn a_command_wraps_and_unwraps() {
        let key = ImageKey::random().unwrap();
        let wrapped = KeyCommand::new(SWAP).wrap(&key).unwrap();
        assert_eq!(wrapped.bytes.len(), 64);
        assert_eq!(wrapped.name, UNNAMED);
        let opened = KeyCommand::new(SWAP_BACK).unwrap_key(std::slice::from_ref(&wrapped));
        assert_eq!(opened, Ok(Some(key)));
        assert_eq!(KeyCommand::new(SWAP_BACK).unwrap_key(&[]), Ok(None));
    }

    #[test]
    fn an_image_shows_the_program_of_a_command_and_no_secret() {
        for (command, name) in [
            ("vault", "vault"),
            ("/opt/secret-project/kms --token s3cret", "kms"),
            ("VAULT_TOKEN=s3cret vault", "vault"),
            ("A=s3cret B=s3cret/x ./kms --key=s3cret", "kms"),
            // The shell sees one assignment, a split at blanks sees more words.
            ("TOKEN='s3cret s3cret' kms", UNNAMED),
            ("TOKEN=s3cret\\ s3cret kms", UNNAMED),
            ("TOKEN=$(cat s3cret) kms", UNNAMED),
            ("\"/opt/s3cret dir/kms\"", UNNAMED),
            ("TOKEN=s3cret;kms", UNNAMED),
            ("kms</s3cret", UNNAMED),
            ("./kms@token=s3cret s3cret", UNNAMED),
            ("TOKEN=s3cret", UNNAMED),
            ("", UNNAMED),
        ] {
            assert_eq!(program_name(command), name, "{command}");
        }
    }

    #[test]
    fn what_a_command_does_wrong_is_an_error_that_names_it() {
        let key = ImageKey::random().unwrap();
        let error = KeyCommand::new("echo denied >&2; exit 3 #").wrap(&key).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("denied") && text.contains("wrap"), "{text}");
        assert!(matches!(
            KeyCommand::new("true").wrap(&key),
            Err(KeyError::Output { found: 0, .. })
        ));
        let long = KeyCommand::new("head -c 9000 /dev/zero #").wrap(&key);
        assert!(long.is_err(), "{long:?}");
        let wrapped =
            WrappedKey { method: WrapMethod::Command, name: String::new(), bytes: vec![1] };
        let short = KeyCommand::new("cat #").unwrap_key(&[wrapped]).unwrap_err();
        assert!(short.contains("32 are expected"), "{short}");
    }
}
