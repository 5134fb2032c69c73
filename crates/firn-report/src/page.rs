//! Report page: one HTML file with its figures, readable on light and on dark screens, that loads
//! nothing.

use firn_measure::{VcpuStalls, responsiveness_curve};
use firn_restore::RunRecord;
use maud::{DOCTYPE, Markup, PreEscaped, html as markup};

use crate::plot::{DotPlot, LinePlot, PlotError};
use crate::run::{ReportedRun, RunFacts, WINDOWS_US, to_seconds, window_name};

/// The window over which utilization is drawn.
const WINDOW_US: u64 = 100_000;
/// Maximum number of points of a line.
const POINTS: u64 = 300;
/// Maximum number of dots of a series.
const DOTS: usize = 4000;
const PAGES_PER_MIB: f64 = 256.0;
const STYLE: &str = "\
:root{color-scheme:light dark}\
body{font:15px/1.5 system-ui,sans-serif;max-width:1580px;margin:2rem auto;padding:0 1rem}\
h1{font-size:1.5rem}h2{font-size:1.1rem;margin-top:2rem}\
.figures{display:flex;flex-wrap:wrap;gap:1rem}.figures svg{flex:1 1 600px;max-width:760px;height:auto}\
.table{overflow-x:auto}table{border-collapse:collapse}\
th,td{padding:.3rem .8rem;text-align:right;border-bottom:1px solid #8884}\
th:first-child,td:first-child{text-align:left}td{font-variant-numeric:tabular-nums}\
p{max-width:70ch}";

/// The report page about these runs.
///
/// # Errors
/// If a figure can't be drawn.
pub fn render_page(runs: &[ReportedRun]) -> Result<String, PlotError> {
    let facts: Vec<RunFacts> = runs.iter().map(ReportedRun::compute_facts).collect();
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
                p {
                    "Times are seconds since the command to restore. TTR(w, u) is the time from which on the guest's vCPUs get at "
                    "least the share u of every window of w seconds: from then on it is as responsive as that."
                }
                div class="table" { (render_table(&facts)) }
                (render_section("Utilization", [utilization_plot(runs).to_svg()?]))
                (render_section("Time to responsiveness", ttr_plots(runs)?))
                (render_section("Where in memory", memory_plots(runs)?))
                (render_section("Reads from storage", [reads_plot(runs).to_svg()?]))
                // In a script element only its end tag is markup.
                script id="facts" type="application/json" { (PreEscaped(facts_json(&facts))) }
            }
        }
    };
    Ok(page.into_string())
}

/// The numbers as JSON that can stand in a script element.
fn facts_json(facts: &[RunFacts]) -> String {
    serde_json::to_string(facts).unwrap_or_default().replace('<', "\\u003c")
}

fn render_section(title: &str, figures: impl IntoIterator<Item = String>) -> Markup {
    markup! {
        h2 { (title) }
        div class="figures" { @for figure in figures { (PreEscaped(figure)) } }
    }
}

fn render_table(facts: &[RunFacts]) -> Markup {
    markup! {
        table {
            thead { tr {
                @for head in ["run", "mode", "running", "TTR(0.1, 0.9)", "TTR(1, 0.8)", "TTR(1, 0.9)", "all memory there",
                    "vCPUs waited", "pages on demand", "prefetched", "in background", "reads", "MiB read"] { th { (head) } }
            } }
            tbody { @for run in facts { tr {
                td { (run.name) } td { (run.mode) }
                td { (format_seconds(run.running_s)) }
                td { (format_seconds(ttr_value(run, "0.1", "0.9"))) }
                td { (format_seconds(ttr_value(run, "1", "0.8"))) }
                td { (format_seconds(ttr_value(run, "1", "0.9"))) }
                td { (format_seconds(run.complete_s)) }
                td { (format_seconds(Some(run.waited_s))) }
                td { (run.on_demand_pages) } td { (run.prefetched_pages) } td { (run.background_pages) }
                td { (run.reads) } td { (format!("{:.1}", to_mib(run.read_bytes))) }
            } } }
        }
    }
}

fn ttr_value(run: &RunFacts, window: &str, utilization: &str) -> Option<f64> {
    run.ttr_s.get(window)?.get(utilization).copied()
}

fn format_seconds(seconds: Option<f64>) -> String {
    seconds.map_or_else(|| "-".to_owned(), |seconds| format!("{seconds:.3}"))
}

fn to_mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

/// The last instant at which a vCPU of these restores resumed or a stall ended, and some time more.
fn end_us(runs: &[(&ReportedRun, VcpuStalls)]) -> u64 {
    let ends =
        runs.iter().map(|(run, stalls)| stalls.end_us().max(run.record.resumed_us.unwrap_or(0)));
    ends.max().unwrap_or(0) + 10 * WINDOW_US
}

fn utilization_plot(runs: &[ReportedRun]) -> LinePlot {
    let runs: Vec<(&ReportedRun, VcpuStalls)> =
        runs.iter().map(|run| (run, run.vcpu_stalls())).collect();
    let step = (end_us(&runs) / POINTS).max(1);
    let points = |stalls: &VcpuStalls| {
        let at = |number| {
            (to_seconds(number * step), 100.0 * stalls.window_utilization(number * step, WINDOW_US))
        };
        (0..=POINTS).map(at).collect()
    };
    LinePlot {
        title: "Utilization over the next 0.1 s".into(),
        x: "seconds since the command".into(),
        y: "%".into(),
        lines: runs.iter().map(|(run, stalls)| (run.name.clone(), points(stalls))).collect(),
    }
}

fn ttr_plots(runs: &[ReportedRun]) -> Result<Vec<String>, PlotError> {
    let curve = |run: &ReportedRun, window| {
        let points = responsiveness_curve(&run.vcpu_stalls(), window);
        let points = points.iter().map(|point| (100.0 * point.utilization, point.ttr_s));
        (run.name.clone(), points.collect())
    };
    let figure = |&window: &u64| {
        let plot = LinePlot {
            title: format!("TTR({}, u)", window_name(window)),
            x: "utilization, %".into(),
            y: "seconds since the command".into(),
            lines: runs.iter().map(|run| curve(run, window)).collect(),
        };
        plot.to_svg()
    };
    WINDOWS_US.iter().map(figure).collect()
}

fn memory_plots(runs: &[ReportedRun]) -> Result<Vec<String>, PlotError> {
    let figure = |run: &ReportedRun| {
        let plot = DotPlot {
            title: format!("{}: pages, and when they came", run.name),
            x: "seconds since the command (prefetched: at 0)".into(),
            y: "guest memory, MiB".into(),
            top: f64::from(run.record.ram_pages) / PAGES_PER_MIB,
            series: vec![
                ("prefetched".into(), prefetched_dots(&run.record)),
                ("on demand".into(), demanded_dots(&run.record)),
            ],
        };
        plot.to_svg()
    };
    runs.iter().map(figure).collect()
}

fn prefetched_dots(record: &RunRecord) -> Vec<(f64, f64)> {
    let pages: Vec<u32> =
        record.prefetched.iter().flat_map(|&(page, pages)| page..page + pages).collect();
    thin_out(&pages).map(|&page| (0.0, f64::from(page) / PAGES_PER_MIB)).collect()
}

fn demanded_dots(record: &RunRecord) -> Vec<(f64, f64)> {
    let dot = |fault: &firn_restore::FaultRecord| {
        (to_seconds(fault.t_us), f64::from(fault.page.0) / PAGES_PER_MIB)
    };
    thin_out(&record.faults).map(dot).collect()
}

/// Evenly chosen elements, [`DOTS`] at most.
fn thin_out<T>(all: &[T]) -> impl Iterator<Item = &T> {
    all.iter().step_by(all.len().div_ceil(DOTS).max(1))
}

fn reads_plot(runs: &[ReportedRun]) -> LinePlot {
    let line = |run: &ReportedRun| {
        let mut done: Vec<(u64, u64)> = Vec::new();
        for read in &run.record.reads {
            let before = done.last().map_or(0, |last| last.1);
            done.push((read.ended_us(), before + u64::from(read.len)));
        }
        let points = thin_out(&done).map(|&(us, bytes)| (to_seconds(us), to_mib(bytes)));
        (run.name.clone(), points.collect())
    };
    LinePlot {
        title: "Read from storage, summed up".into(),
        x: "seconds since the command".into(),
        y: "MiB".into(),
        lines: runs.iter().map(line).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::tests::run;

    #[test]
    fn the_page_holds_the_numbers_it_shows() {
        let mut odd = run();
        odd.name = "a<b>&</script>".into();
        let page = render_page(&[run(), odd]).unwrap();
        let start = page.find("application/json\">").unwrap() + "application/json\">".len();
        let end = start + page[start..].find("</script>").unwrap();
        let facts: serde_json::Value = serde_json::from_str(&page[start..end]).unwrap();
        assert_eq!(facts[0], serde_json::to_value(run().compute_facts()).unwrap());
        assert_eq!(facts[1]["name"], "a<b>&</script>");
        assert!(page.contains("a&lt;b&gt;"), "names are text");
        assert!(page.contains(">0.900<"), "all memory was there after 0.9 s");
    }

    #[test]
    fn the_page_loads_nothing() {
        let page = render_page(&[run()]).unwrap();
        assert!(!page.contains("src=") && !page.contains("href="));
        assert_eq!(page.matches("<svg").count(), 6);
    }

    #[test]
    fn few_dots_are_drawn_of_many_pages() {
        let many: Vec<u32> = (0..100_000).collect();
        assert!(thin_out(&many).count() <= DOTS);
        assert_eq!(thin_out(&many[..10]).count(), 10);
    }
}
