//! Parser of `gpa2hva`: the address of guest-physical memory in the hypervisor's address space.

use firn_types::HostVirt;

use super::parse_hex;

/// Parses `Host virtual address for 0x100000000 (ram) is 0x7fd46bfff000`. `None` for anything else,
/// such as QEMU's `No memory is mapped at address ...`.
pub fn parse_hva(printed: &str) -> Option<HostVirt> {
    let line = printed.trim();
    let (_, address) = line.strip_prefix("Host virtual address for ")?.rsplit_once(" is ")?;
    parse_hex(address.strip_prefix("0x")?).filter(|&hva| hva != 0).map(HostVirt)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn reads_an_address() {
        let printed = "Host virtual address for 0x100000000 (my is odd) is 0x7fd46bfff000\r\n";
        assert_eq!(parse_hva(printed), Some(HostVirt(0x7fd4_6bff_f000)));
    }

    #[test]
    fn refusals_are_no_address() {
        assert_eq!(parse_hva("No memory is mapped at address 0x80000000"), None);
        assert_eq!(parse_hva("Memory at address 0xfd000000 is not RAM"), None);
        assert_eq!(parse_hva("Host virtual address for 0x0 (ram) is 0x"), None);
        assert_eq!(parse_hva("Host virtual address for 0x0 (ram) is 0x+12"), None);
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused(text in ".*") {
            let _ = parse_hva(&text);
        }
    }
}
