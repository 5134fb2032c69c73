//! Hash table with a list for each slot. Node: key, next.

use crate::{COUNT, FIRST, NEXT, NIL, Structure, Words, allocate, at, free, mix};

const SIZE: u64 = 2;
const KEY: u64 = 0;
const LINK: u64 = 1;
/// The word that has the count of slots.
const SLOTS: usize = 4;

pub(crate) const STRUCTURE: Structure = Structure {
    name: "hashsechain",
    words: |elements| FIRST as usize + (elements + 1) * 3,
    create,
    insert,
    delete,
    keys,
    deletes: false,
    by_key: true,
};

fn create(words: &mut Words) {
    let slots = (words.len() as u64 - FIRST) / 3;
    words[SLOTS] = slots;
    words[NEXT] = FIRST + slots;
}

fn slot(words: &Words, key: u64) -> usize {
    (FIRST + mix(key) % words[SLOTS]) as usize
}

fn insert(words: &mut Words, key: u64) {
    let slot = slot(words, key);
    let node = allocate(words, SIZE);
    words[at(node, KEY)] = key;
    words[at(node, LINK)] = words[slot];
    words[slot] = node;
    words[COUNT] += 1;
}

fn delete(words: &mut Words, key: u64) {
    let mut link = slot(words, key);
    while words[link] != NIL {
        let node = words[link];
        if words[at(node, KEY)] == key {
            words[link] = words[at(node, LINK)];
            words[COUNT] -= 1;
            return free(words, node);
        }
        link = at(node, LINK);
    }
}

fn keys(words: &Words) -> Vec<u64> {
    let mut keys = Vec::new();
    for slot in FIRST..FIRST + words[SLOTS] {
        let mut node = words[slot as usize];
        while node != NIL {
            keys.push(words[at(node, KEY)]);
            node = words[at(node, LINK)];
        }
    }
    keys
}
