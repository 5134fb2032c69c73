//! `firn image verify --restorable`

use std::path::Path;

use firn_image::Image;
use firn_supervisor::{Context, Failure, FailureKind, HostCheck, Meta, check_host};
use serde_json::json;

use crate::output::{Output, table};

/// Reports whether this host could restore an image, and fails if not.
pub fn run(path: &Path, image: &Image, out: Output) -> Result<(), Failure> {
    let meta: Meta = serde_json::from_value(image.meta().clone())
        .doing_or(FailureKind::Damaged, "reading the image's metadata of the VM")?;
    let checks = check_host(&meta);
    let failed = checks.iter().filter(|check| !check.passed).count();
    let facts =
        json!({ "image": path.to_string_lossy(), "restorable": failed == 0, "checks": checks });
    out.facts(&facts, || describe(&checks))?;
    match failed {
        0 => Ok(()),
        _ => {
            let text = format!("this host could not restore {}", path.display());
            Err(Failure::new(FailureKind::Refused, text).hint("provide what is marked NO above"))
        }
    }
}

fn describe(checks: &[HostCheck]) -> String {
    let row = |check: &HostCheck| {
        let passed = if check.passed { "ok" } else { "NO" };
        vec![passed.to_owned(), check.what.to_owned(), check.found.clone()]
    };
    table(&checks.iter().map(row).collect::<Vec<_>>())
}
