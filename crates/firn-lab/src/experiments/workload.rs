//! Work of a fixed amount in a guest, which says how long it took: for what something else costs it.

use anyhow::{Context as _, Result};

use super::synthetic::{last_line, words};

/// vCPUs of the guest that works.
pub(super) const VCPUS: u32 = 2;
/// How much computation the synthetic workload does with each page.
const WORK: u32 = 16;

/// Work of a fixed amount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Workload {
    /// The paper's: reads pages in order, each with a good deal of computation.
    Synthetic,
    /// Reads and writes pages at random, flat out.
    Writers,
    /// A long computation over a little memory.
    Sha,
    /// `redis-benchmark` in the guest: SETs and GETs.
    Redis,
}

impl Workload {
    pub(super) const ALL: [Self; 4] = [Self::Synthetic, Self::Writers, Self::Sha, Self::Redis];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Synthetic => "synthetic",
            Self::Writers => "writers",
            Self::Sha => "sha",
            Self::Redis => "redis",
        }
    }

    /// The command line, for so many units of work. It says when it has begun, and how long it took.
    pub(super) fn command(self, mib: u32, units: u64) -> Vec<String> {
        let quarter = mib / 4;
        let line = match self {
            Self::Synthetic => format!(
                "firn-guest synthetic --mib {mib} --working-set-mib {quarter} --work {WORK} --count {units} \
                 --progress-ms 0"
            ),
            Self::Writers => format!(
                "firn-guest random --mib {mib} --percent 100 --write-every 1 --count {units} --progress-ms 0"
            ),
            Self::Sha => {
                let program = format!("firn-guest sha --mib 16 --threads {VCPUS} --rounds {units}");
                return timed(&program);
            }
            Self::Redis => {
                let program =
                    format!("redis-benchmark -q -t set,get -r 20000 -d 1000 -P 8 -n {units}");
                return timed(&program);
            }
        };
        words(&line).into_iter().map(str::to_owned).collect()
    }

    /// Units to find out with how fast it is.
    pub(super) fn trial(self) -> u64 {
        match self {
            Self::Synthetic => 4_000,
            Self::Writers => 100_000,
            Self::Sha => 10_000,
            Self::Redis => 10_000,
        }
    }
}

/// A program that says nothing about its time, timed by the guest's shell.
fn timed(program: &str) -> Vec<String> {
    let now = "$(cut -d' ' -f1 /proc/uptime)";
    let script = format!(
        r#"from={now}; echo '{{"ready":true}}'; {program} >/dev/null || exit 1; echo "{{\"from\":$from,\"until\":{now}}}""#
    );
    ["sh", "-c", &script].map(str::to_owned).into()
}

/// How long the work took, by its last line.
pub(super) fn seconds(said: &str) -> Result<f64> {
    let line = last_line(said)?;
    let took = line["seconds"].as_f64();
    let span = || Some(line["until"].as_f64()? - line["from"].as_f64()?);
    took.or_else(span).with_context(|| format!("{line} tells no time"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn either_kind_of_program_tells_its_time() {
        assert_eq!(seconds("{\"ready\":true}\n{\"done\":true,\"seconds\":2.5}\n").unwrap(), 2.5);
        assert_eq!(seconds("{\"from\":10.5,\"until\":12.0}\n").unwrap(), 1.5);
        assert!(seconds("{\"ready\":true}\n").is_err());
    }

    #[test]
    fn a_timed_program_says_when_it_began_and_ended() {
        let command = timed("true");
        let output = std::process::Command::new(&command[0]).args(&command[1..]).output().unwrap();
        let said = String::from_utf8(output.stdout).unwrap();
        assert!(said.starts_with("{\"ready\":true}\n"), "{said}");
        assert!((0.0..60.0).contains(&seconds(&said).unwrap()));
    }
}
