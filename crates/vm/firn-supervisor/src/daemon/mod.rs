//! The supervisor process: an event loop that passes requests and events to a pure core
//! (`decisions`) and carries out what that decides.

pub(crate) mod control_server;
pub(crate) mod decisions;
pub(crate) mod event_loop;
pub(crate) mod event_sources;
pub(crate) mod status;
pub(crate) mod supervisor_process;
pub(crate) mod template_holder;
