//! Environments in which transactions run.

use firn_transactions::TrackerSystem;

/// The lab's host, or a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TestEnvironment {
    Native,
    /// A guest whose stores are recorded, by a plugin that makes all of it slower.
    Guest,
    /// The same guest without the plugin.
    Plain,
}

impl TestEnvironment {
    pub(super) const ALL: [Self; 3] = [Self::Native, Self::Guest, Self::Plain];

    /// The name in keys.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Native => "native",
            Self::Guest => "guest",
            Self::Plain => "plain-guest",
        }
    }

    /// The systems of interest in this environment.
    pub(super) fn systems(self) -> &'static [TrackerSystem] {
        match self {
            Self::Native => &TrackerSystem::NATIVE,
            Self::Guest => &TrackerSystem::RECORDED,
            Self::Plain => &TrackerSystem::GUEST,
        }
    }
}
