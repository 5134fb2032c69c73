//! AVL tree. Node: key, left, right, height.

use crate::{COUNT, NIL, ROOT, Structure, Words, allocate, at, create, free, in_order};

const SIZE: u64 = 4;
const KEY: u64 = 0;
const LEFT: u64 = 1;
const RIGHT: u64 = 2;
const HEIGHT: u64 = 3;

pub(crate) const STRUCTURE: Structure = Structure {
    name: "avl",
    words: |elements| 16 + elements * SIZE as usize,
    create,
    insert,
    delete,
    keys: |words| in_order(words, [KEY, LEFT, RIGHT]),
    deletes: false,
    by_key: true,
};

fn height(words: &Words, node: u64) -> u64 {
    if node == NIL { 0 } else { words[at(node, HEIGHT)] }
}

fn measure(words: &mut Words, node: u64) {
    let tallest = height(words, words[at(node, LEFT)]).max(height(words, words[at(node, RIGHT)]));
    words[at(node, HEIGHT)] = tallest + 1;
}

/// Lifts the child on a side above its parent.
fn rotate(words: &mut Words, node: u64, side: u64) -> u64 {
    let other = LEFT + RIGHT - side;
    let child = words[at(node, side)];
    words[at(node, side)] = words[at(child, other)];
    words[at(child, other)] = node;
    measure(words, node);
    measure(words, child);
    child
}

fn balance(words: &mut Words, node: u64) -> u64 {
    for (side, other) in [(LEFT, RIGHT), (RIGHT, LEFT)] {
        let child = words[at(node, side)];
        if height(words, child) > height(words, words[at(node, other)]) + 1 {
            let (outer, inner) = (words[at(child, side)], words[at(child, other)]);
            if height(words, inner) > height(words, outer) {
                words[at(node, side)] = rotate(words, child, other);
            }
            return rotate(words, node, side);
        }
    }
    measure(words, node);
    node
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
        words[at(node, HEIGHT)] = 1;
        return node;
    }
    let side = if key < words[at(node, KEY)] { LEFT } else { RIGHT };
    let child = insert_below(words, words[at(node, side)], key);
    words[at(node, side)] = child;
    balance(words, node)
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
    if left == NIL || right == NIL {
        free(words, node);
        words[COUNT] -= 1;
        return if left == NIL { right } else { left };
    }
    let mut least = right;
    while words[at(least, LEFT)] != NIL {
        least = words[at(least, LEFT)];
    }
    let successor = words[at(least, KEY)];
    words[at(node, KEY)] = successor;
    let child = delete_below(words, right, successor);
    words[at(node, RIGHT)] = child;
    balance(words, node)
}
