use std::path::Path;

use super::finding::SHOWN_CHARS_MAX;
use super::*;

/// A command line that opens nothing, as a prefix.
const QUIET: &str = "qemu -nodefaults -display none";

fn words(line: &str) -> Vec<String> {
    line.split(' ').map(str::to_owned).collect()
}

fn find(line: &str, overrides: &CommandOverrides) -> Vec<HostAccess> {
    find_host_accesses(&words(&format!("{QUIET} {line}")), overrides, Path::new("/vms")).unwrap()
}

fn found(line: &str) -> Vec<HostAccess> {
    find(line, &CommandOverrides::default())
}

fn set(key: &str, value: &str) -> CommandOverrides {
    CommandOverrides { values: vec![(key.into(), value.into())], ..CommandOverrides::default() }
}

/// Options of ordinary VMs, which open nothing.
const HARMLESS: &[&str] = &[
    "-M q35,accel=kvm:tcg,smm=on,usb=off,memory-backend=ram -object memory-backend-memfd,id=ram,size=1G,share=on",
    "-machine pc-i440fx-7.2 -accel tcg,thread=multi -m size=1G,slots=2,maxmem=8G -smp 4,sockets=2 -cpu host,+vmx,migratable=no",
    "-machine pc,memory-backend=ram -object memory-backend-file,id=ram,size=1G,mem-path=/etc/passwd,share=on",
    "-object {\"qom-type\":\"memory-backend-file\",\"id\":\"n\",\"size\":1024,\"mem-path\":\"/x\",\"host-nodes\":[0,1]} -numa node,memdev=n",
    "-object memory-backend-file,id=firn.calls,size=1M,share=on,mem-path=firn-calls -device ivshmem-plain,memdev=firn.calls,master=on",
    "-name guest=web,debug-threads=on -uuid 6f -rtc base=utc,driftfix=slew -boot order=c,menu=on -no-reboot -S",
    "-global PIIX4_PM.disable_s3=1 -global driver=ICH9-LPC,property=noreboot,value=on -global migration.send-configuration=off",
    "-device virtio-net-pci,netdev=n,mac=52:54:00:00:00:01,romfile= -netdev user,id=n,restrict=on,ipv6=off",
    "-device {\"driver\":\"pcie-root-port\",\"port\":8,\"chassis\":1,\"id\":\"pci.1\",\"bus\":\"pcie.0\",\"addr\":\"0x1\"}",
    "-device virtio-blk-pci-non-transitional,drive=d -drive if=none,id=d,media=cdrom,readonly=on",
    "-blockdev driver=null-co,node-name=n,size=1M -blockdev {\"driver\":\"throttle\",\"file\":\"n\",\"throttle-group\":\"g\",\"node-name\":\"t\"}",
    "-object throttle-group,id=g,x-bps-total=1 -object iothread,id=i -object rng-random,id=r,filename=/dev/urandom",
    "-object secret,id=s,data=x -serial none -parallel null -monitor none -chardev null,id=c -device isa-serial,chardev=c",
    "-serial chardev:c -serial mon:stdio -vga std -usb -usbdevice tablet -audiodev none,id=a -vnc none -sandbox on,obsolete=deny",
    "-nic none -net none -net nic,model=e1000 -append console=ttyS0,/etc/passwd -fw_cfg name=opt/x,string=y -incoming defer",
    "-smbios type=1,manufacturer=a,product=b -msg timestamp=on -overcommit mem-lock=off -icount shift=3,align=off",
    "-device intel-hda -device hda-duplex,audiodev=a -audiodev none,id=a -numa node,nodeid=0,cpus=0-1,mem=1G -no-user-config -daemonize -action panic=pause -vga none -watchdog i6300esb",
];

#[test]
fn options_of_ordinary_vms_are_harmless() {
    for line in HARMLESS {
        assert_eq!(found(line), [], "{line}");
    }
}

/// Options each of which opens something, or is unknown.
const ACCESSES: &[&str] = &[
    "-incoming exec:touch",
    "-incoming tcp:0:1",
    "-chardev socket,id=c,path=/x,server=on",
    "-chardev file,id=c,path=/x",
    "-chardev pipe,id=c,path=/x",
    "-chardev pty,id=c",
    "-chardev udp,id=c,host=h,port=1",
    "-chardev null,id=c,logfile=/x",
    "-chardev null,backend=file,path=/x",
    "-serial file:/x",
    "-serial tcp:h:1",
    "-serial mon:unix:/x,server=on",
    "-serial /dev/tty",
    "-serial pipe:/x",
    "-parallel file:/x",
    "-debugcon file:/x",
    "-monitor tcp:127.0.0.1:1,server=on",
    "-qmp unix:/x,server=on",
    "-qmp-pretty stdio:",
    "--qmp unix:/x",
    "-qmp=unix:/x",
    "-gdb tcp::1",
    "-s",
    "-qtest unix:/x",
    "-readconfig /x",
    "-writeconfig /x",
    "-set drive.d.file=/x",
    "-pidfile /x",
    "-D /x",
    "-d all",
    "-trace enable=x,file=/x",
    "-plugin /x.so",
    "-L /x",
    "-bios /x",
    "-kernel /x",
    "-initrd /x",
    "-dtb /x",
    "-option-rom /x",
    "-acpitable file=/x",
    "-smbios file=/x",
    "-smbios type=11,path=/x",
    "-fw_cfg name=opt/x,file=/x",
    "-fw_cfg opt/x,file=/x",
    "-boot splash=/x",
    "-icount shift=1,rr=record,rrfile=/x",
    "-M q35,kernel=/x",
    "-machine type=pc,firmware=/x",
    "-machine x-remote",
    "-machine pc,accel=xen",
    "-M {\"type\":\"pc,kernel=/x\"}",
    "-machine ,kernel=/x",
    "-accel kvm,device=/x",
    "-accel qtest",
    "-drive file=/x,format=raw",
    "-drive driver=raw,file.driver=file,file.filename=/x",
    "-drive driver=raw,file.driver=nbd,file.host=h",
    "-drive file=a,file.filename=b",
    "-drive if=none,id=d,snapshot=on",
    "-drive if=none,backing.file.filename=/x",
    "-drive if=none,format=nbd,id=d",
    "-blockdev driver=file,node-name=f,filename=/x",
    "-blockdev driver=host_device,node-name=f,filename=/dev/sda",
    "-blockdev driver=ssh,node-name=f,host=h,path=/x",
    "-blockdev {\"driver\":\"qcow2\",\"node-name\":\"d\",\"file\":{\"driver\":\"file\",\"filename\":\"/x\"}}",
    "-blockdev {\"driver\":\"qcow2\",\"node-name\":\"d\",\"file\":\"n\",\"backing\":{\"driver\":\"file\",\"filename\":\"/x\"}}",
    "-blockdev {'driver':'file'}",
    "-hda /x",
    "-cdrom /x",
    "-fda /x",
    "-pflash /x",
    "/x.img",
    "-",
    "-snapshot",
    "-netdev user,id=n",
    "-netdev user,id=n,restrict=on,restrict=off",
    "-netdev user,id=n,restrict=on,hostfwd=tcp::1-:2",
    "-netdev user,id=n,restrict=on,guestfwd=tcp:10.0.2.1:1-cmd:touch",
    "-netdev user,id=n,restrict=on,smb=/x",
    "-netdev user,id=n,restrict=on,tftp=/x",
    "-netdev tap,id=n,script=/x",
    "-netdev tap,type=hubport,id=n",
    "-netdev bridge,id=n,helper=/x",
    "-netdev socket,id=n,listen=:1",
    "-netdev stream,id=n,addr.type=unix,addr.path=/x",
    "-netdev vhost-user,id=n,chardev=c",
    "-netdev firn,id=n,uplink=/x",
    "-netdev firn,id=n,network=lan",
    "-netdev {\"type\":\"tap\",\"id\":\"n\"}",
    "-nic user",
    "-nic tap",
    "-net user",
    "-net dump,file=/x",
    "-device vfio-pci,host=1:0.0",
    "-device vhost-user-fs-pci,chardev=c",
    "-device vhost-vsock-pci,guest-cid=3",
    "-device virtio-9p-pci,fsdev=f,mount_tag=t",
    "-device virtio-gpu-gl-pci",
    "-device virtio-net-pci,romfile=/x",
    "-device e1000,romfile=,romfile=/x",
    "-device loader,file=/x",
    "-device usb-host,hostbus=1",
    "-device hda-micro",
    "-device usb-mtp,rootdir=/x",
    "-device virtio-input-host-pci,evdev=/x",
    "-device ipmi-bmc-sim,sdrfile=/x",
    "-device {\"driver\":\"e1000\",\"romfile\":\"/x\"}",
    "-device e1000,driver=loader,file=/x",
    "-global virtio-net-pci.romfile=/x",
    "-global driver=e1000,property=romfile,value=/x",
    "-global driver=e1000,property=addr,property=romfile,value=/x",
    "-object memory-backend-file,id=a,size=1M,mem-path=/x",
    "-object memory-backend-file,id=a,size=1M,mem-path=/x -machine memory-backend=a -machine memory-backend=b",
    "-object memory-backend-file,id=a,size=1M,mem-path=/r -machine memory-backend=a -object memory-backend-file,id=a,size=1M,mem-path=/x",
    "-object secret,id=s,file=/x",
    "-object rng-random,id=r,filename=/x",
    "-object rng-random,id=r,filename=/dev/urandom,filename=/x",
    "-object filter-dump,id=f,netdev=n,file=/x",
    "-object tls-creds-x509,id=t,dir=/x",
    "-object pr-manager-helper,id=p,path=/x",
    "-object input-linux,id=i,evdev=/x",
    "-object {\"qom-type\":\"secret\",\"id\":\"s\",\"file\":\"/x\"}",
    "-object secret,id=firn.calls,file=/x",
    "-fsdev local,id=f,path=/x,security_model=none",
    "-virtfs local,path=/x,mount_tag=t,security_model=none",
    "-tpmdev passthrough,id=t,path=/x",
    "-vnc :1",
    "-vnc unix:/x",
    "-spice port=1",
    "-display gtk",
    "-display vnc=:1",
    "-audiodev wav,id=a,path=/x",
    "-audiodev {\"driver\":\"wav\",\"id\":\"a\",\"path\":\"/x\"}",
    "-add-fd fd=3,set=1",
    "-sandbox off",
    "-sandbox on,spawn=allow",
    "-chroot /x",
    "-runas root",
    "-run-with chroot=/x",
    "-semihosting",
    "-semihosting-config enable=on,target=native",
    "-mem-path /x",
    "-loadvm x",
    "-iscsi user=x",
    "-perfmap",
    "-xen-attach",
    "-frobnicate",
    "-frobnicate on",
    "-usbdevice braille",
    "-watchdog /x",
    "-drive",
    "-append",
    "-m {\"size\":1}",
    "-cpu {\"a\":1}",
];

#[test]
fn every_option_that_opens_something_is_found() {
    for line in ACCESSES {
        let accesses = found(line);
        assert!(!accesses.is_empty(), "{line}");
        for access in accesses {
            let option = access.option.trim_end_matches("...");
            let plain = format!(" {line} ").replace(" --", " -");
            assert!(plain.contains(option), "{line}: {access:?}");
        }
    }
}

#[test]
fn what_qemu_adds_by_itself_is_found() {
    let accesses = |line: &str| {
        let none = CommandOverrides::default();
        find_host_accesses(&words(line), &none, Path::new("/")).unwrap()
    };
    let found = accesses("qemu -m 1");
    assert!(found[0].to_string().contains("adds a network card"), "{found:?}");
    assert!(found[1].to_string().contains("VNC"), "{found:?}");
    assert_eq!(accesses("qemu -m 1 -nic none -nographic"), []);
    let words = words("-nic user -vnc :7");
    let named = CommandOverrides { words, ..CommandOverrides::default() };
    assert_eq!(find_host_accesses(&["qemu".into()], &named, Path::new("/")), Ok(vec![]));
}

#[test]
fn what_the_user_names_is_the_users() {
    let line =
        "-chardev file,id=c,path=/x -netdev tap,id=n,ifname=t -drive file=a.img,id=d,format=raw";
    assert_eq!(found(line).len(), 3);
    let pair = |a: &str, b: &str| vec![(a.to_owned(), b.to_owned())];
    let overrides = CommandOverrides {
        netdevs: pair("n", "user,hostfwd=tcp::1-:2"),
        disks: pair("/vms/a.img", "/vms/a.img"),
        values: [pair("chardev.c.backend", "file"), pair("chardev.c.path", "/x")].concat(),
        ..CommandOverrides::default()
    };
    assert_eq!(find(line, &overrides), []);
    assert_eq!(find("-pidfile /x", &set("pidfile", "/x")), []);
    assert_eq!(find("-pidfile /x", &set("pidfile", "")), []);
    assert_eq!(find("-device e1000,id=e,romfile=/x", &set("device.e.romfile", "/y")), []);
    assert_eq!(find("-hda /x", &set("hda", "/x")), []);
}

#[test]
fn the_rest_of_an_option_stays_the_images() {
    for (line, key, value) in [
        ("-chardev file,id=c,path=/x,logfile=/y", "chardev.c.path", "/x"),
        ("-device e1000,id=e,romfile=/x", "device.e.mac", "1"),
        ("-drive file=a,id=d,backing.file.filename=/x", "drive.d.file", "b"),
        ("-frobnicate id=a,file=/x", "frobnicate.a.size", "1"),
        ("-object secret,id=s,file=/x", "object.s.qom-type", "secret"),
        // The image's file is in a nested object, and stays.
        (
            "-blockdev {\"driver\":\"raw\",\"node-name\":\"d\",\"file\":{\"driver\":\"file\",\"filename\":\"/x\"}}",
            "blockdev.d.file.filename",
            "/y",
        ),
    ] {
        assert!(!find(line, &set(key, value)).is_empty(), "{line} with {key}={value}");
    }
    // An image's last option has no value, and would get the user's.
    let words = words("-vnc :5");
    let named = CommandOverrides { words, ..CommandOverrides::default() };
    assert_eq!(find("-pidfile", &named).len(), 1);
}

#[test]
fn each_access_says_how_to_name_something_else() {
    let remedy = |line: &str| found(line)[0].remedy.clone();
    assert_eq!(remedy("-drive file=/a,,b,id=d"), "--disk /a,b=NEW");
    assert_eq!(remedy("-netdev tap,id=n"), "--netdev n=BACKEND");
    assert_eq!(remedy("-device e1000,id=e,romfile=/x"), "--set device.e.romfile=VALUE");
    assert_eq!(remedy("-boot splash=/x"), "--set boot.splash=VALUE");
    assert_eq!(remedy("-kernel /x"), "--set kernel=VALUE");
}

#[test]
fn bombs_are_listed_in_short() {
    let many = "path=/x,".repeat(500_000);
    for line in [
        format!("-chardev file,id=c,{many}"),
        format!("-chardev file,id=c,{}", &many[..60_000]),
        format!("-{}", "x".repeat(1 << 20)),
        "x ".repeat(30_000),
        format!("-object memory-backend-file,id=a,{many}"),
    ] {
        let accesses = found(&line);
        assert!((1..=ACCESSES_MAX).contains(&accesses.len()));
        let bytes = |it: &HostAccess| it.option.len() + it.effect.len() + it.remedy.len();
        assert!(accesses.iter().all(|it| bytes(it) < 4 * SHOWN_CHARS_MAX));
    }
}

mod any {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Whatever the words are: no panic, and an unknown word is never lost.
        #[test]
        fn any_words_are_examined(words in proptest::collection::vec("(-(chardev|drive|device|object|netdev|machine|global|m))|[a-z:,=./{}\"]{0,20}", 0..12)) {
            let command: Vec<String> = std::iter::once("qemu".to_owned()).chain(words).collect();
            let none = CommandOverrides::default();
            let before = find_host_accesses(&command, &none, Path::new("/")).unwrap();
            prop_assert!(before.len() <= ACCESSES_MAX);
        }
    }
}
