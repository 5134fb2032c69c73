//! Linked list, new elements at the head. Node: key, next.

use crate::{DataStructure, NIL, ROOT, WordSlice, allocate_node, field_index, initialize_words};

const SIZE: u64 = 2;
const KEY: u64 = 0;
const LINK: u64 = 1;

pub(crate) const STRUCTURE: DataStructure = DataStructure {
    name: "list",
    words: |elements| 16 + elements * SIZE as usize,
    create: initialize_words,
    insert: insert_key,
    delete: delete_key,
    keys: collect_keys,
    has_deletions_in_paper: true,
    deletes_given_key: true,
};

fn insert_key(words: &mut WordSlice, key: u64) {
    let node = allocate_node(words, SIZE);
    words[field_index(node, KEY)] = key;
    words[field_index(node, LINK)] = words[ROOT];
    words[ROOT] = node;
}

/// Unlinks the element, and leaves it: one write, as in the paper's table.
fn delete_key(words: &mut WordSlice, key: u64) {
    let mut link = ROOT;
    while words[link] != NIL {
        let node = words[link];
        if words[field_index(node, KEY)] == key {
            words[link] = words[field_index(node, LINK)];
            return;
        }
        link = field_index(node, LINK);
    }
}

fn collect_keys(words: &WordSlice) -> Vec<u64> {
    let (mut keys, mut node) = (Vec::new(), words[ROOT]);
    while node != NIL {
        keys.push(words[field_index(node, KEY)]);
        node = words[field_index(node, LINK)];
    }
    keys
}
