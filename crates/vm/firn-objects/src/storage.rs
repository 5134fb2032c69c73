//! Requests to one bucket, or to one web server.
//!
//! The crate `object_store` sends them. Its requests are asynchronous, those here return when they
//! are done: several threads send several at a time. A request that fails because the store is away
//! or overloaded is repeated, after 0.2 s first and 5 s at most, until half a minute is over.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use firn_image::{ImageOutline, OutlineError};
use object_store::aws::AmazonS3;
use object_store::multipart::{MultipartStore, PartId};
use object_store::path::Path as ObjectPath;
use object_store::{
    BackoffConfig, GetOptions, GetRange, ObjectMeta, ObjectStore, ObjectStoreExt, PutPayload,
    RetryConfig,
};
use tokio::runtime::Runtime;

use crate::error::StoreError;
use crate::open;
use crate::reply::request_error;
use firn_cache::{StoreLocation, StoreScheme, store_environment};

/// Whether an upload may replace an object.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum PutRule {
    /// The store refuses that, in the same step in which it makes the object.
    Create,
    /// It may.
    Replace,
}

/// A bucket, or a web server.
pub(crate) struct ObjectStorage {
    runtime: Runtime,
    store: Arc<dyn ObjectStore>,
    /// The same store, if objects can be put there.
    uploads: Option<Arc<AmazonS3>>,
}

/// What the store knows of an object.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct ObjectFacts {
    pub(crate) size: u64,
    /// Seconds since 1970.
    pub(crate) modified: u64,
    /// Another one after each change.
    e_tag: Option<String>,
}

impl ObjectFacts {
    fn of_empty_object() -> Self {
        Self { size: 0, modified: 0, e_tag: None }
    }

    fn from_meta(meta: &ObjectMeta) -> Self {
        let modified = u64::try_from(meta.last_modified.timestamp()).unwrap_or(0);
        Self { size: meta.size, modified, e_tag: meta.e_tag.clone() }
    }
}

/// How long requests may take.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RequestLimits {
    /// How long a request that failed is repeated.
    pub(crate) repeated_for: Duration,
    /// The maximum time of one attempt.
    pub(crate) attempt_max: Duration,
}

/// Those of a command.
const COMMAND_LIMITS: RequestLimits =
    RequestLimits { repeated_for: Duration::from_secs(30), attempt_max: Duration::from_secs(120) };

/// How often, and for how long, a request is repeated.
pub(crate) fn retry_config(limits: RequestLimits) -> RetryConfig {
    RetryConfig {
        backoff: BackoffConfig {
            init_backoff: Duration::from_millis(200),
            max_backoff: Duration::from_secs(5),
            base: 2.0,
        },
        // The time is the bound.
        max_retries: 100,
        retry_timeout: limits.repeated_for,
    }
}

pub(crate) fn path_of(at: &StoreLocation) -> Result<ObjectPath, StoreError> {
    ObjectPath::parse(&at.key).map_err(|error| StoreError::Configuration {
        location: at.clone(),
        problem: error.to_string(),
    })
}

impl ObjectStorage {
    /// The store of a location. Nothing is sent yet.
    pub(crate) fn open(at: &StoreLocation, rule: PutRule) -> Result<Self, StoreError> {
        let failed = |problem: String| StoreError::Configuration { location: at.clone(), problem };
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .map_err(|error| failed(error.to_string()))?;
        let (environment, limits) = (store_environment(), COMMAND_LIMITS);
        match at.scheme {
            StoreScheme::S3 => {
                let store = open::open_s3(&at.container, rule, &environment, limits);
                let store = Arc::new(store.map_err(failed)?);
                Ok(Self { runtime, uploads: Some(Arc::clone(&store)), store })
            }
            StoreScheme::Web { has_tls } => {
                let store = open::open_web(&at.container, has_tls, &environment, limits);
                let store = store.map_err(failed)?;
                Ok(Self { runtime, uploads: None, store: Arc::new(store) })
            }
        }
    }

    /// Checks that objects can be put there.
    pub(crate) fn check_writable(&self, at: &StoreLocation) -> Result<(), StoreError> {
        self.uploads(at).map(drop)
    }

    fn uploads(&self, at: &StoreLocation) -> Result<&AmazonS3, StoreError> {
        self.uploads.as_deref().ok_or_else(|| StoreError::ReadOnly(at.clone()))
    }

    /// What the store knows of an object; `None` if there is no object. It is asked by a read of the
    /// first byte: the answer to a request for the facts alone has no reason where it is an error.
    fn find_object(&self, at: &StoreLocation) -> Result<Option<ObjectFacts>, StoreError> {
        let path = path_of(at)?;
        let options = GetOptions { range: Some(GetRange::Bounded(0..1)), ..GetOptions::default() };
        let found = self.runtime.block_on(self.store.get_opts(&path, options));
        match found.map_err(|error| request_error(at, "find it", &error)) {
            Ok(found) => Ok(Some(ObjectFacts::from_meta(&found.meta))),
            Err(StoreError::Missing { what: "object", .. }) => Ok(None),
            Err(StoreError::NoSuchRange(_)) => Ok(Some(ObjectFacts::of_empty_object())),
            Err(error) => Err(error),
        }
    }

    /// A range of an object that has not changed since these facts.
    pub(crate) fn read_range(
        &self,
        at: &StoreLocation,
        facts: &ObjectFacts,
        range: Range<u64>,
    ) -> Result<Bytes, StoreError> {
        let path = path_of(at)?;
        let options = GetOptions {
            range: Some(GetRange::Bounded(range.clone())),
            if_match: facts.e_tag.clone(),
            ..GetOptions::default()
        };
        let read = self.runtime.block_on(async {
            let found = self.store.get_opts(&path, options).await?;
            found.bytes().await
        });
        match read {
            Ok(bytes) if bytes.len() as u64 == range.end - range.start => Ok(bytes),
            Ok(bytes) => Err(StoreError::Failed {
                location: at.clone(),
                step: "read it",
                reason: format!(
                    "{} bytes came instead of {}",
                    bytes.len(),
                    range.end - range.start
                ),
                was_repeated: false,
            }),
            Err(object_store::Error::Precondition { .. }) => Err(StoreError::Replaced(at.clone())),
            Err(error) => Err(request_error(at, "read it", &error)),
        }
    }

    /// What an image in the store is, by its end; `None` if there is no such object.
    pub(crate) fn read_outline(
        &self,
        at: &StoreLocation,
    ) -> Result<Option<(ObjectFacts, ImageOutline)>, StoreError> {
        let Some(facts) = self.find_object(at)? else { return Ok(None) };
        let outline = self.read_known_outline(at, &facts)?;
        Ok(Some((facts, outline)))
    }

    /// As [`Self::read_outline`], of an object of which the store has reported these facts.
    pub(crate) fn read_known_outline(
        &self,
        at: &StoreLocation,
        facts: &ObjectFacts,
    ) -> Result<ImageOutline, StoreError> {
        let outline = ImageOutline::read(facts.size, &mut |range| {
            self.read_range(at, facts, range).map(|bytes| bytes.to_vec())
        });
        outline.map_err(|error| match error {
            OutlineError::Read(error) => error,
            OutlineError::Flaw(flaw) => StoreError::Damaged { location: at.clone(), flaw },
        })
    }

    /// A small object; `None` if there is none.
    pub(crate) fn read_small(
        &self,
        at: &StoreLocation,
        bytes_max: u64,
    ) -> Result<Option<Bytes>, StoreError> {
        let path = path_of(at)?;
        let read = self.runtime.block_on(async {
            let found = self.store.get_opts(&path, GetOptions::default()).await?;
            match found.meta.size <= bytes_max {
                true => found.bytes().await.map(Some),
                false => Ok(None),
            }
        });
        match read.map_err(|error| request_error(at, "read it", &error)) {
            Err(StoreError::Missing { what: "object", .. }) => Ok(None),
            read => read,
        }
    }

    /// The objects that are directly below a prefix, in the order of their keys.
    pub(crate) fn list_objects(
        &self,
        prefix: &StoreLocation,
    ) -> Result<Vec<(StoreLocation, ObjectFacts)>, StoreError> {
        let path = path_of(prefix)?;
        let below = Some(&path).filter(|_| !prefix.key.is_empty());
        let listed = self.runtime.block_on(self.store.list_with_delimiter(below));
        let listed = listed.map_err(|error| request_error(prefix, "list it", &error))?;
        let object = |meta: &ObjectMeta| {
            (prefix.with_key(meta.location.as_ref()), ObjectFacts::from_meta(meta))
        };
        let mut objects: Vec<_> = listed.objects.iter().map(object).collect();
        objects.sort_unstable_by(|a, b| a.0.key.cmp(&b.0.key));
        Ok(objects)
    }

    /// Puts a small object, which may replace another.
    pub(crate) fn put_small(&self, at: &StoreLocation, bytes: Bytes) -> Result<(), StoreError> {
        let (store, path) = (self.uploads(at)?, path_of(at)?);
        let put = self.runtime.block_on(store.put(&path, PutPayload::from_bytes(bytes)));
        put.map(drop).map_err(|error| request_error(at, "write it", &error))
    }

    /// Removes an object. It is no error if there is none.
    pub(crate) fn remove_object(&self, at: &StoreLocation) -> Result<(), StoreError> {
        let (store, path) = (self.uploads(at)?, path_of(at)?);
        match self.runtime.block_on(store.delete(&path)) {
            Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
            Err(error) => Err(request_error(at, "remove it", &error)),
        }
    }

    /// Begins an upload in parts, and returns its ID.
    pub(crate) fn begin_upload(&self, at: &StoreLocation) -> Result<String, StoreError> {
        let (store, path) = (self.uploads(at)?, path_of(at)?);
        let begun = self.runtime.block_on(store.create_multipart(&path));
        begun.map_err(|error| request_error(at, "begin the upload", &error))
    }

    pub(crate) fn put_part(
        &self,
        at: &StoreLocation,
        upload: &String,
        number: usize,
        bytes: Bytes,
    ) -> Result<PartId, StoreError> {
        let (store, path) = (self.uploads(at)?, path_of(at)?);
        let payload = PutPayload::from_bytes(bytes);
        let put = self.runtime.block_on(store.put_part(&path, upload, number, payload));
        put.map_err(|error| request_error(at, "upload a part of it", &error))
    }

    /// Makes an object of the parts of an upload, by the [`PutRule`].
    pub(crate) fn complete_upload(
        &self,
        at: &StoreLocation,
        upload: &String,
        parts: Vec<PartId>,
    ) -> Result<(), StoreError> {
        let (store, path) = (self.uploads(at)?, path_of(at)?);
        let done = self.runtime.block_on(store.complete_multipart(&path, upload, parts));
        done.map(drop).map_err(|error| request_error(at, "complete the upload", &error))
    }

    /// Drops the parts of an upload. It is no error if there is no such upload any more.
    pub(crate) fn abort_upload(
        &self,
        at: &StoreLocation,
        upload: &String,
    ) -> Result<(), StoreError> {
        let (store, path) = (self.uploads(at)?, path_of(at)?);
        match self.runtime.block_on(store.abort_multipart(&path, upload)) {
            Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
            Err(error) => Err(request_error(at, "abort an unfinished upload", &error)),
        }
    }
}
