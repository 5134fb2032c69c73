//! What the supervisor stores and sends, as plain data: the journal, an image's description of its VM,
//! requests and replies, failures, names. Nothing here does anything to a VM.

pub(crate) mod checkpoint_tally;
pub(crate) mod control_protocol;
pub(crate) mod cpu;
pub(crate) mod device_records;
pub(crate) mod failure;
pub(crate) mod family;
pub(crate) mod image_ids;
pub(crate) mod journal;
pub(crate) mod meta;
pub(crate) mod monitor_address;
pub(crate) mod name;
pub(crate) mod origin;
pub(crate) mod percentiles;
pub(crate) mod process_exit;
pub(crate) mod restored_domain;
pub(crate) mod store_target;
