//! QEMU's version number.

use std::fmt;

use serde::{Deserialize, Serialize};

/// QEMU's version, as `query-version` reports it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct QemuVersion {
    /// The number.
    pub qemu: VersionNumber,
    /// The distribution's own version; empty for a plain build.
    #[serde(default)]
    pub package: String,
}

/// The number of a QEMU release. Ordered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct VersionNumber {
    /// Such as 7.
    pub major: u32,
    /// Such as 2.
    pub minor: u32,
    /// Such as 22.
    pub micro: u32,
}

impl QemuVersion {
    /// Whether this is release `major.minor` or later.
    pub fn is_at_least(&self, major: u32, minor: u32) -> bool {
        (self.qemu.major, self.qemu.minor) >= (major, minor)
    }
}

impl fmt::Display for QemuVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let VersionNumber { major, minor, micro } = self.qemu;
        write!(f, "{major}.{minor}.{micro}")?;
        if self.package.is_empty() { Ok(()) } else { write!(f, " ({})", self.package) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_and_prints_what_qemu_says() {
        let said = r#"{"qemu": {"micro": 22, "minor": 2, "major": 7}, "package": "Debian 1:7.2"}"#;
        let version: QemuVersion = serde_json::from_str(said).unwrap();
        assert_eq!(version.to_string(), "7.2.22 (Debian 1:7.2)");
        assert!(
            version.is_at_least(7, 2) && version.is_at_least(6, 9) && !version.is_at_least(9, 1)
        );
    }
}
