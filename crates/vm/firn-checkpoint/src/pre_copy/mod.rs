//! Pre-copy: copies memory in rounds while the guest runs, until little is left to copy in the
//! pause (Clark et al., "Live Migration of Virtual Machines", NSDI 2005, section 3.2; Sun, Blough,
//! section 4.2).
//!
//! ```text
//!   round 1     pages written since the parent, or all pages             guest runs
//!   round 2     pages written during round 1                             guest runs
//!   ...         until these are few, or no longer become fewer
//!   rounds      of few pages, copied only to memory                      guest runs
//!   the cut     pages written during the last round                      guest is paused
//! ```
//!
//! The kernel records the writes (`PageScan`), so the guest waits for Firn only at the cut. The
//! kernel continues to record them afterwards, for the next checkpoint: its first round consists of
//! the pages written in between, and if these are few there is no round at all before the cut. So a
//! checkpoint that builds on the one before costs as much as changed.
//!
//! **Direct memory access.** A device model that passes guest memory to the kernel for a read from
//! disk makes a page writable when the read begins. The data of the disk arrives later, and no page
//! table shows when. A page protected in between would be copied before it is complete, and Firn
//! would not notice. So where a disk is read past the page cache, every round pauses the VM for a
//! moment after protecting and before copying: a hypervisor that stops the VM lets all such
//! requests end. Requests that begin later make pages writable anew, and the kernel reports that;
//! so it does for a disk that is plugged in only then. Data from the page cache is written by a
//! processor, and the kernel reports it then.
//!
//! **Memory that is given back** before the cut counts as written, and is copied as zeros; after the
//! cut everything is copied. So no contents can be lost, whatever the guest gives back. In private
//! memory the kernel reports these pages, also between two checkpoints. In shared memory it does
//! not: a `HoleTracker` finds them during the save, and no tracker stays behind for the next one.
//!
//! `rounds` decides when to cut, `tracker` holds the writes that the kernel reported, `copy`
//! copies.

mod copy;
mod rounds;
mod tracker;

pub(crate) use copy::{PreCopy, is_stored_in_parent};
pub(crate) use tracker::TrackedImage;
pub use tracker::WriteTracker;
