//! Random parameters of one run, all derived from its seed, so that the seed repeats the run.
//!
//! ```text
//!   seed % 3         vCPUs: 1, 2, 4                          cyclic, so that a few runs cover all of them
//!   seed / 3 % 3     RAM: small, middle, split               (split: above 2.75 GiB q35 has a part of it above 4 GiB)
//!   seed / 9 % 4     the strategy
//!   dice(seed)       sizes to the page, backends, load, options of the save and the restore
//! ```
//!
//! A run with a device by which the guest gives memory back has little RAM, and other cycles:
//!
//! ```text
//!   seed / 3 % n     the device, of the n that the user names
//!   seed / 9 % 3     the strategy
//!   seed / 27 % 2    whether memory is private
//! ```

use std::fmt::Display;

use firn_guest::sha::ShaArgs;
use firn_guest::stamp::mix;
use firn_restore::RestoreMode;
use serde_json::{Value, json};

use super::memory_device::MemoryDevice;
use crate::firn::SaveArgs;
use crate::guest::QemuArgs;

/// RAM, in MiB: minimum, maximum.
const RAM_MIB: [(u64, u64); 3] = [(256, 1024), (1024, 2816), (2816, 4608)];
/// From this size on part of RAM is above the PCI hole.
const SPLIT_KIB: u64 = 2816 << 10;
/// QEMU rounds RAM up to a multiple of this.
const RAM_ALIGN_KIB: u64 = 8;
const PAGE_KIB: u64 = 4;
/// Maximum memory that writers fill: a guest under TCG takes long to fill memory.
const WRITERS_MIB_MAX: u64 = 192;
const KINDS: [&str; 3] = ["memory-backend-memfd", "memory-backend-ram", "memory-backend-shm"];
/// The only kind that can be private everywhere.
const PRIVATE_KIND: &str = "memory-backend-ram";
const STRATEGIES: [&str; 4] = ["trace", "cow", "pre-copy", "stop"];
/// RAM of a run with a memory device, in MiB: minimum, maximum.
const DEVICE_RAM_MIB: (u64, u64) = (288, 448);
/// Memory that a program of such a run allocates and frees over and over, in MiB: minimum, maximum.
const BRIEF_MIB: (u64, u64) = (8, 40);
/// The part of RAM that the guest gives back, in MiB: minimum, maximum. The rest is enough for it.
const STEP_MIB: (u64, u64) = (16, 96);
/// The strategies that save a VM that runs.
const LIVE: [&str; 3] = ["trace", "cow", "pre-copy"];

/// A random number generator, determined by a seed.
struct TrialRandom(u64);

impl TrialRandom {
    fn next_below(&mut self, end: u64) -> u64 {
        self.0 = mix(self.0);
        self.0 % end.max(1)
    }

    fn pick_one<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.next_below(from.len() as u64) as usize]
    }
}

/// The backends of RAM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum DrawnRam {
    /// `-m` alone.
    Plain(u64),
    /// `-object` backends of one kind, with their sizes in KiB; with several, each is a NUMA node.
    Backends(&'static str, Vec<u64>),
}

/// The memory device of a run, and its work.
#[derive(Clone, Copy, Debug)]
pub(super) struct DrawnDevice {
    pub(super) device: MemoryDevice,
    /// Memory that a program allocates and frees over and over, in MiB.
    pub(super) brief_mib: u64,
    /// How much the guest gives back and receives again, in MiB.
    pub(super) step_mib: u64,
    /// The time between two changes.
    pub(super) interval_ms: u64,
}

/// All parameters of one run.
#[derive(Clone, Debug)]
pub(super) struct TrialParameters {
    pub(super) seed: u64,
    pub(super) vcpus: u32,
    pub(super) ram: DrawnRam,
    /// Arguments of `firn-guest writers`.
    pub(super) writers: Vec<String>,
    /// The computation that is interrupted.
    pub(super) sha: ShaArgs,
    pub(super) disk_block_kib: u64,
    pub(super) udp: bool,
    pub(super) echo_bytes: usize,
    /// How long the load runs before the save.
    pub(super) lead_ms: u64,
    pub(super) block_pages: u8,
    pub(super) locality_kib: u32,
    pub(super) codec: &'static str,
    pub(super) throttled: bool,
    pub(super) strategy: &'static str,
    pub(super) mode: RestoreMode,
    /// Number of parents of the compared image: checkpoints that each build on the one before.
    pub(super) below: usize,
    /// The format of the disk that the guest writes to, if there is one. Without one the hypervisor
    /// pauses by itself.
    pub(super) written: Option<&'static str>,
    /// Whether the guest is started by hand, with private memory, and Firn attaches to it.
    pub(super) private: bool,
    /// Number of address spaces whose memory is copied first, with copy-on-write.
    pub(super) first_spaces: u32,
    /// The device by which the guest gives memory back during the save, if it has one.
    pub(super) device: Option<DrawnDevice>,
}

impl TrialParameters {
    pub(super) fn from_seed(seed: u64) -> Self {
        let mut dice = TrialRandom(mix(seed));
        let vcpus = [1, 2, 4][(seed % 3) as usize];
        let ram = DrawnRam::draw_ram(RAM_MIB[(seed / 3 % 3) as usize], &mut dice);
        let udp = dice.next_below(2) == 0;
        Self {
            seed,
            vcpus,
            writers: draw_writers(ram.total_kib() >> 10, &mut dice),
            ram,
            sha: ShaArgs {
                seed,
                mib: 4 + dice.next_below(5) as usize,
                rounds: 10_000 + dice.next_below(10_000),
                threads: 1 + dice.next_below(u64::from(vcpus)) as usize,
                progress_ms: 0,
            },
            disk_block_kib: dice.pick_one(&[4, 16, 64, 256]),
            udp,
            echo_bytes: 64 + dice.next_below(if udp { 1400 } else { 30_000 }) as usize,
            lead_ms: dice.next_below(1000),
            block_pages: dice.pick_one(&[1, 2, 4, 16]),
            locality_kib: dice.pick_one(&[16, 64, 256, 1024]),
            codec: dice.pick_one(&["none", "lz4", "zstd", "zlib"]),
            throttled: dice.next_below(2) == 0,
            mode: dice.pick_one(&[
                RestoreMode::Auto,
                RestoreMode::Eager,
                RestoreMode::Lazy,
                RestoreMode::Locality,
                RestoreMode::WorkingSet,
            ]),
            below: dice.pick_one(&[0, 0, 1, 3]),
            written: dice.pick_one(&[None, Some("raw"), Some("qcow2")]),
            private: dice.next_below(3) == 0,
            first_spaces: dice.pick_one(&[0, 1, 4]),
            strategy: STRATEGIES[(seed / 9 % 4) as usize],
            device: None,
        }
        .make_possible()
    }

    /// The parameters of a run with one of these devices; there is at least one.
    pub(super) fn with_device(seed: u64, devices: &[MemoryDevice]) -> Self {
        let mut dice = TrialRandom(mix(seed ^ 0xba11));
        let mut between = |(from, to): (u64, u64)| from + dice.next_below(to - from);
        let device = DrawnDevice {
            device: devices[(seed / 3) as usize % devices.len()],
            brief_mib: between(BRIEF_MIB),
            step_mib: between(STEP_MIB),
            interval_ms: 0,
        };
        let interval_ms = dice.pick_one(&[0, 1000, 4000, 10_000]);
        let drawn = Self::from_seed(seed);
        // One region: a node of its own for the device is another experiment.
        let ram = DrawnRam::draw_ram(DEVICE_RAM_MIB, &mut dice);
        let ram = match device.device {
            MemoryDevice::VirtioMem => DrawnRam::Plain(ram.total_kib()),
            _ => ram,
        };
        let writers = draw_writers(ram.total_kib() >> 12, &mut dice);
        let sha = ShaArgs { rounds: drawn.sha.rounds / 4, ..drawn.sha };
        Self {
            ram,
            writers,
            sha,
            strategy: LIVE[(seed / 9 % 3) as usize],
            private: seed / 27 % 2 == 1,
            device: Some(DrawnDevice { interval_ms, ..device }),
            ..drawn
        }
        .make_possible()
    }

    /// Makes the parameters possible: reads of private memory can't be tracked, and only
    /// copy-on-write copies address spaces first.
    fn make_possible(self) -> Self {
        match (self.private, self.strategy) {
            (true, "trace") => Self { strategy: "cow", ..self },
            (_, "cow") => self,
            _ => Self { first_spaces: 0, ..self },
        }
    }

    /// The options for `firn checkpoint`.
    pub(super) fn save_args(&self) -> SaveArgs {
        // A memory block of 16 pages needs a locality block that holds it.
        let locality_kib = self.locality_kib.max(u32::from(self.block_pages) * PAGE_KIB as u32);
        let args = SaveArgs::default()
            .with_option("--codec", self.codec)
            .with_option("--strategy", self.strategy)
            .with_option("--block-pages", self.block_pages.to_string())
            .with_option("--locality-block", format!("{locality_kib}K"));
        let args = if self.throttled { args } else { args.with_flag("--no-throttle") };
        match self.first_spaces {
            0 => args,
            spaces => args.with_option("--first-spaces", spaces.to_string()),
        }
    }

    /// The keys under which the run is counted.
    pub(super) fn figure_labels(&self) -> Vec<String> {
        let label = |what: &str, value: &dyn Display| format!("drawn.{what}.{value}");
        let kib = self.ram.total_kib();
        let split = if kib > SPLIT_KIB { "split" } else { "in_one_piece" };
        let multiple = if kib % 1024 == 0 { "whole_mib" } else { "odd" };
        vec![
            label("vcpus", &self.vcpus),
            label("ram", &split),
            label("ram", &multiple),
            label("backends", &self.ram.backend_count()),
            label("block_pages", &self.block_pages),
            label("locality_kib", &self.locality_kib),
            label("codec", &self.codec),
            label("sweep", if self.throttled { &"throttled" } else { &"unthrottled" }),
            label("strategy", &self.strategy),
            label("mode", &self.mode),
            label("below", &self.below),
            label("written", &self.written.unwrap_or("none")),
            label("first_spaces", &self.first_spaces),
            label("memory", if self.private { &"private" } else { &"shared" }),
            label("device", &self.device.map_or("none", |drawn| drawn.device.name())),
        ]
    }

    pub(super) fn to_facts(&self) -> Value {
        json!({
            "seed": self.seed, "vcpus": self.vcpus, "ram_kib": self.ram.part_sizes(),
            "backends": self.ram.backend_count(), "writers": self.writers.join(" "),
            "disk_block_kib": self.disk_block_kib, "udp": self.udp, "echo_bytes": self.echo_bytes,
            "sha_rounds": self.sha.rounds, "sha_threads": self.sha.threads,
            "block_pages": self.block_pages, "locality_kib": self.locality_kib,
            "codec": self.codec, "throttled": self.throttled, "strategy": self.strategy,
            "mode": self.mode, "below": self.below, "written": self.written, "private": self.private,
            "first_spaces": self.first_spaces,
            "device": self.device.map(|drawn| json!({ "name": drawn.device.name(),
                "brief_mib": drawn.brief_mib, "step_mib": drawn.step_mib,
                "interval_ms": drawn.interval_ms })),
        })
    }
}

/// Arguments of writers: a random share of memory, random behaviour.
fn draw_writers(ram_mib: u64, dice: &mut TrialRandom) -> Vec<String> {
    let mib = (ram_mib * (5 + dice.next_below(31)) / 100).clamp(8, WRITERS_MIB_MAX);
    let rate = dice.pick_one(&[0, 500, 5000]);
    let compresses_to = dice.pick_one(&[10, 50, 100]);
    let order = dice.pick_one(&["sequential", "random"]);
    let light = dice.pick_one(&["", " --light"]);
    let line =
        format!("--mib {mib} --rate {rate} --compresses-to {compresses_to} --order {order}{light}");
    line.split_whitespace().map(str::to_owned).collect()
}

impl DrawnRam {
    fn draw_ram((from, to): (u64, u64), dice: &mut TrialRandom) -> Self {
        let kib = (from << 10) + dice.next_below((to - from) << 10);
        let align = dice.pick_one(&[RAM_ALIGN_KIB, RAM_ALIGN_KIB, 1024]);
        let kib = kib.next_multiple_of(align);
        match dice.next_below(4) {
            0 => Self::Plain(kib),
            count => Self::Backends(dice.pick_one(&KINDS), split_ram(kib, count, dice)),
        }
    }

    fn part_sizes(&self) -> &[u64] {
        match self {
            Self::Plain(kib) => std::slice::from_ref(kib),
            Self::Backends(_, parts) => parts,
        }
    }

    pub(super) fn total_kib(&self) -> u64 {
        self.part_sizes().iter().sum()
    }

    fn backend_count(&self) -> usize {
        match self {
            Self::Plain(_) => 0,
            Self::Backends(_, parts) => parts.len(),
        }
    }

    /// Adds RAM to a guest's command line.
    pub(super) fn add_to(&self, mut args: QemuArgs, private: bool) -> QemuArgs {
        args = args.memory_kib(self.total_kib());
        let Self::Backends(kind, parts) = self else { return args };
        let (kind, share) = if private { (PRIVATE_KIND, "off") } else { (*kind, "on") };
        for (number, kib) in parts.iter().enumerate() {
            let object = format!("{kind},id=part{number},size={kib}K,share={share}");
            args = args.add_args(&["-object", &object]);
            args = match parts.len() {
                1 => args.add_args(&["-machine", "memory-backend=part0"]),
                _ => {
                    args.add_args(&["-numa", &format!("node,nodeid={number},memdev=part{number}")])
                }
            };
        }
        args
    }
}

/// Splits `kib` into `count` parts of whole pages, none of them tiny.
fn split_ram(kib: u64, count: u64, dice: &mut TrialRandom) -> Vec<u64> {
    let least = kib / (2 * count);
    let mut parts: Vec<u64> =
        (1..count).map(|_| (least + dice.next_below(least)).next_multiple_of(PAGE_KIB)).collect();
    parts.push(kib - parts.iter().sum::<u64>());
    parts
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn a_seed_repeats_its_run() {
        for seed in 0..100 {
            assert_eq!(
                TrialParameters::from_seed(seed).to_facts(),
                TrialParameters::from_seed(seed).to_facts()
            );
        }
    }

    #[test]
    fn nine_runs_have_every_number_of_vcpus_with_every_size() {
        let both = |seed| {
            let drawn = TrialParameters::from_seed(seed);
            (drawn.vcpus, RAM_MIB.iter().position(|(_, to)| drawn.ram.total_kib() <= to << 10))
        };
        assert_eq!((1..10).map(both).collect::<BTreeSet<_>>().len(), 9);
    }

    #[test]
    fn every_strategy_saves_with_and_without_a_disk_that_is_written() {
        let drawn: Vec<TrialParameters> = (0..216).map(TrialParameters::from_seed).collect();
        for strategy in STRATEGIES {
            let runs = || drawn.iter().filter(|run| run.strategy == strategy);
            assert!(runs().count() >= 30, "{strategy}");
            assert!(
                runs().any(|run| run.written.is_none()) && runs().any(|run| run.written.is_some())
            );
            assert_eq!(runs().any(|run| run.private), strategy != "trace");
        }
    }

    #[test]
    fn memory_backends_have_whole_pages_and_an_aligned_sum() {
        for seed in 0..1000 {
            let ram = TrialParameters::from_seed(seed).ram;
            assert!(
                ram.part_sizes().iter().all(|kib| kib % PAGE_KIB == 0 && *kib > 16 << 10),
                "{ram:?}"
            );
            assert_eq!(ram.total_kib() % RAM_ALIGN_KIB, 0, "{ram:?}");
            assert!((256 << 10..=4608 << 10).contains(&ram.total_kib()), "{ram:?}");
        }
    }

    #[test]
    fn each_device_works_during_each_strategy_with_both_kinds_of_memory() {
        let runs = (1..101).map(|seed| TrialParameters::with_device(seed, &MemoryDevice::ALL));
        let kinds: BTreeSet<_> = runs
            .map(|run| {
                assert!((256 << 10..=448 << 10).contains(&run.ram.total_kib()), "{:?}", run.ram);
                (run.device.unwrap().device.name(), run.strategy, run.private)
            })
            .collect();
        // Reads of private memory can't be traced.
        assert_eq!(kinds.len(), 3 * (3 + 2), "{kinds:?}");
        assert!(
            (0..100).any(|seed| {
                TrialParameters::with_device(seed, &MemoryDevice::ALL[..1]).below > 0
            })
        );
    }

    #[test]
    fn some_run_has_each_kind_of_ram() {
        let kinds: BTreeSet<_> =
            (0..100).map(|seed| TrialParameters::from_seed(seed).ram.backend_count()).collect();
        assert_eq!(kinds, BTreeSet::from([0, 1, 2, 3]));
        let odd = (0..100).any(|seed| {
            TrialParameters::from_seed(seed).ram.part_sizes().iter().any(|kib| kib % 8 == 4)
        });
        assert!(odd, "backends that end at an odd page");
    }
}
