//! AA tree. Node: key, left, right, level.

use crate::{COUNT, NIL, ROOT, Structure, Words, allocate, at, create, free, in_order};

const SIZE: u64 = 4;
const KEY: u64 = 0;
const LEFT: u64 = 1;
const RIGHT: u64 = 2;
const LEVEL: u64 = 3;

pub(crate) const STRUCTURE: Structure = Structure {
    name: "aa",
    words: |elements| 16 + elements * SIZE as usize,
    create,
    insert,
    delete,
    keys: |words| in_order(words, [KEY, LEFT, RIGHT]),
    deletes: true,
    by_key: true,
};

fn level(words: &Words, node: u64) -> u64 {
    if node == NIL { 0 } else { words[at(node, LEVEL)] }
}

/// Makes a left child of the same level the parent.
fn skew(words: &mut Words, node: u64) -> u64 {
    if node == NIL {
        return NIL;
    }
    let left = words[at(node, LEFT)];
    if left == NIL || level(words, left) != level(words, node) {
        return node;
    }
    words[at(node, LEFT)] = words[at(left, RIGHT)];
    words[at(left, RIGHT)] = node;
    left
}

/// Makes two consecutive right children of the same level a higher node with two children.
fn split(words: &mut Words, node: u64) -> u64 {
    if node == NIL {
        return NIL;
    }
    let right = words[at(node, RIGHT)];
    if right == NIL || level(words, words[at(right, RIGHT)]) != level(words, node) {
        return node;
    }
    words[at(node, RIGHT)] = words[at(right, LEFT)];
    words[at(right, LEFT)] = node;
    words[at(right, LEVEL)] += 1;
    right
}

fn insert(words: &mut Words, key: u64) {
    words[ROOT] = insert_below(words, words[ROOT], key);
    words[COUNT] += 1;
}

fn insert_below(words: &mut Words, node: u64, key: u64) -> u64 {
    if node == NIL {
        let node = allocate(words, SIZE);
        words[at(node, KEY)] = key;
        words[at(node, LEFT)] = NIL;
        words[at(node, RIGHT)] = NIL;
        words[at(node, LEVEL)] = 1;
        return node;
    }
    let side = if key < words[at(node, KEY)] { LEFT } else { RIGHT };
    let child = insert_below(words, words[at(node, side)], key);
    words[at(node, side)] = child;
    let node = skew(words, node);
    split(words, node)
}

fn delete(words: &mut Words, key: u64) {
    words[ROOT] = delete_below(words, words[ROOT], key);
}

fn delete_below(words: &mut Words, node: u64, key: u64) -> u64 {
    if node == NIL {
        return NIL;
    }
    let found = words[at(node, KEY)];
    if key != found {
        let side = if key < found { LEFT } else { RIGHT };
        let child = delete_below(words, words[at(node, side)], key);
        words[at(node, side)] = child;
        return balance(words, node);
    }
    let (left, right) = (words[at(node, LEFT)], words[at(node, RIGHT)]);
    if left == NIL && right == NIL {
        free(words, node);
        words[COUNT] -= 1;
        return NIL;
    }
    let (side, towards) = if left == NIL { (RIGHT, LEFT) } else { (LEFT, RIGHT) };
    let mut neighbour = words[at(node, side)];
    while words[at(neighbour, towards)] != NIL {
        neighbour = words[at(neighbour, towards)];
    }
    let key = words[at(neighbour, KEY)];
    words[at(node, KEY)] = key;
    let child = delete_below(words, words[at(node, side)], key);
    words[at(node, side)] = child;
    balance(words, node)
}

fn balance(words: &mut Words, node: u64) -> u64 {
    let (left, right) = (words[at(node, LEFT)], words[at(node, RIGHT)]);
    let should = level(words, left).min(level(words, right)) + 1;
    if should < level(words, node) {
        words[at(node, LEVEL)] = should;
        if should < level(words, right) {
            words[at(right, LEVEL)] = should;
        }
    }
    let node = skew(words, node);
    let right = skew(words, words[at(node, RIGHT)]);
    words[at(node, RIGHT)] = right;
    if right != NIL {
        let next = skew(words, words[at(right, RIGHT)]);
        words[at(right, RIGHT)] = next;
    }
    let node = split(words, node);
    let right = split(words, words[at(node, RIGHT)]);
    words[at(node, RIGHT)] = right;
    node
}
