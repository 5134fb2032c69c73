//! The sources of keys that a user has named, and for whom an image is sealed.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;

use firn_image::{ImageKey, ImageSeal, KeyRing};

use crate::age_keys::{AgeIdentities, parse_recipient, read_recipients, wrap_for};
use crate::command::KeyCommand;
use crate::error::KeyError;
use crate::key_file::KeyFile;

/// The sources of keys that open sealed images.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KeySources {
    /// Files with identities of age.
    pub identities: Vec<PathBuf>,
    /// A key file.
    pub key_file: Option<PathBuf>,
    /// A command.
    pub key_command: Option<String>,
}

impl KeySources {
    /// Those in these variables: `FIRN_IDENTITY`, `FIRN_KEY_FILE`, `FIRN_KEY_COMMAND`.
    pub fn from_variables(variable: &dyn Fn(&str) -> Option<OsString>) -> Self {
        let set = |name| variable(name).filter(|value| !value.is_empty());
        Self {
            identities: set("FIRN_IDENTITY").map(PathBuf::from).into_iter().collect(),
            key_file: set("FIRN_KEY_FILE").map(PathBuf::from),
            key_command: set("FIRN_KEY_COMMAND").and_then(|it| it.into_string().ok()),
        }
    }

    /// Checks that the files can be used.
    ///
    /// # Errors
    /// The first that can't.
    pub fn check(&self) -> Result<(), KeyError> {
        for path in &self.identities {
            AgeIdentities::new(path).read()?;
        }
        self.key_file.as_deref().map_or(Ok(()), |path| KeyFile::new(path).check())
    }

    /// Has the key ring ask these sources. Nothing is read before a sealed image is opened.
    pub fn add_to(&self, ring: &KeyRing) {
        for path in &self.identities {
            ring.add_opener(Arc::new(AgeIdentities::new(path)));
        }
        if let Some(path) = &self.key_file {
            ring.add_opener(Arc::new(KeyFile::new(path)));
        }
        if let Some(command) = &self.key_command {
            ring.add_opener(Arc::new(KeyCommand::new(command)));
        }
    }
}

/// Those who can open an image that is to be sealed: each alone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SealTargets {
    /// Recipients of age.
    pub recipients: Vec<String>,
    /// Files with recipients of age.
    pub recipient_files: Vec<PathBuf>,
    /// A key file.
    pub key_file: Option<PathBuf>,
    /// A command.
    pub key_command: Option<String>,
}

impl SealTargets {
    /// Whether there is none: the image is not sealed.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// A new random key, wrapped for all of them; `None` if there is none.
    ///
    /// # Errors
    /// If a recipient or a file is wrong, or the command fails.
    pub fn make_seal(&self) -> Result<Option<ImageSeal>, KeyError> {
        if self.is_empty() {
            return Ok(None);
        }
        let key = ImageKey::random()?;
        let mut wraps = Vec::new();
        let mut recipients = Vec::new();
        for text in &self.recipients {
            recipients.push(parse_recipient(text)?);
        }
        for path in &self.recipient_files {
            recipients.extend(read_recipients(path)?);
        }
        if !recipients.is_empty() {
            wraps.push(wrap_for(&recipients, &key)?);
        }
        if let Some(path) = &self.key_file {
            wraps.push(KeyFile::new(path).wrap(&key)?);
        }
        if let Some(command) = &self.key_command {
            wraps.push(KeyCommand::new(command).wrap(&key)?);
        }
        Ok(Some(ImageSeal { key, wraps }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_that_are_set_name_sources() {
        let none = KeySources::from_variables(&|_| None);
        assert_eq!(none, KeySources::default());
        let named = KeySources::from_variables(&|name| match name {
            "FIRN_IDENTITY" => Some("/keys/me".into()),
            "FIRN_KEY_FILE" => Some("".into()),
            _ => Some("vault".into()),
        });
        let identities = vec![PathBuf::from("/keys/me")];
        let key_command = Some("vault".to_owned());
        assert_eq!(named, KeySources { identities, key_file: None, key_command });
    }

    #[test]
    fn an_image_without_targets_is_not_sealed() {
        assert_eq!(SealTargets::default().make_seal().unwrap(), None);
        let wrong = SealTargets { recipients: vec!["me".into()], ..SealTargets::default() };
        assert!(wrong.make_seal().is_err());
        let command = SealTargets { key_command: Some("cat #".into()), ..SealTargets::default() };
        let (one, other) = (command.make_seal().unwrap(), command.make_seal().unwrap());
        assert_ne!(one, other, "each image has a key of its own");
        assert_eq!(one.unwrap().wraps.len(), 1);
    }
}
