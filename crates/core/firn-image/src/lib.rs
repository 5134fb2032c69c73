//! The checkpoint file of Firn: write it, read it, verify, compare and reorder it.
//!
//! ```text
//!   0        4096                                                                                 file length
//!   +--------+------------------+------------------+-- ... --+----------+-------+--------+
//!   | header | locality block 0 | locality block 1 |         | sections | index | footer |
//!   +--------+------------------+------------------+-- ... --+----------+-------+--------+
//!     4 KiB     64 KiB each, memory blocks compressed                               1 KiB
//! ```
//!
//! The file is written from front to back and valid only once its footer is written.
//! `docs/format.md` in the repository describes the format in words; the module that writes and
//! reads a part has a drawing of its bytes. This crate promises:
//!
//! - Every byte is covered by a checksum or must be zero. [`Image::open`] checks everything but the
//!   memory blocks; [`Image::decode_block`] checks a memory block when it is needed;
//!   [`verify_image()`] checks all of it.
//! - A damaged, truncated or hostile file gives an error that names the part: never a wrong page, a
//!   panic, a hang, or more memory than its own size justifies.
//! - [`ImageWriter`] leaves the whole image at the target path, or nothing new at all.
//!
//!
//! An image may be sealed: encrypted and authenticated with a key of its own (`seal`). It is read
//! like any other as soon as the key ring of the process has the key, or a source of it ([`KeyRing`]).
//!
//! An image may build on another one and hold only what differs from it. The files of such a chain
//! are opened and read as one image; [`merge_chain()`] and [`rebase_image()`] make one file of
//! several.
//!
//! [`LocalityBlockPacker`] is pure: memory blocks in, locality blocks out.

#![forbid(unsafe_code)]

mod arrange;
mod auxiliary;
mod bitmap;
mod blocks;
mod budget;
mod bytes;
mod chain;
mod codec;
mod compare;
mod compress;
mod decode;
mod error;
mod footer;
mod geometry;
mod header;
mod index;
mod index_builder;
mod keys;
mod locality;
mod object;
mod outline;
mod partial;
mod placement;
mod reader;
mod rebase;
mod reorder;
mod runs;
mod seal;
mod sealed_copy;
mod sealing;
mod sections;
mod source;
mod steps;
mod verify;
mod writer;

pub use auxiliary::{AUX_BLOCKS_MAX, AuxInfo, AuxPiece};
pub use blocks::ReadOrder;
pub use chain::CHAIN_MAX;
pub use codec::{Codec, CodecError, StoredAs, ZLIB_LEVEL_DEFAULT, ZSTD_LEVEL_DEFAULT};
pub use compare::{PageMismatch, compare_with_reference};
pub use compress::{CompressedBlock, PackedBlock, block_checksum, compress_block};
pub use decode::DecodeError;
pub use error::{BlockError, ImageError, ImageFlaw};
pub use firn_cache::fetch_count;
pub use footer::{FOOTER_BYTES, JSON_BYTES_MAX, JSON_VALUES_MAX, SECTION_BYTES_MAX};
pub use geometry::{
    BlockOrganization, Geometry, GeometryError, HEADER_BYTES, LOCALITY_BLOCK_BYTES_DEFAULT,
    LOCALITY_BLOCK_BYTES_MAX, LOCALITY_BLOCK_BYTES_MIN, OrganizationError,
};
pub use header::{VERSION, is_unsealed_image};
pub use keys::{
    ImageKey, ImageSeal, KEY_BYTES, KeyId, KeyOpener, KeyRing, WrapMethod, WrappedKey, from_hex,
    key_ring, to_hex,
};
pub use locality::{
    BlockEntry, ENTRIES_MAX, FilledBy, LocalityBlock, LocalityBlockId, LocalityBlockPacker,
};
pub use outline::{ImageOutline, OutlineError, ParentName};
pub use partial::{PartialFile, abandon_partial, remove_partial};
pub use placement::BlockPlacement;
pub use reader::{ChainFile, Image};
pub use rebase::{merge_chain, rebase_image};
pub use reorder::{ListedWorkingSet, ReorderOptions, reorder_by_need, reorder_image};
pub use sealed_copy::{ChainPart, check_sealed_file, list_chain, unlock_chain};
pub use sections::{AuxBlock, ImageSections};
pub use verify::{PROBLEMS_MAX, VerifyProblem, VerifyReport, verify_image, verify_own_file};
pub use writer::{ImageDraft, ImageSummary, ImageWriter};
