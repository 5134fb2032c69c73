//! The parts of a command line by which libvirt controls its QEMU, which a restore without libvirt
//! does not need.
//!
//! ```text
//!   -chardev socket,id=charmonitor,fd=24,...  -mon chardev=charmonitor,...    its monitor
//!   -object secret,id=masterKey0,file=...     encrypts passwords on the command line, if there are any
//!   -incoming defer                           waits for the state of a domain that Firn has restored
//!   -no-shutdown                              it ends QEMU itself when the guest has powered off
//!   -S                                        it starts the vCPUs itself
//!   -chardev socket,id=charchannel0,fd=25,... a socket that it listens on, such as the guest agent's
//! ```
//!
//! What listens on a descriptor of libvirt's is closed to the guest after a restore, as if no
//! program were connected. A card on a bridge (`-netdev tap,fd=28,...`) has another tap after a
//! restore, which is on no bridge until a user puts it there: a note says so.

use super::arguments::{self, CommandArgument};
use super::properties::OptionProperties;

/// The id of libvirt's monitor.
const MONITOR: &str = "charmonitor";
/// The id of the secret that encrypts others.
const MASTER_KEY: &str = "masterKey0";

/// The command line of a VM that Firn did not start, as a restore can use it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlainCommand {
    /// The command line; the program first.
    pub args: Vec<String>,
    /// What is different after a restore, a sentence each.
    pub notes: Vec<String>,
}

/// The command line of a domain of libvirt, as a user would write it who has no libvirt.
/// With a note for each network card that a restore connects to nothing.
pub fn without_libvirt(words: &[String]) -> PlainCommand {
    let Some((program, words)) = words.split_first() else {
        return PlainCommand { args: Vec::new(), notes: Vec::new() };
    };
    let arguments = arguments::split_words(words);
    let uses_key = |it: &CommandArgument| it.value().contains("keyid") && it.name() == "object";
    let needs_key = arguments.iter().any(uses_key);
    let mut notes = Vec::new();
    let kept = arguments.into_iter().filter(|it| !is_control(it, needs_key)).map(without_listener);
    let kept: Vec<CommandArgument> = kept.map(|it| without_tap(it, &mut notes)).collect();
    let args = std::iter::once(program.clone()).chain(arguments::join_arguments(&kept)).collect();
    PlainCommand { args, notes }
}

/// A tap that libvirt has opened becomes one that QEMU makes.
fn without_tap(argument: CommandArgument, notes: &mut Vec<String>) -> CommandArgument {
    let properties = OptionProperties::parse_value(argument.value(), "type");
    let tap = properties.filter(|it| {
        let is_opened = it.get("fd").is_some() || it.get("fds").is_some();
        argument.name() == "netdev" && it.get("type").as_deref() == Some("tap") && is_opened
    });
    match tap.and_then(|it| it.get("id").map(String::from)) {
        Some(id) => {
            notes.push(format!(
                "libvirt connects {id} to a network; after `firn restore` it is a tap on no bridge: --netdev {id}=... connects it"
            ));
            CommandArgument::new("netdev", format!("tap,id={id},script=no,downscript=no"))
        }
        None => argument,
    }
}

fn is_control(argument: &CommandArgument, needs_key: bool) -> bool {
    let has = |key: &str, wanted: &str| {
        let properties = OptionProperties::parse_value(argument.value(), "");
        properties.is_some_and(|it| it.get(key).as_deref() == Some(wanted))
    };
    match argument.name() {
        "S" | "no-shutdown" | "incoming" => true,
        "chardev" => has("id", MONITOR),
        "mon" => has("chardev", MONITOR),
        "object" => has("id", MASTER_KEY) && !needs_key,
        _ => false,
    }
}

/// A socket that listens on a descriptor becomes a device to which nothing is connected.
fn without_listener(argument: CommandArgument) -> CommandArgument {
    let properties = OptionProperties::parse_value(argument.value(), "backend");
    let listener = properties
        .filter(|it| argument.name() == "chardev" && it.get("fd").is_some() && it.is_on("server"));
    match listener.and_then(|it| it.get("id").map(String::from)) {
        Some(id) => CommandArgument::new("chardev", format!("null,id={id}")),
        None => argument,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn without(words: &str) -> String {
        let words: Vec<String> = words.split_whitespace().map(str::to_owned).collect();
        without_libvirt(&words).args.join(" ")
    }

    #[test]
    fn options_that_libvirt_controls_are_left_out() {
        let words = r#"/usr/bin/qemu -name guest=web,debug-threads=on -S
            -object {"qom-type":"secret","id":"masterKey0","format":"raw","file":"/run/key"}
            -chardev socket,id=charmonitor,fd=24,server=on,wait=off
            -mon chardev=charmonitor,id=monitor,mode=control -no-shutdown -incoming defer
            -chardev socket,id=charchannel0,fd=22,server=on,wait=off
            -chardev pty,id=charserial0 -m 256"#;
        let kept = "/usr/bin/qemu -name guest=web,debug-threads=on -chardev null,id=charchannel0 \
            -chardev pty,id=charserial0 -m 256";
        assert_eq!(without(words), kept);
    }

    #[test]
    fn a_card_on_a_bridge_has_a_tap_of_its_own() {
        let words = r#"qemu -netdev {"type":"tap","fd":"28","vhost":true,"vhostfd":"30","id":"hostnet0"} -netdev user,id=n"#;
        let words: Vec<String> = words.split(' ').map(str::to_owned).collect();
        let plain = without_libvirt(&words);
        let kept = "qemu -netdev tap,id=hostnet0,script=no,downscript=no -netdev user,id=n";
        assert_eq!(plain.args.join(" "), kept);
        assert!(plain.notes[0].contains("--netdev hostnet0="), "{:?}", plain.notes);
    }

    #[test]
    fn a_key_that_is_used_stays() {
        let words = r#"qemu -object {"qom-type":"secret","id":"masterKey0","file":"/run/key"} -object {"qom-type":"secret","id":"s","keyid":"masterKey0","data":"x"}"#;
        assert_eq!(without(words), words);
    }
}
