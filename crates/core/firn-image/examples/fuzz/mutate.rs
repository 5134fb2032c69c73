//! Mutations of an image: blind ones, and ones with corrected checksums.
//!
//! A checksum reveals a blind mutation at once. To reach the parsers behind it, [`Parts`] splits
//! an image, decodes its sections, and assembles them again after they were changed.

use twox_hash::XxHash3_64;

const FOOTER: usize = 1024;
const HEADER: usize = 4096;

/// Numbers as a fuzzer likes them (xorshift64*).
pub struct Dice(u64);

impl Dice {
    pub fn new(seed: u64) -> Self {
        Self(seed | 1)
    }

    pub fn roll(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    pub fn below(&mut self, limit: usize) -> usize {
        (self.roll() % limit.max(1) as u64) as usize
    }

    pub fn one_in(&mut self, sides: usize) -> bool {
        self.below(sides) == 0
    }
}

/// Changes some bytes, or the length.
pub fn blindly(bytes: &mut Vec<u8>, dice: &mut Dice) {
    for _ in 0..=dice.below(4) {
        let at = dice.below(bytes.len());
        match dice.below(7) {
            0 | 1 if at < bytes.len() => bytes[at] ^= 1 << dice.below(8),
            2 if at < bytes.len() => bytes[at] = dice.roll() as u8,
            3 => overwrite_number(bytes, at, dice),
            4 => {
                let (from, len) = (dice.below(bytes.len()), dice.below(64));
                let part = bytes[from..bytes.len().min(from + len)].to_vec();
                overwrite(bytes, at, &part);
            }
            5 if dice.one_in(3) => bytes.truncate(at),
            6 if dice.one_in(3) => {
                let part = bytes[at..bytes.len().min(at + 16)].to_vec();
                bytes.splice(at..at, part);
            }
            _ => {}
        }
    }
}

fn interesting(dice: &mut Dice) -> u64 {
    const NUMBERS: [u64; 12] = [
        0,
        1,
        0x7f,
        0xff,
        0xffff,
        0x1_0000,
        0x7fff_ffff,
        0xffff_fffe,
        0xffff_ffff,
        1 << 40,
        i64::MAX as u64,
        u64::MAX,
    ];
    let number = NUMBERS[dice.below(NUMBERS.len())];
    if dice.one_in(3) { number ^ dice.below(256) as u64 } else { number }
}

fn overwrite(bytes: &mut [u8], at: usize, part: &[u8]) {
    let len = bytes.len().saturating_sub(at).min(part.len());
    bytes[at..at + len].copy_from_slice(&part[..len]);
}

/// Writes an interesting number of 1, 2, 4 or 8 bytes to a random position.
fn overwrite_number(bytes: &mut [u8], at: usize, dice: &mut Dice) {
    let width = 1 << dice.below(4);
    overwrite(bytes, at, &interesting(dice).to_le_bytes()[..width]);
}

/// An image, split into its parts.
pub struct Parts {
    header: Vec<u8>,
    blocks: Vec<u8>,
    sections: Vec<(u32, Vec<u8>)>,
    footer: Vec<u8>,
}

impl Parts {
    /// Splits a good image.
    pub fn from_image(image: &[u8]) -> Self {
        let footer = image[image.len() - FOOTER..].to_vec();
        let count = u32_at(&footer, 12) as usize;
        let entry = |i: usize| &footer[48 + i * 40..][..40];
        let sections: Vec<_> = (0..count).map(|i| section(image, entry(i))).collect();
        let blocks_end = u64_at(entry(0), 8) as usize;
        let (header, blocks) = (image[..HEADER].to_vec(), image[HEADER..blocks_end].to_vec());
        Self { header, blocks, sections, footer }
    }

    /// Changes a part or two.
    pub fn mutate(&mut self, dice: &mut Dice) {
        for _ in 0..=dice.below(2) {
            match dice.below(10) {
                0 => self.mutate_header(dice),
                1 => blindly(&mut self.blocks, dice),
                2 => overwrite(&mut self.footer[..48], 12 + dice.below(36), &[dice.roll() as u8]),
                3 => self.shuffle_sections(dice),
                _ => {
                    let which = dice.below(self.sections.len());
                    // The index is last, and is the most error-prone.
                    let which = if dice.one_in(2) { self.sections.len() - 1 } else { which };
                    if let Some((_, bytes)) = self.sections.get_mut(which)
                        && !bytes.is_empty()
                    {
                        mutate_near_start(bytes, dice);
                    }
                }
            }
        }
    }

    fn mutate_header(&mut self, dice: &mut Dice) {
        let at = 8 + dice.below(40);
        self.header[at] = interesting(dice) as u8;
    }

    fn shuffle_sections(&mut self, dice: &mut Dice) {
        let (a, b) = (dice.below(self.sections.len()), dice.below(self.sections.len()));
        match dice.below(3) {
            0 => self.sections.swap(a, b),
            1 => drop(self.sections.remove(a)),
            _ => self.sections[a].0 = dice.below(10) as u32,
        }
        if self.sections.is_empty() {
            self.sections.push((8, Vec::new()));
        }
    }

    /// Assembles the image again, with its checksums.
    pub fn join(&self, dice: &mut Dice) -> Vec<u8> {
        let mut image = seal(self.header.clone(), HEADER);
        image.extend(&self.blocks);
        let mut table = Vec::new();
        for (kind, decoded) in &self.sections {
            let stored = zstd::bulk::compress(decoded, 1).ok().filter(|_| !dice.one_in(4));
            let (encoding, stored) = match &stored {
                Some(stored) => (1u32, stored),
                None => (0, decoded),
            };
            table.extend(kind.to_le_bytes());
            table.extend(encoding.to_le_bytes());
            table.extend((image.len() as u64).to_le_bytes());
            table.extend((stored.len() as u64).to_le_bytes());
            let lie = if dice.one_in(50) { interesting(dice) } else { decoded.len() as u64 };
            table.extend(lie.to_le_bytes());
            table.extend(XxHash3_64::oneshot(stored).to_le_bytes());
            image.extend(stored);
        }
        let mut footer = self.footer[..48].to_vec();
        let file_bytes = (image.len() + FOOTER) as u64;
        footer[32..40].copy_from_slice(&file_bytes.to_le_bytes());
        if u32_at(&footer, 12) as usize != self.sections.len() && !dice.one_in(10) {
            footer[12..16].copy_from_slice(&(self.sections.len() as u32).to_le_bytes());
        }
        footer.extend(table);
        image.extend(seal(footer, FOOTER));
        image
    }
}

/// Changes bytes, more often near the start, where counts are.
fn mutate_near_start(bytes: &mut Vec<u8>, dice: &mut Dice) {
    if dice.one_in(3) {
        let at = dice.below(bytes.len().min(24));
        overwrite_number(bytes, at, dice);
    } else {
        blindly(bytes, dice);
    }
}

fn section(image: &[u8], entry: &[u8]) -> (u32, Vec<u8>) {
    let (offset, len) = (u64_at(entry, 8) as usize, u64_at(entry, 16) as usize);
    let stored = &image[offset..offset + len];
    let decoded = match u32_at(entry, 4) {
        0 => stored.to_vec(),
        _ => zstd::bulk::decompress(stored, u64_at(entry, 24) as usize).unwrap_or_default(),
    };
    (u32_at(entry, 0), decoded)
}

fn seal(mut bytes: Vec<u8>, len: usize) -> Vec<u8> {
    bytes.resize(len - 8, 0);
    let checksum = XxHash3_64::oneshot(&bytes);
    bytes.extend(checksum.to_le_bytes());
    bytes
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes[at..at + 4].iter().rev().fold(0, |all, &byte| all << 8 | u32::from(byte))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes[at..at + 8].iter().rev().fold(0, |all, &byte| all << 8 | u64::from(byte))
}
