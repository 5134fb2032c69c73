//! So many words of so many pages.

/// Words of a page.
const PAGE: usize = 512;

/// What a transaction does.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Pages per transaction.
    pub ppt: usize,
    /// Writes per page.
    pub wpp: usize,
    /// Pages of the area: a power of two, and no fewer than `ppt`.
    pub pages: usize,
}

impl Shape {
    /// Words of the area.
    pub fn words(self) -> usize {
        self.pages * PAGE
    }

    /// Writes to distinct pages, drawn by the transaction's number.
    pub fn write(self, words: &mut [u64], transaction: usize) {
        let first = (transaction as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 33;
        for number in 0..self.ppt {
            // Steps of an odd number of pages through a power of two: none is met twice.
            let page = (first as usize + number * 37) % self.pages;
            for write in 0..self.wpp {
                let word = &mut words[page * PAGE + (write * 61 + transaction) % PAGE];
                *word = std::hint::black_box(*word + 1);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_transaction_writes_what_its_shape_says() {
        for (ppt, wpp, pages) in [(1, 4, 256), (32, 4, 256), (2, 16, 256), (4, 4, 16)] {
            let shape = Shape { ppt, wpp, pages };
            for transaction in 0..50 {
                let mut words = vec![0; shape.words()];
                shape.write(&mut words, transaction);
                let pages = words.chunks(PAGE).filter(|page| page.iter().any(|&word| word > 0));
                assert_eq!(pages.count(), ppt);
                assert_eq!(words.iter().sum::<u64>(), (ppt * wpp) as u64);
            }
        }
    }
}
