use super::*;
use crate::command_line::arguments::{join_arguments, split_words};

fn words(line: &str) -> Vec<String> {
    line.split(' ').map(str::to_owned).collect()
}

/// Relocates the endpoints of a command line, while another process has those that are displayed
/// like these.
fn beside(line: &str, held: &[&str]) -> Result<(String, Vec<String>), CommandLineError> {
    let mut arguments = split_words(&words(line));
    let holder = |endpoint: &HostEndpoint| {
        held.contains(&&*endpoint.to_string()).then(|| "process 7 (qemu)".to_owned())
    };
    let beside = EndpointRelocation { directory: Path::new("/r/b"), holder: &holder };
    let notes = relocate_endpoints(&mut arguments, &beside)?;
    Ok((join_arguments(&arguments).join(" "), notes))
}

#[track_caller]
fn becomes(line: &str, held: &str, expected: &str) {
    let (new, notes) = beside(line, &[held]).unwrap();
    assert_eq!(new, expected);
    let expected = format!("{line} is now {expected}: {held} is in use by process 7 (qemu)");
    assert_eq!(notes, [expected]);
    assert_eq!(beside(line, &[]).unwrap(), (line.to_owned(), vec![]), "what is free stays");
}

#[test]
fn sockets_that_are_listened_on_go_to_the_directory() {
    let monitor = "unix:/r/b/user-a.qmp,server=on,wait=off";
    for option in ["-qmp", "-qmp-pretty", "-monitor", "-serial", "-parallel", "-debugcon", "-qtest"]
    {
        let line = format!("{option} unix:/x/a.qmp,server=on,wait=off");
        becomes(&line, "/x/a.qmp", &format!("{option} {monitor}"));
    }
    becomes("-qmp unix:/x/a.qmp,server,nowait", "/x/a.qmp", &format!("-qmp {monitor}"));
    becomes("-serial mon:unix:/x/a.qmp,server", "/x/a.qmp", &format!("-serial mon:{monitor}"));
    becomes(
        "-monitor telnet:127.0.0.1:4444,server=on,wait=off",
        "TCP port 4444 of 127.0.0.1",
        "-monitor unix:/r/b/user-telnet-4444,server=on,wait=off",
    );
    becomes(
        "-chardev socket,id=c,path=/x/a,,b,server=on,wait=off,logappend=on",
        "/x/a,b",
        "-chardev socket,id=c,path=/r/b/user-a,,b,server=on,wait=off,logappend=on",
    );
    becomes(
        "-chardev socket,id=c,host=::1,port=44,server=on,telnet=on,ipv4=on",
        "TCP port 44 of ::1",
        "-chardev socket,id=c,server=on,path=/r/b/user-c,wait=off",
    );
}

#[test]
fn files_that_are_written_go_to_the_directory() {
    becomes("-pidfile /x/a.pid", "/x/a.pid", "-pidfile /r/b/user-a.pid");
    becomes("-D log", "log", "-D /r/b/user-log");
    becomes("-serial file:/x/log", "/x/log", "-serial file:/r/b/user-log");
    becomes("-chardev file,id=c,path=l", "l", "-chardev file,id=c,path=/r/b/user-l");
    becomes("-chardev null,id=c,logfile=l", "l", "-chardev null,id=c,logfile=/r/b/user-l");
    becomes("-trace enable=x,file=t", "t", "-trace x,file=/r/b/user-t");
    becomes("-audiodev wav,id=w,path=w.wav", "w.wav", "-audiodev wav,id=w,path=/r/b/user-w.wav");
    becomes(
        "-object filter-dump,id=f,netdev=n,file=p",
        "p",
        "-object filter-dump,id=f,netdev=n,file=/r/b/user-p",
    );
    let same = "-object secret,id=s,file=p -trace x -drive file=p";
    assert_eq!(beside(same, &["p"]).unwrap().0, same);
}

#[test]
fn an_endpoint_without_an_address_is_left_out() {
    becomes("-serial pipe:/x/p", "/x/p.in", "-serial null");
    becomes("-chardev pipe,id=c,path=/x/p", "/x/p.out", "-chardev null,id=c");
    becomes("-serial udp:h:1@:2", "UDP port 2", "-serial null");
    becomes("-chardev udp,id=c,host=h,port=1,localport=2", "UDP port 2", "-chardev null,id=c");
}

#[test]
fn displays_and_debuggers_go_to_the_directory() {
    becomes("-vnc :1", "TCP port 5901", "-vnc unix:/r/b/user-vnc");
    becomes("-vnc unix:/x/v,password=on", "/x/v", "-vnc unix:/r/b/user-v,password=on");
    becomes("-vnc ::1:2,websocket=on", "TCP port 5702 of ::1", "-vnc unix:/r/b/user-vnc");
    becomes("-vnc h:0,websocket=81", "TCP port 81 of h", "-vnc unix:/r/b/user-vnc");
    becomes(
        "-display vnc=:1,lossy=on",
        "TCP port 5901",
        "-display vnc=unix:/r/b/user-vnc,lossy=on",
    );
    becomes(
        "-spice port=5930,addr=127.0.0.1,disable-ticketing=on",
        "TCP port 5930 of 127.0.0.1",
        "-spice addr=/r/b/user-spice,disable-ticketing=on,unix=on",
    );
    becomes("-spice unix=on,addr=/x/s", "/x/s", "-spice unix=on,addr=/r/b/user-s");
    becomes("-gdb tcp::77", "TCP port 77", "-gdb unix:/r/b/user-tcp-77,server=on,wait=off");
    becomes("-s", "TCP port 1234", "-gdb unix:/r/b/user-tcp-1234,server=on,wait=off");
}

#[test]
fn an_endpoint_that_does_not_listen_is_unchanged() {
    let line = concat!(
        "-serial stdio -serial mon:stdio -serial chardev:c -serial pty -monitor none -qmp tcp:h:1 ",
        "-qmp unix:/x -chardev socket,id=a,path=/x -chardev socket,id=b,host=h,port=1 -chardev stdio,id=d ",
        "-vnc none -vnc h:1,reverse=on -vnc :0,to=9 -display gtk -gdb none -nographic -netdev tap,id=n ",
        "-netdev socket,id=o,connect=h:1 -netdev stream,id=p,server=off,addr.type=unix,addr.path=/x ",
        "-frobnicate unix:/x,server=on word"
    );
    let held = ["/x", "TCP port 1 of h", "TCP port 5900"];
    assert_eq!(beside(line, &held).unwrap(), (line.to_owned(), vec![]));
}

#[test]
fn a_port_that_leads_to_the_guest_is_refused() {
    let fails = |line: &str, held: &str| {
        let error = beside(line, &[held]).unwrap_err().to_string();
        assert_eq!(error, format!("{line}: {held} is in use by process 7 (qemu)"));
        assert!(beside(line, &[]).is_ok());
    };
    fails("-netdev user,id=n,hostfwd=tcp::2222-:22,hostfwd=udp:h:53-:53", "TCP port 2222");
    fails("-netdev user,id=n,hostfwd=tcp::2222-:22,hostfwd=udp:h:53-:53", "UDP port 53 of h");
    fails("-nic user,hostfwd=:127.0.0.1:80-10.0.2.15:80", "TCP port 80 of 127.0.0.1");
    fails("-netdev socket,id=n,listen=:1234", "TCP port 1234");
    fails("-netdev stream,id=n,server=on,addr.type=unix,addr.path=/x", "/x");
    fails("-netdev dgram,id=n,local.type=inet,local.host=h,local.port=9", "UDP port 9 of h");
    fails(r#"-netdev {"type":"user","id":"n","hostfwd":[{"str":"tcp::5-:6"}]}"#, "TCP port 5");
    fails(
        r#"-netdev {"type":"stream","id":"n","server":true,"addr":{"type":"inet","host":"h","port":"5"}}"#,
        "TCP port 5 of h",
    );
}

#[test]
fn two_of_one_name_get_two_places() {
    let line = "-qmp unix:/x/q,server=on -monitor unix:/y/q,server=on";
    let (new, _) = beside(line, &["/x/q", "/y/q"]).unwrap();
    assert!(new.contains("/r/b/user-q,") && new.contains("/r/b/user-q-2,"), "{new}");
}

#[test]
fn a_name_too_long_for_a_socket_is_shortened() {
    let long = format!("/x/{}", "n".repeat(104));
    let (new, _) = beside(&format!("-qmp unix:{long},server=on"), &[&long]).unwrap();
    assert_eq!(new, "-qmp unix:/r/b/user-1,server=on,wait=off");
}

mod any {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Whichever endpoints are in use: options keep their order, their number and their names,
        /// and there is a note for each that was changed.
        #[test]
        fn the_machine_stays_the_same(words in proptest::collection::vec("(-(qmp|serial|chardev|vnc|gdb|netdev|D|s))|[a-z:,=/0-9{}]{0,20}", 0..12)) {
            let mut arguments = split_words(&words);
            let before = arguments.clone();
            let holder = |_: &HostEndpoint| Some("x".to_owned());
            let beside = EndpointRelocation { directory: Path::new("/r"), holder: &holder };
            if let Ok(notes) = relocate_endpoints(&mut arguments, &beside) {
                let changed = before.iter().zip(&arguments).filter(|(a, b)| a != b).count();
                prop_assert_eq!(notes.len(), changed);
                prop_assert_eq!(before.len(), arguments.len());
                for (a, b) in before.iter().zip(&arguments) {
                    prop_assert!(a.name() == b.name() || (a.name() == "s" && b.name() == "gdb"));
                }
            }
        }
    }
}
