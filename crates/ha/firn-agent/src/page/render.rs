//! The page as HTML. Pure. All that comes from VMs, hosts and files is text, and escaped.

use firn_control::HostHealth;
use maud::{DOCTYPE, Markup, html};

use super::archive::{render_checkpoints, render_restores};
use super::charts::render_charts;
use super::tables::{render_hosts, render_vms};
use super::view::PageView;

/// The style sheet of the page.
pub const STYLE: &str = include_str!("page.css");
/// The script of the page.
pub const SCRIPT: &str = include_str!("page.js");

/// The whole page.
pub fn render_page(view: &PageView) -> String {
    let host = &view.status.host;
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                @if let Some(token) = &view.token { meta name="firn-token" content=(token.as_str()); }
                title { "Firn at " (host) }
                link rel="stylesheet" href="page/style.css";
                link rel="icon" href="data:,";
                script src="page/script.js" defer {}
            }
            body {
                header {
                    h1 { "Firn at " (host) }
                    p id="notice" role="status" {}
                }
                (render_main(view))
                (render_dialog())
            }
        }
    };
    page.into_string()
}

/// The part of the page that changes.
pub(super) fn render_main(view: &PageView) -> Markup {
    html! {
        main {
            p class="summary" { @for line in summarize(view) { span class=(line.class) { (line.text) } " " } }
            (render_hosts(view))
            (render_vms(view))
            (render_charts(view))
            (render_checkpoints(view))
            (render_restores(view))
        }
    }
}

/// The question before an action. The script fills it.
fn render_dialog() -> Markup {
    html! {
        dialog id="confirm" aria-labelledby="question" {
            form method="dialog" {
                p id="question" {}
                p class="effect" {}
                menu {
                    button type="submit" value="no" autofocus { "Cancel" }
                    button type="submit" value="yes" class="act" {}
                }
            }
        }
    }
}

/// A sentence at the top of the page.
struct SummaryLine {
    class: &'static str,
    text: String,
}

/// What an operator wants to know first.
fn summarize(view: &PageView) -> Vec<SummaryLine> {
    let vms = &view.status.vms;
    let good = |text: String| SummaryLine { class: "good", text };
    let bad = |text: String| SummaryLine { class: "bad", text };
    let runs = vms.iter().filter(|vm| !matches!(vm.state.as_str(), "standby" | "ended")).count();
    let protected = vms.iter().filter(|vm| vm.protection.is_some()).count();
    let mut lines = vec![good(format!("{} run, {protected} protected.", count(runs, "VM")))];
    let lost = view.status.peers.iter().filter(|peer| peer.health == HostHealth::Lost).count();
    if lost > 0 {
        lines.push(bad(format!("{} lost.", count(lost, "host"))));
    }
    let troubled = vms.iter().filter(|vm| vm.advice.is_some() || is_trouble(&vm.state)).count();
    if troubled > 0 {
        lines.push(bad(format!("{} to look at.", count(troubled, "VM"))));
    }
    match &view.membership {
        Some(health) => lines.push(match (&health.trouble, &health.leader) {
            (Some(trouble), _) => bad(format!("No consensus: {trouble}.")),
            (None, Some(leader)) => good(format!("Host {leader} leads.")),
            (None, None) => bad("No host leads.".to_owned()),
        }),
        None if view.status.peers.is_empty() => {}
        None => {
            lines.push(good("Hosts have no consensus: a user decides about failovers.".to_owned()))
        }
    }
    lines
}

/// Whether a VM in this state needs a user.
pub(super) fn is_trouble(state: &str) -> bool {
    matches!(state, "hung" | "waiting" | "ended" | "unknown")
}

fn count(number: usize, what: &str) -> String {
    match number {
        1 => format!("1 {what}"),
        _ => format!("{number} {what}s"),
    }
}

#[cfg(test)]
mod tests;
