//! Sizes and durations in the form that people write and read.

use std::num::NonZeroU64;
use std::ops::RangeInclusive;
use std::time::Duration;

/// The minimum limit of a bandwidth, per second.
const BANDWIDTH_MIN: u64 = 64 << 10;

/// Parses a limit of a bandwidth: a size per second.
pub fn parse_bandwidth(text: &str) -> Result<NonZeroU64, String> {
    let bytes = NonZeroU64::new(parse_bytes(text)?).filter(|bytes| bytes.get() >= BANDWIDTH_MIN);
    bytes.ok_or_else(|| "give 64K per second at least".to_owned())
}

/// Parses a size in bytes: `65536`, `64K`, `1M`, `2G` (powers of 1024; `KiB` and the like are
/// accepted too).
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let shift = match unit {
        "" | "B" => 0,
        "K" | "k" | "KiB" => 10,
        "M" | "MiB" => 20,
        "G" | "GiB" => 30,
        _ => return Err(format!("{text:?} is not a size: write 65536, 64K, 1M or 2G")),
    };
    let number: u64 =
        number.parse().map_err(|_| format!("{text:?} does not begin with a number"))?;
    number
        .checked_shl(shift)
        .filter(|bytes| bytes >> shift == number)
        .ok_or_else(|| format!("{text:?} is too large"))
}

/// Parses a duration: `500ms`, `30s` (or `30`), `5m`, `2h`.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let ms = match unit {
        "ms" => 1,
        "" | "s" => 1000,
        "m" | "min" => 60_000,
        "h" => 3_600_000,
        _ => return Err(format!("{text:?} is not a duration: write 500ms, 30s, 5m or 2h")),
    };
    let number: u64 =
        number.parse().map_err(|_| format!("{text:?} does not begin with a number"))?;
    let ms = number.checked_mul(ms).ok_or_else(|| format!("{text:?} is too long"))?;
    Ok(Duration::from_millis(ms))
}

/// Parses a number within bounds.
pub fn parse_number<T: TryFrom<u64>>(
    bounds: RangeInclusive<u64>,
) -> impl Fn(&str) -> Result<T, String> + Clone + Send + Sync + 'static {
    move |text| {
        let number = text.parse().ok().filter(|number| bounds.contains(number));
        let number = number.and_then(|number| T::try_from(number).ok());
        number.ok_or_else(|| match (*bounds.start(), *bounds.end()) {
            (0, u64::MAX) => "give a number".to_owned(),
            (least, most) => format!("give a number from {least} to {most}"),
        })
    }
}

/// Formats a size: `64 KiB`, `1.5 GiB`.
pub fn format_bytes(bytes: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut size = bytes as f64;
    let mut unit = 0;
    while size >= 1024.0 && unit + 1 < units.len() {
        size /= 1024.0;
        unit += 1;
    }
    match size.fract() == 0.0 || unit == 0 {
        true => format!("{size:.0} {}", units[unit]),
        false => format!("{size:.1} {}", units[unit]),
    }
}

/// Formats a duration: `12 s`, `5 min`, `3 h`, `2 d`.
pub fn format_seconds(seconds: u64) -> String {
    match seconds {
        0..=119 => format!("{seconds} s"),
        120..=7199 => format!("{} min", seconds / 60),
        7200..=172_799 => format!("{} h", seconds / 3600),
        _ => format!("{} d", seconds / 86_400),
    }
}

/// Formats milliseconds.
pub fn format_ms(ms: f64) -> String {
    match ms {
        ms if ms < 10.0 => format!("{ms:.2} ms"),
        ms if ms < 1000.0 => format!("{ms:.0} ms"),
        ms => format!("{:.2} s", ms / 1000.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_of_time_are_read() {
        let ms = |text| parse_duration(text).map(|it| it.as_millis());
        assert_eq!(ms("500ms"), Ok(500));
        assert_eq!(
            (ms("30"), ms("30s"), ms("5m"), ms("2h")),
            (Ok(30_000), Ok(30_000), Ok(300_000), Ok(7_200_000))
        );
        for wrong in ["", "s", "-1s", "1.5s", "3 s", "9d", "99999999999999999999h"] {
            assert!(ms(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn numbers_have_bounds() {
        let parse = parse_number::<u16>(1..=256);
        assert_eq!(parse("256"), Ok(256));
        for wrong in ["", "0", "257", "-1", "1.5", "x", "99999999999999999999"] {
            assert_eq!(parse(wrong), Err("give a number from 1 to 256".to_owned()), "{wrong}");
        }
        assert_eq!(parse_number::<u64>(0..=u64::MAX)("x"), Err("give a number".to_owned()));
    }

    #[test]
    fn sizes_are_read() {
        assert_eq!(parse_bytes("65536"), Ok(65536));
        assert_eq!(parse_bytes("64K"), Ok(65536));
        assert_eq!(parse_bytes("1MiB"), Ok(1 << 20));
        for bad in ["", "K", "64Q", "-1", "1.5G", "99999999999999G"] {
            assert!(parse_bytes(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn sizes_and_times_are_short() {
        assert_eq!(format_bytes(64 << 10), "64 KiB");
        assert_eq!(format_bytes(1_610_612_736), "1.5 GiB");
        assert_eq!(format_bytes(7), "7 B");
        assert_eq!(format_seconds(119), "119 s");
        assert_eq!(format_seconds(7200), "2 h");
        assert_eq!(format_ms(2.34159), "2.34 ms");
        assert_eq!(format_ms(1500.0), "1.50 s");
    }
}
