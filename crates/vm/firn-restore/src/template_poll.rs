//! The template of a clone: a thread that notices what other processes have put into it.
//!
//! ```text
//!   holder     fills the template in the background ----.
//!   clone 1    installs what its guest requests ---------+--> template <--- polled by clones 1, 2, ...
//!   clone 2    installs what its guest requests ---------'
//! ```
//!
//! A clone needs no page that is filled in the template: until the restore is over, the first access
//! is a minor fault, which the fault handler answers without the image; later the kernel maps the
//! page itself. So the filled pages are settled here, and the background fill of a clone is off. It
//! begins when the holder has ended: from then on this clone has to load all that the template
//! lacks, for itself.

use std::time::Duration;

use firn_memory::template::TemplateWriter;

use crate::options::BackgroundFill;
use crate::shared::SharedRestore;

/// The first and the longest interval between two queries of the template.
const INTERVAL_MIN: Duration = Duration::from_millis(5);
const INTERVAL_MAX: Duration = Duration::from_millis(40);

/// Pages that are settled at once, while the lock is held.
const PAGES_MAX: u32 = 4096;

/// Follows the template until the restore is over.
pub(crate) fn follow_template(shared: &SharedRestore) {
    let (mut seen, mut interval) = (Vec::new(), INTERVAL_MIN);
    let mut is_filling = shared.options.fill != BackgroundFill::Off;
    let template = shared.faults.template();
    while !shared.is_over() {
        // What was filled before the holder ended is in the template.
        let is_orphaned = template.is_none_or(TemplateWriter::is_holder_gone);
        let new = template.map(|template| template.take_new_runs(&mut seen, PAGES_MAX));
        new.into_iter().flatten().for_each(|run| shared.record_present(run));
        if is_orphaned && !is_filling {
            tracing::warn!("the template's holder has ended: this clone loads its memory alone");
            shared.begin_own_fill();
            is_filling = true;
        }
        std::thread::sleep(interval);
        interval = (interval * 2).min(INTERVAL_MAX);
    }
}
