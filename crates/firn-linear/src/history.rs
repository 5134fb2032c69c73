//! What was seen from outside.

/// One operation: what a client asked for, and what came of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call<O, A> {
    /// Who asked.
    pub client: u32,
    /// When, by a clock that all clients share.
    pub called: u64,
    /// What for.
    pub operation: O,
    /// When the answer came, and what it was. Without one it may have been done at any moment since, or be done yet, or never.
    pub answer: Option<(u64, A)>,
}

impl<O, A> Call<O, A> {
    /// When the answer came. Clocks are coarse: not before the question.
    pub(crate) fn answered(&self) -> Option<u64> {
        self.answer.as_ref().map(|(at, _)| *at.max(&self.called))
    }

    /// What it was.
    pub(crate) fn told(&self) -> Option<&A> {
        self.answer.as_ref().map(|(_, answer)| answer)
    }
}

/// A question or an answer, of the operation with a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Event {
    Call(u32),
    Return(u32),
    /// An answer that nobody needs: if the operation isn't in the order by now, it never is.
    Gone(u32),
}

/// All events as they came. Of those at the same time questions are first: their operations may then change places.
pub(crate) fn events<O, A>(
    history: &[Call<O, A>],
    is_optional: impl Fn(u32) -> bool,
) -> Vec<Event> {
    let mut events = Vec::with_capacity(2 * history.len());
    for (number, call) in (0..).zip(history) {
        events.push((call.called, Event::Call(number)));
        let end = if is_optional(number) { Event::Gone } else { Event::Return };
        events.extend(call.answered().map(|at| (at, end(number))));
    }
    events.sort_unstable();
    events.into_iter().map(|(_, event)| event).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn questions_come_before_answers_of_the_same_time() {
        let call = |called, answered| Call {
            client: 0,
            called,
            operation: (),
            answer: Some((answered, ())),
        };
        let history = [call(5, 7), call(7, 9), call(8, 8), call(9, 3)];
        use Event::{Call as C, Gone as G, Return as R};
        let events = events(&history, |number| number == 2);
        assert_eq!(events, [C(0), C(1), R(0), C(2), G(2), C(3), R(1), R(3)]);
    }
}
