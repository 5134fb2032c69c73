//! Guest workloads, to measure how much another activity slows a guest. A workload either has a
//! fixed amount of work and reports how long it took, or runs without an end and reports its
//! progress on request.

use anyhow::{Context as _, Result};
use serde::Deserialize;

use super::synthetic::{last_line, split_words};

/// vCPUs of the working guest.
pub(super) const VCPUS: u32 = 2;
/// How much computation the synthetic workload does with each page.
const WORK: u32 = 16;

/// The guest's file in which endless work writes its output.
pub(super) const OUTPUT_PATH: &str = "/tmp/work.said";

/// A kind of work in a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum GuestWorkload {
    /// The paper's: reads pages in order, with a good deal of computation for each.
    Synthetic,
    /// Reads and writes pages at random, as fast as it can.
    Writers,
    /// A long computation over a little memory.
    Sha,
    /// `redis-benchmark` in the guest: SETs and GETs.
    Redis,
}

impl GuestWorkload {
    pub(super) const ALL: [Self; 4] = [Self::Synthetic, Self::Writers, Self::Sha, Self::Redis];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Synthetic => "synthetic",
            Self::Writers => "writers",
            Self::Sha => "sha",
            Self::Redis => "redis",
        }
    }

    /// The command line for a number of units of work. The work prints when it has begun, and how
    /// long it took.
    pub(super) fn command_line(self, mib: u32, units: u64) -> Vec<String> {
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
                return timed_command(&program);
            }
            Self::Redis => {
                let program =
                    format!("redis-benchmark -q -t set,get -r 20000 -d 1000 -P 8 -n {units}");
                return timed_command(&program);
            }
        };
        split_words(&line).into_iter().map(str::to_owned).collect()
    }

    /// The command line of the same work without an end. [`Self::progress_command`] reads its
    /// progress.
    pub(super) fn endless_command(self, mib: u32) -> Vec<String> {
        let program = match self {
            Self::Synthetic | Self::Writers => {
                let endless = self.command_line(mib, 0).join(" ");
                format!("exec {}", endless.replace("--progress-ms 0", "--progress-ms 100"))
            }
            Self::Sha => format!(
                "exec firn-guest sha --mib 16 --threads {VCPUS} --rounds {} --progress-ms 100",
                u64::MAX
            ),
            Self::Redis => {
                let load = |kind| {
                    format!("redis-benchmark -q -t {kind} -r 20000 -d 1000 -P 8 -n 2000000000")
                };
                format!("{} & {} & wait", load("set"), load("get"))
            }
        };
        ["sh", "-c", &format!("rm -f {OUTPUT_PATH}; {{ {program}; }} > {OUTPUT_PATH}")]
            .map(str::to_owned)
            .into()
    }

    /// The command line that prints the progress of endless work: `progress` in units of that work,
    /// `seconds` by the guest's clock.
    pub(super) fn progress_command(self) -> Vec<String> {
        let script = match self {
            Self::Synthetic | Self::Writers | Self::Sha => format!("tail -n 1 {OUTPUT_PATH}"),
            Self::Redis => r#"
                n=$(printf 'INFO stats\r\nQUIT\r\n' | nc 127.0.0.1 6379 | tr -d '\r' |
                    sed -n 's/^total_commands_processed://p')
                echo "{\"progress\":$n,\"seconds\":$(cut -d' ' -f1 /proc/uptime)}""#
                .to_owned(),
        };
        ["sh", "-c", &script].map(str::to_owned).into()
    }

    /// Units of a trial that measures how fast the work is.
    pub(super) fn trial_units(self) -> u64 {
        match self {
            Self::Synthetic => 4_000,
            Self::Writers => 100_000,
            Self::Sha => 10_000,
            Self::Redis => 10_000,
        }
    }
}

/// A program that does not print its duration, timed by the guest's shell.
fn timed_command(program: &str) -> Vec<String> {
    let now = "$(cut -d' ' -f1 /proc/uptime)";
    let script = format!(
        r#"from={now}; echo '{{"ready":true}}'; {program} >/dev/null || exit 1; echo "{{\"from\":$from,\"until\":{now}}}""#
    );
    ["sh", "-c", &script].map(str::to_owned).into()
}

/// Progress of endless work.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
pub(super) struct WorkloadProgress {
    /// Units done since its begin.
    progress: f64,
    /// The time, by the guest's clock.
    seconds: f64,
    /// Pages with wrong content.
    #[serde(default)]
    wrong: u64,
}

impl WorkloadProgress {
    /// Parses the guest's output; `None` if there is none yet.
    pub(super) fn from_output(said: &str) -> Option<Self> {
        serde_json::from_str(said.trim_end()).ok()
    }

    /// Whether the work has found wrong memory.
    pub(super) fn is_wrong(self) -> bool {
        self.wrong > 0
    }

    /// Units per second since an earlier time.
    pub(super) fn rate_since(self, earlier: Self) -> f64 {
        (self.progress - earlier.progress) / (self.seconds - earlier.seconds)
    }
}

/// The duration of the work, from its last line of output.
pub(super) fn parse_seconds(said: &str) -> Result<f64> {
    let line = last_line(said)?;
    let took = line["seconds"].as_f64();
    let span = || Some(line["until"].as_f64()? - line["from"].as_f64()?);
    took.or_else(span).with_context(|| format!("{line} contains no time"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_kinds_of_programs_report_their_time() {
        assert_eq!(
            parse_seconds("{\"ready\":true}\n{\"done\":true,\"seconds\":2.5}\n").unwrap(),
            2.5
        );
        assert_eq!(parse_seconds("{\"from\":10.5,\"until\":12.0}\n").unwrap(), 1.5);
        assert!(parse_seconds("{\"ready\":true}\n").is_err());
    }

    #[test]
    fn a_rate_is_of_the_guests_own_time() {
        let from =
            WorkloadProgress::from_output("{\"progress\":100,\"seconds\":2.0,\"wrong\":0}\n")
                .unwrap();
        let until = WorkloadProgress::from_output("{\"progress\":400,\"seconds\":3.5}\n").unwrap();
        assert_eq!(until.rate_since(from), 200.0);
        assert_eq!(WorkloadProgress::from_output("{\"ready\":true,\"threads\":2}\n"), None);
        assert_eq!(WorkloadProgress::from_output("{\"progress\":4"), None, "still being written");
    }

    #[test]
    fn endless_work_names_its_output_file() {
        for workload in GuestWorkload::ALL {
            let endless = workload.endless_command(1024).join(" ");
            assert!(endless.ends_with(&format!("> {OUTPUT_PATH}")), "{endless}");
            assert!(!endless.contains("--progress-ms 0"), "{endless}");
        }
    }

    #[test]
    fn a_timed_program_reports_its_start_and_end() {
        let command = timed_command("true");
        let output = std::process::Command::new(&command[0]).args(&command[1..]).output().unwrap();
        let said = String::from_utf8(output.stdout).unwrap();
        assert!(said.starts_with("{\"ready\":true}\n"), "{said}");
        assert!((0.0..60.0).contains(&parse_seconds(&said).unwrap()));
    }
}
