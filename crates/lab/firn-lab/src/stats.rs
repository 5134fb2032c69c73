//! Sample statistics: medians, percentiles and spreads of repeated measurements.
//!
//! One run proves little on a shared machine, so everything is measured several times and printed
//! with its spread. Percentiles are by *nearest rank*: the smallest value that at least this
//! percentage of the values does not exceed. It is always a measured value, also for few values.
//!
//! ```text
//!   values     3   5   8   9   40            5 values
//!   rank       1   2   3   4   5             p50: rank ceil(0.50 * 5) = 3 -> 8
//!                                            p95: rank ceil(0.95 * 5) = 5 -> 40
//! ```

use std::fmt;

/// Measurements of one quantity: at least one, all finite, sorted.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample(Vec<f64>);

impl Sample {
    /// A sample of the finite values; `None` if there are none.
    pub fn new(values: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut values: Vec<f64> = values.into_iter().filter(|value| value.is_finite()).collect();
        values.sort_by(f64::total_cmp);
        (!values.is_empty()).then_some(Self(values))
    }

    /// Number of values.
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// The values, ascending.
    pub fn values(&self) -> &[f64] {
        &self.0
    }

    /// The value at a percentile from 0 to 100, by nearest rank.
    pub fn percentile(&self, percent: f64) -> f64 {
        let rank = (percent.clamp(0.0, 100.0) / 100.0 * self.count() as f64).ceil() as usize;
        self.0[rank.clamp(1, self.count()) - 1]
    }

    /// The middle value, or the mean of the two middle ones.
    pub fn median(&self) -> f64 {
        let (lower, upper) = ((self.count() - 1) / 2, self.count() / 2);
        f64::midpoint(self.0[lower], self.0[upper])
    }

    /// The 95 % confidence interval of the median, for any distribution: two order statistics
    /// (Conover, "Practical Nonparametric Statistics", 3rd edition, section 3.2). `None` for fewer
    /// than six values.
    pub fn median_interval(&self) -> Option<(f64, f64)> {
        let n = self.count() as f64;
        let low = (n / 2.0 - 0.98 * n.sqrt()).floor().max(1.0) as usize;
        (self.count() >= 6).then(|| (self.0[low - 1], self.0[self.count() - low]))
    }

    /// The 50th percentile, by nearest rank.
    pub fn p50(&self) -> f64 {
        self.percentile(50.0)
    }

    /// The 95th percentile, by nearest rank.
    pub fn p95(&self) -> f64 {
        self.percentile(95.0)
    }

    /// The 99th percentile, by nearest rank.
    pub fn p99(&self) -> f64 {
        self.percentile(99.0)
    }

    /// The mean.
    pub fn mean(&self) -> f64 {
        self.0.iter().sum::<f64>() / self.count() as f64
    }

    /// The smallest value.
    pub fn min(&self) -> f64 {
        self.0[0]
    }

    /// The largest value.
    pub fn max(&self) -> f64 {
        self.0[self.count() - 1]
    }
}

/// The median, followed in parentheses by the smallest and largest value if there are several.
impl fmt::Display for Sample {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.count() {
            1 => f.write_str(&format_short(self.min())),
            _ => {
                let [median, min, max] = [self.median(), self.min(), self.max()].map(format_short);
                write!(f, "{median} ({min} .. {max})")
            }
        }
    }
}

/// A number with three significant digits, never in scientific notation; whole numbers from 100 on.
pub fn format_short(value: f64) -> String {
    let decimals = match value.abs() {
        magnitude if magnitude >= 100.0 || magnitude == 0.0 => 0,
        magnitude if magnitude >= 10.0 => 1,
        magnitude if magnitude >= 1.0 => 2,
        _ => 3,
    };
    match value.fract() == 0.0 {
        true => format!("{value:.0}"),
        false => format!("{value:.decimals$}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sample(values: &[f64]) -> Sample {
        Sample::new(values.iter().copied()).unwrap()
    }

    #[test]
    fn nearest_rank_is_as_its_documentation_shows() {
        let five = sample(&[40.0, 3.0, 9.0, 5.0, 8.0]);
        assert_eq!((five.p50(), five.p95(), five.p99()), (8.0, 40.0, 40.0));
        assert_eq!(five.percentile(20.0), 3.0);
        assert_eq!(five.percentile(21.0), 5.0);
        assert_eq!(five.percentile(0.0), 3.0);
    }

    #[test]
    fn the_median_of_an_even_number_lies_between() {
        assert_eq!(sample(&[1.0, 2.0, 4.0, 100.0]).median(), 3.0);
        assert_eq!(sample(&[7.0]).median(), 7.0);
    }

    #[test]
    fn the_interval_of_a_median_is_narrower_the_more_there_is() {
        let up_to = |n: u32| sample(&(1..=n).map(f64::from).collect::<Vec<_>>());
        assert_eq!(up_to(5).median_interval(), None);
        assert_eq!(up_to(6).median_interval(), Some((1.0, 6.0)));
        assert_eq!(up_to(24).median_interval(), Some((7.0, 18.0)));
        assert_eq!(up_to(100).median_interval(), Some((40.0, 61.0)));
    }

    #[test]
    fn nan_values_are_left_out() {
        assert_eq!(Sample::new([f64::NAN, f64::INFINITY]), None);
        assert_eq!(sample(&[f64::NAN, 2.0]).count(), 1);
    }

    #[test]
    fn numbers_are_short() {
        let shown = [0.0, 0.01234, 1.234, 12.34, 1234.5, 16.0, -0.5].map(format_short);
        assert_eq!(shown, ["0", "0.012", "1.23", "12.3", "1234", "16", "-0.500"]);
        assert_eq!(sample(&[1.5, 2.5, 9.25]).to_string(), "2.50 (1.50 .. 9.25)");
    }

    proptest! {
        #[test]
        fn a_percentile_was_measured_and_enough_values_do_not_exceed_it(
            values in prop::collection::vec(-1e9_f64..1e9, 1..200),
            percent in 0.0_f64..=100.0,
        ) {
            let sample = sample(&values);
            let found = sample.percentile(percent);
            prop_assert!(values.contains(&found));
            let within = values.iter().filter(|&&value| value <= found).count();
            prop_assert!(within as f64 >= percent / 100.0 * values.len() as f64 - 1e-9);
            let below = values.iter().filter(|&&value| value < found).count();
            prop_assert!((below as f64) < (percent / 100.0 * values.len() as f64).max(1.0));
        }

        #[test]
        fn statistics_are_ordered(values in prop::collection::vec(-1e9_f64..1e9, 1..200)) {
            let sample = sample(&values);
            let ordered = [sample.min(), sample.p50(), sample.p95(), sample.p99(), sample.max()];
            prop_assert!(ordered.is_sorted());
            prop_assert!(sample.min() <= sample.median() && sample.median() <= sample.max());
            prop_assert!(sample.min() - 1e-3 <= sample.mean() && sample.mean() <= sample.max() + 1e-3);
        }

        #[test]
        fn order_of_measurement_does_not_matter(values in prop::collection::vec(-1e9_f64..1e9, 1..50)) {
            let backwards: Vec<f64> = values.iter().rev().copied().collect();
            prop_assert_eq!(sample(&values), sample(&backwards));
        }
    }
}
