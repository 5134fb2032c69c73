//! Finds an image in a store, with those it builds on, and makes files of the cache for them.
//!
//! For each object there is one request for its state. The rest is read through the cache: the end of the
//! image, which has all that opening it needs unless it is long, by one request.

use std::collections::BTreeSet;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes;
use firn_cache::{StoreEnvironment, StoreLocation};
use firn_image::{CHAIN_MAX, ImageOutline, OutlineError};
use tokio::runtime::Handle;

use super::client::{StoreClient, open_store, read_meta, read_small, version_of};
use super::image_dir::{ImageObject, make_image_dir};
use super::object::{CachedObject, ReadKind};
use super::registry::ObjectRegistry;
use crate::chain::parent_file_name;
use crate::error::StoreError;
use crate::side_files::{LEARNED_BYTES_MAX, LEARNED_SUFFIX, SIGNATURE_BYTES_MAX, SIGNATURE_SUFFIX};

/// The bytes at the end of an image that are fetched at once: footer, index, working set, device
/// state. The index grows with the image: of 8 KiB of memory it has a few bytes.
const END_BYTES: Range<u64> = 512 << 10..4 << 20;

/// The share of an image that is fetched at its end, within [`END_BYTES`].
const END_SHARE: u64 = 64;

/// An image whose files are in the cache, though not yet their bytes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CachedImage {
    /// Its own file.
    pub path: PathBuf,
    /// Its objects and those it builds on, the newest first.
    pub objects: Vec<String>,
}

/// A search for an image.
pub(crate) struct ImageSearch<'a> {
    pub(crate) registry: &'a ObjectRegistry,
    pub(crate) environment: &'a StoreEnvironment,
}

impl ImageSearch<'_> {
    pub(crate) async fn find(&self, at: &StoreLocation) -> Result<CachedImage, Arc<StoreError>> {
        if at.key.is_empty() {
            return Err(StoreError::NoObjectName(at.clone()).into());
        }
        let store = open_store(at, self.environment)?;
        let signature_at = at.with_suffix(SIGNATURE_SUFFIX);
        let signature = read_small(&store, &signature_at, SIGNATURE_BYTES_MAX);
        let learned_at = at.with_suffix(LEARNED_SUFFIX);
        let learned = read_small(&store, &learned_at, LEARNED_BYTES_MAX);
        let (chain, signature, learned) =
            tokio::join!(self.find_chain(&store, at), signature, learned);
        // They only make restores faster.
        let learned = learned.ok().flatten();
        self.make_dir(at, &chain?, (signature?.as_ref(), learned.as_ref()))
    }

    fn make_dir(
        &self,
        at: &StoreLocation,
        chain: &[ImageObject],
        beside: (Option<&Bytes>, Option<&Bytes>),
    ) -> Result<CachedImage, Arc<StoreError>> {
        let cache = &self.registry.cache;
        let failed = |source| StoreError::Io { step: "use", path: cache.path().to_owned(), source };
        let directory = make_image_dir(cache, chain, beside).map_err(failed)?;
        let objects = chain.iter().map(|it| it.object.name.hash.clone()).collect();
        Ok(CachedImage { path: directory.join(at.name()), objects })
    }

    /// The objects of an image and of those it builds on, the newest first.
    async fn find_chain(
        &self,
        store: &StoreClient,
        at: &StoreLocation,
    ) -> Result<Vec<ImageObject>, Arc<StoreError>> {
        let (mut chain, mut seen) = (Vec::new(), BTreeSet::new());
        let (mut location, mut expected) = (at.clone(), None);
        loop {
            if chain.len() == CHAIN_MAX || !seen.insert(location.key.clone()) {
                return Err(StoreError::ChainTooLong(at.clone()).into());
            }
            let object = self.open_object(store, &location).await?;
            let mut outline = read_outline(&object, &location).await;
            if outline.as_ref().is_err_and(|error| matches!(**error, StoreError::Damaged { .. })) {
                // Perhaps the copy is damaged, and not the object.
                let failed = |source| StoreError::Io {
                    step: "use",
                    path: self.registry.cache.path().to_owned(),
                    source,
                };
                object.forget_all().map_err(failed)?;
                outline = read_outline(&object, &location).await;
            }
            let outline = outline?;
            if expected.is_some_and(|it| it != outline.identity) {
                let (image, parent) = (at.to_string(), location.to_string());
                return Err(StoreError::WrongParent { image, parent }.into());
            }
            chain.push(ImageObject { object, name: location.name().to_owned() });
            let Some(parent) = outline.parent else { return Ok(chain) };
            location = location.with_name(parent_file_name(&location, &parent)?);
            expected = Some(parent.identity);
        }
    }

    async fn open_object(
        &self,
        store: &StoreClient,
        at: &StoreLocation,
    ) -> Result<Arc<CachedObject>, Arc<StoreError>> {
        let meta = match read_meta(store, at).await {
            Err(StoreError::NoSuchRange(_)) => return Err(empty_object(at).into()),
            meta => meta?,
        };
        let state = (version_of(&meta), meta.size);
        let client = (Arc::clone(store), self.environment);
        Ok(self.registry.open_state(at, (&state.0, state.1), client)?)
    }
}

fn empty_object(at: &StoreLocation) -> StoreError {
    let read = &mut |_| Ok::<_, std::io::Error>(Vec::new());
    match ImageOutline::read(0, read) {
        Err(OutlineError::Flaw(flaw)) => StoreError::Damaged { location: at.clone(), flaw },
        _ => StoreError::NoSuchRange(at.clone()),
    }
}

/// What the image of an object is, by its end. Its header is fetched as well.
async fn read_outline(
    object: &Arc<CachedObject>,
    at: &StoreLocation,
) -> Result<ImageOutline, Arc<StoreError>> {
    let len = object.name.len;
    let end_bytes = (len / END_SHARE).clamp(END_BYTES.start, END_BYTES.end);
    let end = len.saturating_sub(end_bytes)..len;
    let (header, end) = tokio::join!(
        object.provide(0..len.min(1), ReadKind::Demand),
        object.provide(end, ReadKind::InOrder)
    );
    header?;
    end?;
    let (object, runtime) = (Arc::clone(object), Handle::current());
    let read = move || {
        ImageOutline::read(object.name.len, &mut |range: Range<u64>| {
            runtime.block_on(object.read_bytes(range))
        })
    };
    let outline = tokio::task::spawn_blocking(read).await;
    let outline = outline.unwrap_or_else(|_| Err(OutlineError::Read(Arc::new(lost(at)))));
    outline.map_err(|error| match error {
        OutlineError::Read(error) => error,
        OutlineError::Flaw(flaw) => StoreError::Damaged { location: at.clone(), flaw }.into(),
    })
}

fn lost(at: &StoreLocation) -> StoreError {
    let reason = "the server of the cache ends".to_owned();
    StoreError::Failed { location: at.clone(), step: "read it", reason, was_repeated: false }
}
