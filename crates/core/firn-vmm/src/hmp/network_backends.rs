//! Parser of `info network`: the types of network back ends.

/// The name and the type of each client that is not a card; the type is such as `tap` or
/// `vhost-user`.
pub fn parse_backends(text: &str) -> Vec<(String, String)> {
    text.lines().filter_map(parse_backend).filter(|(_, kind)| kind != "nic").collect()
}

fn parse_backend(line: &str) -> Option<(String, String)> {
    let line = line.trim().trim_start_matches("\\ ");
    let (name, properties) = line.split_once(": ")?;
    let kind = properties.split(',').find_map(|property| property.strip_prefix("type="))?;
    Some((name.to_owned(), kind.trim_end().to_owned()))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn back_ends_have_names_and_types() {
        let text = "nic0: index=0,type=nic,model=e1000,macaddr=52:54:00:12:34:56\r\n \\ n0: index=0,type=user,net=10.0.2.0\r\n\
            lone: index=0,type=vhost-user\r\nhub 0\r\n \\ hub0port0: n1: index=0,type=tap,fd=4\r\n";
        let backend = |name: &str, kind: &str| (name.to_owned(), kind.to_owned());
        let expected =
            [backend("n0", "user"), backend("lone", "vhost-user"), backend("hub0port0", "tap")];
        assert_eq!(parse_backends(text), expected);
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text in "(a: |\\\\ n|type=|,|\n){0,30}") {
            parse_backends(&text);
        }
    }
}
