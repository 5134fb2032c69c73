//! Binary search tree, not balanced. Node: key, left, right.

use crate::{COUNT, NIL, ROOT, Structure, Words, allocate, at, create, free, in_order};

const SIZE: u64 = 3;
const KEY: u64 = 0;
const LEFT: u64 = 1;
const RIGHT: u64 = 2;

pub(crate) const STRUCTURE: Structure = Structure {
    name: "tree",
    words: |elements| 16 + elements * SIZE as usize,
    create,
    insert,
    delete,
    keys: |words| in_order(words, [KEY, LEFT, RIGHT]),
    deletes: true,
    by_key: true,
};

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
        return node;
    }
    let side = if key < words[at(node, KEY)] { LEFT } else { RIGHT };
    let child = insert_below(words, words[at(node, side)], key);
    words[at(node, side)] = child;
    node
}

/// Finds the node without a write, then writes there.
fn delete(words: &mut Words, key: u64) {
    let mut link = ROOT;
    while words[link] != NIL {
        let node = words[link];
        let found = words[at(node, KEY)];
        if key == found {
            return unlink(words, link);
        }
        link = at(node, if key < found { LEFT } else { RIGHT });
    }
}

fn unlink(words: &mut Words, link: usize) {
    let node = words[link];
    let (left, right) = (words[at(node, LEFT)], words[at(node, RIGHT)]);
    words[COUNT] -= 1;
    if left == NIL || right == NIL {
        words[link] = if left == NIL { right } else { left };
        return free(words, node);
    }
    let mut least = at(node, RIGHT);
    while words[at(words[least], LEFT)] != NIL {
        least = at(words[least], LEFT);
    }
    let successor = words[least];
    words[at(node, KEY)] = words[at(successor, KEY)];
    words[least] = words[at(successor, RIGHT)];
    free(words, successor);
}
