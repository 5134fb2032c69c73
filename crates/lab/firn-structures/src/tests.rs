use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

#[derive(Clone, Copy, Debug)]
enum Step {
    Insert(u64),
    Delete(u64),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let key = 1_u64..120;
    let step = prop_oneof![
        3 => key.clone().prop_map(Step::Insert),
        2 => key.prop_map(Step::Delete),
    ];
    prop::collection::vec(step, 1..400)
}

fn sorted(mut keys: Vec<u64>) -> Vec<u64> {
    keys.sort_unstable();
    keys
}

fn run(structure: &DataStructure, steps: &[Step]) -> Result<(), TestCaseError> {
    let mut words = vec![0; (structure.words)(steps.len())];
    (structure.create)(&mut words);
    let mut expected = BTreeSet::new();
    for step in steps {
        match *step {
            Step::Insert(key) if expected.insert(key) => (structure.insert)(&mut words, key),
            Step::Insert(_) => {}
            Step::Delete(key) if structure.deletes_given_key => {
                (structure.delete)(&mut words, key);
                expected.remove(&key);
            }
            Step::Delete(key) => {
                let before: BTreeSet<u64> = expected.clone();
                (structure.delete)(&mut words, key);
                let after: BTreeSet<u64> = (structure.keys)(&words).into_iter().collect();
                let gone: Vec<u64> = before.difference(&after).copied().collect();
                prop_assert_eq!(gone.len(), usize::from(!before.is_empty()));
                for key in gone {
                    expected.remove(&key);
                }
            }
        }
        let keys = sorted((structure.keys)(&words));
        prop_assert_eq!(&keys, &expected.iter().copied().collect::<Vec<_>>(), "{}", structure.name);
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    #[test]
    fn each_structure_behaves_as_a_set(steps in steps()) {
        for structure in &ALL {
            run(structure, &steps)?;
        }
    }
}

#[test]
fn heaps_give_the_least_key_first() {
    for structure in ALL.iter().filter(|s| ["leftheap", "heap", "bin"].contains(&s.name)) {
        let mut words = vec![0; (structure.words)(500)];
        (structure.create)(&mut words);
        (1..=500).for_each(|number| (structure.insert)(&mut words, mix_bits(number)));
        let mut left = sorted((structure.keys)(&words));
        while !left.is_empty() {
            (structure.delete)(&mut words, 0);
            left.remove(0);
            assert_eq!(sorted((structure.keys)(&words)), left, "{}", structure.name);
        }
    }
}

#[test]
fn trees_stay_balanced() {
    for structure in ALL.iter().filter(|s| ["aa", "avl", "rb"].contains(&s.name)) {
        let mut words = vec![0; (structure.words)(4096)];
        (structure.create)(&mut words);
        (1..=4096).for_each(|key| (structure.insert)(&mut words, key));
        // A path has the right children on it at least; 4096 in a row would be a list.
        let (mut node, mut depth) = (words[ROOT], 0);
        while node != NIL {
            node = words[field_index(node, 2)];
            depth += 1;
        }
        assert!(depth <= 26, "{} is {depth} deep", structure.name);
    }
}
