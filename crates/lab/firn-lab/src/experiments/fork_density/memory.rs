//! The memory of the host that guests use.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use anyhow::{Context as _, Result};
use procfs::process::{MMapPath, MemoryMap, Process};
use procfs::{Current as _, Meminfo};
use serde::Serialize;

/// The unit in which stat(2) reports how much memory a file occupies.
const STATUS_BLOCK_BYTES: u64 = 512;
/// Bytes of a MiB.
pub(super) const MIB: f64 = (1 << 20) as f64;

/// What guest RAM of some VMs uses, in MiB.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(super) struct RamUse {
    /// The sum of their proportional shares (PSS).
    pub(super) pss_mib: f64,
    /// Of it, pages that a VM has for itself because it wrote them (`Anonymous`).
    pub(super) private_mib: f64,
}

/// Where a hypervisor has guest RAM.
#[derive(Clone, Copy, Debug)]
pub(super) enum RamMapping<'a> {
    /// In mappings of files whose paths contain a word.
    File(&'a str),
    /// In an anonymous mapping of this many bytes.
    Anonymous(u64),
}

impl RamMapping<'_> {
    fn is_mapped_by(self, mapping: &MemoryMap) -> bool {
        match (self, &mapping.pathname) {
            (Self::File(word), MMapPath::Path(path)) => path.to_string_lossy().contains(word),
            (Self::File(word), MMapPath::Other(name)) => name.contains(word),
            (Self::Anonymous(bytes), MMapPath::Anonymous) => {
                mapping.address.1 - mapping.address.0 == bytes
            }
            _ => false,
        }
    }
}

impl RamUse {
    /// The sum over the hypervisors with these process numbers.
    pub(super) fn of_processes(pids: &[i32], ram: RamMapping<'_>) -> Result<Self> {
        let mut sum = Self::default();
        for &pid in pids {
            let maps = Process::new(pid)?.smaps().context("reading a hypervisor's mappings")?;
            let mappings: Vec<_> = maps.iter().filter(|it| ram.is_mapped_by(it)).collect();
            anyhow::ensure!(!mappings.is_empty(), "process {pid} has no mapping of {ram:?}");
            let bytes = |key: &str| -> u64 {
                mappings.iter().filter_map(|mapping| mapping.extension.map.get(key)).sum()
            };
            sum.pss_mib += bytes("Pss") as f64 / MIB;
            sum.private_mib += bytes("Anonymous") as f64 / MIB;
        }
        Ok(sum)
    }
}

/// The memory that the file occupies which a process maps under a path with this word, in MiB.
pub(super) fn mapped_file_mib(pid: i32, word: &str) -> Result<f64> {
    let directory = format!("/proc/{pid}/map_files");
    for entry in fs::read_dir(&directory).context(directory)? {
        let path = entry?.path();
        if fs::read_link(&path).is_ok_and(|link| link.to_string_lossy().contains(word)) {
            return file_mib(&path);
        }
    }
    anyhow::bail!("process {pid} maps no file with {word:?} in its name")
}

/// The memory or disk space that a file occupies, in MiB.
pub(super) fn file_mib(path: &Path) -> Result<f64> {
    let status = fs::metadata(path).with_context(|| path.display().to_string())?;
    Ok((status.blocks() * STATUS_BLOCK_BYTES) as f64 / MIB)
}

/// The memory that the host can still give to processes, in MiB.
pub(super) fn available_mib() -> Result<f64> {
    let available = Meminfo::current()?.mem_available.context("no MemAvailable")?;
    Ok(available as f64 / MIB)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_has_mappings_and_the_host_has_memory() {
        let me = std::process::id() as i32;
        let program = std::env::current_exe().unwrap();
        let name = program.file_name().unwrap().to_str().unwrap();
        let own = RamUse::of_processes(&[me], RamMapping::File(name)).unwrap();
        assert!(own.pss_mib > 0.0 && own.pss_mib >= own.private_mib, "{own:?}");
        let none = RamUse::of_processes(&[me], RamMapping::File("no such file"));
        assert!(none.unwrap_err().to_string().contains("no mapping"));
        assert!(available_mib().unwrap() > 1.0);
        assert!(file_mib(&program).unwrap() > 0.0);
    }
}
