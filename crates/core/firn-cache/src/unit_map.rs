//! Which bytes of an object the cache has.
//!
//! ```text
//!      0  a line of JSON, filled up with spaces: what object this is, and the inode of the file with its bytes
//!   4096  one bit for each unit of 64 KiB, the first in the lowest bit: it is there
//! ```
//!
//! A bit is set when the bytes are on the disk. So after SIGKILL or a power cut no bit is set for
//! bytes that are not there, and what was written without its bit is fetched again.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;

use serde::{Deserialize, Serialize};

/// Bytes of a unit: what is fetched at least.
pub const UNIT_BYTES: u64 = 64 << 10;

/// Bytes before the bits.
const HEADER_BYTES: usize = 4096;

/// The version of the format.
const VERSION: u32 = 1;

/// What object a file of the cache has the bytes of.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ObjectName {
    version: u32,
    /// The name of its files in the cache.
    pub hash: String,
    /// Where the object is.
    pub location: String,
    /// Which store that is, if not the one of the location.
    pub endpoint: Option<String>,
    /// Its state, as the store names it.
    pub e_tag: String,
    /// Its length in bytes.
    pub len: u64,
    /// The inode of the file with its bytes.
    pub inode: u64,
}

impl ObjectName {
    /// The object with this state.
    pub fn new(location: String, endpoint: Option<String>, e_tag: String, len: u64) -> Self {
        let (hash, inode) = (String::new(), 0);
        Self { version: VERSION, hash, location, endpoint, e_tag, len, inode }
    }

    /// The number of its units.
    pub fn unit_count(&self) -> u64 {
        self.len.div_ceil(UNIT_BYTES)
    }

    /// The bytes before the bits.
    ///
    /// # Errors
    /// If the names are too long.
    pub fn encode(&self) -> io::Result<Vec<u8>> {
        let mut header = serde_json::to_vec(self)?;
        if header.len() >= HEADER_BYTES {
            return Err(invalid("its location is too long for the cache"));
        }
        header.resize(HEADER_BYTES - 1, b' ');
        header.push(b'\n');
        Ok(header)
    }

    /// Reads the name from a map.
    ///
    /// # Errors
    /// If it is no map of this version.
    pub fn read_from(map: &File) -> io::Result<Self> {
        let mut header = [0; HEADER_BYTES];
        map.read_exact_at(&mut header, 0)?;
        let name: Self = serde_json::from_slice(&header)?;
        match name.version {
            VERSION => Ok(name),
            _ => Err(invalid("the map of a cached object has another version")),
        }
    }

    /// Reads all bits of a map, as bytes. Bits that were never written are not set.
    ///
    /// # Errors
    /// If the map can't be read.
    pub fn read_bits(&self, map: &File) -> io::Result<Vec<u8>> {
        let mut bits = vec![0; self.unit_count().div_ceil(8) as usize];
        let mut at = 0;
        while let Some(rest) = bits.get_mut(at..).filter(|rest| !rest.is_empty()) {
            match map.read_at(rest, (HEADER_BYTES + at) as u64)? {
                0 => break,
                read => at += read,
            }
        }
        Ok(bits)
    }
}

/// Writes the byte that has the bits of units `8 * index` and following.
///
/// # Errors
/// If the map can't be written.
pub fn write_map_byte(map: &File, index: usize, bits: u8) -> io::Result<()> {
    map.write_all_at(&[bits], (HEADER_BYTES + index) as u64)
}

/// The units that have bytes of a range.
pub fn units_of(offset: u64, len: u64) -> Range<u64> {
    match len {
        0 => 0..0,
        _ => offset / UNIT_BYTES..(offset + len).div_ceil(UNIT_BYTES),
    }
}

fn invalid(text: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_has_all_units_that_it_touches() {
        assert_eq!(units_of(0, 1), 0..1);
        assert_eq!(units_of(UNIT_BYTES - 1, 2), 0..2);
        assert_eq!(units_of(UNIT_BYTES, UNIT_BYTES), 1..2);
        assert_eq!(units_of(7, 0), 0..0);
    }

    #[test]
    fn a_map_has_the_name_and_the_bits_that_were_written() {
        let name = ObjectName::new("s3://a/b".to_owned(), None, "tag".to_owned(), 20 * UNIT_BYTES);
        let map = tempfile::tempfile().unwrap();
        map.write_all_at(&name.encode().unwrap(), 0).unwrap();
        assert_eq!(ObjectName::read_from(&map).unwrap(), name);
        assert_eq!(name.read_bits(&map).unwrap(), [0; 3]);
        write_map_byte(&map, 1, 5).unwrap();
        assert_eq!(name.read_bits(&map).unwrap(), [0, 5, 0]);
    }

    #[test]
    fn what_is_no_map_is_refused() {
        let map = tempfile::tempfile().unwrap();
        assert!(ObjectName::read_from(&map).is_err());
        map.write_all_at(&[b'x'; HEADER_BYTES], 0).unwrap();
        assert!(ObjectName::read_from(&map).is_err());
        let long = "x".repeat(HEADER_BYTES);
        assert!(ObjectName::new(long, None, String::new(), 1).encode().is_err());
    }
}
