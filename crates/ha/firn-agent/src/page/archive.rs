//! Checkpoints with their chains, and restores. Pure.

use firn_control::api::VmView;
use firn_supervisor::CheckpointNote;
use maud::{Markup, html};

use super::chains::ChainFile;
use super::text::{element_id, format_age, format_bytes, format_ms};
use super::view::PageView;

/// The newest checkpoints of each VM.
pub(super) fn render_checkpoints(view: &PageView) -> Markup {
    let saved: Vec<&VmView> =
        view.status.vms.iter().filter(|vm| !vm.checkpoints.is_empty()).collect();
    html! {
        section aria-labelledby="checkpoints" {
            h2 id="checkpoints" { "Checkpoints" }
            @if saved.is_empty() { p { "None was made since Firn began to manage these VMs." } }
            @for vm in saved { (render_vm(view, vm)) }
        }
    }
}

fn render_vm(view: &PageView, vm: &VmView) -> Markup {
    let tally = &vm.checkpoints;
    html! {
        h3 { (vm.name) " at " (vm.host) ": " (tally.saved) " saved, " (tally.failed) " failed" }
        @if let Some(failure) = &tally.failure {
            p class="note bad" { (format_age(view.now_s.saturating_sub(failure.at))) " ago: " (failure.text) }
        }
        @if !tally.newest.is_empty() {
            table {
                thead { tr { th { "Image" } th { "Age" } th { "Size" } th { "Pause" } th { "Duration" } } }
                tbody { @for note in tally.newest.iter().rev() { (render_note(view, vm, note)) } }
            }
        }
    }
}

fn render_note(view: &PageView, vm: &VmView, note: &CheckpointNote) -> Markup {
    let chain = view.files.chains.get(&note.image).filter(|_| vm.host == view.status.host);
    let size = |chain: Option<&Vec<ChainFile>>| chain?.first().map(|file| file.size.clone());
    html! {
        tr {
            th scope="row" class="path" {
                (note.image)
                @match chain {
                    Some(chain) if chain.len() > 1 => (render_chain(vm, note, chain)),
                    _ => { @if let Some(parent) = &note.parent { div class="note" { "builds on " (parent) } } }
                }
            }
            td data-label="Age" { (format_age(view.now_s.saturating_sub(note.at))) }
            td data-label="Size" { @match (size(chain), note.image_bytes) {
                (Some(Err(why)), _) => span class="bad" { (why) },
                (Some(Ok(bytes)), _) | (None, Some(bytes)) => (format_bytes(bytes)),
                (None, None) => "-",
            } }
            td data-label="Pause" { (show_ms(note.downtime_ms)) }
            td data-label="Duration" { (show_ms(note.total_ms)) }
        }
    }
}

fn show_ms(ms: Option<f64>) -> String {
    ms.map_or_else(|| "-".to_owned(), format_ms)
}

/// The images that an incremental image builds on.
fn render_chain(vm: &VmView, note: &CheckpointNote, chain: &[ChainFile]) -> Markup {
    let sizes: u64 = chain.iter().filter_map(|file| file.size.as_ref().ok()).sum();
    let is_whole = chain.iter().all(|file| file.size.is_ok());
    html! {
        details id=(element_id(&["chain", vm.name.as_str(), &note.image])) {
            summary { "a chain of " (chain.len()) " images, " (format_bytes(sizes)) @if !is_whole { span class="bad" { ", broken" } } }
            ol { @for file in &chain[1..] { li {
                (file.path.display()) ": "
                @match &file.size { Ok(bytes) => (format_bytes(*bytes)), Err(why) => span class="bad" { (why) } }
                @if file.is_sealed { ", sealed" }
            } } }
        }
    }
}

/// The newest restore of each VM of this host.
pub(super) fn render_restores(view: &PageView) -> Markup {
    let restores = &view.files.restores;
    html! {
        section aria-labelledby="restores" {
            h2 id="restores" { "Restores at " (view.status.host) }
            @if restores.is_empty() { p { "No VM of this host was restored." } } @else {
                table {
                    thead { tr { th { "VM" } th { "Age" } th { "Mode" } th { "vCPUs ran" } th { "Memory loaded" } th { "Page faults" } th { "Report" } } }
                    tbody { @for (vm, restore) in restores { tr {
                        th scope="row" { (vm) }
                        td data-label="Age" { (format_age(view.now_s.saturating_sub(restore.at))) }
                        td data-label="Mode" { (restore.mode) }
                        td data-label="vCPUs ran" { @match restore.running_ms { Some(ms) => { "after " (format_ms(ms)) }, None => "not yet" } }
                        td data-label="Memory loaded" { @match restore.finished_ms { Some(ms) => { "after " (format_ms(ms)) }, None => "not yet" } }
                        td data-label="Page faults" { (restore.faults) div class="note" { (restore.on_demand_pages) " pages on demand" } }
                        td data-label="Report" class="path" { code { "firn report " (restore.record.display()) } }
                    } } }
                }
            }
        }
    }
}
