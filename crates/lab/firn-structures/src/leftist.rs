//! Leftist heap. Node: key, left, right, length of the rightmost path.

use crate::{
    COUNT, DataStructure, NIL, ROOT, WordSlice, allocate_node, field_index, free_node,
    initialize_words, keys_in_order,
};

const SIZE: u64 = 4;
const KEY: u64 = 0;
const LEFT: u64 = 1;
const RIGHT: u64 = 2;
const LENGTH: u64 = 3;

pub(crate) const STRUCTURE: DataStructure = DataStructure {
    name: "leftheap",
    words: |elements| 16 + elements * SIZE as usize,
    create: initialize_words,
    insert: insert_key,
    delete: delete_minimum,
    keys: |words| keys_in_order(words, [KEY, LEFT, RIGHT]),
    has_deletions_in_paper: true,
    deletes_given_key: false,
};

fn right_path_length(words: &WordSlice, node: u64) -> u64 {
    if node == NIL { 0 } else { words[field_index(node, LENGTH)] }
}

fn merge_heaps(words: &mut WordSlice, one: u64, two: u64) -> u64 {
    if one == NIL || two == NIL {
        return one.max(two);
    }
    let (top, other) = if words[field_index(one, KEY)] < words[field_index(two, KEY)] {
        (one, two)
    } else {
        (two, one)
    };
    let right = merge_heaps(words, words[field_index(top, RIGHT)], other);
    words[field_index(top, RIGHT)] = right;
    let left = words[field_index(top, LEFT)];
    if right_path_length(words, left) < right_path_length(words, right) {
        words[field_index(top, LEFT)] = right;
        words[field_index(top, RIGHT)] = left;
    }
    words[field_index(top, LENGTH)] = right_path_length(words, words[field_index(top, RIGHT)]) + 1;
    top
}

fn insert_key(words: &mut WordSlice, key: u64) {
    let node = allocate_node(words, SIZE);
    words[field_index(node, KEY)] = key;
    words[field_index(node, LEFT)] = NIL;
    words[field_index(node, RIGHT)] = NIL;
    words[field_index(node, LENGTH)] = 1;
    words[ROOT] = merge_heaps(words, words[ROOT], node);
    words[COUNT] += 1;
}

fn delete_minimum(words: &mut WordSlice, _: u64) {
    let top = words[ROOT];
    if top == NIL {
        return;
    }
    words[ROOT] = merge_heaps(words, words[field_index(top, LEFT)], words[field_index(top, RIGHT)]);
    words[COUNT] -= 1;
    free_node(words, top);
}
