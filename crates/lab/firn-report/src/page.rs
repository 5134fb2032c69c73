//! Report page: one HTML file with its figures, readable on light and on dark screens, on paper and
//! by screen readers, that loads nothing.
//!
//! ```text
//!   headline of each run | speed: utilization, TTR | memory: reads, a map per run | numbers | numbers as JSON
//! ```

use maud::{DOCTYPE, Markup, PreEscaped, html as markup};

use crate::figure::{Figure, color_class};
use crate::figures::{RunFigures, to_mib};
use crate::run::{ReportedRun, RunFacts};

const STYLE: &str = include_str!("page.css");

/// A row of the table: its name, and its value of a run.
type Row = (&'static str, fn(&RunFacts) -> String);

const ROWS: [Row; 14] = [
    ("mode", |run| run.mode.to_string()),
    ("vCPUs run, s", |run| format_seconds(run.running_s)),
    ("90 % of speed, s", |run| format_seconds(run.responsive_s)),
    ("TTR(0.1, 0.9), s", |run| format_seconds(ttr_value(run, "0.1", "0.9"))),
    ("TTR(1, 0.8), s", |run| format_seconds(ttr_value(run, "1", "0.8"))),
    ("TTR(1, 0.9), s", |run| format_seconds(ttr_value(run, "1", "0.9"))),
    ("all memory loaded, s", |run| format_seconds(run.complete_s)),
    ("vCPUs waited, s", |run| format_seconds(Some(run.waited_s))),
    ("page faults", |run| run.faults.to_string()),
    ("pages on demand", |run| run.on_demand_pages.to_string()),
    ("pages prefetched", |run| run.prefetched_pages.to_string()),
    ("pages in background", |run| run.background_pages.to_string()),
    ("reads", |run| run.reads.to_string()),
    ("MiB read", |run| format!("{:.1}", to_mib(run.read_bytes))),
];

/// The report page about these runs.
pub fn render_page(runs: &[ReportedRun]) -> String {
    let facts: Vec<RunFacts> = runs.iter().map(ReportedRun::compute_facts).collect();
    let figures = RunFigures::new(runs);
    let page = markup! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                title { "Firn: restores" }
                style { (PreEscaped(STYLE)) }
            }
            body {
                h1 { "Restores" }
                (render_headlines(runs))
                (render_section("Speed", "speed", SPEED_TEXT, figures.responsiveness_figures()))
                (render_section("Memory", "memory", MEMORY_TEXT, figures.memory_figures()))
                h2 id="numbers" { "Numbers" }
                // A table that is wider than the screen is scrolled, with the keyboard too.
                div class="table" role="region" tabindex="0" aria-labelledby="numbers" { (render_table(&facts)) }
                // In a script element only its end tag is markup.
                script id="facts" type="application/json" { (PreEscaped(facts_json(&facts))) }
            }
        }
    };
    page.into_string()
}

const SPEED_TEXT: &str = "The guest's utilization is the share of time in which its vCPUs wait for no page. TTR(w, u) is the time \
    from which on every window of w seconds has at least the utilization u. A window may begin before the vCPUs run; \"90 % of its \
    speed\" is TTR(1, 0.9), but not before they run.";
const MEMORY_TEXT: &str = "A dot is a page that a thread waited for. The strip beside the axis has the pages that were prefetched, \
    for which the record has no times.";

/// The numbers as JSON that can stand in a script element.
fn facts_json(facts: &[RunFacts]) -> String {
    serde_json::to_string(facts).unwrap_or_default().replace('<', "\\u003c")
}

fn render_headlines(runs: &[ReportedRun]) -> Markup {
    markup! {
        ul class="runs" { @for (number, run) in runs.iter().enumerate() {
            li class=(color_class(number)) {
                h3 { (run.name) @if run.name != mode_name(run) { " " span class="mode" { "(" (mode_name(run)) ")" } } }
                p class="headline" { (run.headline()) }
                p class="subline" { (run.subline()) }
            }
        } }
    }
}

fn mode_name(run: &ReportedRun) -> String {
    run.record.mode.to_string()
}

fn render_section(title: &str, id: &str, text: &str, figures: Vec<Figure>) -> Markup {
    markup! {
        section aria-labelledby=(id) {
            h2 id=(id) { (title) }
            p { (text) }
            div class="figures" { @for (number, figure) in figures.iter().enumerate() {
                (figure.render(&format!("{id}-{number}")))
            } }
        }
    }
}

fn render_table(facts: &[RunFacts]) -> Markup {
    markup! {
        table {
            thead { tr { th scope="col" { "run" } @for run in facts { th scope="col" { (run.name) } } } }
            tbody { @for (name, value) in ROWS { tr {
                th scope="row" { (name) } @for run in facts { td { (value(run)) } }
            } } }
        }
    }
}

/// A TTR of a run whose vCPUs are known to run.
fn ttr_value(run: &RunFacts, window: &str, utilization: &str) -> Option<f64> {
    run.running_s?;
    run.ttr_s.get(window)?.get(utilization).copied()
}

fn format_seconds(seconds: Option<f64>) -> String {
    seconds.map_or_else(|| "-".to_owned(), |seconds| format!("{seconds:.3}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::tests::run;
    use firn_restore::{FaultRecord, ReadRecord};
    use firn_types::Page;

    #[test]
    fn the_page_holds_the_numbers_it_shows() {
        let mut odd = run();
        odd.name = "a<b>&</script>".into();
        let page = render_page(&[run(), odd]);
        let start = page.find("application/json\">").unwrap() + "application/json\">".len();
        let end = start + page[start..].find("</script>").unwrap();
        let facts: serde_json::Value = serde_json::from_str(&page[start..end]).unwrap();
        assert_eq!(facts[0], serde_json::to_value(run().compute_facts()).unwrap());
        assert_eq!(facts[1]["name"], "a<b>&</script>");
        assert!(page.contains("a&lt;b&gt;"), "names are text");
        assert!(page.contains(">0.900<"), "all memory was there after 0.9 s");
        assert!(page.contains("90 % of its speed from 0.50\u{a0}s on"));
    }

    #[test]
    fn the_page_loads_nothing() {
        let page = render_page(&[run()]);
        assert!(!page.contains("src=") && !page.contains("href=") && !page.contains("url("));
        // Utilization, three TTR curves, reads, a map; each with a title and a description.
        let counts = ["<svg", "<title id", "<desc id"].map(|tag| page.matches(tag).count());
        assert_eq!(counts, [6, 6, 6]);
    }

    /// Four runs with as many events as a record lists, all over memory and time.
    #[test]
    fn the_page_of_large_records_is_small() {
        let mut large = run();
        let (fault, read) = (large.record.faults[0], large.record.reads[0]);
        large.record.ram_pages = 1 << 20;
        let random = |number: u64| number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20;
        let fault = |number| FaultRecord {
            t_us: random(number) % 60_000_000,
            page: Page((random(number + 7) % (1 << 20)) as u32),
            wait_us: random(number + 3) % 9000,
            ..fault
        };
        let read = |number| ReadRecord { t_us: random(number) % 60_000_000, ..read };
        large.record.faults = (0..firn_restore::FAULTS_MAX as u64).map(fault).collect();
        large.record.reads = (0..firn_restore::READS_MAX as u64).map(read).collect();
        large.record.prefetched = (0..100_000).map(|number| (number * 10, 3)).collect();
        let page = render_page(&[large.clone(), large.clone(), large.clone(), large]);
        assert!(page.len() < 300_000, "{} bytes", page.len());
    }
}
