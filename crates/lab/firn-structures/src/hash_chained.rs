//! Hash table with a list for each slot. Node: key, next.

use crate::{
    COUNT, DataStructure, FIRST, NEXT, NIL, WordSlice, allocate_node, field_index, free_node,
    mix_bits,
};

const SIZE: u64 = 2;
const KEY: u64 = 0;
const LINK: u64 = 1;
/// The word that has the count of slots.
const SLOTS: usize = 4;

pub(crate) const STRUCTURE: DataStructure = DataStructure {
    name: "hashsechain",
    words: |elements| FIRST as usize + (elements + 1) * 3,
    create: create_table,
    insert: insert_key,
    delete: delete_key,
    keys: collect_keys,
    has_deletions_in_paper: false,
    deletes_given_key: true,
};

fn create_table(words: &mut WordSlice) {
    let slots = (words.len() as u64 - FIRST) / 3;
    words[SLOTS] = slots;
    words[NEXT] = FIRST + slots;
}

fn slot_index(words: &WordSlice, key: u64) -> usize {
    (FIRST + mix_bits(key) % words[SLOTS]) as usize
}

fn insert_key(words: &mut WordSlice, key: u64) {
    let slot = slot_index(words, key);
    let node = allocate_node(words, SIZE);
    words[field_index(node, KEY)] = key;
    words[field_index(node, LINK)] = words[slot];
    words[slot] = node;
    words[COUNT] += 1;
}

fn delete_key(words: &mut WordSlice, key: u64) {
    let mut link = slot_index(words, key);
    while words[link] != NIL {
        let node = words[link];
        if words[field_index(node, KEY)] == key {
            words[link] = words[field_index(node, LINK)];
            words[COUNT] -= 1;
            return free_node(words, node);
        }
        link = field_index(node, LINK);
    }
}

fn collect_keys(words: &WordSlice) -> Vec<u64> {
    let mut keys = Vec::new();
    for slot in FIRST..FIRST + words[SLOTS] {
        let mut node = words[slot as usize];
        while node != NIL {
            keys.push(words[field_index(node, KEY)]);
            node = words[field_index(node, LINK)];
        }
    }
    keys
}
