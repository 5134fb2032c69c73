//! Parser of sizes in QEMU's syntax: `1G`, `1.5G`, `512m`, `1024`, `0x40000000`.
//!
//! Source: QEMU `qemu_strtosz` (`util/cutils.c`): a number, decimal with an optional fraction or
//! hexadecimal without, then one of `B K M G T P E` in either case.

/// Number of significant digits in a fraction: more of them are less than a byte with any unit.
const FRACTION_DIGITS_MAX: usize = 18;

/// Bytes in `text`; a number without suffix counts `unit` bytes each. `None` if it is no size or
/// does not fit into 64 bits.
pub(super) fn parse_size(text: &str, unit: u64) -> Option<u64> {
    if let Some(digits) = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        return u64::from_str_radix(digits, 16).ok()?.checked_mul(unit);
    }
    let (number, unit) = match text.chars().last().and_then(suffix_bytes) {
        Some(unit) => (&text[..text.len() - 1], unit),
        None => (text, unit),
    };
    match number.split_once('.') {
        Some((whole, fraction)) => with_fraction(whole, fraction, unit),
        None => parse_digits(number)?.checked_mul(unit),
    }
}

fn suffix_bytes(char: char) -> Option<u64> {
    let power = "BKMGTPE".find(char.to_ascii_uppercase())?;
    Some(1 << (10 * power))
}

fn parse_digits(text: &str) -> Option<u64> {
    (text.bytes().all(|byte| byte.is_ascii_digit())).then(|| text.parse().ok())?
}

fn with_fraction(whole: &str, fraction: &str, unit: u64) -> Option<u64> {
    let counted = fraction.get(..FRACTION_DIGITS_MAX).unwrap_or(fraction);
    let scale = 10u128.checked_pow(counted.len() as u32)?;
    let part = u128::from(parse_digits(counted)?) * u128::from(unit) / scale;
    parse_digits(whole)?.checked_mul(unit)?.checked_add(u64::try_from(part).ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn reads_every_form() {
        for (text, bytes) in [
            ("1024", 1024 * MIB),
            ("1G", 1024 * MIB),
            ("1g", 1024 * MIB),
            ("1.5G", 1536 * MIB),
            ("0.25g", 256 * MIB),
            ("262152K", 262_152 * 1024),
            ("8192B", 8192),
            ("2T", 2 << 40),
            ("0x100", 256 * MIB),
        ] {
            assert_eq!(parse_size(text, MIB), Some(bytes), "{text}");
        }
    }

    #[test]
    fn invalid_sizes_are_refused() {
        for text in
            ["", "G", "-1G", "+1G", "1GG", "1 G", "99999999999P", "1.G5", "0x", "ten", "1.2.3"]
        {
            assert_eq!(parse_size(text, MIB), None, "{text}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused(text in ".*", unit in 1u64..1 << 40) {
            let _ = parse_size(&text, unit);
        }

        #[test]
        fn a_printed_size_is_parsed_to_the_same_number(number in 1u64..1 << 20) {
            prop_assert_eq!(parse_size(&format!("{number}M"), 1), Some(number * MIB));
        }
    }
}
