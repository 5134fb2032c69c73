//! XDR (RFC 4506), as far as libvirt's messages need it: big-endian numbers of 4 and 8 bytes, and
//! strings that are padded to a multiple of 4.
//!
//! ```text
//!   string      length | bytes | padding        optional    0, or 1 and the value
//! ```

use crate::error::LibvirtError;

/// The maximum length of a string, in bytes, as the protocol has it.
pub(crate) const STRING_BYTES_MAX: usize = 4 << 20;

/// A UUID.
pub(crate) type Uuid = [u8; 16];

/// A message that is being written.
#[derive(Debug, Default)]
pub(crate) struct XdrWriter(pub(crate) Vec<u8>);

impl XdrWriter {
    pub(crate) fn number(mut self, number: u32) -> Self {
        self.0.extend(number.to_be_bytes());
        self
    }

    pub(crate) fn signed(mut self, number: i32) -> Self {
        self.0.extend(number.to_be_bytes());
        self
    }

    pub(crate) fn string(mut self, text: &str) -> Self {
        self = self.number(text.len() as u32);
        self.0.extend(text.as_bytes());
        let padding = text.len().next_multiple_of(4) - text.len();
        self.0.extend(std::iter::repeat_n(0, padding));
        self
    }

    pub(crate) fn optional_string(self, text: Option<&str>) -> Self {
        match text {
            Some(text) => self.number(1).string(text),
            None => self.number(0),
        }
    }

    pub(crate) fn uuid(mut self, uuid: &Uuid) -> Self {
        self.0.extend(uuid);
        self
    }
}

/// A message that is being read.
#[derive(Debug)]
pub(crate) struct XdrReader<'a>(pub(crate) &'a [u8]);

impl<'a> XdrReader<'a> {
    fn take_bytes(&mut self, bytes: usize) -> Result<&'a [u8], LibvirtError> {
        let (head, rest) = self
            .0
            .split_at_checked(bytes)
            .ok_or(LibvirtError::Message { what: "it is cut off" })?;
        self.0 = rest;
        Ok(head)
    }

    fn take_array<const BYTES: usize>(&mut self) -> Result<[u8; BYTES], LibvirtError> {
        let mut array = [0; BYTES];
        array.copy_from_slice(self.take_bytes(BYTES)?);
        Ok(array)
    }

    pub(crate) fn number(&mut self) -> Result<u32, LibvirtError> {
        self.take_array().map(u32::from_be_bytes)
    }

    pub(crate) fn signed(&mut self) -> Result<i32, LibvirtError> {
        self.take_array().map(i32::from_be_bytes)
    }

    pub(crate) fn long(&mut self) -> Result<i64, LibvirtError> {
        self.take_array().map(i64::from_be_bytes)
    }

    pub(crate) fn string(&mut self) -> Result<String, LibvirtError> {
        let bytes = self.number()? as usize;
        if bytes > STRING_BYTES_MAX {
            return Err(LibvirtError::Message { what: "a string is too long" });
        }
        let text = &self.take_bytes(bytes.next_multiple_of(4))?[..bytes];
        Ok(String::from_utf8_lossy(text).into_owned())
    }

    pub(crate) fn optional_string(&mut self) -> Result<Option<String>, LibvirtError> {
        match self.number()? {
            0 => Ok(None),
            1 => self.string().map(Some),
            _ => Err(LibvirtError::Message { what: "a string is neither there nor missing" }),
        }
    }

    pub(crate) fn uuid(&mut self) -> Result<Uuid, LibvirtError> {
        self.take_array()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_string_is_padded() {
        let written = XdrWriter::default().string("abcde").number(7).0;
        assert_eq!(written, b"\0\0\0\x05abcde\0\0\0\0\0\0\x07");
        let cut = XdrReader(&written[..8]).string();
        assert!(matches!(cut, Err(LibvirtError::Message { .. })));
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_value_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
            let _ = XdrReader(&bytes).string();
            let _ = XdrReader(&bytes).optional_string();
            let _ = XdrReader(&bytes).uuid();
        }

        #[test]
        fn what_was_written_is_read(text in ".*", number in any::<i32>(), other in proptest::option::of(".*")) {
            let written = XdrWriter::default().string(&text).signed(number).optional_string(other.as_deref()).0;
            let mut reader = XdrReader(&written);
            prop_assert_eq!(reader.string().unwrap(), text);
            prop_assert_eq!(reader.signed().unwrap(), number);
            prop_assert_eq!(reader.optional_string().unwrap(), other);
            prop_assert!(reader.0.is_empty());
        }
    }
}
