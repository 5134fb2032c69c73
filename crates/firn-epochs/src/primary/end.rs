//! The last message of a primary: how its side ended.

use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender};

use crate::primary_end::PrimaryEnd;
use crate::sender::{Event, Job};

/// How long the message may take to be sent and noted. A backup that misses it learns the end from elsewhere.
const REPORT_WAIT: Duration = Duration::from_secs(2);

/// Sends it, and waits until the backup has noted it, or the connection has ended.
pub(super) fn report(jobs: &Sender<Job>, events: &Receiver<Event>, end: PrimaryEnd) {
    let deadline = Instant::now() + REPORT_WAIT;
    tracing::info!("the backup is informed: {end}");
    if jobs.send_deadline(Job::PrimaryEnd(end), deadline).is_err() {
        return tracing::warn!("the backup takes no more: it is not informed how this ended");
    }
    while let Ok(event) = events.recv_deadline(deadline) {
        match event {
            Event::EndNoted => return,
            Event::Lost(error) => {
                return tracing::warn!("the backup has not noted how this ended: {error}");
            }
            _ => {}
        }
    }
    tracing::warn!("the backup has not noted how this ended in time");
}
