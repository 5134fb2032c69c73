//! The page: which hosts and VMs there are, what protects what, lag and pauses of the last minutes,
//! checkpoints with their chains, and restores. It is HTML that the agent writes, a style sheet and
//! a small script; it loads nothing from elsewhere.
//!
//! ```text
//!   browser -- http://127.0.0.1:9415/ ------> the address of metrics      shows
//!   browser -- ssh -L 9415:agent.sock ------> the agent's socket          shows, acts
//!   browser -- https://host:7415/, TLS -----> the listener for peers      shows, acts
//!                 with a certificate
//!
//!   GET  /                 the page             POST /page/move       MoveVmRequest
//!   GET  /page/body        its changing part         /page/failover   FailoverVmRequest
//!   GET  /page/style.css, /page/script.js            /page/drain      DrainRequest
//! ```
//!
//! Acting is off unless the configuration has `page-actions = true`. An action needs a token that
//! only the page has, and so no other site can have a browser send one (`access`).
//!
//! | file | task |
//! |---|---|
//! | `access` | who may see the page, and act (pure) |
//! | `actions` | starts an action |
//! | `routes` | answers requests |
//! | `view` | what the page shows; collects it |
//! | `chains`, `restores` | read images and run records |
//! | `render`, `tables`, `charts`, `archive`, `text` | write HTML (pure) |

pub(crate) mod access;
mod actions;
mod archive;
mod chains;
mod charts;
mod render;
mod restores;
pub(crate) mod routes;
mod tables;
mod text;
mod view;

pub use access::PageToken;
pub use chains::ChainFile;
pub use render::{SCRIPT, STYLE, render_page};
pub use restores::RestoreSummary;
pub(crate) use view::AgentPage;
pub use view::{PageView, VmFiles};
