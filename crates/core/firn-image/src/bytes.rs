//! A reader of little-endian numbers that never reads past the end of its bytes.

use crate::error::ImageFlaw;

/// A part of the file that is being parsed.
#[derive(Clone)]
pub(crate) struct ByteReader<'a> {
    part: &'static str,
    all: &'a [u8],
    at: usize,
}

impl<'a> ByteReader<'a> {
    /// A reader of the bytes of a part, which errors will call `part`.
    pub(crate) fn new(part: &'static str, all: &'a [u8]) -> Self {
        Self { part, all, at: 0 }
    }

    /// The next `len` bytes.
    pub(crate) fn take_bytes(&mut self, len: usize) -> Result<&'a [u8], ImageFlaw> {
        let end = self.at.checked_add(len);
        let Some(taken) = end.and_then(|end| self.all.get(self.at..end)) else {
            let left = self.all.len() - self.at;
            return Err(self.flaw_here(format!("{len} bytes should follow, and {left} do")));
        };
        self.at += len;
        Ok(taken)
    }

    /// The next `N` bytes as an array.
    pub(crate) fn read_array<const N: usize>(&mut self) -> Result<[u8; N], ImageFlaw> {
        let mut array = [0; N];
        array.copy_from_slice(self.take_bytes(N)?);
        Ok(array)
    }

    pub(crate) fn read_u8(&mut self) -> Result<u8, ImageFlaw> {
        self.read_array().map(u8::from_le_bytes)
    }

    pub(crate) fn read_u16(&mut self) -> Result<u16, ImageFlaw> {
        self.read_array().map(u16::from_le_bytes)
    }

    pub(crate) fn read_u32(&mut self) -> Result<u32, ImageFlaw> {
        self.read_array().map(u32::from_le_bytes)
    }

    pub(crate) fn read_u64(&mut self) -> Result<u64, ImageFlaw> {
        self.read_array().map(u64::from_le_bytes)
    }

    /// The next `count` numbers of `N` bytes each, as a column.
    pub(crate) fn read_column<const N: usize>(
        &mut self,
        count: usize,
    ) -> Result<NumberColumn<'a, N>, ImageFlaw> {
        let len = count.checked_mul(N).ok_or_else(|| self.flaw_here(format!("{count} numbers")))?;
        self.take_bytes(len).map(NumberColumn)
    }

    /// Checks that nothing is left.
    pub(crate) fn expect_end(self) -> Result<(), ImageFlaw> {
        match self.all.len() - self.at {
            0 => Ok(()),
            left => Err(self.flaw_here(format!("{left} bytes too many"))),
        }
    }

    /// Checks that only zeros are left.
    pub(crate) fn expect_zeros(self) -> Result<(), ImageFlaw> {
        match self.all.iter().skip(self.at).position(|&byte| byte != 0) {
            None => Ok(()),
            Some(at) => {
                let offset = (self.at + at) as u64;
                Err(ImageFlaw::new(self.part, offset, "a reserved byte is not zero"))
            }
        }
    }

    /// A flaw in the bytes that were read last.
    pub(crate) fn flaw_here(&self, problem: impl Into<String>) -> ImageFlaw {
        ImageFlaw::new(self.part, self.at as u64, problem)
    }
}

/// Numbers of `N` bytes each, one after another.
#[derive(Clone, Copy)]
pub(crate) struct NumberColumn<'a, const N: usize>(&'a [u8]);

impl<'a, const N: usize> NumberColumn<'a, N> {
    pub(crate) fn iter_arrays(self) -> impl Iterator<Item = [u8; N]> + 'a {
        self.0.chunks_exact(N).map(|bytes| {
            let mut array = [0; N];
            array.copy_from_slice(bytes);
            array
        })
    }
}

impl<'a> NumberColumn<'a, 1> {
    pub(crate) fn numbers(self) -> impl Iterator<Item = u8> + 'a {
        self.iter_arrays().map(u8::from_le_bytes)
    }
}

impl<'a> NumberColumn<'a, 2> {
    pub(crate) fn numbers(self) -> impl Iterator<Item = u16> + 'a {
        self.iter_arrays().map(u16::from_le_bytes)
    }
}

impl<'a> NumberColumn<'a, 4> {
    pub(crate) fn numbers(self) -> impl Iterator<Item = u32> + 'a {
        self.iter_arrays().map(u32::from_le_bytes)
    }
}

impl<'a> NumberColumn<'a, 8> {
    pub(crate) fn numbers(self) -> impl Iterator<Item = u64> + 'a {
        self.iter_arrays().map(u64::from_le_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_read_past_the_end() {
        let mut bytes = ByteReader::new("test", &[1, 0, 2]);
        assert_eq!(bytes.read_u16(), Ok(1));
        let flaw = bytes.read_u32().unwrap_err();
        assert_eq!((flaw.part, flaw.offset), ("test", 2));
        assert!(bytes.clone().read_column::<8>(usize::MAX).is_err());
        assert!(bytes.clone().expect_end().is_err());
        assert_eq!(bytes.expect_zeros().unwrap_err().offset, 2);
    }

    #[test]
    fn columns_are_little_endian() {
        let mut bytes = ByteReader::new("test", &[1, 0, 0, 1]);
        let column: Vec<_> = bytes.read_column::<2>(2).unwrap().numbers().collect();
        assert_eq!(column, [1, 256]);
        assert_eq!(bytes.expect_end(), Ok(()));
    }
}
