//! Binary heap in an array.

use crate::{COUNT, FIRST, Structure, Words};

pub(crate) const STRUCTURE: Structure = Structure {
    name: "heap",
    words: |elements| 16 + elements + 1,
    create: |_| {},
    insert,
    delete,
    keys: |words| words[FIRST as usize..][..words[COUNT] as usize].to_vec(),
    deletes: true,
    by_key: false,
};

/// The word of an element; they count from 1.
fn slot(number: u64) -> usize {
    (FIRST + number - 1) as usize
}

fn insert(words: &mut Words, key: u64) {
    words[COUNT] += 1;
    let mut hole = words[COUNT];
    while hole > 1 && words[slot(hole / 2)] > key {
        words[slot(hole)] = words[slot(hole / 2)];
        hole /= 2;
    }
    words[slot(hole)] = key;
}

fn delete(words: &mut Words, _: u64) {
    let count = words[COUNT];
    if count == 0 {
        return;
    }
    let last = words[slot(count)];
    words[COUNT] = count - 1;
    let mut hole = 1;
    while hole * 2 < count {
        let mut child = hole * 2;
        if child + 1 < count && words[slot(child + 1)] < words[slot(child)] {
            child += 1;
        }
        if last <= words[slot(child)] {
            break;
        }
        words[slot(hole)] = words[slot(child)];
        hole = child;
    }
    words[slot(hole)] = last;
}
