//! Experiments: one file for each, named as `firn-lab run` calls it.
//!
//! The documentation of each experiment says which table or figure it reproduces, what varies, and
//! what is held equal. All experiments use Firn as its users do, through the `firn` program or, for
//! applications, the library, except where they measure a floor or a single page fault. Ratios are
//! computed inside one run, from systems that ran alternately on the same machine.

pub mod app;
mod application;
mod cold_store;
mod cow_compile;
mod cow_downtime;
mod cow_spaces;
mod cow_writers;
mod disk_pauses;
mod epochs;
mod exactness;
mod fault_latency;
mod fork_density;
mod halite_compression;
mod halite_desktop;
mod halite_nginx;
mod halite_organization;
mod halite_pgbench;
mod halite_save;
mod incremental;
mod pauses;
mod peers_restore;
mod peers_ttr;
mod scale_busy;
mod sealed;
mod synthetic;
mod typical;
mod vm_matrix;
mod vpc_consistency;
mod vpc_downtime;
mod vpc_drain;
mod vpc_failover;
mod vpc_move;
mod vpc_overhead;
mod vpc_size;
mod vpc_solo;
mod workload;
mod ws;

use anyhow::{Result, bail};

use crate::lab::Lab;
use crate::report::Report;

/// An experiment of the lab.
#[derive(Clone, Copy)]
pub struct Experiment {
    /// Its name.
    pub name: &'static str,
    /// One line that describes it.
    pub about: &'static str,
    run: fn(&Lab) -> Result<Report>,
}

/// All experiments.
pub const ALL: &[Experiment] = &[
    Experiment {
        name: "app-micro",
        about: "application checkpointing: pages and writes per transaction, size of the area, by tracker",
        run: app::micro::run,
    },
    Experiment {
        name: "app-size",
        about: "application checkpointing: time of a commit and memory, by size and count of areas, by tracker",
        run: app::size::run,
    },
    Experiment {
        name: "app-structures",
        about: "application checkpointing: transactions on thirteen data structures, by tracker",
        run: app::structures::run,
    },
    Experiment {
        name: "cold-store",
        about: "restores from object storage, against a local disk and a pull before the restore",
        run: cold_store::run,
    },
    Experiment {
        name: "cow-compile",
        about: "Figures 3 and 4 of Sun and Blough: a guest that compiles, checkpointed at short intervals",
        run: cow_compile::run,
    },
    Experiment {
        name: "cow-downtime",
        about: "Figure 2 of Sun and Blough: the pause of an idle guest, by strategy, against QEMU's methods",
        run: cow_downtime::run,
    },
    Experiment {
        name: "cow-spaces",
        about: "faults after the cut, by how many address spaces are copied first",
        run: cow_spaces::run,
    },
    Experiment {
        name: "cow-writers",
        about: "pause and stalls of a checkpoint as RAM and the rate of writing grow",
        run: cow_writers::run,
    },
    Experiment {
        name: "disk-pauses",
        about: "the pause of a checkpoint while the guest writes to two disks, by strategy, against a bare floor",
        run: disk_pauses::run,
    },
    Experiment {
        name: "exactness",
        about: "randomized saves and restores, compared byte for byte",
        run: exactness::run,
    },
    Experiment {
        name: "fault-latency",
        about: "time from a page fault to the page, image cached, against a bare floor",
        run: fault_latency::run,
    },
    Experiment {
        name: "fork-density",
        about: "many guests from one saved VM: first replies and memory, by clones, restores and QEMU itself",
        run: fork_density::run,
    },
    Experiment {
        name: "halite-compression",
        about: "Figure 4: restore with and without compression, by how well memory compresses",
        run: halite_compression::run,
    },
    Experiment {
        name: "halite-desktop",
        about: "Figure 5: editing, browsing and a film at once; lazy, physical and locality restore",
        run: halite_desktop::run,
    },
    Experiment {
        name: "halite-nginx",
        about: "Figure 7, Table 2: a web server's first page after a boot, a lazy and a locality restore",
        run: halite_nginx::run,
    },
    Experiment {
        name: "halite-organization",
        about: "Table 1, Figures 2 and 3: random, physical and locality blocks, and the lazy baseline",
        run: halite_organization::run,
    },
    Experiment {
        name: "halite-save",
        about: "Table 3: the pause by RAM size against its floor, and the overhead of a save in a running guest",
        run: halite_save::run,
    },
    Experiment {
        name: "halite-pgbench",
        about: "Figure 6: a database in memory; lazy, physical and locality restore",
        run: halite_pgbench::run,
    },
    Experiment {
        name: "incremental",
        about: "incremental checkpoints: size and time by dirty rate, restores by depth of chain",
        run: incremental::run,
    },
    Experiment {
        name: "peers-restore",
        about: "restore by Firn and by QEMU itself, seen by a client, on three disks",
        run: peers_restore::run,
    },
    Experiment {
        name: "peers-ttr",
        about: "time to responsiveness seen by a client: Firn's modes and QEMU itself, on four disks",
        run: peers_ttr::run,
    },
    Experiment {
        name: "scale-busy",
        about: "a save and a background fill beside a guest that touches and rewrites memory, against an idle one",
        run: scale_busy::run,
    },
    Experiment {
        name: "vm-matrix",
        about: "checkpoints, restores and protection of many kinds of VMs, checked by their guests",
        run: vm_matrix::run,
    },
    Experiment {
        name: "vpc-consistency",
        about: "a bank and a token ring of several VMs under load, while hosts, agents, VMs and links fail at random",
        run: vpc_consistency::run,
    },
    Experiment {
        name: "vpc-downtime",
        about: "Figure 4 of VPC: a cluster whose hosts are lost, until all of its VMs run and answer again",
        run: vpc_downtime::run,
    },
    Experiment {
        name: "vpc-drain",
        about: "a host with six protected VMs is drained: time, waits of clients, lost replies",
        run: vpc_drain::run,
    },
    Experiment {
        name: "vpc-failover",
        about: "the time from the death of a host, an agent or a VM to the first reply of the backup",
        run: vpc_failover::run,
    },
    Experiment {
        name: "vpc-move",
        about: "planned moves of a VM to its backup and back under load: lost replies, waits of a client, pauses",
        run: vpc_move::run,
    },
    Experiment {
        name: "vpc-overhead",
        about: "Figure 5 of VPC: EP and IS in two guests that are protected together, or each alone; memory",
        run: vpc_overhead::run,
    },
    Experiment {
        name: "vpc-size",
        about: "Table II of VPC: pages of an epoch by program and interval, with and without prediction",
        run: vpc_size::run,
    },
    Experiment {
        name: "vpc-solo",
        about: "Table I of VPC: the pause of each epoch, with and without prediction, and as others do it",
        run: vpc_solo::run,
    },
    Experiment {
        name: "ws-agree",
        about: "time to responsiveness from inside and from outside, of the same restores",
        run: ws::agree::run,
    },
    Experiment {
        name: "ws-drop",
        about: "Figure 8: restores by a working set that lacks a part, or is wrong",
        run: ws::drop::run,
    },
    Experiment {
        name: "ws-estimators",
        about: "Tables 2 and 3: what tracing and access bits prefetch, avoid, and miss",
        run: ws::estimators::run,
    },
    Experiment {
        name: "ws-overhead",
        about: "Tables 4 to 6: the overhead of continuous access scans in a running guest",
        run: ws::overhead::run,
    },
    Experiment {
        name: "ws-size",
        about: "Figures 9 and 10: restores of guests that use 20 to 80 % of their memory at random",
        run: ws::size::run,
    },
    Experiment {
        name: "sealed",
        about: "sealed images against others: processor time of a save, time to responsiveness",
        run: sealed::run,
    },
    Experiment {
        name: "ws-ttr",
        about: "Figures 2, 4 to 7: time to responsiveness by mode, work and disk",
        run: ws::ttr::run,
    },
];

impl Experiment {
    /// Runs the experiment.
    pub fn run(&self, lab: &Lab) -> Result<Report> {
        (self.run)(lab)
    }
}

/// The experiments that the user names: one by its name, or `all`.
pub fn find_experiments(name: &str) -> Result<Vec<Experiment>> {
    let found: Vec<_> =
        ALL.iter().filter(|experiment| name == "all" || experiment.name == name).copied().collect();
    if found.is_empty() {
        let known: Vec<_> = ALL.iter().map(|experiment| experiment.name).collect();
        bail!("no experiment is called {name:?}; there are {} and all", known.join(", "));
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_found() {
        for experiment in ALL {
            assert_eq!(find_experiments(experiment.name).unwrap().len(), 1);
        }
        assert_eq!(find_experiments("all").unwrap().len(), ALL.len());
        assert!(find_experiments("cold-fusion").is_err());
    }
}
