//! Tests of the changes to a domain's XML.

use super::*;

const XML: &str = "<domain type='qemu' id='1'>
  <name>web</name>
  <uuid>ac507469-c5ad-4a95-800f-16d52a0f4813</uuid>
  <memoryBacking><nosharepages/><source type='anonymous'/></memoryBacking>
  <devices>
    <disk type='block' device='disk'>
      <driver name='qemu' type='raw' cache='none'/>
      <source dev='/dev/a' index='1'/>
      <backingStore/>
      <target dev='vda'/>
    </disk>
    <disk type='file' device='disk'>
      <source file='/d/b.snap'/>
      <backingStore type='file'><source file='/d/b'/><backingStore/></backingStore>
      <target dev='vdb'/>
    </disk>
    <disk type='file' device='cdrom'><source file='/d/c.iso'/><target dev='sda'/></disk>
    <interface type='user'><mac address='52:54:00:00:00:01'/></interface>
    <graphics type='vnc' port='5900'/>
  </devices>
</domain>";

fn replacement(named: &str, file: &str, format: Option<&str>) -> DiskReplacement {
    let format = format.map(str::to_owned);
    DiskReplacement { named: named.to_owned(), file: file.to_owned(), format }
}

fn changes() -> DomainChanges {
    let disks = vec![
        replacement("/dev/a", "/d/a & o", Some("qcow2")),
        replacement("/d/b", "/d/b.o", Some("qcow2")),
    ];
    DomainChanges { disks, ..DomainChanges::default() }
}

fn disk<'a>(document: &'a Document<'a>, target: &str) -> Node<'a, 'a> {
    let is_it =
        |disk: &Node<'_, '_>| child(*disk, "target").unwrap().attribute("dev") == Some(target);
    devices(document.root_element(), "disk").find(is_it).unwrap()
}

fn source_of(document: &Document<'_>, target: &str) -> String {
    let source = child(disk(document, target), "source").unwrap();
    source.attribute("file").unwrap().to_owned()
}

#[test]
fn a_disk_has_the_files_of_the_restore() {
    let xml = changes().apply_to_domain(XML, "m").unwrap();
    let document = Document::parse(&xml).unwrap();
    assert_eq!(source_of(&document, "vda"), "/d/a & o");
    assert_eq!(source_of(&document, "vdb"), "/d/b.o", "a file below the top stands for the disk");
    assert_eq!(source_of(&document, "sda"), "/d/c.iso");
    for target in ["vda", "vdb"] {
        let disk = disk(&document, target);
        assert_eq!(disk.attribute("type"), Some("file"));
        assert_eq!(child(disk, "driver").unwrap().attribute("type"), Some("qcow2"));
        assert!(child(disk, "backingStore").is_none(), "libvirt would not look below the file");
    }
    assert!(xml.contains("cache='none'"), "{xml}");
}

/// Only the XML of the running domain has the numbers of nodes.
#[test]
fn a_disk_on_the_network_is_found_by_its_node_and_becomes_a_file() {
    let disk_xml = |index: &str| {
        format!(
            "<disk type='network' device='disk'><driver name='qemu' type='raw' cache='none'/>\
             <source protocol='rbd' name='vms/web'{index}><host name='a' port='3300'/>\
             <auth username='firn'><secret type='ceph' uuid='1'/></auth></source>\
             <target dev='vdc'/></disk><interface"
        )
    };
    let xml = |index: &str| XML.replacen("<interface", &disk_xml(index), 1);
    let mut changes = changes();
    changes.disks.push(replacement("network:libvirt-3-storage", "/d/web.o", Some("qcow2")));
    assert!(changes.apply_to_domain(&xml(" index='3'"), "m").is_err());
    changes.locate_network_disks(&xml(" index='3'")).unwrap();
    let domain = changes.apply_to_domain(&xml(" index='3'"), "m").unwrap();
    let definition = changes.apply_to_definition(&xml("")).unwrap();
    for changed in [domain, definition] {
        let document = Document::parse(&changed).unwrap();
        let disk = disk(&document, "vdc");
        assert_eq!(
            (source_of(&document, "vdc"), disk.attribute("type")),
            ("/d/web.o".into(), Some("file"))
        );
        assert_eq!(child(disk, "driver").unwrap().attribute("type"), Some("qcow2"));
        assert!(!changed.contains("rbd") && !changed.contains("ceph"), "{changed}");
    }
}

#[test]
fn a_disk_that_the_xml_lacks_is_an_error() {
    let mut changes = changes();
    changes.disks.push(replacement("/d/none", "/d/o", Some("qcow2")));
    let error = changes.apply_to_domain(XML, "m").unwrap_err();
    assert_eq!(error.to_string(), "the domain's XML has no disk /d/none");
    assert!(changes.apply_to_definition(XML).is_ok());
    changes.disks.pop();
    changes.moved.push(replacement("/d/c.iso", "/e/c.iso", None));
    changes.moved.push(replacement("/d/other", "/e/other", None));
    let xml = changes.apply_to_domain(XML, "m").unwrap();
    assert_eq!(source_of(&Document::parse(&xml).unwrap(), "sda"), "/e/c.iso");
}

#[test]
fn a_restore_of_a_restored_domain_has_one_mark_and_waits_once() {
    let first = changes().apply_to_domain(XML, "first").unwrap();
    let changes = DomainChanges::default();
    let second = changes.apply_to_domain(&first, "second").unwrap();
    assert!(has_mark(&first, "first") && !has_mark(&first, "second"));
    assert!(has_mark(&second, "second") && !has_mark(&second, "first"));
    assert_eq!(second.matches("-incoming").count(), 1, "{second}");
    assert_eq!(second.matches("memfd").count(), 1, "{second}");
    assert!(second.contains("<nosharepages/>") && !second.contains("anonymous"), "{second}");
}

#[test]
fn a_definition_waits_for_nothing() {
    let identity = DomainIdentity { name: "a<b".into(), uuid: "0-1".into() };
    let changes = DomainChanges { identity: Some(identity.clone()), ..changes() };
    let definition = changes.apply_to_definition(XML).unwrap();
    assert_eq!(DomainIdentity::of_xml(&definition).unwrap(), identity);
    for word in ["-incoming", "memfd", "52:54:00", "firn:"] {
        assert!(!definition.contains(word), "{word}: {definition}");
    }
    let running = changes.apply_to_domain(XML, "m").unwrap();
    assert!(running.contains("52:54:00"), "the running guest has this address: {running}");
}

#[test]
fn a_console_that_had_a_password_has_one() {
    let password = Some("x\"y".to_owned());
    let changes = DomainChanges { console_password: password, ..DomainChanges::default() };
    let xml = changes.apply_to_domain(XML, "m").unwrap();
    let document = Document::parse(&xml).unwrap();
    let console = devices(document.root_element(), "graphics").next().unwrap();
    assert_eq!(console.attribute("passwd"), Some("x\"y"));
}

#[test]
fn other_text_is_an_error() {
    for text in ["", "web", "<domain>", "<domain/>", "<!DOCTYPE a [<!ENTITY b 'c'>]><a>&b;</a>"] {
        assert!(DomainIdentity::of_xml(text).is_err(), "{text}");
        let _ = DomainChanges::default().apply_to_domain(text, "m");
    }
}
