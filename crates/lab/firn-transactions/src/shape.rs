//! Write shapes: how the transactions of a benchmark write. Each transaction writes a given count
//! of words in each of a given count of pages.

use std::str::FromStr;

use anyhow::{Context as _, Result};

use crate::system::{AreaLayout, GuestCallIdentity, RunResult, TrackerSystem, measure_areas};

/// Words per page.
const PAGE: usize = 512;

/// The writes of a transaction.
#[derive(Clone, Copy, Debug)]
pub struct WriteShape {
    /// Pages per transaction.
    pub ppt: usize,
    /// Writes per page.
    pub wpp: usize,
    /// Pages of each area: a power of two, and at least `ppt`.
    pub pages: usize,
    /// Areas. Each transaction writes to one of them, in turn.
    pub areas: usize,
}

impl WriteShape {
    /// The count of words of each area.
    pub fn area_words(self) -> usize {
        self.pages * PAGE
    }

    /// Writes to distinct pages, chosen by the transaction's number.
    pub fn write_words(self, words: &mut [u64], transaction: usize) {
        let first = (transaction as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 33;
        for number in 0..self.ppt {
            // Steps of an odd count of pages through a power of two: no page occurs twice.
            let page = (first as usize + number * 37) % self.pages;
            for write in 0..self.wpp {
                let word = &mut words[page * PAGE + (write * 61 + transaction) % PAGE];
                *word = std::hint::black_box(*word + 1);
            }
        }
    }

    /// Runs this count of transactions with a tracker, on new areas, and returns the time per
    /// transaction. A second run on other areas also copies the changes and counts their bytes.
    ///
    /// # Errors
    /// If the tracker does not work here.
    pub fn measure_tracker(
        self,
        system: TrackerSystem,
        identity: &GuestCallIdentity,
        transactions: usize,
    ) -> Result<RunResult> {
        let work = |words: &mut [u64], transaction: usize| self.write_words(words, transaction);
        let layout = AreaLayout { areas: self.areas, words: self.area_words() };
        measure_areas(system, identity, layout, transactions, |_| {}, work)
    }

    /// The text that [`Self::from_str`] parses.
    pub fn name(self) -> String {
        format!("{},{},{},{}", self.ppt, self.wpp, self.pages, self.areas)
    }
}

/// Pages per transaction, writes per page, pages of each area, areas.
impl FromStr for WriteShape {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let numbers: Result<Vec<usize>, _> = text.split(',').map(str::parse).collect();
        let numbers = numbers.ok().and_then(|numbers| <[usize; 4]>::try_from(numbers).ok());
        let right = numbers
            .filter(|&[ppt, _, pages, areas]| pages.is_power_of_two() && ppt <= pages && areas > 0);
        let [ppt, wpp, pages, areas] =
            right.with_context(|| format!("{text:?} is no PPT,WPP,PAGES,AREAS"))?;
        Ok(Self { ppt, wpp, pages, areas })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shape_is_read_from_its_name() {
        let shape: WriteShape = "2,4,256,3".parse().unwrap();
        assert_eq!((shape.ppt, shape.wpp, shape.pages, shape.areas), (2, 4, 256, 3));
        assert_eq!(shape.name(), "2,4,256,3");
        let wrong = ["", "2,4,256", "2,4,255,1", "512,4,256,1", "2,4,256,0", "2,4,256,1,1"];
        for wrong in wrong.into_iter().chain(["2,x,256,1"]) {
            assert!(wrong.parse::<WriteShape>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_transaction_writes_the_shape_of_its_options() {
        for (ppt, wpp, pages) in [(1, 4, 256), (32, 4, 256), (2, 16, 256), (4, 4, 16)] {
            let shape = WriteShape { ppt, wpp, pages, areas: 1 };
            for transaction in 0..50 {
                let mut words = vec![0; shape.area_words()];
                shape.write_words(&mut words, transaction);
                let pages = words.chunks(PAGE).filter(|page| page.iter().any(|&word| word > 0));
                assert_eq!(pages.count(), ppt);
                assert_eq!(words.iter().sum::<u64>(), (ppt * wpp) as u64);
            }
        }
    }
}
