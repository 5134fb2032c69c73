//! Binary heap in an array.

use crate::{COUNT, DataStructure, FIRST, WordSlice};

pub(crate) const STRUCTURE: DataStructure = DataStructure {
    name: "heap",
    // The words before the first element, and one word per element; one is to spare.
    words: |elements| FIRST as usize + elements + 1,
    create: |_| {},
    insert: insert_key,
    delete: delete_minimum,
    keys: |words| words[FIRST as usize..][..words[COUNT] as usize].to_vec(),
    has_deletions_in_paper: true,
    deletes_given_key: false,
};

/// The word of an element; they count from 1.
fn element_index(number: u64) -> usize {
    (FIRST + number - 1) as usize
}

fn insert_key(words: &mut WordSlice, key: u64) {
    words[COUNT] += 1;
    let mut hole = words[COUNT];
    while hole > 1 && words[element_index(hole / 2)] > key {
        words[element_index(hole)] = words[element_index(hole / 2)];
        hole /= 2;
    }
    words[element_index(hole)] = key;
}

fn delete_minimum(words: &mut WordSlice, _: u64) {
    let count = words[COUNT];
    if count == 0 {
        return;
    }
    let last = words[element_index(count)];
    words[COUNT] = count - 1;
    let mut hole = 1;
    while hole * 2 < count {
        let mut child = hole * 2;
        if child + 1 < count && words[element_index(child + 1)] < words[element_index(child)] {
            child += 1;
        }
        if last <= words[element_index(child)] {
            break;
        }
        words[element_index(hole)] = words[element_index(child)];
        hole = child;
    }
    words[element_index(hole)] = last;
}
