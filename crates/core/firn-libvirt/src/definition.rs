//! The XML of a domain that is restored from an image.
//!
//! ```text
//!   XML of the running domain, in the image          XML of the restored domain
//!     <name>, <uuid>                                   others, if the user chose another name
//!     <genid>                                          another one, if it has one
//!     <memoryBacking>                                  RAM in a shared memfd, which Firn fills
//!     <disk><source>, <backingStore>                   the files of the restore
//!     <metadata>                                       the mark of this restore
//!     <qemu:commandline>                               -incoming defer
//! ```
//!
//! Elements are replaced in the text, so that all others stay as libvirt wrote them. The definition,
//! from which libvirt starts a persistent domain again, has neither the mark nor `-incoming`.

use std::ops::Range;

use roxmltree::{Document, Node};
use thiserror::Error;

/// The namespace of libvirt's elements for QEMU.
const QEMU_NAMESPACE: &str = "http://libvirt.org/schemas/domain/qemu/1.0";
/// The namespace of the mark.
const MARK_NAMESPACE: &str = "urn:firn:restore:1";
/// The words that make a QEMU wait for device state.
const INCOMING: [&str; 2] = ["-incoming", "defer"];

/// The reason why a domain's XML cannot be used.
#[derive(Debug, Error)]
pub enum DefinitionError {
    /// It is not XML.
    #[error("the domain's XML cannot be read")]
    Parse(#[from] roxmltree::Error),
    /// It has no name or no UUID.
    #[error("the domain's XML has no {0}")]
    Missing(&'static str),
    /// The image has the contents of a disk that the XML does not have.
    #[error("the domain's XML has no disk {0}")]
    NoDisk(String),
}

/// A name and a UUID.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DomainIdentity {
    /// The name.
    pub name: String,
    /// The UUID.
    pub uuid: String,
}

/// A file that replaces the file of a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskReplacement {
    /// The file that the XML names; or the name of a node, of a disk on the network
    /// ([`DomainChanges::locate_network_disks`]).
    pub named: String,
    /// The file that replaces it.
    pub file: String,
    /// Its format, or that of the present file if this is `None`.
    pub format: Option<String>,
}

/// The changes to a domain that is restored.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DomainChanges {
    /// Another name and UUID.
    pub identity: Option<DomainIdentity>,
    /// Another generation ID, for a domain that has one.
    pub generation_id: Option<String>,
    /// Disks with other files. The XML must have each of them.
    pub disks: Vec<DiskReplacement>,
    /// Disks whose files the user has moved. The XML need not have them.
    pub moved: Vec<DiskReplacement>,
    /// A password for consoles: libvirt's XML has none, even if the domain has.
    pub console_password: Option<String>,
}

impl DomainIdentity {
    /// The identity in a domain's XML.
    ///
    /// # Errors
    /// If it is no XML of a domain.
    pub fn of_xml(xml: &str) -> Result<Self, DefinitionError> {
        let document = Document::parse(xml)?;
        let text = |name: &'static str| {
            let node = child(document.root_element(), name);
            let text = node.and_then(|node| node.text()).map(str::trim);
            text.map(str::to_owned).ok_or(DefinitionError::Missing(name))
        };
        Ok(Self { name: text("name")?, uuid: text("uuid")? })
    }
}

/// Whether the XML has the mark of a restore.
pub fn has_mark(xml: &str, mark: &str) -> bool {
    let is_mark =
        |node: &Node<'_, '_>| is_mark_element(node) && node.attribute("restore") == Some(mark);
    Document::parse(xml).is_ok_and(|it| it.descendants().any(|node| is_mark(&node)))
}

/// The start of the name of a disk that is named as the guest has it: `target:vda`.
const TARGET_PREFIX: &str = "target:";

impl DomainChanges {
    /// Finds disks on the network in the XML of the running domain, which alone has the numbers of
    /// their nodes. From then on they are found in any XML of the domain.
    ///
    /// # Errors
    /// If the XML can't be read.
    pub fn locate_network_disks(&mut self, running: &str) -> Result<(), DefinitionError> {
        let document = Document::parse(running)?;
        for disk in &mut self.disks {
            let found = find_network_disk(document.root_element(), &disk.named);
            if let Some(target) = found.and_then(target_of) {
                disk.named = format!("{TARGET_PREFIX}{target}");
            }
        }
        Ok(())
    }

    /// The XML of a domain that waits for its device state, from that of the domain that was saved.
    ///
    /// # Errors
    /// If it is no XML, or if it lacks a disk.
    pub fn apply_to_domain(&self, xml: &str, mark: &str) -> Result<String, DefinitionError> {
        let document = Document::parse(xml)?;
        let root = document.root_element();
        let mut edit = XmlEdit::new(xml);
        self.change_identity(&mut edit, root);
        self.change_disks(&mut edit, root).map_or(Ok(()), Err)?;
        self.set_passwords(&mut edit, root);
        edit.share_memory(root);
        let mark_element =
            format!("<firn:restored xmlns:firn=\"{MARK_NAMESPACE}\" restore=\"{mark}\"/>");
        edit.rebuild(root, ("metadata", ""), |node| !is_mark_element(node), &mark_element);
        edit.add_incoming(root);
        Ok(edit.apply())
    }

    /// The definition of the restored domain, from that of the domain that was saved. A domain with
    /// another name gets other addresses for its network cards when it starts again.
    ///
    /// # Errors
    /// If it is no XML.
    pub fn apply_to_definition(&self, xml: &str) -> Result<String, DefinitionError> {
        let document = Document::parse(xml)?;
        let root = document.root_element();
        let mut edit = XmlEdit::new(xml);
        self.change_identity(&mut edit, root);
        // The definition may have had other disks than the running domain.
        let _ = self.change_disks(&mut edit, root);
        self.set_passwords(&mut edit, root);
        if self.identity.is_some() {
            let cards = devices(root, "interface").filter_map(|card| child(card, "mac"));
            cards.for_each(|mac| edit.remove(mac));
        }
        Ok(edit.apply())
    }

    fn change_identity(&self, edit: &mut XmlEdit<'_>, root: Node<'_, '_>) {
        let identity = self.identity.as_ref();
        let texts = [
            ("name", identity.map(|it| &it.name)),
            ("uuid", identity.map(|it| &it.uuid)),
            ("genid", self.generation_id.as_ref()),
        ];
        for (element, text) in texts {
            if let (Some(node), Some(text)) = (child(root, element), text) {
                edit.replace(node.range(), format!("<{element}>{}</{element}>", escape(text)));
            }
        }
    }

    /// Replaces files of disks. Returns the first disk that is missing.
    fn change_disks(&self, edit: &mut XmlEdit<'_>, root: Node<'_, '_>) -> Option<DefinitionError> {
        let mut missing = None;
        for replacement in self.disks.iter().chain(&self.moved) {
            match find_disk(root, &replacement.named) {
                Some(disk) => edit.replace_disk(disk, replacement),
                None if self.disks.contains(replacement) && missing.is_none() => {
                    missing = Some(DefinitionError::NoDisk(replacement.named.clone()));
                }
                None => {}
            }
        }
        missing
    }

    fn set_passwords(&self, edit: &mut XmlEdit<'_>, root: Node<'_, '_>) {
        let Some(password) = &self.console_password else { return };
        for console in devices(root, "graphics").filter(|it| it.attribute("passwd").is_none()) {
            if matches!(console.attribute("type"), Some("vnc" | "spice")) {
                edit.set_attribute(console, "passwd", password);
            }
        }
    }
}

/// The disk whose file has this name; or else the disk with this file below its own. A name may be
/// that of the disk in the guest, too ([`TARGET_PREFIX`]).
fn find_disk<'a>(root: Node<'a, 'a>, file: &str) -> Option<Node<'a, 'a>> {
    if let Some(target) = file.strip_prefix(TARGET_PREFIX) {
        return devices(root, "disk").find(|disk| target_of(*disk) == Some(target));
    }
    let names = |source: Node<'_, '_>| {
        let name = source.attribute("file").or_else(|| source.attribute("dev"));
        source.has_tag_name("source") && name == Some(file)
    };
    let direct = devices(root, "disk").find(|disk| child(*disk, "source").is_some_and(names));
    direct.or_else(|| devices(root, "disk").find(|disk| disk.descendants().any(names)))
}

fn target_of<'a>(disk: Node<'a, 'a>) -> Option<&'a str> {
    child(disk, "target")?.attribute("dev")
}

/// The disk on the network with this name of its node, by the number that libvirt gave its source.
fn find_network_disk<'a>(root: Node<'a, 'a>, named: &str) -> Option<Node<'a, 'a>> {
    let index = network_index(named)?;
    let is_this = |source: Node<'_, '_>| source.attribute("index") == Some(index);
    devices(root, "disk").find(|disk| child(*disk, "source").is_some_and(is_this))
}

/// The number in `network:libvirt-2-storage`.
fn network_index(named: &str) -> Option<&str> {
    let (index, layer) = named.strip_prefix("network:libvirt-")?.split_once('-')?;
    matches!(layer, "storage" | "format").then_some(index)
}

fn devices<'a>(root: Node<'a, 'a>, name: &'static str) -> impl Iterator<Item = Node<'a, 'a>> {
    let all = child(root, "devices").into_iter().flat_map(|it| it.children());
    all.filter(move |node| node.has_tag_name(name))
}

fn child<'a>(node: Node<'a, 'a>, name: &str) -> Option<Node<'a, 'a>> {
    node.children().find(|child| child.has_tag_name(name))
}

fn is_mark_element(node: &Node<'_, '_>) -> bool {
    node.tag_name().namespace() == Some(MARK_NAMESPACE)
}

fn escape(text: &str) -> String {
    let text = text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    text.replace('"', "&quot;")
}

/// Replacements in the text of a document.
struct XmlEdit<'a> {
    text: &'a str,
    changes: Vec<(Range<usize>, String)>,
}

impl<'a> XmlEdit<'a> {
    fn new(text: &'a str) -> Self {
        Self { text, changes: Vec::new() }
    }

    fn replace(&mut self, range: Range<usize>, new: String) {
        self.changes.push((range, new));
    }

    fn remove(&mut self, node: Node<'_, '_>) {
        self.replace(node.range(), String::new());
    }

    fn apply(mut self) -> String {
        self.changes.sort_by_key(|(range, _)| range.start);
        let mut text = self.text.to_owned();
        for (range, new) in self.changes.into_iter().rev() {
            text.replace_range(range, &new);
        }
        text
    }

    fn set_attribute(&mut self, node: Node<'_, '_>, name: &str, value: &str) {
        let value = escape(value);
        match node.attribute_node(name) {
            Some(attribute) => self.replace(attribute.range_value(), value),
            None => {
                let start = node.range().start;
                let element = &self.text[node.range()];
                let end = element.find(|it: char| it.is_whitespace() || it == '>' || it == '/');
                let at = start + end.unwrap_or(element.len());
                self.replace(at..at, format!(" {name}=\"{value}\""));
            }
        }
    }

    /// Gives a disk another file. libvirt finds the files below that one itself.
    fn replace_disk(&mut self, disk: Node<'_, '_>, new: &DiskReplacement) {
        let Some(source) = child(disk, "source") else { return };
        let element = format!("<source file=\"{}\"/>", escape(&new.file));
        self.set_attribute(disk, "type", "file");
        match (child(disk, "driver"), &new.format) {
            (Some(driver), Some(format)) => self.set_attribute(driver, "type", format),
            (None, Some(format)) => {
                let at = source.range().start;
                self.replace(at..at, format!("<driver name=\"qemu\" type=\"{format}\"/>"));
            }
            (_, None) => {}
        }
        self.replace(source.range(), element);
        let below =
            |it: &Node<'_, '_>| it.has_tag_name("backingStore") || it.has_tag_name("mirror");
        disk.children().filter(below).for_each(|node| self.remove(node));
    }

    /// Puts RAM into shared memory that Firn can find.
    fn share_memory(&mut self, root: Node<'_, '_>) {
        let is_kept =
            |node: &Node<'_, '_>| !node.has_tag_name("source") && !node.has_tag_name("access");
        let shared = "<source type=\"memfd\"/><access mode=\"shared\"/>";
        self.rebuild(root, ("memoryBacking", ""), is_kept, shared);
        for cell in root.descendants().filter(|node| node.has_tag_name("cell")) {
            if cell.attribute("memAccess").is_some() {
                self.set_attribute(cell, "memAccess", "shared");
            }
        }
    }

    /// Adds the words that make QEMU wait, and removes those of an earlier restore.
    fn add_incoming(&mut self, root: Node<'_, '_>) {
        let is_kept = |node: &Node<'_, '_>| {
            !node.attribute("value").is_some_and(|word| INCOMING.contains(&word))
        };
        let words = INCOMING.map(|word| format!("<qemu:arg value=\"{word}\"/>")).concat();
        let namespace = format!(" xmlns:qemu=\"{QEMU_NAMESPACE}\"");
        let element = (QEMU_NAMESPACE, "commandline");
        let found = root.children().find(|node| node.has_tag_name(element));
        self.rebuild_element(root, found, ("qemu:commandline", &namespace), is_kept, &words);
    }

    fn rebuild(
        &mut self,
        root: Node<'_, '_>,
        element: (&str, &str),
        is_kept: impl Fn(&Node<'_, '_>) -> bool,
        added: &str,
    ) {
        self.rebuild_element(root, child(root, element.0), element, is_kept, added);
    }

    /// Writes a child of the root again, with some of its children and with others; adds it if it is
    /// missing.
    fn rebuild_element(
        &mut self,
        root: Node<'_, '_>,
        found: Option<Node<'_, '_>>,
        (name, attributes): (&str, &str),
        is_kept: impl Fn(&Node<'_, '_>) -> bool,
        added: &str,
    ) {
        let children = found.into_iter().flat_map(|it| it.children());
        let kept = children.filter(|it| it.is_element() && is_kept(it));
        let kept: String = kept.map(|it| &self.text[it.range()]).collect();
        let new = format!("<{name}{attributes}>{kept}{added}</{name}>");
        let end = root.range().start + self.text[root.range()].rfind("</").unwrap_or_default();
        self.replace(found.map_or(end..end, |it| it.range()), new);
    }
}

#[cfg(test)]
#[path = "definition_tests.rs"]
mod tests;
