//! `firn image inspect`

use std::fmt::Write;
use std::path::{Path, PathBuf};

use clap::Args as ClapArgs;
use firn_image::{AuxInfo, Image};
use firn_supervisor::{Failure, ImageMeta, OriginReport, report_origin, resolve_current_disks};
use firn_types::make_printable;
use serde_json::json;

use super::stored::find_stored;
use crate::ls::seconds_since;
use crate::output::FactPrinter;
use crate::units;

/// Show the contents of an image, without its memory.
///
/// The lines "opens" list the files, sockets, ports and programs of the host that a restore of the
/// image would use. A restore of an image whose origin is unknown needs --trust for them.
#[derive(Debug, ClapArgs)]
#[command(after_long_help = "Examples:
  firn image inspect web.firn
  firn image inspect web.firn --json | jq .meta.qemu.args")]
pub struct ImageInspectArgs {
    /// The image.
    image: PathBuf,
}

impl ImageInspectArgs {
    /// Runs the verb.
    pub fn run(&self, out: FactPrinter) -> Result<(), Failure> {
        let image = super::open::open_image(&find_stored(&self.image, false)?)?;
        let aux = image.aux_list().map_err(|error| super::open::to_failure(&error))?;
        let origin = report_origin(&image)?;
        out.print_facts(&image_facts(&image, &aux, &origin), || describe_image(&image, &origin))
    }
}

fn image_facts(image: &Image, aux: &[AuxInfo], origin: &OriginReport) -> serde_json::Value {
    let summary = image.summary();
    let aux = aux.iter();
    let aux: Vec<_> = aux.map(|aux| json!({ "id": aux.id, "bytes": aux.bytes })).collect();
    json!({
        "image": summary.path.to_string_lossy(),
        "organization": image.organization(),
        "block_pages": summary.geometry.block_size.page_count(),
        "locality_block_bytes": summary.geometry.locality_block_bytes,
        "file_bytes": summary.file_bytes,
        "locality_blocks": summary.locality_blocks,
        "stored_blocks": summary.stored_blocks,
        "stored_bytes": summary.stored_bytes,
        "zero_blocks": summary.zero_blocks,
        "untouched_blocks": summary.untouched_blocks,
        "inherited_blocks": summary.inherited_blocks,
        "parent": image.chain_paths().nth(1).map(Path::to_string_lossy),
        "identity": image.identity(),
        "overhead_bytes": summary.overhead_bytes,
        "device_state_bytes": image.device_state().len(),
        "aux_blocks": aux,
        "working_set_blocks": image.working_set().len(),
        "page_table_roots": image.page_table_roots().len(),
        "regions": image.regions(),
        "drives_now": drives_now(image),
        "origin": origin.origin,
        "signed_by": origin.signed_by,
        "opens": origin.opens,
        "meta": image.meta(),
    })
}

/// The current files of an image's disks, if layers have been merged since.
fn drives_now(image: &Image) -> Vec<PathBuf> {
    let meta = serde_json::from_value::<ImageMeta>(image.meta().clone()).ok();
    let now = meta.and_then(|meta| resolve_current_disks(meta).ok());
    now.into_iter().flat_map(|meta| meta.drives).map(|drive| drive.file).collect()
}

fn describe_image(image: &Image, origin: &OriginReport) -> String {
    let summary = image.summary();
    let block_bytes = summary.geometry.block_size.byte_count() as u64;
    let blocks =
        |count: u32| format!("{count} ({})", units::format_bytes(u64::from(count) * block_bytes));
    let mut text = String::new();
    let mut line = |key: &str, value: String| {
        let _ = writeln!(text, "{key:<17}{}", make_printable(&value));
    };
    line("image", summary.path.display().to_string());
    line("size", units::format_bytes(summary.file_bytes));
    line("organization", image.organization().to_string());
    line("memory blocks", format!("of {}", units::format_bytes(block_bytes)));
    line("  stored", blocks(summary.stored_blocks));
    line("  zero", blocks(summary.zero_blocks));
    match image.chain_paths().nth(1) {
        Some(parent) => line(
            "  as in parent",
            format!("{}, {}", blocks(summary.inherited_blocks), parent.display()),
        ),
        None => line("  untouched", blocks(summary.untouched_blocks)),
    }
    let locality = units::format_bytes(summary.geometry.locality_block_bytes.into());
    line("locality blocks", format!("{} of {locality}", summary.locality_blocks));
    let raw = u64::from(summary.stored_blocks) * block_bytes;
    line("compressed to", format_percent(summary.stored_bytes, raw));
    line("working set", blocks(image.working_set().len() as u32));
    line("device state", units::format_bytes(image.device_state().len() as u64));
    for region in image.regions().regions() {
        line("RAM", format!("{} {}", region.id, units::format_bytes(region.byte_len())));
    }
    let signer = origin.signed_by.iter().map(|signer| format!(": {signer}"));
    line("origin", origin.origin.describe().to_owned() + &signer.collect::<String>());
    origin.opens.iter().for_each(|access| line("opens", access.to_string()));
    match serde_json::from_value::<ImageMeta>(image.meta().clone()) {
        Ok(meta) => describe_meta(&resolve_current_disks(meta.clone()).unwrap_or(meta), &mut line),
        Err(_) => line("VM", "this Firn cannot read the metadata of the image".into()),
    }
    text
}

fn describe_meta(meta: &ImageMeta, line: &mut impl FnMut(&str, String)) {
    line(
        "VM",
        format!("{}, {} vCPU, {}", meta.name, meta.vcpus, units::format_bytes(meta.memory_bytes)),
    );
    line(
        "saved",
        format!("{} ago by Firn {}", units::format_seconds(seconds_since(meta.created)), meta.firn),
    );
    line("QEMU", format!("{}, {}, {}", meta.qemu.version, meta.qemu.accel, meta.machine));
    line("started in", meta.qemu.directory.display().to_string());
    line("as", meta.qemu.user_args.join(" "));
    if let Some(state) = &meta.paused {
        line("paused", format!("{state}: a restore leaves it paused, unless with --run"));
    }
    for reason in &meta.unrestorable {
        line("no restore", reason.clone());
    }
    for drive in &meta.drives {
        line("drive", format!("{} as in {} ({})", drive.named, drive.file.display(), drive.format));
    }
    for disk in &meta.disks {
        let access = if disk.read_only { ", read-only" } else { "" };
        line("disk", format!("{} ({}{access})", disk.file, disk.format));
    }
}

fn format_percent(part: u64, whole: u64) -> String {
    match whole {
        0 => "-".to_owned(),
        _ => format!("{:.1} %", part as f64 * 100.0 / whole as f64),
    }
}
