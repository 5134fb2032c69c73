//! `firn image verify --restorable`

use std::path::Path;

use firn_image::Image;
use firn_supervisor::{
    Failure, FailureContext, FailureKind, HostCheck, ImageMeta, OriginReport, check_host,
    report_origin,
};
use serde_json::json;

use crate::output::{FactPrinter, format_table};

/// Reports whether this host could restore an image, and fails if not.
pub fn run(path: &Path, image: &Image, out: FactPrinter) -> Result<(), Failure> {
    let meta: ImageMeta = serde_json::from_value(image.meta().clone())
        .while_doing_as(FailureKind::Damaged, "reading the image's metadata of the VM")?;
    let mut checks = vec![check_origin(image)?];
    checks.extend(check_host(&meta));
    let failed = checks.iter().filter(|check| !check.passed).count();
    let facts =
        json!({ "image": path.to_string_lossy(), "restorable": failed == 0, "checks": checks });
    out.print_facts(&facts, || describe_checks(&checks))?;
    match failed {
        0 => Ok(()),
        _ => {
            let text = format!("this host could not restore {}", path.display());
            Err(Failure::new(FailureKind::Refused, text)
                .with_hint("provide what is marked NO above"))
        }
    }
}

/// Whether a restore of the image needs --trust.
fn check_origin(image: &Image) -> Result<HostCheck, Failure> {
    let OriginReport { origin, opens, .. } = report_origin(image)?;
    let passed = origin.is_known() || opens.is_empty();
    let found = match opens.first().filter(|_| !passed) {
        None => origin.describe().to_owned(),
        Some(first) => {
            let (origin, more) = (origin.describe(), opens.len() - 1);
            format!("{origin}; --trust restores it: {first}, and {more} more")
        }
    };
    Ok(HostCheck { what: "origin", passed, found })
}

fn describe_checks(checks: &[HostCheck]) -> String {
    let row = |check: &HostCheck| {
        let passed = if check.passed { "ok" } else { "NO" };
        vec![passed.to_owned(), check.what.to_owned(), check.found.clone()]
    };
    format_table(&checks.iter().map(row).collect::<Vec<_>>())
}
