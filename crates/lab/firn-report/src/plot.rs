//! Plots of the lab as SVG files, readable on light and on dark pages.
//!
//! The background of a figure is transparent. Text, axes and the faint grid are drawn in marker
//! colors, which a style sheet in the file replaces by suitable colors for either kind of page;
//! series have colors of medium lightness that color-blind readers can distinguish too.

use std::error::Error;

use plotters::coord::ranged1d::{KeyPointHint, Ranged, ValueFormatter};
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;
use thiserror::Error;

/// Width and height of a figure, in pixels.
const SIZE: (u32, u32) = (760, 420);
/// The color of text and axes, which the style sheet replaces.
const INK: RGBColor = RGBColor(0x1c, 0x1c, 0x1c);
/// The same for grid lines.
const GRID_COLOUR: RGBColor = RGBColor(0xd4, 0xd4, 0xd4);
/// The colors of series, in this order.
const COLORS: [RGBColor; 6] = [
    RGBColor(0x2f, 0x7e, 0xc7),
    RGBColor(0xd5, 0x6a, 0x1b),
    RGBColor(0x0f, 0x9a, 0x73),
    RGBColor(0xb8, 0x5c, 0xa8),
    RGBColor(0xa8, 0x8a, 0x0c),
    RGBColor(0x7a, 0x7a, 0x7a),
];
const STYLE: &str = "<style>text{font-family:system-ui,sans-serif}\
@media (prefers-color-scheme:dark){\
[fill=\"#1C1C1C\"]{fill:#e4e4e4}[stroke=\"#1C1C1C\"]{stroke:#e4e4e4}\
[fill=\"#D4D4D4\"]{fill:#444}[stroke=\"#D4D4D4\"]{stroke:#444}}</style>\n";

/// Why a figure can't be drawn.
#[derive(Debug, Error)]
#[error("cannot draw {title:?}: {why}")]
pub struct PlotError {
    title: String,
    why: String,
}

/// A value over another, one line per series.
#[derive(Clone, Debug, Default)]
pub struct LinePlot {
    /// The title above the figure.
    pub title: String,
    /// The label of the horizontal axis.
    pub x: String,
    /// The label of the vertical axis.
    pub y: String,
    /// Name and points of each series.
    pub lines: Vec<(String, Vec<(f64, f64)>)>,
}

/// A value per group, one bar per series side by side.
#[derive(Clone, Debug, Default)]
pub struct BarPlot {
    /// The title above the figure.
    pub title: String,
    /// The label of the vertical axis.
    pub y: String,
    /// Names below the groups.
    pub groups: Vec<String>,
    /// Name and one value per group of each series.
    pub series: Vec<(String, Vec<f64>)>,
}

impl LinePlot {
    /// The figure as the text of an SVG file.
    pub fn to_svg(&self) -> Result<String, PlotError> {
        draw_svg(&self.title, |root| self.draw_on(root))
    }

    fn draw_on(&self, root: &DrawingRoot<'_>) -> Result<(), Box<dyn Error>> {
        let points = || self.lines.iter().flat_map(|(_, points)| points);
        let right = axis_end(points().map(|point| point.0));
        let top = axis_end(points().map(|point| point.1));
        let mut chart =
            chart_builder(root, &self.title).build_cartesian_2d(0.0..right, 0.0..top)?;
        let mut mesh = chart.configure_mesh();
        mesh.x_desc(&self.x).y_desc(&self.y).axis_style(INK).label_style(text_style(13));
        mesh.bold_line_style(GRID_COLOUR).light_line_style(TRANSPARENT).draw()?;
        for (number, (name, points)) in self.lines.iter().enumerate() {
            let style = series_color(number).stroke_width(2);
            let line = LineSeries::new(points.iter().copied(), style);
            chart
                .draw_series(line)?
                .label(name)
                .legend(move |(x, y)| PathElement::new(vec![(x, y), (x + 16, y)], style));
        }
        chart
            .configure_series_labels()
            .label_font(text_style(13))
            .border_style(GRID_COLOUR)
            .draw()?;
        Ok(())
    }
}

impl BarPlot {
    /// The figure as the text of an SVG file.
    pub fn to_svg(&self) -> Result<String, PlotError> {
        draw_svg(&self.title, |root| self.draw_on(root))
    }

    fn draw_on(&self, root: &DrawingRoot<'_>) -> Result<(), Box<dyn Error>> {
        let top = axis_end(self.series.iter().flat_map(|(_, values)| values.iter().copied()));
        let groups = self.groups.len().max(1) as f64;
        let named = GroupAxis { names: &self.groups, axis: (0.0..groups).into() };
        let mut chart = chart_builder(root, &self.title).build_cartesian_2d(named, 0.0..top)?;
        let mut mesh = chart.configure_mesh();
        mesh.disable_x_mesh().y_desc(&self.y).axis_style(INK).label_style(text_style(13));
        mesh.bold_line_style(GRID_COLOUR).light_line_style(TRANSPARENT).draw()?;
        for (number, (name, values)) in self.series.iter().enumerate() {
            let bars = values.iter().enumerate().map(|(group, &value)| {
                let (left, right) = bar_edges(group, number, self.series.len());
                Rectangle::new([(left, 0.0), (right, value)], series_color(number).filled())
            });
            let drawn = chart.draw_series(bars)?;
            if self.series.len() > 1 {
                drawn.label(name).legend(move |(x, y)| {
                    Rectangle::new([(x, y - 5), (x + 12, y + 5)], series_color(number).filled())
                });
            }
        }
        if self.series.len() > 1 {
            chart
                .configure_series_labels()
                .label_font(text_style(13))
                .border_style(GRID_COLOUR)
                .draw()?;
        }
        Ok(())
    }
}

type DrawingRoot<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;

fn draw_svg(
    title: &str,
    figure: impl FnOnce(&DrawingRoot<'_>) -> Result<(), Box<dyn Error>>,
) -> Result<String, PlotError> {
    let failed = |why: Box<dyn Error>| PlotError { title: title.to_owned(), why: why.to_string() };
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        figure(&root).map_err(failed)?;
        root.present().map_err(|error| failed(error.into()))?;
    }
    Ok(with_style(&svg))
}

/// Inserts the style sheet right after the opening tag.
fn with_style(svg: &str) -> String {
    match svg.find("<svg").and_then(|tag| Some(tag + svg[tag..].find('>')? + 1)) {
        Some(end) => format!("{}\n{STYLE}{}", &svg[..end], &svg[end..]),
        None => svg.to_owned(),
    }
}

fn chart_builder<'a, 'b>(
    root: &'a DrawingRoot<'b>,
    title: &str,
) -> ChartBuilder<'a, 'b, SVGBackend<'b>> {
    let mut builder = ChartBuilder::on(root);
    builder.caption(title, text_style(17)).margin(12);
    builder.x_label_area_size(44).y_label_area_size(60);
    builder
}

fn text_style(size: u32) -> TextStyle<'static> {
    ("sans-serif", size).into_font().color(&INK)
}

fn series_color(number: usize) -> RGBColor {
    COLORS[number % COLORS.len()]
}

/// The end of an axis that begins at 0: a little above the largest value.
fn axis_end(values: impl Iterator<Item = f64>) -> f64 {
    let largest = values.filter(|value| value.is_finite()).fold(0.0, f64::max);
    if largest > 0.0 { largest * 1.08 } else { 1.0 }
}

/// Left and right edge of a bar; a group is one unit wide, a fifth of which is a gap.
fn bar_edges(group: usize, number: usize, of: usize) -> (f64, f64) {
    let width = 0.8 / of.max(1) as f64;
    let left = group as f64 + 0.1 + width * number as f64;
    (left + 0.06 * width, left + 0.94 * width)
}

/// An axis of named groups, each a unit wide, with its name below its middle.
struct GroupAxis<'a> {
    names: &'a [String],
    axis: RangedCoordf64,
}

impl Ranged for GroupAxis<'_> {
    type FormatOption = plotters::coord::ranged1d::NoDefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, limit: (i32, i32)) -> i32 {
        self.axis.map(value, limit)
    }

    fn key_points<Hint: KeyPointHint>(&self, _hint: Hint) -> Vec<f64> {
        (0..self.names.len()).map(|group| group as f64 + 0.5).collect()
    }

    fn range(&self) -> std::ops::Range<f64> {
        self.axis.range()
    }
}

impl ValueFormatter<f64> for GroupAxis<'_> {
    fn format_ext(&self, value: &f64) -> String {
        self.names.get(*value as usize).cloned().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines() -> LinePlot {
        LinePlot {
            title: "Guest time".into(),
            x: "seconds".into(),
            y: "%".into(),
            lines: vec![("locality".into(), vec![(0.0, 20.0), (1.0, 99.0)])],
        }
    }

    fn bars() -> BarPlot {
        BarPlot {
            title: "Overhead".into(),
            y: "s".into(),
            groups: vec!["10 %".into(), "90 %".into()],
            series: vec![("zlib".into(), vec![1.0, 4.0]), ("none".into(), vec![5.0, 5.1])],
        }
    }

    #[test]
    fn figures_have_titles_and_labels() {
        let svg = lines().to_svg().unwrap();
        assert!(["Guest time", "seconds", "locality"].iter().all(|text| svg.contains(text)));
        let svg = bars().to_svg().unwrap();
        assert!(["Overhead", "10 %", "90 %", "zlib", "none"].iter().all(|text| svg.contains(text)));
    }

    #[test]
    fn the_style_sheet_knows_the_colors_that_are_drawn() {
        for svg in [lines().to_svg().unwrap(), bars().to_svg().unwrap()] {
            assert!(svg.contains("prefers-color-scheme:dark"));
            assert!(svg.contains("fill=\"#1C1C1C\""), "text is drawn in ink");
            assert!(!svg.contains("#000000") && !svg.contains("#FFFFFF"), "{svg}");
        }
    }

    #[test]
    fn no_values_are_no_panic() {
        LinePlot::default().to_svg().unwrap();
        BarPlot::default().to_svg().unwrap();
        let odd = vec![("odd".into(), vec![(f64::NAN, 1.0), (1.0, f64::INFINITY)])];
        LinePlot { lines: odd, ..lines() }.to_svg().unwrap();
    }

    #[test]
    fn bars_do_not_overlap() {
        let edges: Vec<f64> = (0..2)
            .flat_map(|group| (0..3).map(move |number| bar_edges(group, number, 3)))
            .flat_map(|(left, right)| [left, right])
            .collect();
        assert!(edges.is_sorted());
    }
}
