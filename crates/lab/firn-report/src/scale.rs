//! Scale of an axis: from 0 to an end, with ticks at round numbers.

/// Maximum number of ticks beside the one at 0.
const TICKS_MAX: f64 = 5.0;

/// A scale from 0 to `end`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Scale {
    end: f64,
    step: f64,
}

impl Scale {
    /// A scale that ends here.
    pub(crate) fn up_to(end: f64) -> Self {
        let end = if end.is_finite() && end > 0.0 { end } else { 1.0 };
        Self { end, step: round_step(end / TICKS_MAX) }
    }

    /// A scale that ends a little after the largest of these values.
    pub(crate) fn containing(values: impl Iterator<Item = f64>) -> Self {
        Self::up_to(1.04 * values.filter(|value| value.is_finite()).fold(0.0, f64::max))
    }

    /// The largest value.
    pub(crate) fn end(self) -> f64 {
        self.end
    }

    /// The position of a value, from 0 to 1.
    pub(crate) fn position_of(self, value: f64) -> f64 {
        (value / self.end).clamp(0.0, 1.0)
    }

    /// The values that have ticks.
    pub(crate) fn ticks(self) -> impl Iterator<Item = f64> {
        let count = (self.end / self.step + 1e-9) as u32;
        (0..=count).map(move |number| f64::from(number) * self.step)
    }

    /// The label of a tick: as many decimals as the ticks need.
    pub(crate) fn label_of(self, tick: f64) -> String {
        let decimals = (-self.step.log10().floor()).max(0.0) as usize;
        format!("{tick:.decimals$}")
    }
}

/// The smallest of 1, 2, 5, 10, 20 ... and their fractions that is not below `least`.
fn round_step(least: f64) -> f64 {
    let unit = 10_f64.powf(least.log10().floor());
    let factors = [1.0, 2.0, 5.0, 10.0];
    let factor = factors.into_iter().find(|factor| factor * unit >= least * (1.0 - 1e-9));
    factor.unwrap_or(10.0) * unit
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(scale: Scale) -> Vec<String> {
        scale.ticks().map(|tick| scale.label_of(tick)).collect()
    }

    #[test]
    fn ticks_are_round_and_few() {
        assert_eq!(labels(Scale::up_to(100.0)), ["0", "20", "40", "60", "80", "100"]);
        assert_eq!(labels(Scale::up_to(2.3)), ["0.0", "0.5", "1.0", "1.5", "2.0"]);
        assert_eq!(labels(Scale::up_to(0.07)), ["0.00", "0.02", "0.04", "0.06"]);
        for end in [1e-6, 0.3, 1.0, 7.0, 512.0, 4.2e6] {
            let ticks = Scale::up_to(end).ticks().count();
            assert!((3..=6).contains(&ticks), "{ticks} ticks up to {end}");
        }
    }

    #[test]
    fn values_are_positions() {
        let scale = Scale::containing([0.5, 2.0, f64::NAN].into_iter());
        assert!(scale.position_of(2.0) > 0.9 && scale.position_of(2.0) < 1.0);
        assert_eq!((scale.position_of(-1.0), scale.position_of(9.0)), (0.0, 1.0));
        assert_eq!(Scale::containing(std::iter::empty()).end(), 1.0);
    }
}
