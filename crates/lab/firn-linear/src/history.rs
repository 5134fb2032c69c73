//! History: the operations that clients observed.

/// One operation: a client's request, and its result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientCall<O, A> {
    /// The client.
    pub client: u32,
    /// The time of the request, by a clock that all clients share.
    pub called: u64,
    /// The request.
    pub operation: O,
    /// The time of the answer, and the answer. Without one the operation may have been done at any
    /// moment since, may be done later, or never.
    pub answer: Option<(u64, A)>,
}

impl<O, A> ClientCall<O, A> {
    /// The time of the answer. Clocks are coarse: never before the request.
    pub(crate) fn answer_time(&self) -> Option<u64> {
        self.answer.as_ref().map(|(at, _)| *at.max(&self.called))
    }

    /// The answer.
    pub(crate) fn answer_value(&self) -> Option<&A> {
        self.answer.as_ref().map(|(_, answer)| answer)
    }
}

/// A request or an answer, of the operation with a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum HistoryEvent {
    Call(u32),
    Return(u32),
    /// An optional answer: if the operation is not in the order by now, it never is.
    Gone(u32),
}

/// All events by time. Of simultaneous ones requests come first: their operations may then be in
/// either order.
pub(crate) fn sorted_events<O, A>(
    history: &[ClientCall<O, A>],
    is_optional: impl Fn(u32) -> bool,
) -> Vec<HistoryEvent> {
    let mut events = Vec::with_capacity(2 * history.len());
    for (number, call) in (0..).zip(history) {
        events.push((call.called, HistoryEvent::Call(number)));
        let end = if is_optional(number) { HistoryEvent::Gone } else { HistoryEvent::Return };
        events.extend(call.answer_time().map(|at| (at, end(number))));
    }
    events.sort_unstable();
    events.into_iter().map(|(_, event)| event).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn at_equal_times_calls_are_ordered_before_answers() {
        let call = |called, answered| ClientCall {
            client: 0,
            called,
            operation: (),
            answer: Some((answered, ())),
        };
        let history = [call(5, 7), call(7, 9), call(8, 8), call(9, 3)];
        use HistoryEvent::{Call as C, Gone as G, Return as R};
        let events = sorted_events(&history, |number| number == 2);
        assert_eq!(events, [C(0), C(1), R(0), C(2), G(2), C(3), R(1), R(3)]);
    }
}
