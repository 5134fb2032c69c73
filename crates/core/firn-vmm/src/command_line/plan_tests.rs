use super::*;
use proptest::prelude::*;

const MIB: u64 = 1 << 20;

/// Splits a line into words; a word in single quotes may contain blanks.
fn command(line: &str) -> Vec<String> {
    let mut words = vec!["qemu".to_owned()];
    for (at, part) in line.split('\'').enumerate() {
        match at % 2 {
            0 => words.extend(part.split_whitespace().map(str::to_owned)),
            _ => words.push(part.to_owned()),
        }
    }
    words
}

fn paths(regions: usize) -> AddedPaths {
    let ram = (0..regions).map(|at| PathBuf::from(format!("/proc/self/fd/{}", 10 + at))).collect();
    AddedPaths {
        qmp: "/run/q".into(),
        ram,
        calls: "/run/calls".into(),
        stores: None,
        cards: Vec::new(),
    }
}

fn augmented(line: &str) -> AugmentedCommand {
    let plan = plan_command(&command(line)).unwrap();
    plan.augment(&paths(plan.ram().len())).unwrap()
}

fn text(line: &str) -> String {
    augmented(line).args.join(" ")
}

fn ram(line: &str) -> Vec<(String, u64)> {
    let plan = plan_command(&command(line)).unwrap();
    plan.ram().iter().map(|ram| (ram.id.clone(), ram.bytes / MIB)).collect()
}

fn refusal(line: &str) -> String {
    let refused = |plan: CommandPlan| plan.augment(&paths(plan.ram().len()));
    plan_command(&command(line)).and_then(refused).unwrap_err().to_string()
}

const MONITOR: &str =
    "-chardev socket,id=firn.qmp,path=/run/q,server=on,wait=off -mon chardev=firn.qmp,mode=control";

#[test]
fn plain_ram_gets_a_backend_and_the_rest_stays() {
    let expected = format!(
        "qemu -M q35 -m 1G -append -S a.img -object memory-backend-file,id=firn.ram,size=1073741824,\
         mem-path=/proc/self/fd/10,share=on -machine memory-backend=firn.ram {MONITOR}"
    );
    assert_eq!(text("-M q35 -m 1G -append -S a.img"), expected);
}

#[test]
fn every_form_of_m_is_understood() {
    for (line, mib) in [
        ("", 128),
        ("-m 1G", 1024),
        ("-m 1024", 1024),
        ("--m 512m", 512),
        ("-m 1.5G", 1536),
        ("-m size=1G,slots=2,maxmem=4G", 1024),
        ("-m 200,slots=2,maxmem=4G", 200),
        ("-m slots=2,maxmem=4G", 128),
        ("-m 200 -m slots=2,maxmem=400M", 200),
        ("-m 200 -m 300", 300),
        ("-m 4608", 4608),
    ] {
        assert_eq!(ram(line), [("firn.ram".to_owned(), mib)], "{line}");
    }
}

#[test]
fn odd_sizes_are_rounded_as_qemu_rounds_them() {
    let bytes = |line: &str| plan_command(&command(line)).unwrap().ram()[0].bytes;
    assert_eq!(bytes("-m 100001K"), 100_008 * 1024);
    assert_eq!(bytes("-m 262152K"), 262_152 * 1024);
    assert_eq!(bytes("-m 8193B"), 16384);
}

#[test]
fn a_backend_of_the_user_is_put_over_firns_file() {
    for (object, expected) in [
        (
            "memory-backend-ram,id=mem0,size=1G,prealloc=on,host-nodes=0-1,policy=bind",
            "memory-backend-file,id=mem0,size=1G,prealloc=on,host-nodes=0-1,policy=bind,\
             mem-path=/proc/self/fd/10,share=on",
        ),
        (
            "memory-backend-memfd,id=mem0,size=1073741824,seal=off,share=off",
            "memory-backend-file,id=mem0,size=1073741824,share=on,mem-path=/proc/self/fd/10",
        ),
        (
            "memory-backend-shm,id=mem0,size=1G,share=on",
            "memory-backend-file,id=mem0,size=1G,share=on,mem-path=/proc/self/fd/10",
        ),
        (
            "qom-type=memory-backend-file,id=mem0,size=1G,mem-path=/dev/shm/a,,b,discard-data=on",
            "memory-backend-file,id=mem0,size=1G,mem-path=/proc/self/fd/10,share=on",
        ),
    ] {
        let line = format!("-m 1G -object {object} -machine q35,memory-backend=mem0");
        let expected =
            format!("qemu -m 1G -object {expected} -machine q35,memory-backend=mem0 {MONITOR}");
        assert_eq!(text(&line), expected);
        assert_eq!(ram(&line), [("mem0".to_owned(), 1024)]);
    }
}

#[test]
fn json_objects_stay_json() {
    let json = r#"{"qom-type":"memory-backend-ram","id":"m","size":268435456,"host-nodes":[0],"policy":"bind"}"#;
    let line = format!("-m 256M -object '{json}' -M q35 -machine memory-backend=m");
    assert_eq!(ram(&line), [("m".to_owned(), 256)]);
    let args = augmented(&line).args;
    let object: serde_json::Value = serde_json::from_str(&args[4]).unwrap();
    assert_eq!(object["qom-type"], "memory-backend-file");
    assert_eq!(object["share"], true);
    assert_eq!(object["mem-path"], "/proc/self/fd/10");
    assert_eq!(object["host-nodes"][0], 0);
}

#[test]
fn numa_nodes_and_memory_devices_are_regions_in_order() {
    let line = "-m 768M,slots=1,maxmem=2G -object memory-backend-ram,id=dimm,size=128M \
                -object memory-backend-memfd,id=b,size=512M -object memory-backend-memfd,id=a,size=256M \
                -numa node,nodeid=0,memdev=a -numa node,nodeid=1,memdev=b -numa dist,src=0,dst=1,val=20 \
                -device pc-dimm,memdev=dimm,id=d0";
    let expected = [("a", 256), ("b", 512), ("dimm", 128)];
    assert_eq!(ram(line), expected.map(|(id, mib)| (id.to_owned(), mib)));
    let text = text(line);
    assert!(text.contains("id=dimm,size=128M,mem-path=/proc/self/fd/12,share=on"), "{text}");
    assert!(text.contains("id=a,size=256M,mem-path=/proc/self/fd/10,share=on"), "{text}");
    assert!(!text.contains("firn.ram"));
}

#[test]
fn a_memory_device_beside_plain_ram() {
    let line = "-m 256M,slots=1,maxmem=1G -object memory-backend-ram,id=dimm,size=128M \
                -device '{\"driver\":\"pc-dimm\",\"memdev\":\"dimm\"}'";
    assert_eq!(ram(line), [("firn.ram".to_owned(), 256), ("dimm".to_owned(), 128)]);
}

#[test]
fn memory_of_other_devices_stays_as_it_is() {
    let object = "memory-backend-file,id=iv,size=1M,mem-path=/dev/shm/iv,share=on";
    let line = format!("-object {object} -device ivshmem-plain,memdev=iv");
    assert_eq!(ram(&line), [("firn.ram".to_owned(), 128)]);
    assert!(text(&line).contains(object));
}

#[test]
fn a_monitor_of_the_user_stays_beside_firns() {
    let text = text("-qmp unix:/tmp/mine,server=on,wait=off -monitor stdio");
    assert!(text.starts_with("qemu -qmp unix:/tmp/mine,server=on,wait=off -monitor stdio"));
    assert!(text.ends_with(MONITOR));
}

#[test]
fn commas_in_paths_are_doubled() {
    let plan = plan_command(&command("")).unwrap();
    let paths = AddedPaths {
        qmp: "/run/a,b".into(),
        ram: vec!["/x,y".into()],
        calls: "/c".into(),
        stores: None,
        cards: Vec::new(),
    };
    let text = plan.augment(&paths).unwrap().args.join(" ");
    assert!(text.contains("path=/run/a,,b,") && text.contains("mem-path=/x,,y,"));
}

#[test]
fn options_that_firn_added_are_not_added_twice() {
    let first = augmented("-M q35 -m 1G");
    let plan = plan_command(&first.args).unwrap();
    assert_eq!(plan.ram(), first.ram);
    let (qmp, calls) = ("/run/q".into(), "/c".into());
    let again = plan.augment(&AddedPaths {
        qmp,
        ram: vec!["/proc/self/fd/10".into()],
        calls,
        stores: None,
        cards: Vec::new(),
    });
    assert_eq!(again.unwrap().args, first.args);
}

#[test]
fn each_change_has_its_note() {
    let notes = augmented("-m 1G -daemonize").notes;
    assert_eq!(notes.len(), 5, "{notes:#?}");
    assert!(notes[0].starts_with("added -object memory-backend-file,id=firn.ram,size=1073741824"));
    assert!(notes[4].starts_with("left out -daemonize: "));
}

#[test]
fn a_restore_replaces_huge_pages_by_ordinary_ones() {
    for backend in [
        "memory-backend-memfd,id=x,size=1G,share=on,hugetlb=on,hugetlbsize=2M,prealloc=on",
        "memory-backend-file,id=x,size=1G,mem-path=/dev/hugepages/libvirt/x,prealloc=on",
    ] {
        let command = command(&format!("-object {backend} -M memory-backend=x"));
        let restore = plan_command(&command).unwrap().for_restore(&paths(1)).unwrap();
        let object = restore.args.iter().find(|word| word.contains("id=x")).unwrap();
        assert!(object.starts_with("memory-backend-file,"), "{object}");
        let gone = ["huge", "prealloc"].iter().all(|word| !object.contains(word));
        assert!(gone && object.contains("share=on"), "{object}");
        assert!(restore.notes[0].contains("in ordinary pages"), "{:?}", restore.notes);
    }
}

#[test]
fn switches_that_do_no_harm_stay() {
    let line = "-S -sandbox on,obsolete=deny,spawn=deny -snapshot -pidfile p -no-reboot -smp 2";
    assert!(text(line).starts_with(&format!("qemu {line} ")));
}

#[test]
fn a_restore_waits_for_its_state() {
    let command = command("-m 1G -S -loadvm x -incoming tcp:0:1 -daemonize");
    let restore = plan_command(&command).unwrap().for_restore(&paths(1)).unwrap();
    let text = restore.args.join(" ");
    assert!(
        text.ends_with("-S -incoming defer -global migration.send-configuration=off"),
        "{text}"
    );
    assert!(text.starts_with("qemu -m 1G -object "), "{text}");
    assert_eq!(text.matches("-S").count(), 1);
}

#[test]
fn unsupported_options_are_refused_with_a_reason() {
    for (line, part) in [
        ("-mem-path /dev/hugepages", "leave -mem-path out"),
        ("-incoming defer", "without -incoming"),
        ("-readconfig f", "could not read this file"),
        ("--preconfig", "leave --preconfig out"),
        ("-overcommit mem-lock=on", "locked memory"),
        ("-numa node,mem=128M", "-numa node,memdev=ID"),
        ("-machine q35,memory.size=1G", "with -m"),
        ("-machine q35,memory-backend=x", "memory backend \"x\" is used as guest RAM, but"),
        ("-m ten", "-m ten: the size of RAM cannot be read"),
        ("-m 0", "the size of RAM"),
        (
            "-object memory-backend-memfd,id=x,size=1G,hugetlb=on -M memory-backend=x",
            "start QEMU with huge pages by yourself",
        ),
        (
            "-object memory-backend-file,id=x,size=1G,mem-path=/dev/hugepages/x -M memory-backend=x",
            "start QEMU with huge pages by yourself",
        ),
        (
            "-object memory-backend-file,id=x,size=1G,mem-path=f,readonly=on -M memory-backend=x",
            "read-only",
        ),
        (
            "-object memory-backend-epc,id=x,size=1G -M memory-backend=x",
            "-ram, -memfd, -shm and -file",
        ),
        ("-object memory-backend-ram,id=x -M memory-backend=x", "its size cannot be read"),
        ("-object memory-backend-ram,size=1G", "its id cannot be read"),
        ("-object '{\"qom-type\":' ", "its JSON cannot be read"),
        ("-device nvdimm,memdev=x", "persistent"),
    ] {
        let refusal = refusal(line);
        assert!(refusal.contains(part), "{line}: {refusal}");
    }
    assert_eq!(plan_command(&[]), Err(CommandLineError::Empty));
    let plan = plan_command(&command("-m 1G")).unwrap();
    assert_eq!(plan.augment(&paths(2)), Err(CommandLineError::Files { files: 2, regions: 1 }));
}

proptest! {
    #[test]
    fn any_command_line_is_planned_or_refused(words in proptest::collection::vec(
        "(-m|-M|-object|-numa|-device|memory-backend-ram,id=a,size=1G|node,memdev=a|[a-z0-9=,{}\":-]{0,20})", 0..8))
    {
        if let Ok(plan) = plan_command(&words) {
            let line = plan.augment(&paths(plan.ram().len()));
            prop_assert!(line.is_err() || line.is_ok_and(|line| line.ram == plan.ram()));
        }
    }

    #[test]
    fn unknown_options_are_passed_on(words in proptest::collection::vec("[a-z0-9=,./]{1,12}", 0..6)) {
        let mut command = command("");
        words.iter().for_each(|word| command.extend(["-append".to_owned(), word.clone()]));
        let args = plan_command(&command).unwrap().augment(&paths(1)).unwrap().args;
        prop_assert_eq!(&args[..command.len()], &command[..]);
    }
}

#[test]
fn the_device_for_calls_has_a_file_of_the_vms_own() {
    let words = |line: &str| line.split(' ').map(str::to_owned).collect::<Vec<_>>();
    let with = calls::with_calls(&words("qemu-system-x86_64 -m 64"));
    assert_eq!(calls::with_calls(&with), with, "added once");
    let line = plan_command(&with).unwrap().augment(&paths(1)).unwrap().args;
    let object = line.iter().find(|word| word.contains("id=firn.calls")).unwrap();
    assert!(object.contains("mem-path=/run/calls") && object.contains("share=on"), "{object}");
    assert!(line.contains(&"ivshmem-plain,memdev=firn.calls,master=on".to_owned()), "{line:?}");
    let again = plan_command(&line).unwrap().ram().len();
    assert_eq!(again, 1, "it is no RAM of the guest's");
}

#[test]
fn the_plugin_writes_reports_to_the_call_window() {
    let (library, orders) = ("/lib/a,b.so".into(), "/run/s".into());
    let paths = AddedPaths { stores: Some(StorePlugin { library, orders }), ..paths(1) };
    let plan = plan_command(&calls::with_calls(&command("-m 64"))).unwrap();
    for line in [plan.augment(&paths).unwrap(), plan.for_restore(&paths).unwrap()] {
        let wanted = "file=/lib/a,,b.so,window=/run/calls,orders=/run/s".to_owned();
        assert!(line.args.contains(&wanted), "{:?}", line.args);
    }
}

#[test]
fn a_card_of_firns_gets_a_socket() {
    let given = "-netdev user,id=a -netdev firn,id=b,uplink=/run/u,,1 -device e1000,netdev=b";
    let plan = plan_command(&command(given)).unwrap();
    let uplink = cards::CardUplink::Socket("/run/u,1".into());
    assert_eq!(plan.cards(), [CardPlan { id: "b".into(), uplink }]);
    let with = AddedPaths { cards: vec![7], ..paths(1) };
    for line in [plan.augment(&with).unwrap(), plan.for_restore(&with).unwrap()] {
        let words = line.args.join(" ");
        let expected = "-netdev user,id=a -netdev dgram,id=b,local.type=fd,local.str=7 -device";
        assert!(words.contains(expected), "{words}");
        assert!(
            line.notes.iter().any(|note| note.contains("frames to /run/u,1")),
            "{:?}",
            line.notes
        );
    }
    assert_eq!(plan.augment(&paths(1)), Err(CommandLineError::Sockets { sockets: 0, cards: 1 }));
}

#[test]
fn cards_that_are_not_firns_are_named() {
    let cards = |line: &str| plan_command(&command(line)).unwrap().other_cards();
    let others =
        |line: &str| -> Vec<String> { cards(line).into_iter().map(|card| card.option).collect() };
    let firns = "-netdev firn,id=b,uplink=/u";
    assert!(others(firns).is_empty() && others("-nodefaults").is_empty());
    assert!(others("-nic none").is_empty());
    assert_eq!(others("-m 1G"), ["QEMU's own card"]);
    let given = format!("{firns} -netdev user,id=a -nic tap");
    assert_eq!(others(&given), ["-netdev user,id=a", "-nic tap"]);
    assert_eq!(cards("-netdev user,id=a")[0].id.as_deref(), Some("a"));
}

#[test]
fn cards_whose_frames_pass_qemu_by_are_known() {
    let bypass = |line: &str| plan_command(&command(line)).unwrap().other_cards()[0].bypass;
    for seen in ["tap,id=a,vhost=off", "user,id=a", "tap,id=a,queues=1,fds=7", "bridge,id=a"] {
        assert_eq!(bypass(&format!("-netdev {seen}")), None, "{seen}");
    }
    for vhost in [
        "tap,id=a,vhost=on",
        "tap,id=a,fd=3,vhostfd=4",
        "vhost-user,id=a,chardev=c",
        r#"{"type":"tap","fd":"3","vhost":true,"id":"a"}"#,
    ] {
        let words = ["q".to_owned(), "-netdev".to_owned(), vhost.to_owned()];
        let card = plan_command(&words).unwrap().other_cards().remove(0);
        assert!(card.bypass.is_some_and(|why| why.contains("vhost")), "{vhost}");
    }
    assert!(bypass("-netdev tap,id=a,queues=2").is_some_and(|why| why.contains("queues")));
    assert!(bypass("-netdev tap,id=a,fds=3:4").is_some_and(|why| why.contains("queues")));
}

#[test]
fn a_card_needs_an_id_and_an_uplink() {
    for line in
        ["-netdev firn", "-netdev firn,id=b", "-netdev firn,uplink=/u", "-netdev firn,id=b,uplink="]
    {
        assert!(refusal(line).contains("uplink=PATH"), "{line}");
    }
}

#[test]
fn a_card_goes_to_a_socket_or_to_a_network() {
    let of = |line: &str| plan_command(&command(line)).map(|plan| plan.cards().to_vec());
    let uplink = cards::CardUplink::Network("lan".into());
    assert_eq!(
        of("-m 1G -netdev firn,id=b,network=lan"),
        Ok(vec![CardPlan { id: "b".into(), uplink }])
    );
    for nothing in ["", ",uplink=/u,network=lan", ",network=", ",uplink="] {
        let error = of(&format!("-m 1G -netdev firn,id=b{nothing}")).unwrap_err().to_string();
        assert!(error.contains("network=NAME"), "{error}");
    }
}

#[test]
fn a_card_can_have_another_uplink_elsewhere() {
    let given = command("-netdev firn,id=b,uplink=/here -m 1G");
    let there = cards::with_uplink(&given, "b", "/there,1").unwrap();
    assert_eq!(there, command("-netdev firn,id=b,uplink=/there,,1 -m 1G"));
    let network = command("-netdev firn,id=b,network=lan -m 1G");
    let there = cards::with_uplink(&network, "b", "/there").unwrap();
    assert_eq!(there, command("-netdev firn,id=b,uplink=/there -m 1G"));
    let none = cards::with_uplink(&given, "c", "/there").unwrap_err();
    assert_eq!(none, CommandLineError::NoCard { id: "c".into() });
}
