//! Binary search tree, not balanced. Node: key, left, right.

use crate::{
    COUNT, DataStructure, NIL, ROOT, WordSlice, allocate_node, field_index, free_node,
    initialize_words, keys_in_order,
};

const SIZE: u64 = 3;
const KEY: u64 = 0;
const LEFT: u64 = 1;
const RIGHT: u64 = 2;

pub(crate) const STRUCTURE: DataStructure = DataStructure {
    name: "tree",
    words: |elements| 16 + elements * SIZE as usize,
    create: initialize_words,
    insert: insert_key,
    delete: delete_key,
    keys: |words| keys_in_order(words, [KEY, LEFT, RIGHT]),
    has_deletions_in_paper: true,
    deletes_given_key: true,
};

fn insert_key(words: &mut WordSlice, key: u64) {
    words[ROOT] = insert_below(words, words[ROOT], key);
    words[COUNT] += 1;
}

fn insert_below(words: &mut WordSlice, node: u64, key: u64) -> u64 {
    if node == NIL {
        let node = allocate_node(words, SIZE);
        words[field_index(node, KEY)] = key;
        words[field_index(node, LEFT)] = NIL;
        words[field_index(node, RIGHT)] = NIL;
        return node;
    }
    let side = if key < words[field_index(node, KEY)] { LEFT } else { RIGHT };
    let child = insert_below(words, words[field_index(node, side)], key);
    words[field_index(node, side)] = child;
    node
}

/// Finds the node without a write, then writes there.
fn delete_key(words: &mut WordSlice, key: u64) {
    let mut link = ROOT;
    while words[link] != NIL {
        let node = words[link];
        let found = words[field_index(node, KEY)];
        if key == found {
            return unlink_node(words, link);
        }
        link = field_index(node, if key < found { LEFT } else { RIGHT });
    }
}

fn unlink_node(words: &mut WordSlice, link: usize) {
    let node = words[link];
    let (left, right) = (words[field_index(node, LEFT)], words[field_index(node, RIGHT)]);
    words[COUNT] -= 1;
    if left == NIL || right == NIL {
        words[link] = if left == NIL { right } else { left };
        return free_node(words, node);
    }
    let mut least = field_index(node, RIGHT);
    while words[field_index(words[least], LEFT)] != NIL {
        least = field_index(words[least], LEFT);
    }
    let successor = words[least];
    words[field_index(node, KEY)] = words[field_index(successor, KEY)];
    words[least] = words[field_index(successor, RIGHT)];
    free_node(words, successor);
}
