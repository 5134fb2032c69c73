//! Which pages a guest has used lately, without a page-fault handler: what there is to know of the working set of a VM
//! that is suspended, after which nothing runs that could be traced.
//!
//! Zhang et al. ("Fast Restore of Checkpointed Memory using Working Set Estimation", VEE 2011, section 4.1.1) scan the
//! accessed bits of the page tables in a loop, as fast as memory is restored, so that one round sees what the guest uses
//! in the time of a restore. An ordinary process can't clear those bits in another one. What it can do is to have
//! page-table entries dropped, and to look later which are there again. That costs the guest more than a cleared bit does, so
//! a guest that uses much of its memory is scanned more slowly than that.
//!
//! ```text
//!   one round    |-- chunk 0 --|-- chunk 1 --|-- ... --|          (64 MiB each, at the speed of a restore at most)
//!   at each      which entries are there again? those pages were used since the last round
//!                drop the entries: the next touch of each page makes a new one, inside the kernel
//! ```
//!
//! `clock` knows the rounds; `scanner` is the thread that goes them; [`watch`] is a single short one.

mod clock;
mod scanner;

pub use scanner::{Scanner, watch};
