//! Operations on data structures in areas, compared with the same operations on plain memory.

use firn_app::Session;

use crate::SessionVariant;

/// Tests each structure with one of the variants, in turn: every second structure with one operation
/// in a transaction, the others with five.
pub(crate) fn run_structures(variants: &[SessionVariant<'_>], transactions: usize) {
    for (number, structure) in firn_structures::ALL.iter().enumerate() {
        let per_transaction = if number % 2 == 0 { 1 } else { 5 };
        let len = (structure.words)(transactions * per_transaction) * 8;
        let mut session = (variants[number % variants.len()].open)();
        let area = session.allocate(structure.name, len).unwrap();
        let mut plain = vec![0_u64; len / 8];
        let mut image = vec![0_u8; len];
        (structure.create)(&mut plain);
        let mut begun = session.begin().unwrap();
        (structure.create)(begun.words(&area));
        for transaction in 0..transactions {
            for number in 0..per_transaction {
                let operation = (transaction * per_transaction + number) as u64;
                run_operation(structure, begun.words(&area), operation);
                run_operation(structure, &mut plain, operation);
            }
            begun.commit().unwrap();
            apply_changes(&session, &mut image);
            let expected: Vec<u8> = plain.iter().flat_map(|word| word.to_le_bytes()).collect();
            assert!(image == expected, "{} after {transaction} transactions", structure.name);
            begun = session.begin().unwrap();
        }
    }
}

/// Two insertions, then a deletion of a key inserted before.
fn run_operation(structure: &firn_structures::DataStructure, words: &mut [u64], operation: u64) {
    let key = |number: u64| number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20;
    match operation % 3 {
        2 => (structure.delete)(words, key(operation / 2)),
        _ => (structure.insert)(words, key(operation)),
    }
}

fn apply_changes(session: &Session, image: &mut [u8]) {
    let mut bytes = Vec::new();
    session.copy_changes(&mut bytes);
    let mut rest = bytes.as_slice();
    for change in session.changes().iter() {
        let (now, later) = rest.split_at(change.bytes.len());
        image[change.bytes.clone()].copy_from_slice(now);
        rest = later;
    }
}
