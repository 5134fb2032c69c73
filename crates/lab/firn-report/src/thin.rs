//! Thinning: the points that a screen can show.
//!
//! ```text
//!   line   per column of pixels: the first point, the lowest, the highest, the last, in their order
//!   dots   per cell of 2 x 2 pixels: one; cells above each other are one stroke
//! ```

use std::collections::BTreeSet;
use std::fmt::Write;

/// The edge of a cell.
const CELL: f64 = 2.0;

/// The points of a line, in pixels and ordered by x, that show its form: no extreme is lost.
pub(crate) fn thin_line(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    points.chunk_by(|one, next| one.0.floor() == next.0.floor()).flat_map(column_extremes).collect()
}

fn column_extremes(column: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let by_height = |&one: &usize, other: &usize| column[one].1.total_cmp(&column[*other].1);
    let lowest = (0..column.len()).min_by(by_height);
    let highest = (0..column.len()).max_by(by_height);
    let ends = [Some(0), column.len().checked_sub(1)];
    let kept: BTreeSet<usize> = ends.into_iter().chain([lowest, highest]).flatten().collect();
    kept.into_iter().filter_map(|at| column.get(at).copied()).collect()
}

/// The dots, in pixels, as the data of an SVG path: vertical strokes of the width [`CELL`].
pub(crate) fn dots_path(dots: impl Iterator<Item = (f64, f64)>) -> String {
    let cell = |(x, y): (f64, f64)| ((x / CELL).floor() as i32, (y / CELL).floor() as i32);
    let cells: Vec<(i32, i32)> = dots.map(cell).collect::<BTreeSet<_>>().into_iter().collect();
    let mut path = String::new();
    for stroke in cells.chunk_by(|one, next| one.0 == next.0 && one.1 + 1 == next.1) {
        let ((column, top), length) = (stroke[0], CELL as usize * stroke.len());
        let (x, y) = ((f64::from(column) + 0.5) * CELL, f64::from(top) * CELL);
        let _ = write!(path, "M{x} {y}v{length}");
    }
    path
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_keeps_its_extremes_and_its_ends() {
        let noise = |number: u32| f64::from(number.wrapping_mul(2_654_435_761) >> 16);
        let mut points: Vec<(f64, f64)> =
            (0..30_000).map(|number| (f64::from(number) / 100.0, noise(number))).collect();
        points[12_345].1 = 1e6;
        points[23_456].1 = -1e6;
        let thin = thin_line(&points);
        assert!(thin.len() <= 4 * 300, "{}", thin.len());
        assert_eq!((thin.first(), thin.last()), (points.first(), points.last()));
        assert!(thin.contains(&points[12_345]) && thin.contains(&points[23_456]));
        assert!(thin.is_sorted_by_key(|point| point.0));
        assert_eq!(thin_line(&points[..1]), points[..1]);
        assert_eq!(thin_line(&[]), []);
    }

    #[test]
    fn dots_of_one_cell_are_one_and_neighbours_are_a_stroke() {
        let dots = [(4.1, 6.0), (5.9, 7.9), (4.0, 8.1), (4.0, 20.0), (9.0, 0.5)];
        assert_eq!(dots_path(dots.into_iter()), "M5 6v4M5 20v2M9 0v2");
        assert_eq!(dots_path(std::iter::empty()), "");
    }
}
