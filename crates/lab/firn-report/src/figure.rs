//! Figure of the page: an SVG with its axes, below its title and legend.
//!
//! ```text
//!   title
//!   -- lazy  -- auto                legend: HTML, which wraps and is never scaled
//!   +------------------------+
//!   | MiB                    |
//!   |  40 |......../-----    |      SVG: as wide as a narrow phone, so that its text is never
//!   |   0 |_______/______    |      scaled down by much
//!   |     0   1   2 seconds  |
//!   +------------------------+
//! ```
//!
//! Colors are classes of the page's style sheet: `c0` to `c5` by the number of the run. A screen
//! reader reads the title and a description in words. `data-*` attributes have the ends of the
//! axes, from which tests compute values back.

use maud::{Markup, html as markup};

use crate::scale::Scale;
use crate::thin::{dots_path, thin_line};

/// Width and height of the SVG, in pixels.
const SIZE: (f64, f64) = (360.0, 238.0);
/// Edges of the area of the data: left, right, top, bottom.
const LEFT: f64 = 44.0;
const RIGHT: f64 = 352.0;
const TOP: f64 = 22.0;
const BOTTOM: f64 = 196.0;
/// Where prefetched pages are drawn: left of the axis.
const STRIP: f64 = LEFT - 3.5;
/// The number of series colors in the style sheet.
pub(crate) const COLOR_COUNT: usize = 6;

/// A figure.
#[derive(Clone, Debug)]
pub(crate) struct Figure {
    /// What it shows.
    pub(crate) title: String,
    /// The main facts in words, for screen readers.
    pub(crate) description: String,
    pub(crate) x: Axis,
    pub(crate) y: Axis,
    pub(crate) series: Vec<Series>,
}

/// An axis.
#[derive(Clone, Debug)]
pub(crate) struct Axis {
    pub(crate) label: &'static str,
    pub(crate) scale: Scale,
}

/// Data of one color.
#[derive(Clone, Debug)]
pub(crate) struct Series {
    /// Its name in the legend.
    pub(crate) name: String,
    /// The number of its run.
    pub(crate) number: usize,
    pub(crate) marks: PlotMarks,
}

/// How data is drawn.
#[derive(Clone, Debug)]
pub(crate) enum PlotMarks {
    /// A line through points that are ordered by x.
    Line(Vec<(f64, f64)>),
    /// A dot at each point.
    Dots(Vec<(f64, f64)>),
    /// A strip left of the vertical axis, with these ranges of y.
    Strip(Vec<(f64, f64)>),
}

impl Figure {
    /// The figure; `id` is unique in the page.
    pub(crate) fn render(&self, id: &str) -> Markup {
        let (title, description) = (format!("{id}-title"), format!("{id}-text"));
        markup! {
            figure {
                figcaption { (self.title) }
                (self.render_legend())
                svg viewBox=(format!("0 0 {} {}", SIZE.0, SIZE.1)) role="img"
                    aria-labelledby=(title) aria-describedby=(description)
                    data-x-end=(self.x.scale.end()) data-y-end=(self.y.scale.end())
                {
                    title id=(title) { (self.title) }
                    desc id=(description) { (self.description) }
                    (self.render_axes())
                    @for series in &self.series { (self.render_series(series)) }
                }
            }
        }
    }

    fn render_legend(&self) -> Markup {
        markup! {
            ul class="legend" { @for series in &self.series {
                li { span class={ "swatch " (series.kind()) " " (color_class(series.number)) } {} (series.name) }
            } }
        }
    }

    fn render_axes(&self) -> Markup {
        let (x, y) = (self.x.scale, self.y.scale);
        markup! {
            @for tick in y.ticks() {
                @let at = self.y_of(tick);
                line class="grid" x1=(LEFT) x2=(RIGHT) y1=(number(at)) y2=(number(at)) {}
                text x=(LEFT - 9.0) y=(number(at + 4.0)) text-anchor="end" { (y.label_of(tick)) }
            }
            @for tick in x.ticks() {
                @let at = self.x_of(tick);
                line class="grid" x1=(number(at)) x2=(number(at)) y1=(TOP) y2=(BOTTOM) {}
                text x=(number(at)) y=(BOTTOM + 17.0) text-anchor="middle" { (x.label_of(tick)) }
            }
            path class="axes" d=(format!("M{LEFT} {TOP}V{BOTTOM}H{RIGHT}")) {}
            text x=(LEFT - 9.0) y="10" { (self.y.label) }
            text x=(RIGHT) y=(BOTTOM + 36.0) text-anchor="end" { (self.x.label) }
        }
    }

    fn render_series(&self, series: &Series) -> Markup {
        let color = color_class(series.number);
        let on_screen = |&(x, y): &(f64, f64)| (self.x_of(x), self.y_of(y));
        markup! {
            @match &series.marks {
                PlotMarks::Line(points) => {
                    polyline class={ "line " (color) } data-name=(series.name) points=(points_text(points, on_screen)) {}
                }
                PlotMarks::Dots(dots) => {
                    path class={ "dots " (color) } d=(dots_path(dots.iter().filter(is_finite_point).map(on_screen))) {}
                }
                PlotMarks::Strip(ranges) => { path class="strip" d=(self.strip_path(ranges)) {} }
            }
        }
    }

    fn strip_path(&self, ranges: &[(f64, f64)]) -> String {
        let rows = ranges.iter().filter(is_finite_point).flat_map(|&(from, to)| {
            let (top, bottom) = (self.y_of(to).floor() as i32, self.y_of(from).ceil() as i32);
            (top..bottom.max(top + 1)).map(|row| (STRIP, f64::from(row)))
        });
        dots_path(rows)
    }

    fn x_of(&self, value: f64) -> f64 {
        LEFT + (RIGHT - LEFT) * self.x.scale.position_of(value)
    }

    fn y_of(&self, value: f64) -> f64 {
        BOTTOM - (BOTTOM - TOP) * self.y.scale.position_of(value)
    }
}

impl Series {
    fn kind(&self) -> &'static str {
        match self.marks {
            PlotMarks::Line(_) => "of-line",
            PlotMarks::Dots(_) => "of-dots",
            PlotMarks::Strip(_) => "of-strip",
        }
    }
}

/// The classes of a series: its color, and dashes once all colors are used.
pub(crate) fn color_class(number: usize) -> String {
    let dashes = if number < COLOR_COUNT { "" } else { " dashed" };
    format!("c{}{dashes}", number % COLOR_COUNT)
}

fn points_text(points: &[(f64, f64)], on_screen: impl Fn(&(f64, f64)) -> (f64, f64)) -> String {
    let points: Vec<(f64, f64)> = points.iter().filter(is_finite_point).map(on_screen).collect();
    let texts: Vec<String> =
        thin_line(&points).iter().map(|&(x, y)| format!("{},{}", number(x), number(y))).collect();
    texts.join(" ")
}

fn is_finite_point(point: &&(f64, f64)) -> bool {
    point.0.is_finite() && point.1.is_finite()
}

/// A coordinate, exact to a tenth of a pixel.
fn number(coordinate: f64) -> String {
    format!("{}", (coordinate * 10.0).round() / 10.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figure(marks: PlotMarks) -> Figure {
        let axis = |label| Axis { label, scale: Scale::up_to(10.0) };
        let series = vec![Series { name: "a<b>".into(), number: 7, marks }];
        Figure {
            title: "Reads".into(),
            description: "a<b>: 7 MiB".into(),
            x: axis("seconds"),
            y: axis("MiB"),
            series,
        }
    }

    #[test]
    fn a_figure_has_a_title_a_description_and_a_legend() {
        let text =
            figure(PlotMarks::Line(vec![(0.0, 0.0), (10.0, 10.0)])).render("f1").into_string();
        assert!(text.contains("<title id=\"f1-title\">Reads</title>"), "{text}");
        assert!(text.contains("<desc id=\"f1-text\">a&lt;b&gt;: 7 MiB</desc>"), "{text}");
        assert!(text.contains("points=\"44,196 352,22\""), "{text}");
        let (before, svg) = text.split_once("<svg").unwrap();
        assert!(before.contains("class=\"legend\"") && !svg.contains("legend"), "{text}");
        assert!(before.contains("c1 dashed"), "an eighth run has a dashed line: {before}");
    }

    #[test]
    fn values_that_are_no_numbers_are_not_drawn() {
        let odd = vec![(f64::NAN, 1.0), (1.0, f64::INFINITY), (5.0, 5.0)];
        let line = figure(PlotMarks::Line(odd.clone())).render("f").into_string();
        assert!(line.contains("points=\"198,109\""), "{line}");
        let dots = figure(PlotMarks::Dots(odd.clone())).render("f").into_string();
        assert!(dots.contains("d=\"M199 108v2\""), "{dots}");
        assert!(!figure(PlotMarks::Strip(odd)).render("f").into_string().contains("NaN"));
    }

    #[test]
    fn a_strip_is_left_of_the_axis() {
        let strip = figure(PlotMarks::Strip(vec![(0.0, 5.0)])).render("f").into_string();
        assert!(strip.contains("class=\"strip\" d=\"M41 108v88\""), "{strip}");
    }
}
