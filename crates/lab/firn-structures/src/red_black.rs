//! Left-leaning red-black tree. A node has four words: key, left child, right child, and 1 if the
//! node is red.
//!
//! A red node and its parent together form one node of a 2-3 tree. All tests here are about that:
//!
//! ```text
//!   2-node: one key        3-node: two keys         not allowed, and repaired by `fix_colours`:
//!        b                       b                   - a red right child (without a red left one): rotate
//!       / \                     / \                  - a red left child with a red left child: rotate
//!                           red a                    - two red children: flip the colours
//! ```
//!
//! All leaves have the same number of black nodes above them, so the tree is balanced. A deletion
//! goes from the root down. It makes sure that the node to which it descends is no 2-node: so it
//! can remove a key there without changing the number of black nodes.

use crate::{
    COUNT, DataStructure, NIL, ROOT, WordSlice, allocate_node, field_index, free_node,
    initialize_words, keys_in_order,
};

const SIZE: u64 = 4;
const KEY: u64 = 0;
const LEFT: u64 = 1;
const RIGHT: u64 = 2;
const RED: u64 = 3;

pub(crate) const STRUCTURE: DataStructure = DataStructure {
    name: "rb",
    words: |elements| 16 + elements * SIZE as usize,
    create: initialize_words,
    insert: insert_key,
    delete: delete_key,
    keys: |words| keys_in_order(words, [KEY, LEFT, RIGHT]),
    has_deletions_in_paper: false,
    deletes_given_key: true,
};

/// Whether there is a node, and it is red.
fn is_red(words: &WordSlice, node: u64) -> bool {
    node != NIL && words[field_index(node, RED)] == 1
}

/// Rotates: the child on a side becomes the parent of `node`. The child gets the colour of `node`,
/// and `node` becomes red. Returns the child, which is now at the top.
fn rotate_child(words: &mut WordSlice, node: u64, side: u64) -> u64 {
    let other = LEFT + RIGHT - side;
    let child = words[field_index(node, side)];
    words[field_index(node, side)] = words[field_index(child, other)];
    words[field_index(child, other)] = node;
    words[field_index(child, RED)] = words[field_index(node, RED)];
    words[field_index(node, RED)] = 1;
    child
}

/// Inverts the colours of a node and of both its children: splits or joins nodes of the 2-3 tree.
fn flip_colours(words: &mut WordSlice, node: u64) {
    for node in [node, words[field_index(node, LEFT)], words[field_index(node, RIGHT)]] {
        words[field_index(node, RED)] ^= 1;
    }
}

/// Repairs the rules at a node after a change below it. Returns the node that is now at the top.
fn fix_colours(words: &mut WordSlice, node: u64) -> u64 {
    let mut node = node;
    if is_red(words, words[field_index(node, RIGHT)])
        && !is_red(words, words[field_index(node, LEFT)])
    {
        node = rotate_child(words, node, RIGHT);
    }
    let left = words[field_index(node, LEFT)];
    if is_red(words, left) && is_red(words, words[field_index(left, LEFT)]) {
        node = rotate_child(words, node, LEFT);
    }
    if is_red(words, words[field_index(node, LEFT)])
        && is_red(words, words[field_index(node, RIGHT)])
    {
        flip_colours(words, node);
    }
    node
}

/// Inserts a key that is not in the tree.
fn insert_key(words: &mut WordSlice, key: u64) {
    let root = insert_below(words, words[ROOT], key);
    words[ROOT] = root;
    if is_red(words, root) {
        words[field_index(root, RED)] = 0;
    }
    words[COUNT] += 1;
}

/// Inserts a key below a node. Returns the new top of this subtree.
fn insert_below(words: &mut WordSlice, node: u64, key: u64) -> u64 {
    if node == NIL {
        let node = allocate_node(words, SIZE);
        words[field_index(node, KEY)] = key;
        words[field_index(node, LEFT)] = NIL;
        words[field_index(node, RIGHT)] = NIL;
        words[field_index(node, RED)] = 1;
        return node;
    }
    let side = if key < words[field_index(node, KEY)] { LEFT } else { RIGHT };
    let child = insert_below(words, words[field_index(node, side)], key);
    words[field_index(node, side)] = child;
    fix_colours(words, node)
}

/// Deletes a key, if it is in the tree.
fn delete_key(words: &mut WordSlice, key: u64) {
    if !contains_key(words, key) {
        return;
    }
    let root = words[ROOT];
    if !is_red(words, words[field_index(root, LEFT)])
        && !is_red(words, words[field_index(root, RIGHT)])
    {
        words[field_index(root, RED)] = 1;
    }
    let root = delete_below(words, root, key);
    words[ROOT] = root;
    if root != NIL {
        words[field_index(root, RED)] = 0;
    }
    words[COUNT] -= 1;
}

/// Whether the key is in the tree.
fn contains_key(words: &WordSlice, key: u64) -> bool {
    let mut node = words[ROOT];
    while node != NIL && words[field_index(node, KEY)] != key {
        node = words
            [field_index(node, if key < words[field_index(node, KEY)] { LEFT } else { RIGHT })];
    }
    node != NIL
}

/// Enlarges the child on a side, a 2-node, so that it is no 2-node any more (it or one of its
/// children is red then): the child takes a key from its sibling if that is a 3-node, and else
/// joins with it. Returns the new top.
fn grow_two_node_child(words: &mut WordSlice, node: u64, side: u64) -> u64 {
    flip_colours(words, node);
    let other = LEFT + RIGHT - side;
    let sibling = words[field_index(node, other)];
    if !is_red(words, words[field_index(sibling, LEFT)]) {
        return node;
    }
    if side == LEFT {
        words[field_index(node, RIGHT)] = rotate_child(words, sibling, LEFT);
    }
    let node = rotate_child(words, node, other);
    flip_colours(words, node);
    node
}

/// Whether the child on a side is a 2-node: black, with a black left child. A deletion must enlarge
/// it before it descends to it.
fn is_two_node(words: &WordSlice, node: u64, side: u64) -> bool {
    let child = words[field_index(node, side)];
    !is_red(words, child) && child != NIL && !is_red(words, words[field_index(child, LEFT)])
}

/// Deletes a key that is in the subtree of a node. Returns the new top of this subtree.
fn delete_below(words: &mut WordSlice, node: u64, key: u64) -> u64 {
    let mut node = node;
    if key < words[field_index(node, KEY)] {
        if is_two_node(words, node, LEFT) {
            node = grow_two_node_child(words, node, LEFT);
        }
        let child = delete_below(words, words[field_index(node, LEFT)], key);
        words[field_index(node, LEFT)] = child;
        return fix_colours(words, node);
    }
    if is_red(words, words[field_index(node, LEFT)]) {
        node = rotate_child(words, node, LEFT);
    }
    if key == words[field_index(node, KEY)] && words[field_index(node, RIGHT)] == NIL {
        free_node(words, node);
        return NIL;
    }
    if is_two_node(words, node, RIGHT) {
        node = grow_two_node_child(words, node, RIGHT);
    }
    let right = words[field_index(node, RIGHT)];
    let child = match key == words[field_index(node, KEY)] {
        true => {
            words[field_index(node, KEY)] = least_key(words, right);
            delete_least(words, right)
        }
        false => delete_below(words, right, key),
    };
    words[field_index(node, RIGHT)] = child;
    fix_colours(words, node)
}

/// The least key in the subtree of a node.
fn least_key(words: &WordSlice, node: u64) -> u64 {
    let mut node = node;
    while words[field_index(node, LEFT)] != NIL {
        node = words[field_index(node, LEFT)];
    }
    words[field_index(node, KEY)]
}

/// Deletes the least key in the subtree of a node. Returns the new top of this subtree.
fn delete_least(words: &mut WordSlice, node: u64) -> u64 {
    let mut node = node;
    if words[field_index(node, LEFT)] == NIL {
        free_node(words, node);
        return NIL;
    }
    if is_two_node(words, node, LEFT) {
        node = grow_two_node_child(words, node, LEFT);
    }
    let child = delete_least(words, words[field_index(node, LEFT)]);
    words[field_index(node, LEFT)] = child;
    fix_colours(words, node)
}
