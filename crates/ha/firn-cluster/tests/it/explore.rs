//! State explorer: visits every state that a model can reach, breadth first. So the first wrong
//! state found is one with the fewest steps.
//!
//! States are compared by a fingerprint of 128 bits; whole states are stored only until their
//! successors are known.

use std::collections::HashMap;
use std::fmt::{self, Debug};
use std::hash::{BuildHasherDefault, Hash, Hasher};

/// A model that can be explored.
pub trait Model {
    /// A state: everything that determines the next steps.
    type State: Clone + Hash;
    /// A step.
    type Step: Clone + Debug;

    /// The initial state.
    fn start(&self) -> Self::State;
    /// All steps that are possible now.
    fn steps(&self, state: &Self::State) -> Vec<Self::Step>;
    /// Takes a step.
    fn take(&self, state: &mut Self::State, step: &Self::Step);
    /// A violated invariant, if there is one.
    fn wrong(&self, state: &Self::State) -> Option<String>;
    /// A missing result, if there is one after no more failures occur.
    fn stuck(&self, state: &Self::State) -> Option<String>;
}

/// The results of an exploration.
#[derive(Clone, Copy, Debug)]
pub struct Explored {
    pub states: usize,
    pub steps: usize,
    pub depth: usize,
}

impl fmt::Display for Explored {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} states, {} steps, {} deep", self.states, self.steps, self.depth)
    }
}

/// The shortest path to a wrong state.
#[derive(Debug)]
pub struct Wrong<S> {
    pub what: String,
    pub steps: Vec<S>,
}

/// The bounds of an exploration.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    /// More states than this are an error: the bounds of the model are meant to make it finite.
    pub states_max: usize,
    /// Progress is checked from one in this many states; from none if zero.
    pub try_one_in: u128,
}

/// A state visited for the first time, and its number.
type First<M> = Option<(u32, <M as Model>::State)>;

type Found = HashMap<u128, u32, BuildHasherDefault<Folded>>;

/// Explores everything.
pub fn explore<M: Model>(model: &M, effort: Effort) -> Result<Explored, Wrong<M::Step>> {
    let mut search = Search { model, effort, found: Found::default(), from: Vec::new(), steps: 0 };
    let start = model.start();
    let mut depth = 0;
    let mut edge: Vec<(u32, M::State)> = search.visit(None, start)?.into_iter().collect();
    while !edge.is_empty() {
        let mut next = Vec::new();
        for (index, state) in &edge {
            search.expand(*index, state, &mut next)?;
        }
        edge = next;
        depth += 1;
    }
    Ok(Explored { states: search.from.len(), steps: search.steps, depth })
}

struct Search<'a, M: Model> {
    model: &'a M,
    effort: Effort,
    found: Found,
    /// For each state, a predecessor and the number of the step from there.
    from: Vec<Option<(u32, u16)>>,
    steps: usize,
}

impl<M: Model> Search<'_, M> {
    fn expand(
        &mut self,
        index: u32,
        state: &M::State,
        next: &mut Vec<(u32, M::State)>,
    ) -> Result<(), Wrong<M::Step>> {
        for (number, step) in self.model.steps(state).iter().enumerate() {
            let mut after = state.clone();
            self.model.take(&mut after, step);
            self.steps += 1;
            next.extend(self.visit(Some((index, number as u16)), after)?);
        }
        Ok(())
    }

    /// Records a state; returns it if it was new.
    fn visit(
        &mut self,
        from: Option<(u32, u16)>,
        state: M::State,
    ) -> Result<First<M>, Wrong<M::Step>> {
        let print = fingerprint(&state);
        let index = self.from.len() as u32;
        if self.found.contains_key(&print) {
            return Ok(None);
        }
        self.found.insert(print, index);
        self.from.push(from);
        assert!(self.from.len() <= self.effort.states_max, "more states than expected");
        let tried = self.effort.try_one_in != 0 && print % self.effort.try_one_in == 0;
        let wrong = self.model.wrong(&state);
        match wrong.or_else(|| tried.then(|| self.model.stuck(&state)).flatten()) {
            Some(what) => Err(Wrong { what, steps: self.way_to(index) }),
            None => Ok(Some((index, state))),
        }
    }

    fn way_to(&self, index: u32) -> Vec<M::Step> {
        let mut numbers = Vec::new();
        let mut at = index;
        while let Some((before, number)) = self.from[at as usize] {
            numbers.push(number);
            at = before;
        }
        let mut state = self.model.start();
        let replay = |number: &u16| {
            let step = self.model.steps(&state)[*number as usize].clone();
            self.model.take(&mut state, &step);
            step
        };
        numbers.iter().rev().map(replay).collect()
    }
}

/// The fingerprint of a state.
pub fn fingerprint(state: &impl Hash) -> u128 {
    let mut hasher = Print::default();
    state.hash(&mut hasher);
    u128::from(finish(hasher.0)) << 64 | u128::from(finish(hasher.1))
}

fn finish(mut bits: u64) -> u64 {
    bits = (bits ^ bits >> 33).wrapping_mul(0xff51_afd7_ed55_8ccd);
    bits = (bits ^ bits >> 33).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    bits ^ bits >> 33
}

/// Two independent sums of the hashed bytes.
#[derive(Default)]
struct Print(u64, u64);

impl Print {
    fn word(&mut self, word: u64) {
        self.0 = (self.0 ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
        self.1 = (self.1.rotate_left(31) ^ word).wrapping_add(0x1656_67b1);
        self.1 = (self.1 ^ self.1 >> 29).wrapping_mul(0xd6e8_feb8_6659_fd93);
    }
}

impl Hasher for Print {
    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.word(u64::from_le_bytes(word) ^ (bytes.len() as u64) << 56);
        }
    }
    fn write_u8(&mut self, value: u8) {
        self.word(u64::from(value));
    }
    fn write_u16(&mut self, value: u16) {
        self.word(u64::from(value));
    }
    fn write_u32(&mut self, value: u32) {
        self.word(u64::from(value));
    }
    fn write_u64(&mut self, value: u64) {
        self.word(value);
    }
    fn write_u128(&mut self, value: u128) {
        self.word(value as u64);
        self.word((value >> 64) as u64);
    }
    fn write_usize(&mut self, value: usize) {
        self.word(value as u64);
    }
    fn finish(&self) -> u64 {
        self.0 ^ self.1
    }
}

/// Fingerprints need no more hashing.
#[derive(Default)]
struct Folded(u64);

impl Hasher for Folded {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.0 = self.0 << 8 ^ u64::from(byte));
    }
    fn write_u128(&mut self, value: u128) {
        self.0 = (value >> 64) as u64 ^ value as u64;
    }
    fn finish(&self) -> u64 {
        self.0
    }
}

#[test]
fn the_explorer_finds_the_shortest_path_and_every_state() {
    struct Steps;
    impl Model for Steps {
        type State = (u32, bool);
        type Step = u32;
        fn start(&self) -> (u32, bool) {
            (0, false)
        }
        fn steps(&self, state: &(u32, bool)) -> Vec<u32> {
            if state.0 < 20 { vec![1, 3] } else { vec![] }
        }
        fn take(&self, state: &mut (u32, bool), step: &u32) {
            state.0 += step;
            state.1 |= *step == 3 && state.0 == 17;
        }
        fn wrong(&self, state: &(u32, bool)) -> Option<String> {
            (state.0 == 22 && state.1).then(|| "there".to_owned())
        }
        fn stuck(&self, _: &(u32, bool)) -> Option<String> {
            None
        }
    }
    let effort = Effort { states_max: 100, try_one_in: 0 };
    let wrong = explore(&Steps, effort).unwrap_err();
    assert_eq!((wrong.steps.len(), wrong.steps.iter().sum::<u32>()), (10, 22));
}
