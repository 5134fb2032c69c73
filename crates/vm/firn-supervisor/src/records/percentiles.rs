//! Percentiles of the newest values of a series, for `firn status`.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

/// The number of newest values that percentiles are computed from.
const VALUES_MAX: usize = 1000;

/// Percentiles of the newest thousand values, by nearest rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Percentiles {
    /// Half of the values are not above it.
    pub p50: f64,
    /// 95 of 100 values are not above it.
    pub p95: f64,
}

impl Percentiles {
    /// The percentiles of these values; zeros if there are none.
    pub(crate) fn from_values(values: impl Iterator<Item = f64>) -> Self {
        let mut sorted: Vec<f64> = values.collect();
        sorted.sort_by(f64::total_cmp);
        let rank = |percent: usize| (sorted.len() * percent).div_ceil(100).saturating_sub(1);
        let at = |percent| sorted.get(rank(percent)).copied().unwrap_or_default();
        Self { p50: at(50), p95: at(95) }
    }
}

/// The newest values of a series.
#[derive(Debug, Default)]
pub(crate) struct NewestValues(VecDeque<f64>);

impl NewestValues {
    pub(crate) fn push_value(&mut self, value: f64) {
        if self.0.len() == VALUES_MAX {
            self.0.pop_front();
        }
        self.0.push_back(value);
    }

    pub(crate) fn percentiles(&self) -> Percentiles {
        Percentiles::from_values(self.0.iter().copied())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_of_the_newest() {
        let mut newest = NewestValues::default();
        assert_eq!(newest.percentiles(), Percentiles::default());
        (0..1100).for_each(|value| newest.push_value(f64::from(value)));
        assert_eq!(newest.percentiles(), Percentiles { p50: 599.0, p95: 1049.0 });
    }
}
