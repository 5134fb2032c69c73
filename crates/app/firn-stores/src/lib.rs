//! A plugin for QEMU's TCG: notes which words of their critical data areas the applications of a
//! guest have written.
//!
//! ```text
//!   -plugin libfirn_stores.so,window=FILE,orders=SOCKET
//!
//!   vCPU threads                                        a thread of the plugin's own
//!     each store: is its page in the filter?              supervisor: order --> areas whose stores are noted
//!     if so: notes it, or ends an epoch                                         filter: their pages
//!            and writes its report to the window
//! ```
//!
//! The notes, and the reason why they are exact, are in `firn_calls` (`StoreNotes`): this crate
//! decides nothing. The plugin checks all stores of the guest, also those of its kernel, which
//! writes into areas when an application reads files or sockets. A store to another page costs a
//! load and a test.
//!
//! The plugin never harms the guest: any failure here ends noting, and applications find that no
//! report arrives.

mod filter;
mod noter;
mod orders;
mod qemu;
