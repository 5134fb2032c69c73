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
pub struct Stamp {
    /// The region of the writer: one per vCPU.
    pub region: u32,
    /// The number of the page in that region.
    pub index: u64,
    /// The number of rewrites; 0 is the first fill.
    pub sequence: u64,
}

/// The way in which a page is stamped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Style {
    /// Body words that don't compress; the others are zero. At most [`BODY_WORDS`].
    pub noise: u16,
    /// Rewrite header and tail only.
    pub light: bool,
}

/// The reason why a page does not match its stamp.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum Broken {
    /// The first word is not [`MAGIC`].
    #[error("not a stamped page: it starts with {0:#018x}")]
    NotStamped(u64),
    /// Header fields and their seal disagree.
    #[error("header of {0:?} is torn")]
    Header(Stamp),
    /// A word of the body or the tail belongs to another write.
    #[error("word {word} of {stamp:?} belongs to another write")]
    Body {
        /// The stamp in the header.
        stamp: Stamp,
        /// The number of the word in the page, from 0.
        word: usize,
    },
}

impl Style {
    /// A style whose pages compress to about `percent` of their size.
    pub fn compressing_to(percent: u8, light: bool) -> Self {
        let share = usize::from(percent.min(100)) * WORDS / 100;
        Self { noise: share.saturating_sub(HEADER_WORDS + 1).min(BODY_WORDS) as u16, light }
    }

    fn packed(self) -> u32 {
        u32::from(self.noise) | if self.light { LIGHT } else { 0 }
    }

    fn unpacked(word: u32) -> Self {
        Self { noise: (word & 0xffff) as u16, light: word & LIGHT != 0 }
    }
}

impl Stamp {
    fn seal(&self, style: Style) -> u64 {
        let first = mix(mix(self.owner_word(style)) ^ self.index);
        mix(first.wrapping_add(self.sequence)) | 1
    }

    fn owner_word(&self, style: Style) -> u64 {
        u64::from(self.region) | u64::from(style.packed()) << 32
    }

    fn body_seed(&self, style: Style) -> u64 {
        let sequence = if style.light { 0 } else { self.sequence };
        mix(mix(mix(self.region.into()) ^ self.index).wrapping_add(sequence))
    }
}

/// Stamps a page in full, body included.
pub fn fill(page: &mut PageWords, stamp: Stamp, style: Style) {
    let seed = stamp.body_seed(style);
    let noise = usize::from(style.noise).min(BODY_WORDS);
    let body = &mut page[HEADER_WORDS..HEADER_WORDS + BODY_WORDS];
    for (at, word) in body.iter_mut().enumerate() {
        *word = if at < noise { noise_word(seed, at) } else { 0 };
    }
    seal(page, stamp, style);
}

/// Stamps a page that was filled before: in full, or header and tail only for a light style.
pub fn rewrite(page: &mut PageWords, stamp: Stamp, style: Style) {
    if style.light { seal(page, stamp, style) } else { fill(page, stamp, style) }
}

fn seal(page: &mut PageWords, stamp: Stamp, style: Style) {
    let seal = stamp.seal(style);
    page[0] = MAGIC;
    page[1] = stamp.owner_word(style);
    page[2] = stamp.index;
    page[3] = stamp.sequence;
    page[4] = seal;
    page[WORDS - 1] = seal;
}

/// Reads a page's stamp and checks every word of it.
pub fn check(page: &PageWords) -> Result<Stamp, Broken> {
    let (stamp, style) = header(page)?;
    let seed = stamp.body_seed(style);
    let noise = usize::from(style.noise).min(BODY_WORDS);
    let body = &page[HEADER_WORDS..HEADER_WORDS + BODY_WORDS];
    let wrong = body
        .iter()
        .enumerate()
        .position(|(at, &word)| word != if at < noise { noise_word(seed, at) } else { 0 });
    match wrong {
        Some(at) => Err(Broken::Body { stamp, word: at + HEADER_WORDS }),
        None if page[WORDS - 1] != stamp.seal(style) => {
            Err(Broken::Body { stamp, word: WORDS - 1 })
        }
        None => Ok(stamp),
    }
}

/// The stamp of a page from outside, as bytes; `None` where the page is not a stamped one. Only the
/// header is checked: enough to identify the page's owner.
pub fn owner_of(page: &[u8]) -> Option<Stamp> {
    let word = |at: usize| Some(u64::from_le_bytes(page.get(at * 8..at * 8 + 8)?.try_into().ok()?));
    let mut words = [0; WORDS];
    for (at, slot) in words.iter_mut().enumerate().take(HEADER_WORDS) {
        *slot = word(at)?;
    }
    header(&words).ok().map(|(stamp, _)| stamp)
}

/// Checks a whole page from outside, as 4096 bytes.
pub fn check_bytes(page: &[u8; 4096]) -> Result<Stamp, Broken> {
    let mut words = [0_u64; WORDS];
    words.as_mut_bytes().copy_from_slice(page);
    words.iter_mut().for_each(|word| *word = u64::from_le(*word));
    check(&words)
}

fn header(page: &PageWords) -> Result<(Stamp, Style), Broken> {
    if page[0] != MAGIC {
        return Err(Broken::NotStamped(page[0]));
    }
    let style = Style::unpacked((page[1] >> 32) as u32);
    let stamp = Stamp { region: page[1] as u32, index: page[2], sequence: page[3] };
    let whole = page[4] == stamp.seal(style) && page[1] == stamp.owner_word(style);
    if whole { Ok((stamp, style)) } else { Err(Broken::Header(stamp)) }
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

    const FULL: Style = Style { noise: 200, light: false };
    const LIGHTLY: Style = Style { noise: 200, light: true };

    fn bytes(page: &PageWords) -> [u8; 4096] {
        let mut out = [0; 4096];
        for (to, from) in out.chunks_exact_mut(8).zip(page) {
            to.copy_from_slice(&from.to_le_bytes());
        }
        out
    }

    #[test]
    fn a_page_tells_what_it_is() {
        let stamp = Stamp { region: 3, index: 77, sequence: 12 };
        for style in [FULL, LIGHTLY] {
            let mut page = [0; WORDS];
            fill(&mut page, stamp, style);
            assert_eq!(check(&page), Ok(stamp));
            assert_eq!(check_bytes(&bytes(&page)), Ok(stamp));
            assert_eq!(owner_of(&bytes(&page)), Some(stamp));
        }
        assert_eq!(check(&[0; WORDS]), Err(Broken::NotStamped(0)));
    }

    #[test]
    fn a_light_rewrite_is_a_whole_page() {
        let mut page = [0; WORDS];
        fill(&mut page, Stamp { region: 1, index: 2, sequence: 0 }, LIGHTLY);
        let later = Stamp { region: 1, index: 2, sequence: 9 };
        rewrite(&mut page, later, LIGHTLY);
        assert_eq!(check(&page), Ok(later));
    }

    proptest! {
        #[test]
        fn any_flipped_bit_is_found(word in 0..WORDS, bit in 0..64, light: bool, sequence: u64) {
            let style = Style { noise: 100, light };
            let mut page = [0; WORDS];
            fill(&mut page, Stamp { region: 2, index: 5, sequence }, style);
            page[word] ^= 1_u64 << bit;
            prop_assert!(check(&page).is_err());
        }

        #[test]
        fn a_mix_of_two_writes_is_found(cut in 4..WORDS, sequence in 0..u64::MAX) {
            let (mut old, mut new) = ([0; WORDS], [0; WORDS]);
            fill(&mut old, Stamp { region: 2, index: 5, sequence }, FULL);
            fill(&mut new, Stamp { region: 2, index: 5, sequence: sequence + 1 }, FULL);
            new[cut..].copy_from_slice(&old[cut..]);
            prop_assert!(check(&new).is_err());
        }
    }
}
