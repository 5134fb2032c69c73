//! Times and sizes as the page shows them. Pure.

/// A size with three digits or so.
pub(super) fn format_bytes(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut value = bytes as f64 / 1024.0;
    let mut unit = 0;
    while value >= 999.5 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{} {}", format_number(value), UNITS[unit])
}

/// A number from 0 to 1000 with three digits or so.
fn format_number(value: f64) -> String {
    match value {
        value if value < 9.995 => format!("{value:.2}"),
        value if value < 99.95 => format!("{value:.1}"),
        value => format!("{value:.0}"),
    }
}

/// A short time.
pub(super) fn format_ms(ms: f64) -> String {
    match ms {
        ms if ms < 9.95 => format!("{ms:.1} ms"),
        ms if ms < 999.5 => format!("{ms:.0} ms"),
        ms if ms < 99_950.0 => format!("{:.1} s", ms / 1e3),
        ms => format_age((ms / 1e3) as u64),
    }
}

/// A long time, in the largest unit of which there are two or so.
pub(super) fn format_age(seconds: u64) -> String {
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7200 => format!("{} min", seconds / 60),
        7200..172_800 => format!("{} h", seconds / 3600),
        _ => format!("{} days", seconds / 86_400),
    }
}

/// A name for an element: letters, digits and dashes. Different names may become the same.
pub(super) fn element_id(parts: &[&str]) -> String {
    let plain = |letter: char| if letter.is_ascii_alphanumeric() { letter } else { '-' };
    parts.join("-").chars().map(plain).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_times_are_short() {
        let sizes = [0, 1023, 1024, 1536, 10 << 20, (999 << 20) + (900 << 10), 1 << 30, 5 << 40];
        let shown: Vec<String> = sizes.into_iter().map(format_bytes).collect();
        assert_eq!(
            shown,
            [
                "0 B", "1023 B", "1.00 KiB", "1.50 KiB", "10.0 MiB", "0.98 GiB", "1.00 GiB",
                "5.00 TiB"
            ]
        );
        let times = [0.04, 2.5, 9.94, 250.0, 1500.0, 99_000.0, 600_000.0];
        let shown: Vec<String> = times.into_iter().map(format_ms).collect();
        assert_eq!(shown, ["0.0 ms", "2.5 ms", "9.9 ms", "250 ms", "1.5 s", "99.0 s", "10 min"]);
        let ages = [119, 120, 7199, 7200, 172_800].map(format_age);
        assert_eq!(ages, ["119 s", "2 min", "119 min", "2 h", "2 days"]);
        assert_eq!(element_id(&["lag", "<a>", "web.1"]), "lag--a--web-1");
    }
}
