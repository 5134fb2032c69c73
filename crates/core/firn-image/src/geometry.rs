//! The sizes of an image's blocks, and its block organization.

use std::fmt;
use std::str::FromStr;

use firn_types::{BlockSize, PAGE_SIZE};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::locality::LocalityBlockId;

/// Bytes of the file header; locality block 0 starts right behind it.
pub const HEADER_BYTES: u64 = 4096;

/// Smallest locality block, in bytes.
pub const LOCALITY_BLOCK_BYTES_MIN: u32 = 16 << 10;

/// Largest locality block, in bytes.
pub const LOCALITY_BLOCK_BYTES_MAX: u32 = 1 << 20;

/// Default locality block, in bytes: a good trade-off between disk efficiency and latency (Halite,
/// section 4.2).
pub const LOCALITY_BLOCK_BYTES_DEFAULT: u32 = 64 << 10;

/// Largest RAM page space: the maximum of a region map (16 TiB less alignment).
const TOTAL_PAGES_MAX: u32 = u32::MAX - 2 * firn_types::REGION_ALIGN;

/// The sizes of an image.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Geometry {
    /// Pages in a memory block.
    pub block_size: BlockSize,
    /// Bytes in a locality block: a power of two from 16 KiB to 1 MiB, and no smaller than a memory
    /// block.
    pub locality_block_bytes: u32,
    /// Pages of the RAM page space, those between regions included.
    pub total_pages: u32,
}

/// Sizes that an image cannot have.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum GeometryError {
    /// Not a power of two in range.
    #[error(
        "a locality block has a power of two of bytes from {LOCALITY_BLOCK_BYTES_MIN} to \
         {LOCALITY_BLOCK_BYTES_MAX}, not {0}"
    )]
    LocalityBlock(u32),
    /// An uncompressed memory block would not fit.
    #[error(
        "a memory block of {block} bytes does not fit into a locality block of {locality} bytes"
    )]
    BlockTooLarge {
        /// Bytes of a memory block.
        block: usize,
        /// Bytes of a locality block.
        locality: u32,
    },
    /// No RAM, or more than fits into the page space.
    #[error("an image holds 1 to {TOTAL_PAGES_MAX} pages, not {0}")]
    TotalPages(u32),
}

impl Geometry {
    /// Default memory blocks and locality blocks over `total_pages` pages.
    pub fn new(total_pages: u32) -> Self {
        Self {
            block_size: BlockSize::default(),
            locality_block_bytes: LOCALITY_BLOCK_BYTES_DEFAULT,
            total_pages,
        }
    }

    /// Checks that an image can have these sizes.
    pub fn check_sizes(&self) -> Result<(), GeometryError> {
        let (block, locality) = (self.block_size.byte_count(), self.locality_block_bytes);
        let range = LOCALITY_BLOCK_BYTES_MIN..=LOCALITY_BLOCK_BYTES_MAX;
        if !locality.is_power_of_two() || !range.contains(&locality) {
            return Err(GeometryError::LocalityBlock(locality));
        }
        if block > locality as usize {
            return Err(GeometryError::BlockTooLarge { block, locality });
        }
        if self.total_pages == 0 || self.total_pages > TOTAL_PAGES_MAX {
            return Err(GeometryError::TotalPages(self.total_pages));
        }
        Ok(())
    }

    /// Memory blocks that cover all of RAM; the last may reach past the last page.
    pub fn block_count(&self) -> u32 {
        self.block_size.blocks_in(self.total_pages)
    }

    /// Bytes of the RAM page space: the length of a flat copy of it.
    pub fn flat_bytes(&self) -> u64 {
        u64::from(self.total_pages) * PAGE_SIZE as u64
    }

    /// The offset of a locality block in the file, in bytes. For the number after the last one: the
    /// offset it would have.
    pub fn offset_of(&self, id: LocalityBlockId) -> u64 {
        HEADER_BYTES + u64::from(id.0) * u64::from(self.locality_block_bytes)
    }
}

/// The block organization of an image: the order of its memory blocks (Halite, section 8.1.2).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BlockOrganization {
    /// In order of first access per vCPU, then in guest-virtual order. A save writes this order.
    /// Also called `locality`.
    #[serde(alias = "locality")]
    Access,
    /// By memory block number.
    Physical,
    /// Shuffled: memory blocks that share a locality block are unrelated.
    Random,
}

impl BlockOrganization {
    /// Its number in the file header.
    pub(crate) fn code(self) -> u8 {
        match self {
            Self::Access => 0,
            Self::Physical => 1,
            Self::Random => 2,
        }
    }

    /// The organization with a number, if there is one.
    pub(crate) fn from_code(code: u8) -> Option<Self> {
        [Self::Access, Self::Physical, Self::Random].into_iter().find(|it| it.code() == code)
    }
}

impl fmt::Display for BlockOrganization {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Access => "access",
            Self::Physical => "physical",
            Self::Random => "random",
        })
    }
}

/// A word that names no block organization.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("{0:?} is no block organization; they are access (or locality), physical and random")]
pub struct OrganizationError(String);

impl FromStr for BlockOrganization {
    type Err = OrganizationError;

    fn from_str(word: &str) -> Result<Self, OrganizationError> {
        match word {
            "access" | "locality" => Ok(Self::Access),
            "physical" => Ok(Self::Physical),
            "random" => Ok(Self::Random),
            _ => Err(OrganizationError(word.to_owned())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_fits() {
        assert_eq!(Geometry::new(1).check_sizes(), Ok(()));
        assert_eq!(Geometry::new(5).block_count(), 3);
    }

    #[test]
    fn odd_sizes_are_refused() {
        let of = |pages, locality_block_bytes, total_pages| Geometry {
            block_size: BlockSize::new(pages).unwrap(),
            locality_block_bytes,
            total_pages,
        };
        assert_eq!(of(2, 65_535, 1).check_sizes(), Err(GeometryError::LocalityBlock(65_535)));
        assert_eq!(of(2, 8192, 1).check_sizes(), Err(GeometryError::LocalityBlock(8192)));
        assert_eq!(of(2, 1 << 21, 1).check_sizes(), Err(GeometryError::LocalityBlock(1 << 21)));
        assert_eq!(of(2, 65_536, 0).check_sizes(), Err(GeometryError::TotalPages(0)));
        let error = GeometryError::BlockTooLarge { block: 65_536, locality: 16_384 };
        assert_eq!(of(16, 16_384, 1).check_sizes(), Err(error));
    }

    #[test]
    fn organizations_have_names() {
        for organization in
            [BlockOrganization::Access, BlockOrganization::Physical, BlockOrganization::Random]
        {
            assert_eq!(organization.to_string().parse(), Ok(organization));
            assert_eq!(BlockOrganization::from_code(organization.code()), Some(organization));
        }
        assert_eq!("locality".parse(), Ok(BlockOrganization::Access));
        assert!("spiral".parse::<BlockOrganization>().is_err());
    }
}
