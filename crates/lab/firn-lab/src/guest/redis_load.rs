//! Redis load: fills a guest's Redis with values that can be checked without storing them
//! elsewhere.
//!
//! ```text
//!   key    firn:NUMBER
//!   value  "NUMBER GENERATION " and noise drawn from both, VALUE_BYTES in all
//! ```

use std::ops::Range;
use std::time::{Duration, Instant};

use firn_guest::stamp::mix;

use super::redis::{RedisClient, RedisError, encode_command};

/// Maximum number of unanswered commands: enough to hide the round trip, few enough for a small
/// guest.
const WINDOW: u64 = 64;

/// The keys and values to load.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RedisLoad {
    /// The numbers of the keys.
    pub keys: Range<u64>,
    /// Bytes of each value.
    pub value_bytes: usize,
    /// Distinguishes this load's values from another's of the same keys.
    pub generation: u64,
}

/// The result of writing or checking a load.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LoadReport {
    /// Keys written or checked.
    pub keys: u64,
    /// Keys that are gone.
    pub missing: u64,
    /// Keys with another value than they should have.
    pub wrong: u64,
    /// Descriptions of the first missing or wrong keys.
    pub problems: Vec<String>,
    /// How long it took.
    pub took: Duration,
}

impl LoadReport {
    /// Whether every key was right.
    pub fn is_right(&self) -> bool {
        self.missing == 0 && self.wrong == 0
    }
}

impl RedisLoad {
    /// `keys` keys of `value_bytes` bytes.
    pub fn new(keys: u64, value_bytes: usize) -> Self {
        Self { keys: 0..keys, value_bytes, generation: 0 }
    }

    /// The value a key must have.
    pub fn value_for(&self, key: u64) -> Vec<u8> {
        let mut value = format!("{key} {} ", self.generation).into_bytes();
        let mut state = mix(key ^ self.generation << 48);
        while value.len() < self.value_bytes {
            state = mix(state);
            value.extend_from_slice(&state.to_le_bytes());
        }
        value.truncate(self.value_bytes);
        value
    }

    /// Writes every key.
    pub fn write_all(&self, redis: &mut RedisClient) -> Result<LoadReport, RedisError> {
        let start = Instant::now();
        for window in self.key_windows() {
            let mut commands = Vec::new();
            for key in window.clone() {
                encode_command(
                    &mut commands,
                    &[b"SET", key_name(key).as_bytes(), &self.value_for(key)],
                );
            }
            redis.send_commands(&commands)?;
            for _ in window {
                redis.read_reply()?.expect_simple("OK")?;
            }
        }
        Ok(LoadReport { keys: self.key_count(), took: start.elapsed(), ..LoadReport::default() })
    }

    /// Reads every key and compares.
    pub fn verify_all(&self, redis: &mut RedisClient) -> Result<LoadReport, RedisError> {
        let start = Instant::now();
        let mut report = LoadReport { keys: self.key_count(), ..LoadReport::default() };
        for window in self.key_windows() {
            let mut commands = Vec::new();
            window
                .clone()
                .for_each(|key| encode_command(&mut commands, &[b"GET", key_name(key).as_bytes()]));
            redis.send_commands(&commands)?;
            for key in window {
                let value = redis.read_reply()?.expect_value()?;
                self.compare_key(key, value.as_deref(), &mut report);
            }
        }
        report.took = start.elapsed();
        Ok(report)
    }

    fn compare_key(&self, key: u64, value: Option<&[u8]>, report: &mut LoadReport) {
        let problem = match value {
            Some(value) if value == self.value_for(key) => return,
            Some(value) => {
                report.wrong += 1;
                let words = String::from_utf8_lossy(&value[..value.len().min(24)]).into_owned();
                format!("key {key} is {words:?}...")
            }
            None => {
                report.missing += 1;
                format!("key {key} is gone")
            }
        };
        if report.problems.len() < 8 {
            report.problems.push(problem);
        }
    }

    fn key_count(&self) -> u64 {
        self.keys.end.saturating_sub(self.keys.start)
    }

    fn key_windows(&self) -> impl Iterator<Item = Range<u64>> + use<> {
        let (first, end) = (self.keys.start, self.keys.end);
        (first..end).step_by(WINDOW as usize).map(move |at| at..(at + WINDOW).min(end))
    }
}

fn key_name(key: u64) -> String {
    format!("firn:{key}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_cover_every_key_once() {
        let load = RedisLoad { keys: 3..200, value_bytes: 10, generation: 0 };
        let keys: Vec<u64> = load.key_windows().flatten().collect();
        assert_eq!(keys, (3..200).collect::<Vec<_>>());
    }

    #[test]
    fn a_value_names_its_writer() {
        let load = RedisLoad { keys: 0..2, value_bytes: 100, generation: 3 };
        assert!(load.value_for(7).starts_with(b"7 3 "));
        assert_eq!(load.value_for(7).len(), 100);
        let mut report = LoadReport::default();
        load.compare_key(1, Some(&load.value_for(1)), &mut report);
        assert!(report.is_right());
        load.compare_key(1, Some(&load.value_for(2)), &mut report);
        load.compare_key(2, None, &mut report);
        assert_eq!((report.wrong, report.missing), (1, 1));
    }
}
