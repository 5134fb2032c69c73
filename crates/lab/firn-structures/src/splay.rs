//! Splay tree, top-down. Node: key, left, right.

use crate::{
    COUNT, DataStructure, NIL, ROOT, WordSlice, allocate_node, field_index, free_node,
    initialize_words, keys_in_order,
};

const SIZE: u64 = 3;
const KEY: u64 = 0;
const LEFT: u64 = 1;
const RIGHT: u64 = 2;
/// A node in the head of the memory, to which splaying attaches two trees: words 8 to 10.
const HEADER: u64 = 8;

pub(crate) const STRUCTURE: DataStructure = DataStructure {
    name: "splay",
    words: |elements| 16 + elements * SIZE as usize,
    create: initialize_words,
    insert: insert_key,
    delete: delete_key,
    keys: |words| keys_in_order(words, [KEY, LEFT, RIGHT]),
    has_deletions_in_paper: true,
    deletes_given_key: true,
};

fn rotate_child(words: &mut WordSlice, node: u64, side: u64) -> u64 {
    let other = LEFT + RIGHT - side;
    let child = words[field_index(node, side)];
    words[field_index(node, side)] = words[field_index(child, other)];
    words[field_index(child, other)] = node;
    child
}

/// Moves the node with the key, or a neighbour of its position, to the top of a tree that is not
/// empty.
fn splay_key(words: &mut WordSlice, top: u64, key: u64) -> u64 {
    words[field_index(HEADER, LEFT)] = NIL;
    words[field_index(HEADER, RIGHT)] = NIL;
    // The largest of the smaller ones, and the smallest of the larger ones.
    let mut ends = [HEADER, HEADER];
    let mut top = top;
    while words[field_index(top, KEY)] != key {
        let smaller = key < words[field_index(top, KEY)];
        let side = if smaller { LEFT } else { RIGHT };
        let child = words[field_index(top, side)];
        if child == NIL {
            break;
        }
        let further = words[field_index(child, KEY)];
        if key != further && (key < further) == smaller {
            top = rotate_child(words, top, side);
            if words[field_index(top, side)] == NIL {
                break;
            }
        }
        let end = &mut ends[usize::from(smaller)];
        words[field_index(*end, side)] = top;
        *end = top;
        top = words[field_index(top, side)];
    }
    words[field_index(ends[0], RIGHT)] = words[field_index(top, LEFT)];
    words[field_index(ends[1], LEFT)] = words[field_index(top, RIGHT)];
    words[field_index(top, LEFT)] = words[field_index(HEADER, RIGHT)];
    words[field_index(top, RIGHT)] = words[field_index(HEADER, LEFT)];
    top
}

fn insert_key(words: &mut WordSlice, key: u64) {
    let node = allocate_node(words, SIZE);
    words[field_index(node, KEY)] = key;
    words[field_index(node, LEFT)] = NIL;
    words[field_index(node, RIGHT)] = NIL;
    words[COUNT] += 1;
    if words[ROOT] != NIL {
        let top = splay_key(words, words[ROOT], key);
        let (side, other) =
            if key < words[field_index(top, KEY)] { (LEFT, RIGHT) } else { (RIGHT, LEFT) };
        words[field_index(node, side)] = words[field_index(top, side)];
        words[field_index(node, other)] = top;
        words[field_index(top, side)] = NIL;
    }
    words[ROOT] = node;
}

fn delete_key(words: &mut WordSlice, key: u64) {
    if words[ROOT] == NIL {
        return;
    }
    let top = splay_key(words, words[ROOT], key);
    words[ROOT] = top;
    if words[field_index(top, KEY)] != key {
        return;
    }
    let (left, right) = (words[field_index(top, LEFT)], words[field_index(top, RIGHT)]);
    words[ROOT] = right;
    if left != NIL {
        let greatest = splay_key(words, left, key);
        words[field_index(greatest, RIGHT)] = right;
        words[ROOT] = greatest;
    }
    words[COUNT] -= 1;
    free_node(words, top);
}
