//! Device state sizes: predicts how many bytes the devices of a VM occupy.
//!
//! QEMU may save most of them before it waits, if it is known that more bytes follow
//! ([`firn_vmm::Vm::prepare_late_hold`]). So only a size counts that has been almost constant for
//! some time: requests in flight in a device (connections of user-mode networking, for example)
//! make its state larger for a while.

/// The number of consecutive saves that have to agree.
const SAVES_MIN: usize = 8;
/// The number of bytes by which they may differ.
const SPREAD_BYTES_MAX: usize = 4 << 10;

/// The sizes of the last saves, as far as they agree.
#[derive(Debug, Default)]
pub(super) struct StateSizes {
    minimum: usize,
    maximum: usize,
    saves: usize,
}

impl StateSizes {
    /// Records the size of a save.
    pub(super) fn add_save(&mut self, bytes: usize) {
        let (least, most) = (self.minimum.min(bytes), self.maximum.max(bytes));
        *self = match self.saves > 0 && most - least <= SPREAD_BYTES_MAX {
            true => Self { minimum: least, maximum: most, saves: self.saves + 1 },
            false => Self { minimum: bytes, maximum: bytes, saves: 1 },
        };
    }

    /// The expected minimum size of the next save; 0 if it is unknown.
    pub(super) fn expected_minimum(&self) -> usize {
        if self.saves < SAVES_MIN { 0 } else { self.minimum }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(saves: impl IntoIterator<Item = usize>) -> usize {
        let mut sizes = StateSizes::default();
        saves.into_iter().for_each(|bytes| sizes.add_save(bytes));
        sizes.expected_minimum()
    }

    #[test]
    fn an_unchanged_size_becomes_known() {
        assert_eq!(after([]), 0);
        assert_eq!(after(vec![80_000; SAVES_MIN - 1]), 0);
        assert_eq!(after(vec![80_000; SAVES_MIN]), 80_000);
        assert_eq!(after((0..SAVES_MIN).map(|save| 80_000 - save)), 80_000 - SAVES_MIN + 1);
    }

    #[test]
    fn one_that_differs_is_the_first_of_others() {
        let jump = |bytes| std::iter::repeat_n(80_000, SAVES_MIN).chain([bytes]);
        assert_eq!(after(jump(80_000 + SPREAD_BYTES_MAX)), 80_000);
        assert_eq!(after(jump(80_000 + SPREAD_BYTES_MAX + 1)), 0);
        assert_eq!(after(jump(70_000)), 0);
        assert_eq!(after(jump(70_000).chain(vec![70_000; SAVES_MIN - 1])), 70_000);
    }
}
