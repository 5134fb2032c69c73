//! Auxiliary blocks, read piece by piece: a few bytes of a file can stand for a gigabyte of them.

use std::io::{self, Read};

use crate::error::ImageError;
use crate::footer::SectionKind;
use crate::reader::Image;
use crate::sections::AuxBlock;

/// The maximum number of auxiliary blocks in an image.
pub const AUX_BLOCKS_MAX: u32 = 1024;

/// The maximum length of their ids, all together, in bytes.
pub const AUX_ID_BYTES_MAX: usize = 1 << 20;

/// The maximum length of a piece in bytes.
const PIECE: usize = 64 << 10;

/// A piece of an auxiliary block.
#[derive(Clone, Copy, Debug)]
pub struct AuxPiece<'a> {
    /// The hypervisor's name for the block.
    pub id: &'a str,
    /// The length of the block in bytes.
    pub block_bytes: u64,
    /// The offset of the piece in the block.
    pub offset: u64,
    /// The bytes of the piece. A block without bytes has one piece, an empty one.
    pub bytes: &'a [u8],
}

/// The name and length of an auxiliary block.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct AuxInfo {
    /// The hypervisor's name for it.
    pub id: String,
    /// Its length in bytes.
    pub bytes: u64,
}

impl Image {
    /// Reads all auxiliary blocks, piece by piece, in their order. No more than one piece is in
    /// memory at a time.
    ///
    /// # Errors
    /// If the section is damaged, or the error that `take` returned.
    pub fn each_aux_piece<E: From<ImageError>>(
        &self,
        mut take: impl FnMut(AuxPiece<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        let Some((reader, at)) = self.section_reader(SectionKind::AuxBlocks)? else {
            return Ok(());
        };
        let mut parts = AuxReader { reader, left: at.decoded_len };
        let damaged = |error: io::Error| self.section_flaw(&at, error.to_string());
        if at.decoded_len == 0 {
            return Ok(());
        }
        let count = parts.read_count().map_err(damaged)?;
        let (mut ids, mut piece) = (0, vec![0; PIECE]);
        for _ in 0..count {
            let (id, block_bytes) = parts.read_head(&mut ids).map_err(damaged)?;
            let mut offset = 0;
            loop {
                let len = (block_bytes - offset).min(PIECE as u64) as usize;
                parts.read_bytes(&mut piece[..len]).map_err(damaged)?;
                take(AuxPiece { id: &id, block_bytes, offset, bytes: &piece[..len] })?;
                offset += len as u64;
                if offset >= block_bytes {
                    break;
                }
            }
        }
        parts.expect_end().map_err(damaged)?;
        Ok(())
    }

    /// The names and lengths of the auxiliary blocks, without their bytes.
    ///
    /// # Errors
    /// If the section is damaged.
    pub fn aux_list(&self) -> Result<Vec<AuxInfo>, ImageError> {
        let mut list = Vec::new();
        self.each_aux_piece(|piece| {
            if piece.offset == 0 {
                list.push(AuxInfo { id: piece.id.to_owned(), bytes: piece.block_bytes });
            }
            Ok::<(), ImageError>(())
        })?;
        Ok(list)
    }

    /// The auxiliary blocks, whole: up to 1 GiB.
    ///
    /// # Errors
    /// If the section is damaged.
    pub fn aux_blocks(&self) -> Result<Vec<AuxBlock>, ImageError> {
        let mut blocks: Vec<AuxBlock> = Vec::new();
        self.each_aux_piece(|piece| {
            if piece.offset == 0 {
                blocks.push(AuxBlock { id: piece.id.to_owned(), bytes: Vec::new() });
            }
            if let Some(block) = blocks.last_mut() {
                block.bytes.extend_from_slice(piece.bytes);
            }
            Ok::<(), ImageError>(())
        })?;
        Ok(blocks)
    }
}

/// The part of the decoded section that has not been read yet.
struct AuxReader<R> {
    reader: R,
    left: u64,
}

impl<R: Read> AuxReader<R> {
    fn read_bytes(&mut self, bytes: &mut [u8]) -> io::Result<()> {
        let left = self.left.checked_sub(bytes.len() as u64);
        self.left =
            left.ok_or_else(|| other_error(format!("{} bytes should follow", bytes.len())))?;
        self.reader.read_exact(bytes)
    }

    fn read_array<const N: usize>(&mut self) -> io::Result<[u8; N]> {
        let mut array = [0; N];
        self.read_bytes(&mut array)?;
        Ok(array)
    }

    fn read_count(&mut self) -> io::Result<u32> {
        match u32::from_le_bytes(self.read_array()?) {
            count if count <= AUX_BLOCKS_MAX => Ok(count),
            count => Err(other_error(format!("{count} blocks, at most {AUX_BLOCKS_MAX}"))),
        }
    }

    /// Reads the id and the length of the next block. `ids` is the total length of the ids so far,
    /// in bytes.
    fn read_head(&mut self, ids: &mut usize) -> io::Result<(String, u64)> {
        let id_len = usize::from(u16::from_le_bytes(self.read_array()?));
        *ids += id_len;
        if *ids > AUX_ID_BYTES_MAX {
            return Err(other_error(format!("ids have at most {AUX_ID_BYTES_MAX} bytes")));
        }
        let mut id = vec![0; id_len];
        self.read_bytes(&mut id)?;
        let id = String::from_utf8(id).map_err(|_| other_error("an id is not UTF-8"))?;
        let bytes = u64::from_le_bytes(self.read_array()?);
        match bytes <= self.left {
            true => Ok((id, bytes)),
            false => Err(other_error(format!("{bytes} bytes should follow, and {} do", self.left))),
        }
    }

    /// Checks that nothing is left.
    fn expect_end(mut self) -> io::Result<()> {
        match self.left {
            0 if self.reader.read(&mut [0])? == 0 => Ok(()),
            left => Err(other_error(format!("{left} bytes too many"))),
        }
    }
}

fn other_error(problem: impl Into<String>) -> io::Error {
    io::Error::other(problem.into())
}
