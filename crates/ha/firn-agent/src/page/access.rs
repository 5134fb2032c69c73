//! Who may see the page, and who may act by it. Pure.
//!
//! A browser runs scripts of other sites beside the page. Such a script can send requests to any
//! address that the browser reaches, and a name of such a site can be made to lead to a loopback
//! address (DNS rebinding). So the page is shown only under a name of this host, and an action needs
//! a token that is on the page, which no other site can read.

use std::fmt;
use std::hint::black_box;
use std::net::IpAddr;

use hyper::HeaderMap;
use hyper::header::{CONTENT_TYPE, HOST, ORIGIN};

/// The header with the token of the page.
pub(crate) const TOKEN_HEADER: &str = "x-firn-token";

/// The header by which a browser states where a request comes from.
const SITE_HEADER: &str = "sec-fetch-site";

/// Names under which commands and users address the agent's socket.
const SOCKET_NAMES: [&str; 2] = ["agent", "firn-agent"];

const TOKEN_BYTES: usize = 32;

/// Where a request came in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Entrance {
    /// At the agent's socket, which only its owner can open.
    Socket,
    /// At the address for metrics, which every user of this host can open.
    Loopback,
    /// From a client with a certificate.
    Certificate,
}

impl Entrance {
    /// Whether actions are possible there at all.
    pub(crate) fn may_act(self) -> bool {
        matches!(self, Self::Socket | Self::Certificate)
    }

    /// Whether the page may be shown under this name. A client with a certificate has checked the
    /// name of this host.
    pub(crate) fn accepts_name(self, headers: &HeaderMap) -> bool {
        let named = headers.get(HOST).and_then(|host| host.to_str().ok());
        match self {
            Self::Certificate => true,
            _ => named.is_some_and(is_local_name),
        }
    }
}

/// Whether it is a name that no other site can have, with or without a port.
fn is_local_name(host: &str) -> bool {
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => host.split(':').next().unwrap_or_default(),
    };
    let is_loopback = name.parse::<IpAddr>().is_ok_and(|address| address.is_loopback());
    is_loopback || name.eq_ignore_ascii_case("localhost") || SOCKET_NAMES.contains(&name)
}

/// Whether a browser has sent this request for another site, or may have.
pub(crate) fn is_cross_site(headers: &HeaderMap) -> bool {
    let text = |name: &str| headers.get(name).map(|value| value.to_str().unwrap_or("?"));
    let is_other_site =
        text(SITE_HEADER).is_some_and(|site| !matches!(site, "same-origin" | "none"));
    let host = text(HOST.as_str()).unwrap_or_default();
    let is_other_origin = text(ORIGIN.as_str()).is_some_and(|origin| {
        let authority = origin.split_once("://").map(|(_, authority)| authority);
        authority.is_none_or(|authority| !authority.eq_ignore_ascii_case(host))
    });
    is_other_site || is_other_origin
}

/// Whether no browser has sent this request: its scripts may not use the API of commands.
pub(crate) fn is_of_command(headers: &HeaderMap) -> bool {
    let is_of_browser = headers.contains_key(ORIGIN) || headers.contains_key(SITE_HEADER);
    !is_of_browser && Entrance::Socket.accepts_name(headers)
}

/// What an action needs, of a page that this agent has served since it began.
#[derive(Clone, PartialEq, Eq)]
pub struct PageToken(String);

impl PageToken {
    /// Makes one from random bytes.
    pub(crate) fn from_random(fill: impl FnOnce(&mut [u8]) -> bool) -> Option<Self> {
        let mut bytes = [0; TOKEN_BYTES];
        let text = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        fill(&mut bytes).then(|| Self(text(&bytes)))
    }

    /// A token for tests of the page.
    #[doc(hidden)]
    pub fn sample() -> Self {
        Self("ab".repeat(TOKEN_BYTES))
    }

    /// The token, for the page.
    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether this is the token. The time that this takes does not depend on how much is right.
    fn is_equal(&self, other: &[u8]) -> bool {
        let own = self.0.as_bytes();
        let differing = own.iter().zip(other).fold(0, |all, (a, b)| black_box(all | (a ^ b)));
        own.len() == other.len() && differing == 0
    }

    /// Why this request may not act, if it may not.
    pub(crate) fn check_action(
        &self,
        entrance: Entrance,
        headers: &HeaderMap,
    ) -> Result<(), &'static str> {
        let token = headers.get(TOKEN_HEADER).map(|value| value.as_bytes()).unwrap_or_default();
        let is_json = headers.get(CONTENT_TYPE).is_some_and(|kind| kind == "application/json");
        match () {
            () if !entrance.may_act() => {
                Err("actions are possible at the agent's socket, or with a certificate")
            }
            () if !entrance.accepts_name(headers) => Err("the page has another name here"),
            () if is_cross_site(headers) => Err("the request comes from another site"),
            () if !is_json => Err("the request is not JSON"),
            () if !self.is_equal(token) => Err("the page is older than this agent: load it again"),
            () => Ok(()),
        }
    }
}

impl fmt::Debug for PageToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PageToken(...)")
    }
}

#[cfg(test)]
mod tests {
    use hyper::header::{HeaderName, HeaderValue};

    use super::*;

    fn headers(of: &[(&'static str, &str)]) -> HeaderMap {
        let header = |(name, value): &(&'static str, &str)| {
            (HeaderName::from_static(name), HeaderValue::from_str(value).unwrap())
        };
        of.iter().map(header).collect()
    }

    fn token() -> PageToken {
        let fill = |bytes: &mut [u8]| {
            bytes.fill(0xa5);
            true
        };
        PageToken::from_random(fill).unwrap()
    }

    #[test]
    fn the_page_is_shown_under_names_of_this_host_only() {
        let local =
            ["localhost", "LocalHost:9415", "127.0.0.1:9415", "127.9.9.9", "[::1]:80", "agent"];
        let other = [
            "evil.example:9415",
            "127.0.0.1.evil.example",
            "10.0.0.1",
            "localhost.evil",
            "",
            "[::2]",
        ];
        for entrance in [Entrance::Socket, Entrance::Loopback] {
            for name in local {
                assert!(entrance.accepts_name(&headers(&[("host", name)])), "{name}");
            }
            for name in other {
                assert!(!entrance.accepts_name(&headers(&[("host", name)])), "{name}");
            }
            assert!(!entrance.accepts_name(&HeaderMap::new()));
        }
        assert!(Entrance::Certificate.accepts_name(&headers(&[("host", "host1:7415")])));
    }

    #[test]
    fn an_action_needs_the_token_of_the_page() {
        let (token, text) = (token(), "a5".repeat(TOKEN_BYTES));
        assert_eq!(token.as_str(), text);
        let mut good = headers(&[
            ("host", "localhost:9415"),
            ("origin", "http://localhost:9415"),
            ("sec-fetch-site", "same-origin"),
            ("content-type", "application/json"),
            (TOKEN_HEADER, text.as_str()),
        ]);
        assert_eq!(token.check_action(Entrance::Socket, &good), Ok(()));
        assert_eq!(token.check_action(Entrance::Certificate, &good), Ok(()));
        assert!(token.check_action(Entrance::Loopback, &good).is_err());
        let other = text.replace('5', "6");
        let wrong = [
            ("host", "evil.example"),
            ("origin", "http://evil.example"),
            ("origin", "null"),
            ("sec-fetch-site", "cross-site"),
            ("sec-fetch-site", "same-site"),
            ("content-type", "text/plain"),
            (TOKEN_HEADER, ""),
            (TOKEN_HEADER, &text[1..]),
            (TOKEN_HEADER, other.as_str()),
        ];
        for (name, value) in wrong {
            let mut changed = good.clone();
            changed.insert(name, HeaderValue::from_str(value).unwrap());
            assert!(token.check_action(Entrance::Socket, &changed).is_err(), "{name}: {value}");
        }
        good.remove(TOKEN_HEADER);
        assert!(token.check_action(Entrance::Socket, &good).is_err());
        assert!(PageToken::from_random(|_| false).is_none());
    }

    #[test]
    fn requests_of_browsers_are_recognized() {
        let local = ("host", "firn-agent");
        assert!(is_of_command(&headers(&[local])));
        assert!(!is_of_command(&headers(&[local, ("origin", "http://localhost:9415")])));
        assert!(!is_of_command(&headers(&[local, ("sec-fetch-site", "none")])));
        assert!(!is_of_command(&headers(&[("host", "evil.example:9415")])));
        assert!(!is_cross_site(&headers(&[("host", "localhost"), ("sec-fetch-site", "none")])));
    }
}
