//! End report: the last message of a primary, which reports how the protection ended.

use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender};

use crate::protection_end::ProtectionEnd;
use crate::sender::{ConnectionEvent, SendJob};

/// How long the message may take to be sent and acknowledged. A backup that misses it learns of the
/// end by other means.
const REPORT_TIMEOUT: Duration = Duration::from_secs(2);

/// Sends the report, and waits until the backup has acknowledged it, or the connection has ended.
pub(super) fn report_end(
    jobs: &Sender<SendJob>,
    events: &Receiver<ConnectionEvent>,
    end: ProtectionEnd,
) {
    let deadline = Instant::now() + REPORT_TIMEOUT;
    tracing::info!("the backup is informed: {end}");
    if jobs.send_deadline(SendJob::ProtectionEnd(end), deadline).is_err() {
        return tracing::warn!("the sender has stopped: the backup is not informed how this ended");
    }
    while let Ok(event) = events.recv_deadline(deadline) {
        match event {
            ConnectionEvent::EndRecorded => return,
            ConnectionEvent::Lost(error) => {
                return tracing::warn!("the backup has not acknowledged how this ended: {error}");
            }
            _ => {}
        }
    }
    tracing::warn!("the backup has not acknowledged how this ended in time");
}
