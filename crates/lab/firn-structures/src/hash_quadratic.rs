//! Hash table with quadratic probing. Slot: state, key. A textbook table doubles by rehashing when
//! it is half full; here its memory is made large enough at once.

use crate::{COUNT, DataStructure, FIRST, WordSlice, mix_bits};

const EMPTY: u64 = 0;
const LIVE: u64 = 1;
const DELETED: u64 = 2;
/// The word that has the count of slots, a prime.
const SLOTS: usize = 4;

pub(crate) const STRUCTURE: DataStructure = DataStructure {
    name: "hashquad",
    words: |elements| FIRST as usize + 2 * largest_prime(elements * 2 + 7),
    create: create_table,
    insert: insert_key,
    delete: delete_key,
    keys: collect_keys,
    has_deletions_in_paper: false,
    deletes_given_key: true,
};

/// The largest prime up to a number.
fn largest_prime(most: usize) -> usize {
    let is_prime = |n: &usize| (2..).take_while(|d| d * d <= *n).all(|d| n % d != 0);
    (2..=most).rev().find(is_prime).unwrap_or(2)
}

fn create_table(words: &mut WordSlice) {
    words[SLOTS] = largest_prime((words.len() - FIRST as usize) / 2) as u64;
}

/// The slot that has a key, or the first empty one on its probe sequence.
fn find_slot(words: &WordSlice, key: u64) -> usize {
    let slots = words[SLOTS];
    let mut slot = mix_bits(key) % slots;
    let mut step = 1;
    loop {
        let at = (FIRST + 2 * slot) as usize;
        if words[at] == EMPTY || words[at + 1] == key {
            return at;
        }
        slot = (slot + step) % slots;
        step += 2;
    }
}

fn insert_key(words: &mut WordSlice, key: u64) {
    let at = find_slot(words, key);
    words[at + 1] = key;
    words[at] = LIVE;
    words[COUNT] += 1;
}

fn delete_key(words: &mut WordSlice, key: u64) {
    let at = find_slot(words, key);
    if words[at] == LIVE {
        words[at] = DELETED;
        words[COUNT] -= 1;
    }
}

fn collect_keys(words: &WordSlice) -> Vec<u64> {
    let slots = words[FIRST as usize..].chunks_exact(2).take(words[SLOTS] as usize);
    slots.filter(|slot| slot[0] == LIVE).map(|slot| slot[1]).collect()
}
