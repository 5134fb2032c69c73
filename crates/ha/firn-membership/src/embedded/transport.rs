//! The transport that the servers and their clients use.

use crate::MembershipFuture;

/// The transport of messages to servers.
pub trait MessageTransport: Send + Sync + 'static {
    /// Sends a message to the server of that name, and returns its answer.
    /// [`crate::MembershipError::Unreachable`] means that it was not sent.
    fn call_server<'a>(&'a self, to: &'a str, message: Vec<u8>) -> MembershipFuture<'a, Vec<u8>>;
}
