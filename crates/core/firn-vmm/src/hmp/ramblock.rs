//! Parser of `info ramblock`: every memory block that QEMU has for the guest.
//!
//! ```text
//!                 Block Name    PSize              Offset               Used              Total
//!                        ram    4 KiB  0x0000000000000000 0x0000000120000000 0x0000000120000000
//!                                                       later versions:  ... 0x00007fd3e7fff000  rw
//! ```

use firn_types::HostVirt;

use super::parse_hex;

/// A block of guest-visible memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RamBlock {
    /// QEMU's name for it, such as `ram` or `0000:00:01.0/vga.vram`.
    pub id: String,
    /// Bytes in use. A resizable block may have room for more.
    pub used_bytes: u64,
    /// Its address in the hypervisor; QEMU 7.2 does not print it.
    pub hva: Option<HostVirt>,
}

/// Parses every block. Skips lines of an unknown form.
pub fn parse_ramblock(printed: &str) -> Vec<RamBlock> {
    printed.lines().filter_map(parse_block).collect()
}

fn parse_block(line: &str) -> Option<RamBlock> {
    let line = line.trim();
    let line = line.strip_suffix("rw").or_else(|| line.strip_suffix("ro")).unwrap_or(line);
    let (rest, numbers) = numbers_at_the_end(line.trim_end());
    let (used_bytes, hva) = match numbers[..] {
        [_offset, used, _total] => (used, None),
        [_offset, used, _total, hva] => (used, Some(HostVirt(hva)).filter(|hva| hva.0 != 0)),
        _ => return None,
    };
    let id = without_page_size(rest)?;
    (!id.is_empty()).then(|| RamBlock { id: id.to_owned(), used_bytes, hva })
}

/// Splits off the `0x` numbers at the end of the line, in their order, from the text before them.
fn numbers_at_the_end(mut line: &str) -> (&str, Vec<u64>) {
    let mut numbers = Vec::new();
    while let Some((rest, last)) = line.rsplit_once(' ') {
        let Some(number) = last.strip_prefix("0x").and_then(parse_hex) else { break };
        numbers.insert(0, number);
        line = rest.trim_end();
        if numbers.len() == 4 {
            break;
        }
    }
    (line, numbers)
}

/// `name    4 KiB` without the page size.
fn without_page_size(text: &str) -> Option<&str> {
    let (rest, _unit) = text.rsplit_once(' ')?;
    let (name, number) = rest.trim_end().rsplit_once(' ')?;
    number.parse::<u64>().ok()?;
    Some(name.trim_end())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn reads_the_columns_of_7_2() {
        let printed = "              Block Name    PSize              Offset               Used              Total\n\
                       \x20                  a b    4 KiB  0x0000000000000000 0x0000000000020000 0x0000000000200000\n";
        let block = RamBlock { id: "a b".into(), used_bytes: 0x20000, hva: None };
        assert_eq!(parse_ramblock(printed), [block]);
    }

    #[test]
    fn reads_the_address_later_versions_print() {
        let printed = "  ram    2 MiB  0x0000000000000000 0x0000000010000000 0x0000000010000000 0x00007f0000000000  rw\r\n";
        let block = RamBlock {
            id: "ram".into(),
            used_bytes: 0x1000_0000,
            hva: Some(HostVirt(0x7f00_0000_0000)),
        };
        assert_eq!(parse_ramblock(printed), [block]);
    }

    proptest! {
        #[test]
        fn any_text_is_read(text in "([ a-z0-9/@]{0,20} 4 KiB  0x[0-9a-f]{0,20} 0x[0-9a-f]{0,18} ?0?x?[0-9]{0,4}\n?){0,4}.*") {
            prop_assert!(parse_ramblock(&text).iter().all(|block| !block.id.is_empty()));
        }
    }
}
