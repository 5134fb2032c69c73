//! Parser of `info network`: network cards and the back ends that they are connected to.
//!
//! ```text
//!   virtio-net-pci.0: index=0,type=nic,model=virtio-net-pci,macaddr=52:54:00:12:34:15
//!    \ net: index=0,type=tap,ifname=tap0,script=no
//!   hub 0
//!    \ hub0port0: e1000.0: index=0,type=nic,model=e1000,macaddr=52:54:00:12:34:56
//! ```
//!
//! A card at a hub is connected to a port of the hub.

/// A network card that is connected to a back end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConnectedCard {
    /// QEMU's name for the card.
    pub name: String,
    /// The name of the back end, which filters are added to.
    pub netdev: String,
    /// The type of the back end, such as `tap`.
    pub kind: String,
}

/// The cards that are connected to a back end, each back end once: a card with several queues has a
/// line for each.
pub fn parse_connected_cards(text: &str) -> Vec<ConnectedCard> {
    let (mut cards, mut above): (Vec<ConnectedCard>, Option<String>) = (Vec::new(), None);
    for line in text.lines() {
        let Some((names, kind)) = parse_client(line) else { continue };
        let is_below = line.trim_start().starts_with("\\ ");
        let found = match (is_below, kind, names.split_once(": "), above.clone()) {
            (false, "nic", None, _) => {
                above = Some(names.to_owned());
                None
            }
            (false, ..) => {
                above = None;
                None
            }
            (true, "nic", Some((port, name)), _) => Some((name.to_owned(), port, "hubport")),
            (true, kind, None, Some(name)) if kind != "nic" => Some((name, names, kind)),
            _ => None,
        };
        let Some((name, netdev, kind)) = found else { continue };
        if cards.iter().all(|card| card.netdev != netdev) {
            let (netdev, kind) = (netdev.to_owned(), kind.to_owned());
            cards.push(ConnectedCard { name, netdev, kind });
        }
    }
    cards
}

/// The names in a line, and the type behind them.
fn parse_client(line: &str) -> Option<(&str, &str)> {
    let line = line.trim().trim_start_matches("\\ ");
    let (names, properties) = line.rsplit_once(": index=")?;
    let kind = properties.split(',').find_map(|property| property.strip_prefix("type="))?;
    Some((names, kind.trim_end()))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn each_card_has_its_back_end() {
        let text = "v.0: index=0,type=nic,model=virtio-net-pci,macaddr=52:54:00:12:34:56\r\n \\ n0: index=0,type=tap,ifname=t\r\n\
            v.1: index=1,type=nic,\r\n \\ n0: index=1,type=tap,ifname=t\r\n\
            filters:\r\n  - f: type=filter-redirector,netdev=n0,queue=rx\r\n\
            alone: index=0,type=nic,model=e1000,macaddr=52:54:00:12:34:57\r\n\
            unused: index=0,type=user,net=10.0.2.0\r\n\
            hub 0\r\n \\ hub0port1: #net190: index=0,type=user,net=10.0.2.0\r\n \
            \\ hub0port0: e.0: index=0,type=nic,model=e1000,macaddr=52:54:00:12:34:58\r\n";
        let card = |name: &str, netdev: &str, kind: &str| {
            let (name, netdev, kind) = (name.to_owned(), netdev.to_owned(), kind.to_owned());
            ConnectedCard { name, netdev, kind }
        };
        let expected = [card("v.0", "n0", "tap"), card("e.0", "hub0port0", "hubport")];
        assert_eq!(parse_connected_cards(text), expected);
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text in "(a: |: index=0|\\\\ n|,type=nic|,type=tap|,|\n){0,30}") {
            parse_connected_cards(&text);
        }
    }
}
