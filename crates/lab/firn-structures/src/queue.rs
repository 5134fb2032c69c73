//! Queue in a circular array.

use crate::{COUNT, DataStructure, FIRST, ROOT, WordSlice};

/// The word that has the position of the next new element.
const NEXT_POSITION: usize = 4;

pub(crate) const STRUCTURE: DataStructure = DataStructure {
    name: "queue",
    words: |elements| 16 + elements.max(1),
    create: |_| {},
    insert: insert_key,
    delete: delete_first,
    keys: collect_keys,
    has_deletions_in_paper: true,
    deletes_given_key: false,
};

fn capacity(words: &WordSlice) -> u64 {
    words.len() as u64 - FIRST
}

fn insert_key(words: &mut WordSlice, key: u64) {
    assert!(words[COUNT] < capacity(words), "the queue is full");
    let rear = words[NEXT_POSITION];
    words[(FIRST + rear) as usize] = key;
    words[NEXT_POSITION] = (rear + 1) % capacity(words);
    words[COUNT] += 1;
}

fn delete_first(words: &mut WordSlice, _: u64) {
    if words[COUNT] > 0 {
        words[ROOT] = (words[ROOT] + 1) % capacity(words);
        words[COUNT] -= 1;
    }
}

fn collect_keys(words: &WordSlice) -> Vec<u64> {
    let numbers = words[ROOT]..words[ROOT] + words[COUNT];
    numbers.map(|number| words[(FIRST + number % capacity(words)) as usize]).collect()
}
