//! Parser of `info network`: network cards, each followed by its back ends.
//!
//! ```text
//!   virtio-net-pci.0: index=0,type=nic,model=virtio-net-pci,macaddr=52:54:00:12:34:15
//!    \\ net: index=0,type=dgram,fd=12 unix
//! ```

/// The MAC address of the card with this back end.
pub fn parse_card_address(text: &str, netdev: &str) -> Option<[u8; 6]> {
    let mut card = None;
    for line in text.lines() {
        match line.trim_start().strip_prefix("\\ ") {
            Some(behind) if behind.split(':').next() == Some(netdev) => return card,
            Some(_) => {}
            None => card = line.split("macaddr=").nth(1).and_then(parse_mac),
        }
    }
    None
}

fn parse_mac(words: &str) -> Option<[u8; 6]> {
    let words = words.split([',', ' ']).next()?;
    let bytes: Option<Vec<u8>> =
        words.split(':').map(|byte| u8::from_str_radix(byte, 16).ok()).collect();
    bytes?.try_into().ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TEXT: &str = "a.0: index=0,type=nic,model=e1000,macaddr=52:54:00:12:34:56\r\n \\ one: index=0,type=user\r\n\
        b.0: index=0,type=nic,model=virtio-net-pci,macaddr=52:54:00:12:34:15\r\n \\ net: index=0,type=dgram,fd=9\r\n";

    #[test]
    fn a_card_is_found_by_its_back_end() {
        assert_eq!(parse_card_address(TEXT, "net"), Some([0x52, 0x54, 0, 0x12, 0x34, 0x15]));
        assert_eq!(parse_card_address(TEXT, "one"), Some([0x52, 0x54, 0, 0x12, 0x34, 0x56]));
        assert_eq!(parse_card_address(TEXT, "ne"), None);
        assert_eq!(parse_card_address("net: index=0,type=user\n", "net"), None);
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text in "(a|\\\\ net:|macaddr=5:|,|\n){0,30}") {
            parse_card_address(&text, "net");
        }
    }
}
