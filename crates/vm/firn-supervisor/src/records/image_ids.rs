//! What distinguishes an image from every other, for a process that opens it again later.
//!
//! The identity is readable in each image, so any user can write another image with it. Only a
//! process that has the key can make a sealed image with the ID of that key.

use firn_image::Image;
use serde::{Deserialize, Serialize};

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
    fn an_identity_alone_is_not_the_same_image() {
        let sealed =
            |key: Option<&str>| ImageIds { identity: "1f".into(), key_id: key.map(str::to_owned) };
        assert_ne!(sealed(Some("a")), sealed(None));
        assert_ne!(sealed(Some("a")), sealed(Some("b")));
    }
}
