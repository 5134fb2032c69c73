//! What happens after a supervisor or a hypervisor has died: guards that start successors, the plan of a
//! successor, and the ways to end a VM that no supervisor manages.

pub(crate) mod force;
pub(crate) mod guard;
pub(crate) mod image_files;
pub(crate) mod recovery_plan;
pub(crate) mod recovery_run;
pub(crate) mod suggested_command;
pub(crate) mod vm_survey;
