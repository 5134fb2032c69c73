//! Copying while the guest runs, again and again, until little is left to be copied while it stands still (Clark et al.,
//! "Live Migration of Virtual Machines", NSDI 2005, section 3.2; Sun, Blough, section 4.2).
//!
//! ```text
//!   round 1     what was written since the parent, or all there is       guest runs
//!   round 2     what was written during round 1                          guest runs
//!   ...         until that is little, or no longer gets less
//!   rounds      of what is little, copied to memory and no further       guest runs
//!   the cut     what was written during the last round                   guest stands still
//! ```
//!
//! The kernel remembers the writes (`PageScan`), so nobody waits for Firn at any time but the cut. It goes on remembering
//! them afterwards, for the next checkpoint: that one's first round is what was written in between, and if that is little
//! there is no round at all before the cut. So a checkpoint that builds on the one before costs what changed.
//!
//! **Direct memory access.** A device model that hands guest memory to the kernel for a read from disk makes a page
//! writable when the read begins; what the disk brings comes later, and no page table tells. A page protected in between
//! would be copied before it is complete, and nobody would know. So where a disk is read past the page cache, every round stops the
//! VM for a moment after protecting and before copying: a hypervisor that stops lets all such requests end. Those that begin
//! later make pages writable anew, and are told; so are those of a disk that is only then plugged in. What comes from the page cache is
//! written by a processor, and told when it is.
//!
//! `rounds` decides when to cut, `tracker` is what the kernel remembers, `copy` does it.

mod copy;
mod rounds;
mod tracker;

pub(crate) use copy::{PreCopy, stores};
pub use tracker::Tracker;
