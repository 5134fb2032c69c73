//! Accelerator choice, KVM or TCG, by a trial.
//!
//! A host may have `/dev/kvm`, let it be opened, run sixteen bits of code in it, and still be
//! unable to run an ordinary guest. So [`choose_accel`] boots the small guest under `-accel kvm`
//! with the processor the lab uses, and chooses KVM if the guest boots in time. Where KVM cannot
//! work the trial mostly fails within a fraction of a second; the process remembers the result for
//! its lifetime.

use std::fmt;
use std::str::FromStr;
use std::sync::OnceLock;
use std::time::Duration;

use super::{GuestImage, QemuArgs, UnmanagedGuest};

/// How long the small guest may take to boot under KVM.
pub const TRIAL_TIMEOUT: Duration = Duration::from_secs(20);
/// Environment variable that chooses without a trial: `kvm` or `tcg`.
pub const VARIABLE: &str = "FIRN_ACCEL";

/// The accelerator that executes the guest's instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Accel {
    /// The processor, through the host kernel.
    Kvm,
    /// QEMU's translator.
    Tcg,
}

impl Accel {
    /// The value of QEMU's `-accel`.
    pub fn option(self) -> &'static str {
        match self {
            Self::Kvm => "kvm",
            Self::Tcg => "tcg,thread=multi",
        }
    }

    /// The value of QEMU's `-cpu`.
    pub fn cpu(self) -> &'static str {
        match self {
            Self::Kvm => "host",
            Self::Tcg => "max",
        }
    }
}

impl fmt::Display for Accel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Kvm => "kvm",
            Self::Tcg => "tcg",
        })
    }
}

impl FromStr for Accel {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "kvm" => Ok(Self::Kvm),
            "tcg" => Ok(Self::Tcg),
            _ => Err(format!("an accelerator is kvm or tcg, not {text}")),
        }
    }
}

/// The chosen accelerator and the reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AccelChoice {
    /// The accelerator to use.
    pub accel: Accel,
    /// One line that explains it to the user.
    pub why: String,
}

/// Chooses once per process.
pub fn choose_accel() -> &'static AccelChoice {
    static DECISION: OnceLock<AccelChoice> = OnceLock::new();
    DECISION.get_or_init(|| from_environment().unwrap_or_else(from_trial))
}

fn from_environment() -> Option<AccelChoice> {
    let accel = std::env::var(VARIABLE).ok()?.parse().ok()?;
    Some(AccelChoice { accel, why: format!("{VARIABLE} is set") })
}

fn from_trial() -> AccelChoice {
    if !std::path::Path::new("/dev/kvm").exists() {
        return tcg_because("this host has no /dev/kvm".to_owned());
    }
    match try_kvm() {
        Ok(took) => AccelChoice {
            accel: Accel::Kvm,
            why: format!("a guest booted under KVM in {:.1} s", took.as_secs_f64()),
        },
        Err(problem) => tcg_because(format!("KVM cannot run a guest here: {problem}")),
    }
}

fn tcg_because(why: String) -> AccelChoice {
    AccelChoice { accel: Accel::Tcg, why }
}

/// Boots the small guest under KVM until it is ready.
fn try_kvm() -> Result<Duration, String> {
    let image = GuestImage::small().map_err(|error| error.to_string())?;
    let args = QemuArgs::new(&image, Accel::Kvm).memory_mib(256).vcpus(1);
    let mut machine = UnmanagedGuest::start(args).map_err(|error| error.to_string())?;
    machine.wait_ready(TRIAL_TIMEOUT).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_it_writes() {
        for accel in [Accel::Kvm, Accel::Tcg] {
            assert_eq!(accel.to_string().parse(), Ok(accel));
        }
        assert!("hax".parse::<Accel>().is_err());
    }
}
