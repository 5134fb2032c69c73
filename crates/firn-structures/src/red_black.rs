//! Red-black tree, leaning left. Node: key, left, right, whether it is red.

use crate::{COUNT, NIL, ROOT, Structure, Words, allocate, at, create, free, in_order};

const SIZE: u64 = 4;
const KEY: u64 = 0;
const LEFT: u64 = 1;
const RIGHT: u64 = 2;
const RED: u64 = 3;

pub(crate) const STRUCTURE: Structure = Structure {
    name: "rb",
    words: |elements| 16 + elements * SIZE as usize,
    create,
    insert,
    delete,
    keys: |words| in_order(words, [KEY, LEFT, RIGHT]),
    deletes: false,
    by_key: true,
};

fn is_red(words: &Words, node: u64) -> bool {
    node != NIL && words[at(node, RED)] == 1
}

/// Lifts the child on a side above its parent, and swaps their colours.
fn rotate(words: &mut Words, node: u64, side: u64) -> u64 {
    let other = LEFT + RIGHT - side;
    let child = words[at(node, side)];
    words[at(node, side)] = words[at(child, other)];
    words[at(child, other)] = node;
    words[at(child, RED)] = words[at(node, RED)];
    words[at(node, RED)] = 1;
    child
}

fn flip(words: &mut Words, node: u64) {
    for node in [node, words[at(node, LEFT)], words[at(node, RIGHT)]] {
        words[at(node, RED)] ^= 1;
    }
}

fn fix(words: &mut Words, node: u64) -> u64 {
    let mut node = node;
    if is_red(words, words[at(node, RIGHT)]) && !is_red(words, words[at(node, LEFT)]) {
        node = rotate(words, node, RIGHT);
    }
    let left = words[at(node, LEFT)];
    if is_red(words, left) && is_red(words, words[at(left, LEFT)]) {
        node = rotate(words, node, LEFT);
    }
    if is_red(words, words[at(node, LEFT)]) && is_red(words, words[at(node, RIGHT)]) {
        flip(words, node);
    }
    node
}

fn insert(words: &mut Words, key: u64) {
    let root = insert_below(words, words[ROOT], key);
    words[ROOT] = root;
    if is_red(words, root) {
        words[at(root, RED)] = 0;
    }
    words[COUNT] += 1;
}

fn insert_below(words: &mut Words, node: u64, key: u64) -> u64 {
    if node == NIL {
        let node = allocate(words, SIZE);
        words[at(node, KEY)] = key;
        words[at(node, LEFT)] = NIL;
        words[at(node, RIGHT)] = NIL;
        words[at(node, RED)] = 1;
        return node;
    }
    let side = if key < words[at(node, KEY)] { LEFT } else { RIGHT };
    let child = insert_below(words, words[at(node, side)], key);
    words[at(node, side)] = child;
    fix(words, node)
}

fn delete(words: &mut Words, key: u64) {
    if !contains(words, key) {
        return;
    }
    let root = words[ROOT];
    if !is_red(words, words[at(root, LEFT)]) && !is_red(words, words[at(root, RIGHT)]) {
        words[at(root, RED)] = 1;
    }
    let root = delete_below(words, root, key);
    words[ROOT] = root;
    if root != NIL {
        words[at(root, RED)] = 0;
    }
    words[COUNT] -= 1;
}

fn contains(words: &Words, key: u64) -> bool {
    let mut node = words[ROOT];
    while node != NIL && words[at(node, KEY)] != key {
        node = words[at(node, if key < words[at(node, KEY)] { LEFT } else { RIGHT })];
    }
    node != NIL
}

/// Makes the child on a side, or one of its children, red.
fn borrow(words: &mut Words, node: u64, side: u64) -> u64 {
    flip(words, node);
    let other = LEFT + RIGHT - side;
    let sibling = words[at(node, other)];
    if !is_red(words, words[at(sibling, LEFT)]) {
        return node;
    }
    if side == LEFT {
        words[at(node, RIGHT)] = rotate(words, sibling, LEFT);
    }
    let node = rotate(words, node, other);
    flip(words, node);
    node
}

fn thin(words: &Words, node: u64, side: u64) -> bool {
    let child = words[at(node, side)];
    !is_red(words, child) && child != NIL && !is_red(words, words[at(child, LEFT)])
}

fn delete_below(words: &mut Words, node: u64, key: u64) -> u64 {
    let mut node = node;
    if key < words[at(node, KEY)] {
        if thin(words, node, LEFT) {
            node = borrow(words, node, LEFT);
        }
        let child = delete_below(words, words[at(node, LEFT)], key);
        words[at(node, LEFT)] = child;
        return fix(words, node);
    }
    if is_red(words, words[at(node, LEFT)]) {
        node = rotate(words, node, LEFT);
    }
    if key == words[at(node, KEY)] && words[at(node, RIGHT)] == NIL {
        free(words, node);
        return NIL;
    }
    if thin(words, node, RIGHT) {
        node = borrow(words, node, RIGHT);
    }
    let right = words[at(node, RIGHT)];
    let child = match key == words[at(node, KEY)] {
        true => {
            words[at(node, KEY)] = least(words, right);
            delete_least(words, right)
        }
        false => delete_below(words, right, key),
    };
    words[at(node, RIGHT)] = child;
    fix(words, node)
}

fn least(words: &Words, node: u64) -> u64 {
    let mut node = node;
    while words[at(node, LEFT)] != NIL {
        node = words[at(node, LEFT)];
    }
    words[at(node, KEY)]
}

fn delete_least(words: &mut Words, node: u64) -> u64 {
    let mut node = node;
    if words[at(node, LEFT)] == NIL {
        free(words, node);
        return NIL;
    }
    if thin(words, node, LEFT) {
        node = borrow(words, node, LEFT);
    }
    let child = delete_least(words, words[at(node, LEFT)]);
    words[at(node, LEFT)] = child;
    fix(words, node)
}
