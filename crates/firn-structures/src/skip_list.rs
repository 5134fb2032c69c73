//! Deterministic skip list (1-2-3), linked downwards. Node: key, right, down, whether it was
//! deleted.
//!
//! Insertion splits every gap of three that it passes, on its way down. Deletion, which the paper's
//! table does not have, marks the element on the lowest level.

use crate::{COUNT, NIL, ROOT, Structure, Words, allocate, at, create};

const SIZE: u64 = 4;
const KEY: u64 = 0;
const RIGHT: u64 = 1;
const DOWN: u64 = 2;
const DELETED: u64 = 3;
/// The key of the node at the right end of each level.
const INFINITY: u64 = u64::MAX;
/// Two nodes in the head of the memory: below the lowest level, and right of the last node.
const BOTTOM: u64 = 8;
const TAIL: u64 = 12;

pub(crate) const STRUCTURE: Structure = Structure {
    name: "dsl",
    words: |elements| 16 + (2 * elements + 64) * SIZE as usize,
    create: create_empty,
    insert,
    delete,
    keys,
    deletes: false,
    by_key: true,
};

fn create_empty(words: &mut Words) {
    create(words);
    words[at(BOTTOM, RIGHT)] = BOTTOM;
    words[at(BOTTOM, DOWN)] = BOTTOM;
    words[at(TAIL, KEY)] = INFINITY;
    words[at(TAIL, RIGHT)] = TAIL;
    words[ROOT] = node(words, INFINITY, TAIL, BOTTOM);
}

fn node(words: &mut Words, key: u64, right: u64, down: u64) -> u64 {
    let node = allocate(words, SIZE);
    words[at(node, KEY)] = key;
    words[at(node, RIGHT)] = right;
    words[at(node, DOWN)] = down;
    words[at(node, DELETED)] = 0;
    node
}

/// The node of the lowest level that has a key, or none.
fn find(words: &Words, key: u64) -> u64 {
    let mut current = words[ROOT];
    loop {
        while words[at(current, KEY)] < key {
            current = words[at(current, RIGHT)];
        }
        match words[at(current, DOWN)] {
            BOTTOM if words[at(current, KEY)] == key => return current,
            BOTTOM => return NIL,
            down => current = down,
        }
    }
}

fn insert(words: &mut Words, key: u64) {
    words[COUNT] += 1;
    let known = find(words, key);
    if known != NIL {
        words[at(known, DELETED)] = 0;
        return;
    }
    words[at(BOTTOM, KEY)] = key;
    let mut current = words[ROOT];
    while current != BOTTOM {
        while words[at(current, KEY)] < key {
            current = words[at(current, RIGHT)];
        }
        let down = words[at(current, DOWN)];
        let second = words[at(down, RIGHT)];
        let third = words[at(second, RIGHT)];
        match words[at(current, KEY)] > words[at(third, KEY)] {
            true => split(words, current, words[at(second, KEY)], third),
            false => current = down,
        }
    }
    if words[at(words[ROOT], RIGHT)] != TAIL {
        words[ROOT] = node(words, INFINITY, TAIL, words[ROOT]);
    }
}

/// Inserts a smaller key before that of a node. On the lowest level that is the insertion.
fn split(words: &mut Words, current: u64, key: u64, below: u64) {
    let after = node(words, words[at(current, KEY)], words[at(current, RIGHT)], below);
    words[at(after, DELETED)] = words[at(current, DELETED)];
    words[at(current, RIGHT)] = after;
    words[at(current, KEY)] = key;
    words[at(current, DELETED)] = 0;
}

fn delete(words: &mut Words, key: u64) {
    let node = find(words, key);
    if node != NIL && words[at(node, DELETED)] == 0 {
        words[at(node, DELETED)] = 1;
        words[COUNT] -= 1;
    }
}

fn keys(words: &Words) -> Vec<u64> {
    let (mut keys, mut node) = (Vec::new(), words[ROOT]);
    while words[at(node, DOWN)] != BOTTOM {
        node = words[at(node, DOWN)];
    }
    while node != TAIL {
        if words[at(node, DELETED)] == 0 && words[at(node, KEY)] != INFINITY {
            keys.push(words[at(node, KEY)]);
        }
        node = words[at(node, RIGHT)];
    }
    keys
}
