//! The `firn` command, used as a user would.
//!
//! Tests that need a guest start the small one of `guests/` (built if it is not cached) under whatever accelerator
//! works here.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod agent;
mod attached_disks;
mod attribution;
mod balloon;
mod bombs;
mod calls;
mod cluster;
mod completions;
mod console;
mod damaged_image;
mod disk_layers;
mod disks;
mod doctor;
mod edges;
mod epoch_disks;
mod failover;
mod faults;
mod file_system;
mod filters;
mod forge;
mod fork;
mod guest_ends;
mod help;
mod hooks;
mod hostile_text;
mod huge_pages;
mod hypervisor_dies;
mod identity;
mod incremental;
mod input;
mod libvirt;
mod machine;
mod many_clones;
mod mirrored_disks;
mod mistakes;
mod model;
mod neighbours;
mod network;
mod network_disks;
mod object_server;
mod objects;
mod outside;
mod own_qemu;
mod parts;
mod path_table;
mod pause;
mod pool;
mod protect;
mod protected_balloon;
mod proxmox;
mod restorable;
mod save_limits;
mod sealed;
mod session;
mod storage;
mod storage_snapshots;
mod store_faults;
mod store_proxy;
mod stored_checkpoint;
mod stored_restore;
mod switch;
mod tiny_guest;
mod transparent_huge_pages;
mod traps;
mod trust;
mod two_users;
mod video_memory;
mod vm;
mod ways_out;
mod working_set;
mod writer_guest;
