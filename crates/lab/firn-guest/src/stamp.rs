//! Self-describing pages: a page records its own number, how often it was written, and whether it
//! is complete.
//!
//! ```text
//!   byte  0        8        12      16       24         32        40                         4088     4096
//!         | MAGIC  | region | noise | index  | sequence | seal    | body: 506 words          | seal   |
//! ```
//!
//! `seal` is a mix of all header fields. The body is `noise` words drawn from a generator (they
//! don't compress) and zeros after that, so `noise` determines how well the page compresses. In a
//! page stamped in full the generator starts from (region, index, sequence): no word of it survives
//! the next write, and a mix of two writes is detected. In a lightly stamped page it starts from
//! (region, index) alone: rewriting it changes header and tail only, which dirties memory as fast
//! as a guest can.
//!
//! Only one page per writer may legitimately be torn in a copy taken from outside: the one that the
//! writer was writing.

use thiserror::Error;
use zerocopy::IntoBytes as _;

/// Words of 8 bytes in a page.
pub const WORDS: usize = 512;
/// Words in the body of a stamped page.
pub const BODY_WORDS: usize = WORDS - HEADER_WORDS - 1;
/// First word of every stamped page: "FIRNPAGE".
pub const MAGIC: u64 = u64::from_le_bytes(*b"FIRNPAGE");

const HEADER_WORDS: usize = 5;
const LIGHT: u32 = 1 << 31;

/// A page as the guest programs access it.
pub type PageWords = [u64; WORDS];

/// The contents of a page's stamp.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PageStamp {
    /// The region of the writer: one per vCPU.
    pub region: u32,
    /// The number of the page in that region.
    pub index: u64,
    /// The number of rewrites; 0 is the first fill.
    pub sequence: u64,
}

/// The way in which a page is stamped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StampStyle {
    /// Body words that don't compress; the others are zero. At most [`BODY_WORDS`].
    pub noise: u16,
    /// Rewrite header and tail only.
    pub light: bool,
}

/// The reason why a page does not match its stamp.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum StampError {
    /// The first word is not [`MAGIC`].
    #[error("not a stamped page: it starts with {0:#018x}")]
    NotStamped(u64),
    /// Header fields and their seal disagree.
    #[error("header of {0:?} is torn")]
    Header(PageStamp),
    /// A word of the body or the tail belongs to another write.
    #[error("word {word} of {stamp:?} belongs to another write")]
    Body {
        /// The stamp in the header.
        stamp: PageStamp,
        /// The number of the word in the page, from 0.
        word: usize,
    },
}

impl StampStyle {
    /// A style whose pages compress to about `percent` of their size.
    pub fn compressing_to(percent: u8, light: bool) -> Self {
        let share = usize::from(percent.min(100)) * WORDS / 100;
        Self { noise: share.saturating_sub(HEADER_WORDS + 1).min(BODY_WORDS) as u16, light }
    }

    fn to_bits(self) -> u32 {
        u32::from(self.noise) | if self.light { LIGHT } else { 0 }
    }

    fn from_bits(word: u32) -> Self {
        Self { noise: (word & 0xffff) as u16, light: word & LIGHT != 0 }
    }
}

impl PageStamp {
    fn compute_seal(&self, style: StampStyle) -> u64 {
        let first = mix(mix(self.pack_region_and_style(style)) ^ self.index);
        mix(first.wrapping_add(self.sequence)) | 1
    }

    /// The header word that has the region in its lower half and the style in its upper half.
    fn pack_region_and_style(&self, style: StampStyle) -> u64 {
        u64::from(self.region) | u64::from(style.to_bits()) << 32
    }

    fn body_seed(&self, style: StampStyle) -> u64 {
        let sequence = if style.light { 0 } else { self.sequence };
        mix(mix(mix(self.region.into()) ^ self.index).wrapping_add(sequence))
    }
}

/// Stamps a page in full, body included.
pub fn fill_page(page: &mut PageWords, stamp: PageStamp, style: StampStyle) {
    let seed = stamp.body_seed(style);
    let noise = usize::from(style.noise).min(BODY_WORDS);
    let body = &mut page[HEADER_WORDS..HEADER_WORDS + BODY_WORDS];
    for (at, word) in body.iter_mut().enumerate() {
        *word = if at < noise { noise_word(seed, at) } else { 0 };
    }
    write_header_and_tail(page, stamp, style);
}

/// Stamps a page that was filled before: in full, or header and tail only for a light style.
pub fn rewrite_page(page: &mut PageWords, stamp: PageStamp, style: StampStyle) {
    if style.light {
        write_header_and_tail(page, stamp, style)
    } else {
        fill_page(page, stamp, style)
    }
}

fn write_header_and_tail(page: &mut PageWords, stamp: PageStamp, style: StampStyle) {
    let seal = stamp.compute_seal(style);
    page[0] = MAGIC;
    page[1] = stamp.pack_region_and_style(style);
    page[2] = stamp.index;
    page[3] = stamp.sequence;
    page[4] = seal;
    page[WORDS - 1] = seal;
}

/// Reads a page's stamp and checks every word of it.
pub fn check_page(page: &PageWords) -> Result<PageStamp, StampError> {
    let (stamp, style) = read_header(page)?;
    let seed = stamp.body_seed(style);
    let noise = usize::from(style.noise).min(BODY_WORDS);
    let body = &page[HEADER_WORDS..HEADER_WORDS + BODY_WORDS];
    let wrong = body
        .iter()
        .enumerate()
        .position(|(at, &word)| word != if at < noise { noise_word(seed, at) } else { 0 });
    match wrong {
        Some(at) => Err(StampError::Body { stamp, word: at + HEADER_WORDS }),
        None if page[WORDS - 1] != stamp.compute_seal(style) => {
            Err(StampError::Body { stamp, word: WORDS - 1 })
        }
        None => Ok(stamp),
    }
}

/// Reads the stamp of a page from outside, as bytes; `None` where the page is not a stamped one.
/// Only the header is checked: enough to identify the page's region, and so the vCPU that wrote it.
pub fn read_stamp(page: &[u8]) -> Option<PageStamp> {
    let word = |at: usize| Some(u64::from_le_bytes(page.get(at * 8..at * 8 + 8)?.try_into().ok()?));
    let mut words = [0; WORDS];
    for (at, slot) in words.iter_mut().enumerate().take(HEADER_WORDS) {
        *slot = word(at)?;
    }
    read_header(&words).ok().map(|(stamp, _)| stamp)
}

/// Checks a whole page from outside, as 4096 bytes.
pub fn check_bytes(page: &[u8; 4096]) -> Result<PageStamp, StampError> {
    let mut words = [0_u64; WORDS];
    words.as_mut_bytes().copy_from_slice(page);
    words.iter_mut().for_each(|word| *word = u64::from_le(*word));
    check_page(&words)
}

fn read_header(page: &PageWords) -> Result<(PageStamp, StampStyle), StampError> {
    if page[0] != MAGIC {
        return Err(StampError::NotStamped(page[0]));
    }
    let style = StampStyle::from_bits((page[1] >> 32) as u32);
    let stamp = PageStamp { region: page[1] as u32, index: page[2], sequence: page[3] };
    let whole =
        page[4] == stamp.compute_seal(style) && page[1] == stamp.pack_region_and_style(style);
    if whole { Ok((stamp, style)) } else { Err(StampError::Header(stamp)) }
}

fn noise_word(seed: u64, at: usize) -> u64 {
    mix(seed.wrapping_add(at as u64))
}

/// A well-mixing function of 64 bits (the finalizer of the splitmix64 generator).
pub fn mix(value: u64) -> u64 {
    let mut x = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const FULL: StampStyle = StampStyle { noise: 200, light: false };
    const LIGHTLY: StampStyle = StampStyle { noise: 200, light: true };

    fn bytes(page: &PageWords) -> [u8; 4096] {
        let mut out = [0; 4096];
        for (to, from) in out.chunks_exact_mut(8).zip(page) {
            to.copy_from_slice(&from.to_le_bytes());
        }
        out
    }

    #[test]
    fn a_page_contains_its_stamp() {
        let stamp = PageStamp { region: 3, index: 77, sequence: 12 };
        for style in [FULL, LIGHTLY] {
            let mut page = [0; WORDS];
            fill_page(&mut page, stamp, style);
            assert_eq!(check_page(&page), Ok(stamp));
            assert_eq!(check_bytes(&bytes(&page)), Ok(stamp));
            assert_eq!(read_stamp(&bytes(&page)), Some(stamp));
        }
        assert_eq!(check_page(&[0; WORDS]), Err(StampError::NotStamped(0)));
    }

    #[test]
    fn a_light_rewrite_is_a_whole_page() {
        let mut page = [0; WORDS];
        fill_page(&mut page, PageStamp { region: 1, index: 2, sequence: 0 }, LIGHTLY);
        let later = PageStamp { region: 1, index: 2, sequence: 9 };
        rewrite_page(&mut page, later, LIGHTLY);
        assert_eq!(check_page(&page), Ok(later));
    }

    proptest! {
        #[test]
        fn any_flipped_bit_is_found(word in 0..WORDS, bit in 0..64, light: bool, sequence: u64) {
            let style = StampStyle { noise: 100, light };
            let mut page = [0; WORDS];
            fill_page(&mut page, PageStamp { region: 2, index: 5, sequence }, style);
            page[word] ^= 1_u64 << bit;
            prop_assert!(check_page(&page).is_err());
        }

        #[test]
        fn a_mix_of_two_writes_is_found(cut in 4..WORDS, sequence in 0..u64::MAX) {
            let (mut old, mut new) = ([0; WORDS], [0; WORDS]);
            fill_page(&mut old, PageStamp { region: 2, index: 5, sequence }, FULL);
            fill_page(&mut new, PageStamp { region: 2, index: 5, sequence: sequence + 1 }, FULL);
            new[cut..].copy_from_slice(&old[cut..]);
            prop_assert!(check_page(&new).is_err());
        }
    }
}
