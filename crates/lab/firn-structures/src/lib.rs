//! Thirteen data structures whose every bit lives in a slice of words.
//!
//! They are those of Table 2 of Lee et al., "Hypervisor-Assisted Application Checkpointing in
//! Virtualized Environments": workloads to test and measure application checkpointing with.
//! Pointers are indexes into the slice, so that a copy of the words, at any address, is a copy of
//! the structure.
//!
//! ```text
//!   word 0  next word never used     2  root, or the structure's own starting value
//!        1  list of freed nodes      3  elements             4 ..  the structure's own, then nodes
//! ```
//!
//! Insertions and deletions write as textbook code does: recursive functions write each child
//! pointer as they return, changed or not. That makes the count of writes, and of pages, that of
//! real programs rather than the minimum.

#![forbid(unsafe_code)]

mod aa;
mod avl;
mod binary_heap;
mod binomial;
mod hash_chained;
mod hash_quadratic;
mod leftist;
mod list;
mod queue;
mod red_black;
mod skip_list;
mod splay;
mod tree;

/// The memory of a structure.
pub type WordSlice = [u64];

/// No node.
const NIL: u64 = 0;
const NEXT: usize = 0;
const FREED: usize = 1;
const ROOT: usize = 2;
const COUNT: usize = 3;
/// Words before the first node.
const FIRST: u64 = 16;

/// The functions of one of the thirteen structures.
#[derive(Clone, Copy, Debug)]
pub struct DataStructure {
    /// The structure's name in the paper.
    pub name: &'static str,
    /// The count of words needed for a count of elements.
    pub words: fn(usize) -> usize,
    /// Makes an empty structure, in memory that is all zeros.
    pub create: fn(&mut WordSlice),
    /// Inserts a key; each at most once.
    pub insert: fn(&mut WordSlice, u64),
    /// Deletes a key: the given key; from heaps the minimum, from queues the first. Does nothing if
    /// there is none.
    pub delete: fn(&mut WordSlice, u64),
    /// All keys, in the structure's own order.
    pub keys: fn(&WordSlice) -> Vec<u64>,
    /// Whether the paper's table includes its deletions.
    pub has_deletions_in_paper: bool,
    /// Whether `delete` deletes the given key.
    pub deletes_given_key: bool,
}

/// All structures, in the order of the paper's table.
pub const ALL: [DataStructure; 13] = [
    aa::STRUCTURE,
    avl::STRUCTURE,
    binomial::STRUCTURE,
    skip_list::STRUCTURE,
    hash_quadratic::STRUCTURE,
    hash_chained::STRUCTURE,
    leftist::STRUCTURE,
    binary_heap::STRUCTURE,
    list::STRUCTURE,
    queue::STRUCTURE,
    red_black::STRUCTURE,
    splay::STRUCTURE,
    tree::STRUCTURE,
];

/// Makes an empty structure that has no words of its own to initialize.
fn initialize_words(words: &mut WordSlice) {
    words[NEXT] = FIRST;
}

/// Allocates a node of some words, which the caller must write. All nodes of a structure have the
/// same size.
fn allocate_node(words: &mut WordSlice, size: u64) -> u64 {
    let freed = words[FREED];
    if freed != NIL {
        words[FREED] = words[freed as usize];
        return freed;
    }
    let node = words[NEXT];
    words[NEXT] = node + size;
    assert!(words[NEXT] as usize <= words.len(), "the structure is full");
    node
}

fn free_node(words: &mut WordSlice, node: u64) {
    words[node as usize] = words[FREED];
    words[FREED] = node;
}

/// The index of a field of a node.
fn field_index(node: u64, field: u64) -> usize {
    (node + field) as usize
}

/// Spreads the bits of a number.
fn mix_bits(key: u64) -> u64 {
    let mut z = key.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The keys of a binary tree, in order. The fields of its nodes for the key, the left and the right
/// child are given.
fn keys_in_order(words: &WordSlice, [key, left, right]: [u64; 3]) -> Vec<u64> {
    let (mut keys, mut path, mut node) = (Vec::new(), Vec::new(), words[ROOT]);
    while node != NIL || !path.is_empty() {
        while node != NIL {
            path.push(node);
            node = words[field_index(node, left)];
        }
        if let Some(top) = path.pop() {
            keys.push(words[field_index(top, key)]);
            node = words[field_index(top, right)];
        }
    }
    keys
}

#[cfg(test)]
mod tests;
