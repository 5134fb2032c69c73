//! Splay tree, top-down. Node: key, left, right.

use crate::{COUNT, NIL, ROOT, Structure, Words, allocate, at, create, free, in_order};

const SIZE: u64 = 3;
const KEY: u64 = 0;
const LEFT: u64 = 1;
const RIGHT: u64 = 2;
/// A node in the head of the memory, to which splaying attaches two trees: words 8 to 10.
const HEADER: u64 = 8;

pub(crate) const STRUCTURE: Structure = Structure {
    name: "splay",
    words: |elements| 16 + elements * SIZE as usize,
    create,
    insert,
    delete,
    keys: |words| in_order(words, [KEY, LEFT, RIGHT]),
    deletes: true,
    by_key: true,
};

fn rotate(words: &mut Words, node: u64, side: u64) -> u64 {
    let other = LEFT + RIGHT - side;
    let child = words[at(node, side)];
    words[at(node, side)] = words[at(child, other)];
    words[at(child, other)] = node;
    child
}

/// Moves the node with the key, or a neighbour of its position, to the top of a tree that is not
/// empty.
fn splay(words: &mut Words, top: u64, key: u64) -> u64 {
    words[at(HEADER, LEFT)] = NIL;
    words[at(HEADER, RIGHT)] = NIL;
    // The largest of the smaller ones, and the smallest of the larger ones.
    let mut ends = [HEADER, HEADER];
    let mut top = top;
    while words[at(top, KEY)] != key {
        let smaller = key < words[at(top, KEY)];
        let side = if smaller { LEFT } else { RIGHT };
        let child = words[at(top, side)];
        if child == NIL {
            break;
        }
        let further = words[at(child, KEY)];
        if key != further && (key < further) == smaller {
            top = rotate(words, top, side);
            if words[at(top, side)] == NIL {
                break;
            }
        }
        let end = &mut ends[usize::from(smaller)];
        words[at(*end, side)] = top;
        *end = top;
        top = words[at(top, side)];
    }
    words[at(ends[0], RIGHT)] = words[at(top, LEFT)];
    words[at(ends[1], LEFT)] = words[at(top, RIGHT)];
    words[at(top, LEFT)] = words[at(HEADER, RIGHT)];
    words[at(top, RIGHT)] = words[at(HEADER, LEFT)];
    top
}

fn insert(words: &mut Words, key: u64) {
    let node = allocate(words, SIZE);
    words[at(node, KEY)] = key;
    words[at(node, LEFT)] = NIL;
    words[at(node, RIGHT)] = NIL;
    words[COUNT] += 1;
    if words[ROOT] != NIL {
        let top = splay(words, words[ROOT], key);
        let (side, other) = if key < words[at(top, KEY)] { (LEFT, RIGHT) } else { (RIGHT, LEFT) };
        words[at(node, side)] = words[at(top, side)];
        words[at(node, other)] = top;
        words[at(top, side)] = NIL;
    }
    words[ROOT] = node;
}

fn delete(words: &mut Words, key: u64) {
    if words[ROOT] == NIL {
        return;
    }
    let top = splay(words, words[ROOT], key);
    words[ROOT] = top;
    if words[at(top, KEY)] != key {
        return;
    }
    let (left, right) = (words[at(top, LEFT)], words[at(top, RIGHT)]);
    words[ROOT] = right;
    if left != NIL {
        let greatest = splay(words, left, key);
        words[at(greatest, RIGHT)] = right;
        words[ROOT] = greatest;
    }
    words[COUNT] -= 1;
    free(words, top);
}
