//! AVL tree. Node: key, left, right, height.

use crate::{
    COUNT, DataStructure, NIL, ROOT, WordSlice, allocate_node, field_index, free_node,
    initialize_words, keys_in_order,
};

const SIZE: u64 = 4;
const KEY: u64 = 0;
const LEFT: u64 = 1;
const RIGHT: u64 = 2;
const HEIGHT: u64 = 3;

pub(crate) const STRUCTURE: DataStructure = DataStructure {
    name: "avl",
    words: |elements| 16 + elements * SIZE as usize,
    create: initialize_words,
    insert: insert_key,
    delete: delete_key,
    keys: |words| keys_in_order(words, [KEY, LEFT, RIGHT]),
    has_deletions_in_paper: false,
    deletes_given_key: true,
};

fn node_height(words: &WordSlice, node: u64) -> u64 {
    if node == NIL { 0 } else { words[field_index(node, HEIGHT)] }
}

fn update_height(words: &mut WordSlice, node: u64) {
    let tallest = node_height(words, words[field_index(node, LEFT)])
        .max(node_height(words, words[field_index(node, RIGHT)]));
    words[field_index(node, HEIGHT)] = tallest + 1;
}

/// Lifts the child on a side above its parent.
fn rotate_child(words: &mut WordSlice, node: u64, side: u64) -> u64 {
    let other = LEFT + RIGHT - side;
    let child = words[field_index(node, side)];
    words[field_index(node, side)] = words[field_index(child, other)];
    words[field_index(child, other)] = node;
    update_height(words, node);
    update_height(words, child);
    child
}

fn rebalance_node(words: &mut WordSlice, node: u64) -> u64 {
    for (side, other) in [(LEFT, RIGHT), (RIGHT, LEFT)] {
        let child = words[field_index(node, side)];
        if node_height(words, child) > node_height(words, words[field_index(node, other)]) + 1 {
            let (outer, inner) =
                (words[field_index(child, side)], words[field_index(child, other)]);
            if node_height(words, inner) > node_height(words, outer) {
                words[field_index(node, side)] = rotate_child(words, child, other);
            }
            return rotate_child(words, node, side);
        }
    }
    update_height(words, node);
    node
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
        words[field_index(node, HEIGHT)] = 1;
        return node;
    }
    let side = if key < words[field_index(node, KEY)] { LEFT } else { RIGHT };
    let child = insert_below(words, words[field_index(node, side)], key);
    words[field_index(node, side)] = child;
    rebalance_node(words, node)
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
    if left == NIL || right == NIL {
        free_node(words, node);
        words[COUNT] -= 1;
        return if left == NIL { right } else { left };
    }
    let mut least = right;
    while words[field_index(least, LEFT)] != NIL {
        least = words[field_index(least, LEFT)];
    }
    let successor = words[field_index(least, KEY)];
    words[field_index(node, KEY)] = successor;
    let child = delete_below(words, right, successor);
    words[field_index(node, RIGHT)] = child;
    rebalance_node(words, node)
}
