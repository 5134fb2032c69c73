//! Every fault point: those of a save, of merging layers and of a restore, each in the order in
//! which they are passed; then those of protection, clusters, standbys and served disks.

/// The names of all fault points.
pub const POINTS: &[&str] = &[
    // The first instruction of `firn`: shows whether a program has fault points.
    "command.started",
    // A save, in the supervisor.
    "save.asked",
    "save.begin",
    "save.journaled",
    "save.attached",
    "save.registered",
    // All RAM is write-protected, and the guest runs.
    "save.protected",
    "save.rounds",
    "save.disks",
    // The record of disk layers names the new overlays.
    "save.layers-recorded",
    "save.drives-ready",
    "save.drives-cut",
    "save.stopped",
    "save.device-state",
    "save.reprotected",
    "save.resumed",
    // The cut is made. If reads are traced as well, the page-table entries are dropped.
    "save.tracing",
    "save.first-fault",
    "save.fault",
    "save.sweep",
    "save.swept",
    // Memory is unregistered, and the descriptor in the hypervisor is closed.
    "save.detached",
    "save.sections",
    "save.finished",
    // A save with `pre-copy`. First: the kernel records the guest's writes.
    "pre-copy.tracking",
    "pre-copy.drained",
    "pre-copy.round",
    "pre-copy.copied",
    // A copy of memory that was given back before counts as complete, if this fails.
    "discards.check",
    // A search for memory that was given back finds none, if this fails.
    "holes.search",
    // Waiting for the jobs that copy disks.
    "copies.begun",
    "copies.finished",
    // Merging layers of disks: the record of disk layers has the merge, the job runs, the job has
    // ended, the record has its result.
    "merge.recorded",
    "merge.begun",
    "merge.ended",
    "merge.settled",
    // `firn disk commit`, in the same order; in between the VM is paused and switched to its base.
    "disk-commit.recorded",
    "disk-commit.ready",
    "disk-commit.paused",
    "disk-commit.completed",
    "disk-commit.settled",
    // Removing an image: the record of disk layers has that, the files are removed.
    "image-rm.recorded",
    "image-rm.removed",
    // A system call in a thread of the hypervisor: its registers are set, it has returned.
    "inject.registers-set",
    "inject.called",
    // Access scans: chunk by chunk as long as the VM runs, or one scan of all memory before a
    // suspend, in which the page-table entries are dropped once.
    "scan.begun",
    "scan.visited",
    "single-scan.begun",
    "single-scan.unmapped",
    // Writing an image file.
    "image.create",
    "image.write",
    "image.index",
    "image.footer",
    "image.sync",
    "image.rename",
    // Reading one.
    "image.open",
    "image.read",
    // A restore, in the supervisor.
    "libvirt.created",
    "restore.drives",
    "restore.prefill",
    "restore.begin",
    "restore.journaled",
    "restore.mapped",
    "restore.spawned",
    // userfaultfd cannot be had, if this fails: an eager restore needs none.
    "restore.userfaultfd",
    "restore.attached",
    "restore.registered",
    // The pages that QEMU had mapped are removed from the RAM files.
    "restore.punched",
    "restore.device-state",
    "restore.resumed",
    "restore.fault",
    // Before a memory block is installed: passed once.
    "restore.install",
    // Before each attempt to install it. The host has no memory for a page, if this fails.
    "restore.copy",
    "restore.fill",
    "restore.filled",
    "restore.unregistered",
    "restore.finished",
    // The holder of a template.
    "template.sealed",
    "template.listening",
    "template.fill",
    // Protection of a VM: the kernel records the guest's writes.
    "protect.tracking",
    // A thread of the protection can't be started, if this fails.
    "protect.start-thread",
    "protect.seeded",
    // The pages to copy ahead of the pause are write-protected, and not copied yet.
    "protect.protected-ahead",
    "protect.scanned",
    "protect.copied",
    "protect.cut",
    // A planned move. In the supervisor of the primary: the VM is stopped for its final cut; the
    // backup has committed that.
    "move.paused",
    "move.committed",
    // In the agent of the primary: the backup runs the VM; the lease is given up; the record names
    // the backup.
    "move.running",
    "move.given-up",
    "move.recorded",
    // In the agent of the backup: the VM is about to run, and runs.
    "move.asked",
    "move.ran",
    // The filters of a network card that is not Firn's own: added, and removed.
    "filter.recorded",
    "filter.half-added",
    "filter.added",
    "filter.opened",
    "filter.removed",
    // Mirrors of a VM's disks, one after another: the journal has it, QEMU has its target, a job was
    // tried, the job is started with the seed; a job is ended, and its target removed.
    "mirror.recorded",
    "mirror.added",
    "mirror.tried",
    "mirror.started",
    "mirror.ended",
    "mirror.removed",
    // Frames that a protected VM sends are buffered, unless this fails.
    "net.hold",
    // Frames to a member of a cluster have their sender's marker, unless this fails.
    "net.marker",
    // A global checkpoint of a cluster.
    "cluster.record",
    // VMs are asked for their marks at the same time, unless this fails.
    "cluster.ask",
    "cluster.failover",
    // A standby, and its failover.
    "standby.listen",
    "standby.stopped",
    "standby.ready",
    "failover.loaded",
    "failover.started",
    "failover.running",
    // A disk that is served.
    "mirror.write",
    "disk.read",
    "disk.write",
    "disk.sync",
    // A change is made to the file, and is not in the change log yet.
    "disk.changed",
    // A push of an image to object storage: the upload and its record exist, a part is about to be
    // sent, all parts are there, the object is complete.
    "store.begun",
    "store.part",
    "store.complete",
    "store.completed",
    // A freeze of the guest's file systems: the journal has it, the guest is frozen; it is about to be
    // thawed, and is thawed.
    "freeze.recorded",
    "freeze.frozen",
    "freeze.thawing",
    "freeze.thawed",
    // The supervisor uploads an image that it has saved: the file is whole, the object is complete, the
    // journal has that.
    "upload.begin",
    "upload.pushed",
    "upload.recorded",
    // The server of the cache of objects: bytes have come, are about to be written, are written, are on
    // the disk; no bit is set for them yet.
    "cache.fetched",
    "cache.write",
    "cache.written",
    "cache.synced",
];
