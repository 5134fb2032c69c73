//! AA tree. Node: key, left, right, level.

use crate::{
    COUNT, DataStructure, NIL, ROOT, WordSlice, allocate_node, field_index, free_node,
    initialize_words, keys_in_order,
};

const SIZE: u64 = 4;
const KEY: u64 = 0;
const LEFT: u64 = 1;
const RIGHT: u64 = 2;
const LEVEL: u64 = 3;

pub(crate) const STRUCTURE: DataStructure = DataStructure {
    name: "aa",
    words: |elements| 16 + elements * SIZE as usize,
    create: initialize_words,
    insert: insert_key,
    delete: delete_key,
    keys: |words| keys_in_order(words, [KEY, LEFT, RIGHT]),
    has_deletions_in_paper: true,
    deletes_given_key: true,
};

fn node_level(words: &WordSlice, node: u64) -> u64 {
    if node == NIL { 0 } else { words[field_index(node, LEVEL)] }
}

/// Makes a left child of the same level the parent.
fn skew_node(words: &mut WordSlice, node: u64) -> u64 {
    if node == NIL {
        return NIL;
    }
    let left = words[field_index(node, LEFT)];
    if left == NIL || node_level(words, left) != node_level(words, node) {
        return node;
    }
    words[field_index(node, LEFT)] = words[field_index(left, RIGHT)];
    words[field_index(left, RIGHT)] = node;
    left
}

/// Makes two consecutive right children of the same level a higher node with two children.
fn split_node(words: &mut WordSlice, node: u64) -> u64 {
    if node == NIL {
        return NIL;
    }
    let right = words[field_index(node, RIGHT)];
    if right == NIL
        || node_level(words, words[field_index(right, RIGHT)]) != node_level(words, node)
    {
        return node;
    }
    words[field_index(node, RIGHT)] = words[field_index(right, LEFT)];
    words[field_index(right, LEFT)] = node;
    words[field_index(right, LEVEL)] += 1;
    right
}

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
        words[field_index(node, LEVEL)] = 1;
        return node;
    }
    let side = if key < words[field_index(node, KEY)] { LEFT } else { RIGHT };
    let child = insert_below(words, words[field_index(node, side)], key);
    words[field_index(node, side)] = child;
    let node = skew_node(words, node);
    split_node(words, node)
}

fn delete_key(words: &mut WordSlice, key: u64) {
    words[ROOT] = delete_below(words, words[ROOT], key);
}

fn delete_below(words: &mut WordSlice, node: u64, key: u64) -> u64 {
    if node == NIL {
        return NIL;
    }
    let found = words[field_index(node, KEY)];
    if key != found {
        let side = if key < found { LEFT } else { RIGHT };
        let child = delete_below(words, words[field_index(node, side)], key);
        words[field_index(node, side)] = child;
        return rebalance_node(words, node);
    }
    let (left, right) = (words[field_index(node, LEFT)], words[field_index(node, RIGHT)]);
    if left == NIL && right == NIL {
        free_node(words, node);
        words[COUNT] -= 1;
        return NIL;
    }
    let (side, towards) = if left == NIL { (RIGHT, LEFT) } else { (LEFT, RIGHT) };
    let mut neighbour = words[field_index(node, side)];
    while words[field_index(neighbour, towards)] != NIL {
        neighbour = words[field_index(neighbour, towards)];
    }
    let key = words[field_index(neighbour, KEY)];
    words[field_index(node, KEY)] = key;
    let child = delete_below(words, words[field_index(node, side)], key);
    words[field_index(node, side)] = child;
    rebalance_node(words, node)
}

fn rebalance_node(words: &mut WordSlice, node: u64) -> u64 {
    let (left, right) = (words[field_index(node, LEFT)], words[field_index(node, RIGHT)]);
    let should = node_level(words, left).min(node_level(words, right)) + 1;
    if should < node_level(words, node) {
        words[field_index(node, LEVEL)] = should;
        if should < node_level(words, right) {
            words[field_index(right, LEVEL)] = should;
        }
    }
    let node = skew_node(words, node);
    let right = skew_node(words, words[field_index(node, RIGHT)]);
    words[field_index(node, RIGHT)] = right;
    if right != NIL {
        let next = skew_node(words, words[field_index(right, RIGHT)]);
        words[field_index(right, RIGHT)] = next;
    }
    let node = split_node(words, node);
    let right = split_node(words, words[field_index(node, RIGHT)]);
    words[field_index(node, RIGHT)] = right;
    node
}
