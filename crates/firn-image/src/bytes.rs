//! A reader of little-endian numbers that never reads past the end of its bytes.

use crate::error::Flaw;

/// A part of the file that is being parsed.
#[derive(Clone)]
pub(crate) struct Bytes<'a> {
    place: &'static str,
    all: &'a [u8],
    at: usize,
}

impl<'a> Bytes<'a> {
    /// A reader of the bytes of a part, which errors will call `place`.
    pub(crate) fn new(place: &'static str, all: &'a [u8]) -> Self {
        Self { place, all, at: 0 }
    }

    /// The next `len` bytes.
    pub(crate) fn take(&mut self, len: usize) -> Result<&'a [u8], Flaw> {
        let end = self.at.checked_add(len);
        let Some(taken) = end.and_then(|end| self.all.get(self.at..end)) else {
            let left = self.all.len() - self.at;
            return Err(self.flaw(format!("{len} bytes should follow, and {left} do")));
        };
        self.at += len;
        Ok(taken)
    }

    /// The next `N` bytes as an array.
    pub(crate) fn array<const N: usize>(&mut self) -> Result<[u8; N], Flaw> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }

    pub(crate) fn u8(&mut self) -> Result<u8, Flaw> {
        self.array().map(u8::from_le_bytes)
    }

    pub(crate) fn u16(&mut self) -> Result<u16, Flaw> {
        self.array().map(u16::from_le_bytes)
    }

    pub(crate) fn u32(&mut self) -> Result<u32, Flaw> {
        self.array().map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self) -> Result<u64, Flaw> {
        self.array().map(u64::from_le_bytes)
    }

    /// The next `count` numbers of `N` bytes each, as a column.
    pub(crate) fn column<const N: usize>(&mut self, count: usize) -> Result<Column<'a, N>, Flaw> {
        let len = count.checked_mul(N).ok_or_else(|| self.flaw(format!("{count} numbers")))?;
        self.take(len).map(Column)
    }

    /// Checks that nothing is left.
    pub(crate) fn end(self) -> Result<(), Flaw> {
        match self.all.len() - self.at {
            0 => Ok(()),
            left => Err(self.flaw(format!("{left} bytes too many"))),
        }
    }

    /// Checks that only zeros are left.
    pub(crate) fn zeros_to_the_end(self) -> Result<(), Flaw> {
        match self.all.iter().skip(self.at).position(|&byte| byte != 0) {
            None => Ok(()),
            Some(at) => {
                let offset = (self.at + at) as u64;
                Err(Flaw::new(self.place, offset, "a reserved byte is not zero"))
            }
        }
    }

    /// A flaw in the bytes that were read last.
    pub(crate) fn flaw(&self, problem: impl Into<String>) -> Flaw {
        Flaw::new(self.place, self.at as u64, problem)
    }
}

/// Numbers of `N` bytes each, one after another.
#[derive(Clone, Copy)]
pub(crate) struct Column<'a, const N: usize>(&'a [u8]);

impl<'a, const N: usize> Column<'a, N> {
    fn arrays(self) -> impl Iterator<Item = [u8; N]> + 'a {
        self.0.chunks_exact(N).map(|bytes| {
            let mut array = [0; N];
            array.copy_from_slice(bytes);
            array
        })
    }
}

impl<'a> Column<'a, 1> {
    pub(crate) fn numbers(self) -> impl Iterator<Item = u8> + 'a {
        self.arrays().map(u8::from_le_bytes)
    }
}

impl<'a> Column<'a, 2> {
    pub(crate) fn numbers(self) -> impl Iterator<Item = u16> + 'a {
        self.arrays().map(u16::from_le_bytes)
    }
}

impl<'a> Column<'a, 4> {
    pub(crate) fn numbers(self) -> impl Iterator<Item = u32> + 'a {
        self.arrays().map(u32::from_le_bytes)
    }
}

impl<'a> Column<'a, 8> {
    pub(crate) fn numbers(self) -> impl Iterator<Item = u64> + 'a {
        self.arrays().map(u64::from_le_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_read_past_the_end() {
        let mut bytes = Bytes::new("test", &[1, 0, 2]);
        assert_eq!(bytes.u16(), Ok(1));
        let flaw = bytes.u32().unwrap_err();
        assert_eq!((flaw.place, flaw.offset), ("test", 2));
        assert!(bytes.clone().column::<8>(usize::MAX).is_err());
        assert!(bytes.clone().end().is_err());
        assert_eq!(bytes.zeros_to_the_end().unwrap_err().offset, 2);
    }

    #[test]
    fn columns_are_little_endian() {
        let mut bytes = Bytes::new("test", &[1, 0, 0, 1]);
        let column: Vec<_> = bytes.column::<2>(2).unwrap().numbers().collect();
        assert_eq!(column, [1, 256]);
        assert_eq!(bytes.end(), Ok(()));
    }
}
