//! Every fault point, in the order in which a save or a restore passes them.

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
    "save.armed",
    "save.rounds",
    "save.disks",
    "save.layers-noted",
    "save.drives-ready",
    "save.drives-cut",
    "save.stopped",
    "save.device-state",
    "save.reprotected",
    "save.resumed",
    "save.retraced",
    "save.first-fault",
    "save.fault",
    "save.sweep",
    "save.swept",
    "save.disarmed",
    "save.sections",
    "save.finished",
    // The same by rounds.
    "pre-copy.armed",
    "pre-copy.drained",
    "pre-copy.round",
    "pre-copy.copied",
    // Waiting for the jobs that copy disks.
    "copies.begun",
    "copies.finished",
    // Merging layers of disks.
    "merge.noted",
    "merge.begun",
    "merge.ended",
    "merge.settled",
    "commit.noted",
    "commit.ready",
    "commit.paused",
    "commit.completed",
    "commit.settled",
    // Removing an image.
    "image-rm.noted",
    "image-rm.removed",
    // A system call in a thread of the hypervisor.
    "inject.set",
    "inject.called",
    // Finding out what a guest uses: all the time, or for a moment before a suspend.
    "scan.begun",
    "scan.visited",
    "watch.begun",
    "watch.forgotten",
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
    "restore.punched",
    "restore.device-state",
    "restore.resumed",
    "restore.fault",
    "restore.install",
    // The host has no memory for a page, if this fails.
    "restore.copy",
    "restore.fill",
    "restore.filled",
    "restore.unregistered",
    "restore.finished",
    // The holder of a template.
    "template.sealed",
    "template.listening",
    "template.fill",
    // An epoch.
    "protect.armed",
    "protect.thread",
    "protect.seeded",
    "protect.ahead",
    "protect.scanned",
    "protect.copied",
    "protect.cut",
    // What a protected VM sends is held, unless this fails.
    "net.hold",
    // What comes to a member of a cluster is marked first, unless this fails.
    "net.mark",
    // A global checkpoint of a cluster.
    "cluster.record",
    // VMs are asked for their marks at the same time, unless this fails.
    "cluster.ask",
    "cluster.failover",
    // A standby's.
    "standby.listen",
    "standby.stopped",
    "standby.ready",
    "failover.loaded",
    "failover.started",
    "failover.running",
    // A disk that is served.
    "disk.read",
    "disk.write",
    "disk.sync",
    "disk.changed",
];
