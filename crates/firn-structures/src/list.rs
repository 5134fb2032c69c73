//! Linked list, new elements at the head. Node: key, next.

use crate::{NIL, ROOT, Structure, Words, allocate, at, create};

const SIZE: u64 = 2;
const KEY: u64 = 0;
const LINK: u64 = 1;

pub(crate) const STRUCTURE: Structure = Structure {
    name: "list",
    words: |elements| 16 + elements * SIZE as usize,
    create,
    insert,
    delete,
    keys,
    deletes: true,
    by_key: true,
};

fn insert(words: &mut Words, key: u64) {
    let node = allocate(words, SIZE);
    words[at(node, KEY)] = key;
    words[at(node, LINK)] = words[ROOT];
    words[ROOT] = node;
}

/// Unlinks the element, and leaves it: one write, as in the paper's table.
fn delete(words: &mut Words, key: u64) {
    let mut link = ROOT;
    while words[link] != NIL {
        let node = words[link];
        if words[at(node, KEY)] == key {
            words[link] = words[at(node, LINK)];
            return;
        }
        link = at(node, LINK);
    }
}

fn keys(words: &Words) -> Vec<u64> {
    let (mut keys, mut node) = (Vec::new(), words[ROOT]);
    while node != NIL {
        keys.push(words[at(node, KEY)]);
        node = words[at(node, LINK)];
    }
    keys
}
