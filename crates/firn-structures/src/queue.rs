//! Queue in a circular array.

use crate::{COUNT, FIRST, ROOT, Structure, Words};

/// The word that has the position of the next new element.
const REAR: usize = 4;

pub(crate) const STRUCTURE: Structure = Structure {
    name: "queue",
    words: |elements| 16 + elements.max(1),
    create: |_| {},
    insert,
    delete,
    keys,
    deletes: true,
    by_key: false,
};

fn room(words: &Words) -> u64 {
    words.len() as u64 - FIRST
}

fn insert(words: &mut Words, key: u64) {
    assert!(words[COUNT] < room(words), "the queue is full");
    let rear = words[REAR];
    words[(FIRST + rear) as usize] = key;
    words[REAR] = (rear + 1) % room(words);
    words[COUNT] += 1;
}

fn delete(words: &mut Words, _: u64) {
    if words[COUNT] > 0 {
        words[ROOT] = (words[ROOT] + 1) % room(words);
        words[COUNT] -= 1;
    }
}

fn keys(words: &Words) -> Vec<u64> {
    let numbers = words[ROOT]..words[ROOT] + words[COUNT];
    numbers.map(|number| words[(FIRST + number % room(words)) as usize]).collect()
}
