//! Leftist heap. Node: key, left, right, length of the rightmost path.

use crate::{COUNT, NIL, ROOT, Structure, Words, allocate, at, create, free, in_order};

const SIZE: u64 = 4;
const KEY: u64 = 0;
const LEFT: u64 = 1;
const RIGHT: u64 = 2;
const LENGTH: u64 = 3;

pub(crate) const STRUCTURE: Structure = Structure {
    name: "leftheap",
    words: |elements| 16 + elements * SIZE as usize,
    create,
    insert,
    delete,
    keys: |words| in_order(words, [KEY, LEFT, RIGHT]),
    deletes: true,
    by_key: false,
};

fn length(words: &Words, node: u64) -> u64 {
    if node == NIL { 0 } else { words[at(node, LENGTH)] }
}

fn merge(words: &mut Words, one: u64, two: u64) -> u64 {
    if one == NIL || two == NIL {
        return one.max(two);
    }
    let (top, other) =
        if words[at(one, KEY)] < words[at(two, KEY)] { (one, two) } else { (two, one) };
    let right = merge(words, words[at(top, RIGHT)], other);
    words[at(top, RIGHT)] = right;
    let left = words[at(top, LEFT)];
    if length(words, left) < length(words, right) {
        words[at(top, LEFT)] = right;
        words[at(top, RIGHT)] = left;
    }
    words[at(top, LENGTH)] = length(words, words[at(top, RIGHT)]) + 1;
    top
}

fn insert(words: &mut Words, key: u64) {
    let node = allocate(words, SIZE);
    words[at(node, KEY)] = key;
    words[at(node, LEFT)] = NIL;
    words[at(node, RIGHT)] = NIL;
    words[at(node, LENGTH)] = 1;
    words[ROOT] = merge(words, words[ROOT], node);
    words[COUNT] += 1;
}

fn delete(words: &mut Words, _: u64) {
    let top = words[ROOT];
    if top == NIL {
        return;
    }
    words[ROOT] = merge(words, words[at(top, LEFT)], words[at(top, RIGHT)]);
    words[COUNT] -= 1;
    free(words, top);
}
