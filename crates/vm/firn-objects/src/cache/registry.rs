//! All objects of the cache that were used since the server was started.

use std::collections::HashMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use firn_cache::{CacheDir, ObjectName, StoreEnvironment, StoreLocation, map_path};
use sha2::{Digest as _, Sha256};

use super::client::{ObjectClient, StoreClient, open_store};
use super::object::CachedObject;
use super::room::CacheRoom;
use crate::error::StoreError;
use crate::open::find_endpoint;

/// The objects of the cache.
pub(crate) struct ObjectRegistry {
    pub(crate) cache: CacheDir,
    pub(crate) room: Arc<CacheRoom>,
    objects: Mutex<HashMap<String, Arc<CachedObject>>>,
}

/// The name of the files of an object, or of the directory of an image.
pub(crate) fn hash_parts(parts: &[&str]) -> String {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    hash.finalize().iter().take(16).map(|byte| format!("{byte:02x}")).collect()
}

impl ObjectRegistry {
    pub(crate) fn new(cache: CacheDir, room: Arc<CacheRoom>) -> Self {
        Self { cache, room, objects: Mutex::default() }
    }

    fn lock_objects(&self) -> MutexGuard<'_, HashMap<String, Arc<CachedObject>>> {
        self.objects.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn all_objects(&self) -> Vec<Arc<CachedObject>> {
        self.lock_objects().values().cloned().collect()
    }

    /// The object of a location in the state that its store has reported; it is made if it is not
    /// there.
    pub(crate) fn open_state(
        &self,
        at: &StoreLocation,
        (version, len): (&str, u64),
        (store, environment): (StoreClient, &StoreEnvironment),
    ) -> Result<Arc<CachedObject>, StoreError> {
        let endpoint = find_endpoint(environment);
        let mut name = ObjectName::new(at.to_string(), endpoint.clone(), version.to_owned(), len);
        let store_name = endpoint.unwrap_or_default();
        name.hash = hash_parts(&[&store_name, &name.location, version, &len.to_string()]);
        let data = self.cache.object(&name.hash);
        let failed = |source| StoreError::Io { step: "make", path: data.clone(), source };
        let mut objects = self.lock_objects();
        if let Some(object) = objects.get(&name.hash).filter(|_| map_path(&data).exists()) {
            let object = Arc::clone(object);
            drop(objects);
            object.client.use_environment(environment)?;
            mark_used(&data);
            return Ok(object);
        }
        let files = open_files(&data, &mut name).map_err(failed)?;
        mark_used(&data);
        let client = ObjectClient::new(at.clone(), version.to_owned(), store, environment.clone());
        let room = Arc::clone(&self.room);
        let object = Arc::new(CachedObject::new(name, client, files, room).map_err(failed)?);
        objects.insert(object.name.hash.clone(), Arc::clone(&object));
        Ok(object)
    }

    /// An object by its hash, for a process that has its file open.
    pub(crate) fn open_hash(
        &self,
        hash: &str,
        environment: &StoreEnvironment,
    ) -> Result<Arc<CachedObject>, StoreError> {
        let known = self.lock_objects().get(hash).cloned();
        if let Some(object) = known {
            // A process without credentials for this store uses those that are here.
            if find_endpoint(environment) == object.name.endpoint && !environment.is_empty() {
                object.client.use_environment(environment)?;
            }
            return Ok(object);
        }
        let data = self.cache.object(&hash.replace(['/', '.'], "_"));
        let failed = |source| StoreError::Io { step: "open", path: data.clone(), source };
        let map = File::open(map_path(&data)).map_err(failed)?;
        let name = ObjectName::read_from(&map).map_err(failed)?;
        let wrong = || failed(io::ErrorKind::InvalidData.into());
        let at: StoreLocation = name.location.parse().map_err(|_| wrong())?;
        if find_endpoint(environment) != name.endpoint {
            let problem = "the environment of the process that reads it names another store (AWS_ENDPOINT_URL)";
            return Err(StoreError::Configuration { location: at, problem: problem.to_owned() });
        }
        let store = open_store(&at, environment)?;
        let state = (name.e_tag.as_str(), name.len);
        self.open_state(&at, state, (store, environment))
    }

    /// Writes to the disk what is only in memory.
    pub(crate) fn sync(&self) {
        for object in self.all_objects() {
            if let Err(error) = object.sync() {
                tracing::warn!(%error, object = object.name.location, "the cache can't be synced");
            }
        }
        // An object that was removed has no map any more, and no process reads it.
        self.lock_objects().retain(|hash, object| {
            Arc::strong_count(object) > 1 || map_path(&self.cache.object(hash)).exists()
        });
    }
}

/// The file of an object and its map, which are made if they are not there: first the file, then the
/// map by its rename.
fn open_files(data: &Path, name: &mut ObjectName) -> io::Result<(File, File)> {
    let open = |path: &Path, creates: bool| {
        OpenOptions::new()
            .read(true)
            .write(true)
            .create(creates)
            .truncate(false)
            .mode(0o600)
            .open(path)
    };
    let map = map_path(data);
    if let (Ok(data), Ok(map)) = (open(data, false), open(&map, false))
        && let Ok(found) = ObjectName::read_from(&map)
        && (found.inode, &found.hash) == (data.metadata()?.ino(), &name.hash)
    {
        *name = found;
        return Ok((data, map));
    }
    let _ = fs::remove_file(data);
    let file = open(data, true)?;
    file.set_len(name.len)?;
    name.inode = file.metadata()?.ino();
    let new = map.with_extension("new");
    let mut written = open(&new, true)?;
    written.set_len(0)?;
    written.write_all(&name.encode()?)?;
    fs::rename(&new, &map)?;
    Ok((file, written))
}

/// Records that an object is used now.
fn mark_used(data: &Path) {
    let map = OpenOptions::new().write(true).open(map_path(data));
    let _ = map.and_then(|map| map.set_modified(SystemTime::now()));
}
