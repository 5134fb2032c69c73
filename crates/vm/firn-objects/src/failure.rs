//! Errors of stores as failures: their kind, and what to try.

use firn_cache::StoreLocation;
use firn_supervisor::{Failure, FailureContext as _, FailureKind, image_failure};

use crate::error::StoreError;

/// Parses a location. The failure does not repeat a password.
///
/// # Errors
/// If it is none.
pub fn parse_location(text: &str) -> Result<StoreLocation, Failure> {
    let parsed = text.parse::<StoreLocation>();
    parsed.while_doing_as(FailureKind::Usage, "the location can't be used")
}

/// The failure for an error of a store, with its kind and a hint.
pub fn store_failure(error: &StoreError) -> Failure {
    if let StoreError::Image(error) = error {
        return image_failure(error);
    }
    let failure = Failure::from_error(kind_of(error), error);
    match find_hint(error) {
        Some(hint) => failure.with_hint(hint),
        None => failure,
    }
}

fn kind_of(error: &StoreError) -> FailureKind {
    match error {
        StoreError::NoObjectName(_)
        | StoreError::ReadOnly(_)
        | StoreError::NoParent { .. }
        | StoreError::ParentElsewhere { .. }
        | StoreError::ChainTooLong(_) => FailureKind::Usage,
        StoreError::Taken(_) => FailureKind::Busy,
        StoreError::Configuration { .. } | StoreError::Denied { .. } => FailureKind::Host,
        StoreError::WrongParent { .. } | StoreError::InUse { .. } => FailureKind::Refused,
        StoreError::Damaged { .. }
        | StoreError::Unsound { .. }
        | StoreError::Unopenable { .. }
        | StoreError::DamagedFile { .. } => FailureKind::Damaged,
        _ => FailureKind::Other,
    }
}

fn find_hint(error: &StoreError) -> Option<String> {
    let hint = match error {
        StoreError::Configuration { .. } => {
            "set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_REGION, and AWS_ENDPOINT_URL for \
             another store than that of AWS"
        }
        StoreError::Denied { .. } => {
            "check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN and AWS_REGION, what \
             they may do in this bucket, and the clock of this host"
        }
        StoreError::NoObjectName(_) => "add the name of the image: s3://BUCKET/PREFIX/web.firn",
        StoreError::Missing { what: "bucket", .. } => "make the bucket with a tool of the store",
        StoreError::Missing { .. } => "`firn image ls` lists the images below a prefix",
        StoreError::Taken(_) => "choose another name, or replace the image with --force",
        StoreError::NoParent { .. } => {
            "push its parents with it (--chain), or make it whole: firn image merge"
        }
        StoreError::ParentElsewhere { .. } => {
            "move the parent into the directory of the image, and give its path to `firn image \
             rebase --moved`, or make the image whole: firn image merge"
        }
        StoreError::Failed { was_repeated: true, .. } => {
            "run the command again when the store is available; there is no half image"
        }
        StoreError::Failed { .. } | StoreError::Replaced(_) => {
            "run the command again; there is no half image"
        }
        StoreError::InUse { .. } => {
            "remove that image first, or this one with --force: the other can't be restored then"
        }
        StoreError::Damaged { .. } | StoreError::Unsound { .. } | StoreError::Unopenable { .. } => {
            "push the image again with --force, from a host that has a good copy"
        }
        _ => return None,
    };
    Some(hint.to_owned())
}
