//! Requests to the store of one object: always for the state of the object that the cache began with.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use firn_cache::{StoreEnvironment, StoreLocation, StoreScheme};
use object_store::{GetOptions, GetRange, ObjectMeta, ObjectStore, ObjectStoreExt as _};

use crate::error::StoreError;
use crate::open;
use crate::reply::request_error;
use crate::storage::{PutRule, RequestLimits, path_of};

/// What needs the bytes reports an outage after that time, and tries again. A store that accepts a request and does
/// not answer is an outage as well: 4 MiB in this time are 140 kB/s.
const READ_LIMITS: RequestLimits =
    RequestLimits { repeated_for: Duration::from_secs(4), attempt_max: Duration::from_secs(30) };

/// A client of a store.
pub(crate) type StoreClient = Arc<dyn ObjectStore>;

/// Opens the store of a location with these variables.
pub(crate) fn open_store(
    at: &StoreLocation,
    environment: &StoreEnvironment,
) -> Result<StoreClient, StoreError> {
    let failed = |problem| StoreError::Configuration { location: at.clone(), problem };
    let limits = READ_LIMITS;
    match at.scheme {
        StoreScheme::S3 => {
            let store = open::open_s3(&at.container, PutRule::Create, environment, limits);
            Ok(Arc::new(store.map_err(failed)?))
        }
        StoreScheme::Web { has_tls } => {
            let store = open::open_web(&at.container, has_tls, environment, limits);
            Ok(Arc::new(store.map_err(failed)?))
        }
    }
}

/// The state of an object, as its store names it.
pub(crate) fn version_of(meta: &ObjectMeta) -> String {
    match &meta.e_tag {
        Some(e_tag) => e_tag.clone(),
        None => format!("of {}", meta.last_modified.timestamp_micros()),
    }
}

/// The client of an object.
pub(crate) struct ObjectClient {
    location: StoreLocation,
    version: String,
    access: Mutex<StoreAccess>,
}

/// The credentials with which the object is read.
struct StoreAccess {
    store: StoreClient,
    environment: StoreEnvironment,
    /// Variables with which the store denied access. A process that still has them does not replace
    /// those of another one with which it may not.
    denied: Option<StoreEnvironment>,
}

impl ObjectClient {
    pub(crate) fn new(
        location: StoreLocation,
        version: String,
        store: StoreClient,
        environment: StoreEnvironment,
    ) -> Self {
        let access = StoreAccess { store, environment, denied: None };
        Self { location, version, access: Mutex::new(access) }
    }

    pub(crate) fn location(&self) -> &StoreLocation {
        &self.location
    }

    /// Uses these variables from now on: the credentials of before may have expired. But those that have
    /// expired do not replace others.
    pub(crate) fn use_environment(&self, environment: &StoreEnvironment) -> Result<(), StoreError> {
        let mut access = self.access();
        if access.environment != *environment && access.denied.as_ref() != Some(environment) {
            access.store = open_store(&self.location, environment)?;
            access.environment = environment.clone();
        }
        Ok(())
    }

    /// Records whether the store denied access with these variables.
    fn record_access(&self, environment: &StoreEnvironment, is_denied: bool) {
        let mut access = self.access();
        match is_denied {
            true => access.denied = Some(environment.clone()),
            false if access.denied.as_ref() == Some(environment) => access.denied = None,
            false => {}
        }
    }

    fn access(&self) -> MutexGuard<'_, StoreAccess> {
        self.access.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes of the object.
    pub(crate) async fn read_range(&self, range: Range<u64>) -> Result<Bytes, StoreError> {
        let (store, environment) = {
            let access = self.access();
            (Arc::clone(&access.store), access.environment.clone())
        };
        let read = self.read_from(&store, range).await;
        self.record_access(&environment, matches!(read, Err(StoreError::Denied { .. })));
        read
    }

    async fn read_from(&self, store: &StoreClient, range: Range<u64>) -> Result<Bytes, StoreError> {
        let path = path_of(&self.location)?;
        let has_tag = !self.version.starts_with("of ");
        let options = GetOptions {
            range: Some(GetRange::Bounded(range.clone())),
            if_match: has_tag.then(|| self.version.clone()),
            ..GetOptions::default()
        };
        let replaced = || StoreError::Replaced(self.location.clone());
        let failed = |error: &object_store::Error| match error {
            object_store::Error::Precondition { .. } => replaced(),
            error => match request_error(&self.location, "read it", error) {
                // The object had this range.
                StoreError::NoSuchRange(_) => replaced(),
                error => error,
            },
        };
        let found = store.get_opts(&path, options).await.map_err(|error| failed(&error))?;
        // Not every server knows the condition.
        if version_of(&found.meta) != self.version {
            return Err(replaced());
        }
        let bytes = found.bytes().await.map_err(|error| failed(&error))?;
        match bytes.len() as u64 == range.end - range.start {
            true => Ok(bytes),
            false => Err(StoreError::NoSuchRange(self.location.clone())),
        }
    }
}

/// A small object; `None` if there is none, or it is larger.
pub(crate) async fn read_small(
    store: &StoreClient,
    at: &StoreLocation,
    bytes_max: u64,
) -> Result<Option<Bytes>, StoreError> {
    let read = async {
        let found =
            store.get(&path_of(at)?).await.map_err(|error| request_error(at, "read it", &error))?;
        match found.meta.size <= bytes_max {
            true => {
                found.bytes().await.map(Some).map_err(|error| request_error(at, "read it", &error))
            }
            false => Ok(None),
        }
    };
    match read.await {
        Err(StoreError::Missing { what: "object", .. }) => Ok(None),
        read => read,
    }
}

/// The state of an object.
pub(crate) async fn read_meta(
    store: &StoreClient,
    at: &StoreLocation,
) -> Result<ObjectMeta, StoreError> {
    // The answer to a request for the facts alone has no reason where it is an error.
    let options = GetOptions { range: Some(GetRange::Bounded(0..1)), ..GetOptions::default() };
    let found = store.get_opts(&path_of(at)?, options).await;
    found.map(|found| found.meta).map_err(|error| request_error(at, "find it", &error))
}
