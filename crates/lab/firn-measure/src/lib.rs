//! Responsiveness: when is a restored VM back to normal?
//!
//! Not when it starts, and not when its last page is there, but when it no longer waits noticeably
//! for pages: Zhang et al., "Fast Restore of Checkpointed Memory using Working Set Estimation" (VEE
//! 2011), section 2.
//!
//! ```text
//!   vCPU 0   ######__##_#___#______________#______        # waits for a page, or not started yet
//!            |command given
//!   utilization of a window [t, t + w): the share of it in which vCPUs waited for no page, over all vCPUs
//!   MMU(t, w): the lowest utilization of any window that begins at t or later
//!   TTR(w, u): the earliest t with MMU(t, w) >= u
//! ```
//!
//! There are two measures: from inside, the waits of vCPUs ([`VcpuWaitingTime`]); from outside, the
//! replies of a guest that gets requests all the time ([`ReplyTimes`]), whatever program restored
//! it.
//!
//! Times are microseconds since the restore command was given.

#![forbid(unsafe_code)]

mod replies;
mod stalls;
mod ttr;

pub use replies::ReplyTimes;
pub use stalls::{StallInterval, VcpuWaitingTime};
pub use ttr::{
    CurvePoint, minimum_utilization, responsiveness_curve, time_to_responsiveness,
    utilization_curve,
};
