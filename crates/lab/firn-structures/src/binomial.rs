//! Binomial queue: a forest of heaps of 1, 2, 4 ... elements. Node: key, first child, next sibling.

use crate::{
    COUNT, DataStructure, NIL, WordSlice, allocate_node, field_index, free_node, initialize_words,
};

const SIZE: u64 = 3;
const KEY: u64 = 0;
const CHILD: u64 = 1;
const SIBLING: u64 = 2;
/// Trees of the forest, in the words after the nodes' common ones: 4 to 15, then more before the
/// first node.
const TREES: usize = 16;
const MOST: usize = 32;

pub(crate) const STRUCTURE: DataStructure = DataStructure {
    name: "bin",
    words: |elements| TREES + MOST + elements * SIZE as usize,
    create: |words| {
        initialize_words(words);
        words[crate::NEXT] = (TREES + MOST) as u64;
    },
    insert: insert_key,
    delete: delete_minimum,
    keys: collect_keys,
    has_deletions_in_paper: false,
    deletes_given_key: false,
};

/// Makes one tree of two equal ones.
fn link_trees(words: &mut WordSlice, one: u64, two: u64) -> u64 {
    let (top, below) = if words[field_index(one, KEY)] < words[field_index(two, KEY)] {
        (one, two)
    } else {
        (two, one)
    };
    words[field_index(below, SIBLING)] = words[field_index(top, CHILD)];
    words[field_index(top, CHILD)] = below;
    top
}

/// Adds a tree of 2^rank elements, carrying as in binary addition.
fn add_tree(words: &mut WordSlice, tree: u64, rank: usize) {
    let (mut tree, mut rank) = (tree, rank);
    while words[TREES + rank] != NIL {
        tree = link_trees(words, words[TREES + rank], tree);
        words[TREES + rank] = NIL;
        rank += 1;
    }
    words[TREES + rank] = tree;
}

fn insert_key(words: &mut WordSlice, key: u64) {
    let node = allocate_node(words, SIZE);
    words[field_index(node, KEY)] = key;
    words[field_index(node, CHILD)] = NIL;
    words[field_index(node, SIBLING)] = NIL;
    add_tree(words, node, 0);
    words[COUNT] += 1;
}

fn delete_minimum(words: &mut WordSlice, _: u64) {
    let trees = (0..MOST).filter(|rank| words[TREES + rank] != NIL);
    let Some(rank) = trees.min_by_key(|rank| words[field_index(words[TREES + rank], KEY)]) else {
        return;
    };
    let top = words[TREES + rank];
    words[TREES + rank] = NIL;
    words[COUNT] -= 1;
    let (mut child, mut rank) = (words[field_index(top, CHILD)], rank);
    free_node(words, top);
    while child != NIL {
        let next = words[field_index(child, SIBLING)];
        rank -= 1;
        add_tree(words, child, rank);
        child = next;
    }
}

fn collect_keys(words: &WordSlice) -> Vec<u64> {
    let mut left: Vec<u64> = words[TREES..TREES + MOST].to_vec();
    let mut keys = Vec::new();
    while let Some(node) = left.pop() {
        if node != NIL {
            keys.push(words[field_index(node, KEY)]);
            left.push(words[field_index(node, CHILD)]);
            // A root's sibling is stale.
            if !words[TREES..TREES + MOST].contains(&node) {
                left.push(words[field_index(node, SIBLING)]);
            }
        }
    }
    keys
}
