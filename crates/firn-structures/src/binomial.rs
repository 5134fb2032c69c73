//! Binomial queue: a forest of heaps of 1, 2, 4 ... elements. Node: key, first child, next sibling.

use crate::{COUNT, NIL, Structure, Words, allocate, at, create, free};

const SIZE: u64 = 3;
const KEY: u64 = 0;
const CHILD: u64 = 1;
const SIBLING: u64 = 2;
/// Trees of the forest, in the words after the nodes' common ones: 4 to 15, then more before the
/// first node.
const TREES: usize = 16;
const MOST: usize = 32;

pub(crate) const STRUCTURE: Structure = Structure {
    name: "bin",
    words: |elements| TREES + MOST + elements * SIZE as usize,
    create: |words| {
        create(words);
        words[crate::NEXT] = (TREES + MOST) as u64;
    },
    insert,
    delete,
    keys,
    deletes: false,
    by_key: false,
};

/// Makes one tree of two equal ones.
fn link(words: &mut Words, one: u64, two: u64) -> u64 {
    let (top, below) =
        if words[at(one, KEY)] < words[at(two, KEY)] { (one, two) } else { (two, one) };
    words[at(below, SIBLING)] = words[at(top, CHILD)];
    words[at(top, CHILD)] = below;
    top
}

/// Adds a tree of 2^rank elements, carrying as in binary addition.
fn add(words: &mut Words, tree: u64, rank: usize) {
    let (mut tree, mut rank) = (tree, rank);
    while words[TREES + rank] != NIL {
        tree = link(words, words[TREES + rank], tree);
        words[TREES + rank] = NIL;
        rank += 1;
    }
    words[TREES + rank] = tree;
}

fn insert(words: &mut Words, key: u64) {
    let node = allocate(words, SIZE);
    words[at(node, KEY)] = key;
    words[at(node, CHILD)] = NIL;
    words[at(node, SIBLING)] = NIL;
    add(words, node, 0);
    words[COUNT] += 1;
}

fn delete(words: &mut Words, _: u64) {
    let trees = (0..MOST).filter(|rank| words[TREES + rank] != NIL);
    let Some(rank) = trees.min_by_key(|rank| words[at(words[TREES + rank], KEY)]) else { return };
    let top = words[TREES + rank];
    words[TREES + rank] = NIL;
    words[COUNT] -= 1;
    let (mut child, mut rank) = (words[at(top, CHILD)], rank);
    free(words, top);
    while child != NIL {
        let next = words[at(child, SIBLING)];
        rank -= 1;
        add(words, child, rank);
        child = next;
    }
}

fn keys(words: &Words) -> Vec<u64> {
    let mut left: Vec<u64> = words[TREES..TREES + MOST].to_vec();
    let mut keys = Vec::new();
    while let Some(node) = left.pop() {
        if node != NIL {
            keys.push(words[at(node, KEY)]);
            left.push(words[at(node, CHILD)]);
            // A root's sibling is stale.
            if !words[TREES..TREES + MOST].contains(&node) {
                left.push(words[at(node, SIBLING)]);
            }
        }
    }
    keys
}
