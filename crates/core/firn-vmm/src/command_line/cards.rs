//! Network cards whose frames pass through Firn.
//!
//! ```text
//!   -netdev firn,id=net0,uplink=/run/passt.sock        as given; or network=lan, of this host's agent
//!   -netdev dgram,id=net0,local.type=fd,local.str=7    descriptor 7: QEMU's end of a pair of sockets; Firn has the other
//! ```
//!
//! The VM's record keeps the user's option, so that a restored VM and a standby have the same card
//! and the same uplink. A network has one name on all hosts; the path of a socket is that of one
//! host.
//!
//! Source: QEMU `qapi/net.json`, `NetdevDgramOptions` (7.2 and later).

use std::fmt;
use std::path::PathBuf;

use super::arguments::{self, CommandArgument};
use super::error::CommandLineError;
use super::properties::OptionProperties;

/// The type of the back end of such a card.
const KIND: &str = "firn";
const SYNTAX_HINT: &str = "give it as -netdev firn,id=ID,uplink=PATH, with the socket that its frames go to, \
    or as -netdev firn,id=ID,network=NAME, with a network of this host's agent";

/// The connection of a card to the outside, as the command line names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CardUplink {
    /// A socket.
    Socket(PathBuf),
    /// A network for which each host's agent has a switch.
    Network(String),
}

impl fmt::Display for CardUplink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Socket(path) => path.display().fmt(f),
            Self::Network(name) => write!(f, "the network {name}"),
        }
    }
}

/// The back end of a network card in a command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CardPlan {
    /// The back end's id, by which a device names it.
    pub id: String,
    /// Its connection to the outside.
    pub uplink: CardUplink,
}

/// Finds the cards of a command line, in its order.
pub(super) fn find_cards(arguments: &[CommandArgument]) -> Result<Vec<CardPlan>, CommandLineError> {
    arguments.iter().filter_map(|argument| read_card(argument).transpose()).collect()
}

fn read_card(argument: &CommandArgument) -> Result<Option<CardPlan>, CommandLineError> {
    let Some(properties) = card_properties(argument) else { return Ok(None) };
    let given = |key| properties.get(key).filter(|value| !value.is_empty());
    let uplink = match (given("uplink"), given("network")) {
        (Some(path), None) => CardUplink::Socket(PathBuf::from(&*path)),
        (None, Some(name)) => CardUplink::Network(name.into()),
        _ => return Err(CommandLineError::refuse_option(argument, SYNTAX_HINT)),
    };
    let id = given("id").ok_or_else(|| CommandLineError::refuse_option(argument, SYNTAX_HINT))?;
    Ok(Some(CardPlan { id: id.into(), uplink }))
}

/// The properties of an option, if it is such a back end.
fn card_properties(argument: &CommandArgument) -> Option<OptionProperties> {
    if argument.name() != "netdev" {
        return None;
    }
    let properties = OptionProperties::parse_value(argument.value(), "type")?;
    (properties.get("type").as_deref() == Some(KIND)).then_some(properties)
}

/// An option that gives the VM a network card, or a back end for one, that is not Firn's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OtherCard {
    /// The id of a back end.
    pub id: Option<String>,
    /// The option, or what adds the card without one.
    pub option: String,
    /// Why QEMU does not see the frames that are sent by it.
    pub bypass: Option<&'static str>,
}

impl OtherCard {
    fn from_argument(argument: &CommandArgument) -> Self {
        let properties = OptionProperties::parse_value(argument.value(), "type");
        let id = properties.as_ref().and_then(|it| it.get("id")).map(Into::into);
        let bypass = properties.as_ref().and_then(find_bypass);
        Self { id, option: argument.to_string(), bypass }
    }
}

/// Why QEMU does not pass on the frames of a back end itself, if it does not.
fn find_bypass(properties: &OptionProperties) -> Option<&'static str> {
    let is_on = |key| matches!(properties.get(key).as_deref(), Some("on" | "yes" | "true"));
    let has = |key| properties.get(key).is_some();
    let is_vhost = matches!(properties.get("type").as_deref(), Some("vhost-user" | "vhost-vdpa"))
        || is_on("vhost")
        || is_on("vhostforce")
        || has("vhostfd")
        || has("vhostfds");
    let queues = properties.get("queues").and_then(|queues| queues.parse::<u32>().ok());
    let descriptors = properties.get("fds").is_some_and(|fds| fds.contains(':'));
    match (is_vhost, queues.is_some_and(|queues| queues > 1) || descriptors) {
        (true, _) => Some("with vhost its frames do not pass through QEMU"),
        (false, true) => Some("QEMU has no filters for a back end with several queues"),
        (false, false) => None,
    }
}

/// The options through which the VM may send frames past Firn. QEMU adds a card of its own to a
/// machine without one.
pub(super) fn find_other_cards(arguments: &[CommandArgument]) -> Vec<OtherCard> {
    let has = |name: &str| arguments.iter().any(|argument| argument.name() == name);
    if !["netdev", "nic", "net", "nodefaults"].into_iter().any(has) {
        let (id, option, bypass) = (None, "QEMU's own card".to_owned(), None);
        return vec![OtherCard { id, option, bypass }];
    }
    let is_other = |argument: &&CommandArgument| match argument.name() {
        "netdev" => card_properties(argument).is_none(),
        "nic" | "net" => argument.value() != "none",
        _ => false,
    };
    arguments.iter().filter(is_other).map(OtherCard::from_argument).collect()
}

/// The same back end over a descriptor, if this option is that of the card.
pub(super) fn card_over_descriptor(
    argument: &CommandArgument,
    card: &CardPlan,
    descriptor: i32,
) -> Option<CommandArgument> {
    let is_it = card_properties(argument)?.get("id").as_deref() == Some(&card.id);
    let mut socket = OptionProperties::default();
    socket.set("type", "dgram");
    socket.set("id", &card.id);
    socket.set("local.type", "fd");
    socket.set("local.str", &descriptor.to_string());
    is_it.then(|| CommandArgument::new("netdev", socket.to_text("type")))
}

/// Replaces the uplink of a card in a command line.
pub fn with_uplink(
    command: &[String],
    id: &str,
    uplink: &str,
) -> Result<Vec<String>, CommandLineError> {
    let (program, words) = command.split_first().ok_or(CommandLineError::Empty)?;
    let mut arguments = arguments::split_words(words);
    let card = arguments.iter_mut().find_map(|argument| {
        let properties = card_properties(argument)?;
        (properties.get("id").as_deref() == Some(id)).then_some((argument, properties))
    });
    let Some((argument, mut properties)) = card else {
        return Err(CommandLineError::NoCard { id: id.to_owned() });
    };
    properties.remove("network");
    properties.set("uplink", uplink);
    *argument = CommandArgument::new("netdev", properties.to_text("type"));
    Ok([vec![program.clone()], arguments::join_arguments(&arguments)].concat())
}
