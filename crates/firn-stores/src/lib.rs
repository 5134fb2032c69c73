//! A plugin for QEMU's TCG: notes which words of their critical data areas a guest's applications have written.
//!
//! ```text
//!   -plugin libfirn_stores.so,window=FILE,orders=SOCKET
//!
//!   vCPU threads                                        a thread of the plugin's own
//!     each store: is its page in the filter?              supervisor: order --> whose stores are noted
//!     if so: notes it, or ends an epoch                                         filter: their pages
//!            and tells it in the window
//! ```
//!
//! What is noted, and why that is exact, is in `firn_calls` (`Notes`): nothing here decides anything. All stores of the guest
//! are looked at, its kernel's too, which writes into areas where an application reads files or sockets: a load and a test for
//! those that go elsewhere.
//!
//! The guest is never harmed: whatever fails here ends noting, and applications find that nobody tells them anything.

mod filter;
mod noter;
mod orders;
mod qemu;
