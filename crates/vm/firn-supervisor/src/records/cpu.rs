//! The host's processor, as far as a guest with `-cpu host` depends on it.

use serde::{Deserialize, Serialize};

/// A processor.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CpuFacts {
    /// Its model name.
    pub model: String,
    /// Its features, by the names of `/proc/cpuinfo`.
    pub flags: Vec<String>,
}

impl CpuFacts {
    /// The first processor of this host.
    pub fn of_host() -> Self {
        parse_cpuinfo(&std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default())
    }

    /// The processor that the guest sees, if it is the host's: under KVM, with `-cpu host` or
    /// `max`.
    pub(crate) fn seen_by_guest(accel: &str, args: &[String]) -> Option<Self> {
        let is_host = |pair: &[String]| {
            let model = pair[1].split(',').next().unwrap_or_default();
            matches!(&*pair[0], "-cpu" | "--cpu") && matches!(model, "host" | "max")
        };
        (accel == "kvm" && args.windows(2).any(is_host)).then(Self::of_host)
    }

    /// Features that another processor lacks.
    pub fn missing_in(&self, other: &Self) -> Vec<String> {
        self.flags.iter().filter(|flag| !other.flags.contains(flag)).cloned().collect()
    }
}

fn parse_cpuinfo(cpuinfo: &str) -> CpuFacts {
    let value = |key: &str| {
        let mut pairs = cpuinfo.lines().filter_map(|line| line.split_once(':'));
        let found = pairs.find(|(name, _)| name.trim() == key);
        found.map(|(_, value)| value.trim().to_owned()).unwrap_or_default()
    };
    let flags = value("flags").split_whitespace().map(str::to_owned).collect();
    CpuFacts { model: value("model name"), flags }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn features_that_are_missing_are_named() {
        let then = parse_cpuinfo("processor\t: 0\nmodel name\t: A\nflags\t\t: fpu avx2 sse\n");
        let now = parse_cpuinfo("processor\t: 0\nmodel name\t: B\nflags\t\t: sse fpu\n");
        assert_eq!((then.model.as_str(), then.missing_in(&now)), ("A", vec!["avx2".to_owned()]));
        assert!(now.missing_in(&then).is_empty());
    }

    #[test]
    fn only_the_hosts_own_model_depends_on_the_host() {
        let args = |cpu: &str| ["qemu", "-cpu", cpu].map(str::to_owned);
        assert!(CpuFacts::seen_by_guest("kvm", &args("host,-x2apic")).is_some());
        assert_eq!(CpuFacts::seen_by_guest("kvm", &args("qemu64")), None);
        assert_eq!(CpuFacts::seen_by_guest("tcg", &args("max")), None);
    }
}
