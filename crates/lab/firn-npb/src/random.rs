//! The random number generator of all these benchmarks: x <- a x mod 2^46, a = 5^13 (section 2.3).

const MASK: u64 = (1 << 46) - 1;
const A: u64 = 1_220_703_125;

/// A generator of numbers between 0 and 1.
#[derive(Clone, Debug)]
pub(crate) struct NpbRandom(u64);

impl NpbRandom {
    /// Makes a generator with this seed whose first `skipped` numbers are skipped.
    pub(crate) fn after_skipping(seed: u64, skipped: u64) -> Self {
        Self(multiply(seed, raise_to_power(A, skipped)))
    }

    pub(crate) fn next(&mut self) -> f64 {
        self.0 = multiply(self.0, A);
        // 46 bits: exact.
        self.0 as f64 / (1_u64 << 46) as f64
    }
}

/// The product modulo 2^46. 2^46 divides 2^64, so the overflow does not matter.
fn multiply(one: u64, other: u64) -> u64 {
    one.wrapping_mul(other) & MASK
}

fn raise_to_power(mut base: u64, mut exponent: u64) -> u64 {
    let mut product = 1;
    while exponent > 0 {
        if exponent % 2 == 1 {
            product = multiply(product, base);
        }
        base = multiply(base, base);
        exponent /= 2;
    }
    product
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_leap_is_as_many_steps() {
        let mut steps = NpbRandom::after_skipping(271_828_183, 0);
        (0..1000).for_each(|_| {
            steps.next();
        });
        let mut leap = NpbRandom::after_skipping(271_828_183, 1000);
        assert_eq!(steps.next(), leap.next());
    }
}
