//! Access scan: which pages a guest has used lately, found without a page-fault handler. It gives
//! the working set of a VM that is suspended, after which nothing runs that could be traced.
//!
//! Zhang et al. ("Fast Restore of Checkpointed Memory using Working Set Estimation", VEE 2011,
//! section 4.1.1) scan the accessed bits of the page tables in a loop, as fast as memory is
//! restored, so that one round sees what the guest uses in the time of a restore. An ordinary
//! process can't clear those bits in another one. It can have page-table entries dropped, and check
//! later which are present again. That costs the guest more than a cleared bit does, so a guest
//! that uses much of its memory is scanned more slowly than that.
//!
//! ```text
//!   one round    |-- chunk 0 --|-- chunk 1 --|-- ... --|          (64 MiB each, at the speed of a restore at most)
//!   at each      which entries are present again? those pages were used since the last round
//!                drop the entries: the next touch of each page makes a new one, inside the kernel
//! ```
//!
//! `clock` keeps the rounds; `scanner` is the thread that scans; [`watch_accesses`] is a single
//! short round.

mod clock;
mod scanner;

pub use scanner::{AccessScanner, watch_accesses};
