//! Deterministic skip list (1-2-3), linked downwards. Node: key, right, down, whether it was
//! deleted.
//!
//! Insertion splits every gap of three that it passes, on its way down. Deletion, which the paper's
//! table does not have, marks the element on the lowest level.

use crate::{
    COUNT, DataStructure, NIL, ROOT, WordSlice, allocate_node, field_index, initialize_words,
};

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

pub(crate) const STRUCTURE: DataStructure = DataStructure {
    name: "dsl",
    words: |elements| 16 + (2 * elements + 64) * SIZE as usize,
    create: create_empty,
    insert: insert_key,
    delete: delete_key,
    keys: collect_keys,
    has_deletions_in_paper: false,
    deletes_given_key: true,
};

fn create_empty(words: &mut WordSlice) {
    initialize_words(words);
    words[field_index(BOTTOM, RIGHT)] = BOTTOM;
    words[field_index(BOTTOM, DOWN)] = BOTTOM;
    words[field_index(TAIL, KEY)] = INFINITY;
    words[field_index(TAIL, RIGHT)] = TAIL;
    words[ROOT] = create_node(words, INFINITY, TAIL, BOTTOM);
}

fn create_node(words: &mut WordSlice, key: u64, right: u64, down: u64) -> u64 {
    let node = allocate_node(words, SIZE);
    words[field_index(node, KEY)] = key;
    words[field_index(node, RIGHT)] = right;
    words[field_index(node, DOWN)] = down;
    words[field_index(node, DELETED)] = 0;
    node
}

/// The node of the lowest level that has a key, or none.
fn find_node(words: &WordSlice, key: u64) -> u64 {
    let mut current = words[ROOT];
    loop {
        while words[field_index(current, KEY)] < key {
            current = words[field_index(current, RIGHT)];
        }
        match words[field_index(current, DOWN)] {
            BOTTOM if words[field_index(current, KEY)] == key => return current,
            BOTTOM => return NIL,
            down => current = down,
        }
    }
}

fn insert_key(words: &mut WordSlice, key: u64) {
    words[COUNT] += 1;
    let known = find_node(words, key);
    if known != NIL {
        words[field_index(known, DELETED)] = 0;
        return;
    }
    words[field_index(BOTTOM, KEY)] = key;
    let mut current = words[ROOT];
    while current != BOTTOM {
        while words[field_index(current, KEY)] < key {
            current = words[field_index(current, RIGHT)];
        }
        let down = words[field_index(current, DOWN)];
        let second = words[field_index(down, RIGHT)];
        let third = words[field_index(second, RIGHT)];
        match words[field_index(current, KEY)] > words[field_index(third, KEY)] {
            true => split_gap(words, current, words[field_index(second, KEY)], third),
            false => current = down,
        }
    }
    if words[field_index(words[ROOT], RIGHT)] != TAIL {
        words[ROOT] = create_node(words, INFINITY, TAIL, words[ROOT]);
    }
}

/// Inserts a smaller key before that of a node. On the lowest level that is the insertion.
fn split_gap(words: &mut WordSlice, current: u64, key: u64, below: u64) {
    let after = create_node(
        words,
        words[field_index(current, KEY)],
        words[field_index(current, RIGHT)],
        below,
    );
    words[field_index(after, DELETED)] = words[field_index(current, DELETED)];
    words[field_index(current, RIGHT)] = after;
    words[field_index(current, KEY)] = key;
    words[field_index(current, DELETED)] = 0;
}

fn delete_key(words: &mut WordSlice, key: u64) {
    let node = find_node(words, key);
    if node != NIL && words[field_index(node, DELETED)] == 0 {
        words[field_index(node, DELETED)] = 1;
        words[COUNT] -= 1;
    }
}

fn collect_keys(words: &WordSlice) -> Vec<u64> {
    let (mut keys, mut node) = (Vec::new(), words[ROOT]);
    while words[field_index(node, DOWN)] != BOTTOM {
        node = words[field_index(node, DOWN)];
    }
    while node != TAIL {
        if words[field_index(node, DELETED)] == 0 && words[field_index(node, KEY)] != INFINITY {
            keys.push(words[field_index(node, KEY)]);
        }
        node = words[field_index(node, RIGHT)];
    }
    keys
}
