//! What distinguishes an image from every other, for a process that opens it again later.
//!
//! The identity is readable in each image, so any user can write another image with it. Only a
//! process that has the key can make a sealed image with the ID of that key.

use std::path::Path;

use firn_image::{Image, ImageKey};
use serde::{Deserialize, Serialize};

use crate::records::failure::{Failure, FailureKind};

/// The numbers of an image. They are not secret.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageIds {
    /// Its random number. A copy of the file has the same.
    pub identity: String,
    /// The ID of the key with which it is sealed, if it is sealed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key_id: Option<String>,
}

impl ImageIds {
    /// Those of an open image.
    pub(crate) fn from_image(image: &Image) -> Self {
        let key_id = image.seal().map(|seal| seal.key.id().to_string());
        Self { identity: image.identity(), key_id }
    }

    /// Refuses an image that is not sealed with one of these keys, if there are any: the file that
    /// the command has unlocked was replaced before this process opened it.
    pub(crate) fn check_keys(&self, path: &Path, keys: &[ImageKey]) -> Result<(), Failure> {
        let is_own = |key: &ImageKey| self.key_id.as_ref() == Some(&key.id().to_string());
        if keys.is_empty() || keys.iter().any(is_own) {
            return Ok(());
        }
        let text = format!("{} is not the sealed image that it was a moment ago", path.display());
        let failure = Failure::new(FailureKind::Refused, text);
        Err(failure.with_hint("another program replaces the file; find out which, and try again"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a supervisor before sealed images wrote.
    #[test]
    fn an_image_without_a_recorded_key_is_not_sealed() {
        let ids: ImageIds = serde_json::from_str(r#"{"identity":"1f"}"#).unwrap();
        assert_eq!(ids, ImageIds { identity: "1f".into(), key_id: None });
        assert_eq!(serde_json::to_string(&ids).unwrap(), r#"{"identity":"1f"}"#);
    }

    #[test]
    fn an_image_that_replaced_the_unlocked_one_is_refused() {
        let keys = [1, 2].map(|byte| ImageKey::from_bytes([byte; 32]));
        let foreign = ImageKey::from_bytes([3; 32]);
        let ids = |key: Option<&ImageKey>| ImageIds {
            identity: "1f".into(),
            key_id: key.map(|key| key.id().to_string()),
        };
        let path = Path::new("/web.firn");
        assert!(ids(Some(&keys[1])).check_keys(path, &keys).is_ok());
        assert!(ids(None).check_keys(path, &[]).is_ok());
        for other in [None, Some(&foreign)] {
            let failure = ids(other).check_keys(path, &keys).unwrap_err();
            assert!(failure.to_string().contains("/web.firn"), "{failure}");
        }
    }

    #[test]
    fn an_identity_alone_is_not_the_same_image() {
        let sealed =
            |key: Option<&str>| ImageIds { identity: "1f".into(), key_id: key.map(str::to_owned) };
        assert_ne!(sealed(Some("a")), sealed(None));
        assert_ne!(sealed(Some("a")), sealed(Some("b")));
    }
}
