//! Charts of lag and pauses over the last ten minutes, as SVG. Pure.

use std::time::Duration;

use firn_control::api::VmView;
use maud::{Markup, html};

use super::text::{element_id, format_ms};
use super::view::PageView;
use crate::history::{HISTORY_WINDOW, HistoryPoint};

/// The size of a chart, and the area of its data: left, right, top, bottom.
const SIZE: (f64, f64) = (360.0, 120.0);
const AREA: [f64; 4] = [4.0, 356.0, 8.0, 100.0];

/// Points that are further apart than this are not connected: nothing was observed between them.
const GAP: Duration = Duration::from_secs(15);

/// The charts of all protected VMs.
pub(super) fn render_charts(view: &PageView) -> Markup {
    let protected: Vec<&VmView> =
        view.status.vms.iter().filter(|vm| vm.protection.is_some()).collect();
    html! {
        section aria-labelledby="over-time" {
            h2 id="over-time" { "Lag and pauses, the last ten minutes" }
            @if protected.is_empty() { p { "No VM is protected." } }
            div class="charts" { @for vm in protected {
                (render_chart(view, vm, "lag", "how far its standby is behind", |point| point.lag_ms))
                (render_chart(view, vm, "pause", "how long an epoch pauses it", |point| Some(point.pause_ms)))
            } }
        }
    }
}

fn render_chart(
    view: &PageView,
    vm: &VmView,
    kind: &str,
    meaning: &str,
    value: impl Fn(&HistoryPoint) -> Option<f64>,
) -> Markup {
    let points: Vec<(f64, f64)> = view
        .history
        .points(&vm.host, &vm.name)
        .filter_map(|point| Some((age_of(view.now, point), value(point)?)))
        .collect();
    let top = scale_end(points.iter().map(|point| point.1).fold(0.0, f64::max));
    let newest = points.last().map(|point| format_ms(point.1));
    let title = element_id(&[kind, vm.host.as_str(), vm.name.as_str()]);
    html! {
        figure class=(kind) {
            figcaption {
                strong { (vm.name) " at " (vm.host) } ": " (kind)
                @if let Some(newest) = &newest { " " span class="newest" { (newest) } }
            }
            svg viewBox=(format!("0 0 {} {}", SIZE.0, SIZE.1)) role="img" aria-labelledby=(title) {
                title id=(title) { (vm.name) ": " (meaning) @if let Some(newest) = &newest { ", now " (newest) } }
                path class="grid" d=(format!("M{0} {2}H{1}M{0} {3}H{1}", AREA[0], AREA[1], AREA[2], AREA[3])) {}
                text x=(AREA[0]) y=(AREA[2] + 12.0) { (format_ms(top)) }
                text x=(AREA[0]) y=(AREA[3] + 15.0) { "10 min ago" }
                text x=(AREA[1]) y=(AREA[3] + 15.0) text-anchor="end" { "now" }
                @for line in split_lines(&points) { polyline class="line" points=(place_points(line, top)) {} }
            }
        }
    }
}

/// How long ago a point was made, in seconds.
fn age_of(now: Duration, point: &HistoryPoint) -> f64 {
    now.saturating_sub(point.at).as_secs_f64()
}

/// The end of the scale: the next of 1, 2, 5, 10, 20, ... ms.
fn scale_end(value: f64) -> f64 {
    let mut steps = (0..9).flat_map(|power| [1.0, 2.0, 5.0].map(|step| step * 10_f64.powi(power)));
    steps.find(|end| *end >= value).unwrap_or(value)
}

/// Splits a series where it has gaps. A point alone is a line of two equal ones, which is drawn as a
/// dot.
fn split_lines(points: &[(f64, f64)]) -> impl Iterator<Item = &[(f64, f64)]> {
    points.chunk_by(|one, other| one.0 - other.0 <= GAP.as_secs_f64())
}

fn place_points(line: &[(f64, f64)], top: f64) -> String {
    let place = |(age, value): &(f64, f64)| {
        let right = 1.0 - (age / HISTORY_WINDOW.as_secs_f64()).clamp(0.0, 1.0);
        let x = AREA[0] + right * (AREA[1] - AREA[0]);
        let y = AREA[3] - (value / top).clamp(0.0, 1.0) * (AREA[3] - AREA[2]);
        format!("{x:.1},{y:.1}")
    };
    let mut placed: Vec<String> = line.iter().map(place).collect();
    if let [one] = &placed[..] {
        placed.push(one.clone());
    }
    placed.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scale_ends_at_a_round_number() {
        assert_eq!([0.0, 0.9, 1.1, 21.0, 4000.0].map(scale_end), [1.0, 1.0, 2.0, 50.0, 5000.0]);
        assert_eq!(scale_end(1e12), 1e12);
    }

    #[test]
    fn a_line_ends_where_nothing_was_observed() {
        let points = [(100.0, 1.0), (98.0, 2.0), (40.0, 3.0), (38.0, 4.0), (0.0, 5.0)];
        let lines: Vec<&[(f64, f64)]> = split_lines(&points).collect();
        assert_eq!(lines, [&points[..2], &points[2..4], &points[4..]]);
        assert_eq!(place_points(lines[2], 10.0), "356.0,54.0 356.0,54.0");
        assert_eq!(place_points(&[(600.0, 10.0), (0.0, 0.0)], 10.0), "4.0,8.0 356.0,100.0");
        assert_eq!(place_points(&[(900.0, 20.0), (0.0, 0.0)], 10.0), "4.0,8.0 356.0,100.0");
    }
}
