//! A plugin for QEMU's TCG: records which words of their critical data areas the applications of a
//! guest have written.
//!
//! ```text
//!   -plugin libfirn_stores.so,window=FILE,orders=SOCKET
//!
//!   vCPU threads                                        a thread of the plugin's own
//!     each store: is its page in the filter?              supervisor: order --> areas whose stores are recorded
//!     if so: records it, or ends an epoch                                       filter: their pages
//!            and writes its report to the window
//! ```
//!
//! The recorded stores, and the reason why they are exact, are in `firn_calls` (`RecordedStores`):
//! this crate decides nothing. The plugin checks all stores of the guest, also those of its kernel,
//! which writes into areas when an application reads files or sockets. A store to another page
//! costs a load and a test.
//!
//! The plugin never harms the guest: any failure here ends recording, and applications find that no
//! report arrives.

mod filter;
mod orders;
mod qemu;
mod recorder;
