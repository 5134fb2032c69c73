use proptest::prelude::*;

use super::*;

fn name(name: &str) -> HostName {
    HostName::new(name).unwrap()
}

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// A detector that ticks every 100 ms, and a peer that answers after a given time, or not at all.
struct World {
    detector: FailureDetector,
    now: BootTime,
    /// When open questions will be answered.
    answers: Vec<(BootTime, BootTime)>,
    seen: Vec<(u64, HostHealth)>,
    asked: Vec<u64>,
}

impl World {
    fn new() -> Self {
        let now = ms(1_000_000);
        let detector = FailureDetector::new(DetectorTiming::default(), [name("b")], now);
        Self { detector, now, answers: Vec::new(), seen: Vec::new(), asked: Vec::new() }
    }

    fn at(&self) -> u64 {
        self.now.as_millis() as u64 - 1_000_000
    }

    fn see(&mut self, actions: Vec<DetectorAction>, answers_after: Option<u64>) {
        for action in actions {
            match action {
                DetectorAction::Changed(_, health) => self.seen.push((self.at(), health)),
                DetectorAction::Ask(_) => {
                    self.asked.push(self.at());
                    self.answers
                        .extend(answers_after.map(|after| (self.now + ms(after), self.now)));
                }
            }
        }
    }

    /// Lets time pass; questions are answered after so many milliseconds, or fail after 2 s.
    fn pass(&mut self, length: u64, answers_after: Option<u64>) {
        let end = self.now + ms(length);
        while self.now < end {
            self.now += ms(100);
            let now = self.now;
            let (due, open): (Vec<_>, Vec<_>) =
                self.answers.drain(..).partition(|(when, _)| *when <= now);
            self.answers = open;
            for (_, asked) in due {
                let actions =
                    self.detector.handle_event(now, DetectorEvent::Answered(name("b"), asked));
                self.see(actions, answers_after);
            }
            if self.asked.last().is_some_and(|last| self.at() == last + 2000) {
                self.detector.handle_event(now, DetectorEvent::Failed(name("b")));
            }
            let actions = self.detector.handle_event(self.now, DetectorEvent::Tick);
            self.see(actions, answers_after);
        }
    }
}

#[test]
fn a_peer_that_answers_is_alive_and_asked_twice_a_second() {
    let mut world = World::new();
    world.pass(10_000, Some(100));
    assert_eq!(world.seen, [(200, HostHealth::Alive)]);
    assert_eq!(world.asked, (0..20).map(|n| 100 + n * 500).collect::<Vec<_>>());
    let (_, known) = world.detector.peer_states().next().unwrap();
    assert_eq!(known.round_trip, Some(ms(100)));
}

#[test]
fn a_silent_one_is_suspected_and_lost_after_the_times_that_are_stated() {
    let mut world = World::new();
    world.pass(1_000, Some(0));
    world.seen.clear();
    // It answered the question that was asked last, at 600.
    assert_eq!(world.asked.last(), Some(&600));
    world.pass(10_000, None);
    assert_eq!(world.seen, [(2600, HostHealth::Suspected), (5600, HostHealth::Lost)]);
    world.seen.clear();
    world.pass(2_000, Some(0));
    assert_eq!(world.seen.len(), 1);
    assert_eq!(world.seen[0].1, HostHealth::Alive);
}

#[test]
fn one_that_never_answered_is_lost_too() {
    let mut world = World::new();
    world.pass(10_000, None);
    assert_eq!(world.seen, [(5000, HostHealth::Lost)]);
}

#[test]
fn an_answer_counts_from_the_time_of_its_request() {
    let mut detector = FailureDetector::new(DetectorTiming::default(), [name("b")], ms(0));
    for at in [900, 1800, 2700] {
        detector.handle_event(ms(at), DetectorEvent::Tick);
    }
    detector.handle_event(ms(2700), DetectorEvent::Failed(name("b")));
    let mut answered =
        |now, asked| detector.handle_event(ms(now), DetectorEvent::Answered(name("b"), ms(asked)));
    assert_eq!(answered(3000, 0), [], "3 s old, it proves too little");
    assert_eq!(answered(3100, 1200), [DetectorAction::Changed(name("b"), HostHealth::Alive)]);
    assert_eq!(
        detector.handle_event(ms(3200), DetectorEvent::Tick),
        [DetectorAction::Changed(name("b"), HostHealth::Suspected), DetectorAction::Ask(name("b")),]
    );
}

#[test]
fn a_late_answer_makes_a_lost_peer_a_suspected_one() {
    let mut world = World::new();
    world.pass(6_000, None);
    let asked = world.now - ms(3000);
    let changed = world.detector.handle_event(world.now, DetectorEvent::Answered(name("b"), asked));
    assert_eq!(changed, [DetectorAction::Changed(name("b"), HostHealth::Suspected)]);
}

/// The host slept, or the agent was stopped: no peer was asked.
#[test]
fn sleep_of_this_host_makes_no_peer_suspected() {
    let mut world = World::new();
    world.pass(1_000, Some(0));
    world.seen.clear();
    world.now += Duration::from_secs(3600);
    world.pass(1_900, None);
    assert_eq!(world.seen, [], "an hour later nothing else is known");
    world.pass(5_000, None);
    let healths: Vec<HostHealth> = world.seen.iter().map(|(_, health)| *health).collect();
    assert_eq!(healths, [HostHealth::Suspected, HostHealth::Lost]);
}

#[test]
fn sleep_of_this_host_does_not_revive_a_lost_peer() {
    let mut world = World::new();
    world.pass(6_000, None);
    world.seen.clear();
    world.now += Duration::from_secs(3600);
    world.pass(100, None);
    assert_eq!(world.seen, []);
    // Nor because of an answer to an earlier question.
    let asked = world.now - Duration::from_secs(3601);
    assert_eq!(
        world.detector.handle_event(world.now, DetectorEvent::Answered(name("b"), asked)),
        []
    );
}

#[test]
fn a_question_that_is_open_is_not_asked_again() {
    let mut detector = FailureDetector::new(DetectorTiming::default(), [name("b")], ms(0));
    assert_eq!(
        detector.handle_event(ms(100), DetectorEvent::Tick),
        [DetectorAction::Ask(name("b"))]
    );
    assert_eq!(detector.handle_event(ms(1100), DetectorEvent::Tick), []);
    detector.handle_event(ms(1150), DetectorEvent::Failed(name("b")));
    assert_eq!(
        detector.handle_event(ms(1200), DetectorEvent::Tick),
        [DetectorAction::Ask(name("b"))]
    );
}

#[test]
fn an_unknown_peer_has_no_health() {
    let mut detector = FailureDetector::new(DetectorTiming::default(), [name("b")], ms(0));
    assert_eq!(detector.handle_event(ms(1), DetectorEvent::Answered(name("c"), ms(0))), []);
    assert_eq!(detector.handle_event(ms(1), DetectorEvent::Failed(name("c"))), []);
    assert_eq!(detector.peer_states().count(), 1);
}

proptest! {
    /// Whatever the order of events: an alive peer has answered a question that was asked within
    /// the last 2 s in which this agent was awake, and no peer is lost that answered a question
    /// that was asked within 5 s.
    #[test]
    fn health_changes_only_by_answers_and_silence(
        steps in proptest::collection::vec((0u64..900, 0u8..4, 0u64..7000), 1..300)
    ) {
        let b = name("b");
        let mut now = ms(1_000_000);
        let mut detector = FailureDetector::new(DetectorTiming::default(), [b.clone()], now);
        let mut newest: Option<BootTime> = None;
        let (begun, mut ticked) = (now, now);
        for (pass, what, ago) in steps {
            now += ms(pass);
            if what == 0 {
                let asked = (now - ms(ago)).max(begun);
                newest = newest.max(Some(asked));
                detector.handle_event(now, DetectorEvent::Answered(b.clone(), asked));
            }
            // In each gap this agent is awake.
            if now - ticked >= ms(100) || what == 1 {
                prop_assert!(now - ticked <= ms(1000));
                detector.handle_event(now, DetectorEvent::Tick);
                ticked = now;
                let (_, known) = detector.peer_states().next().unwrap();
                let silence = now - newest.unwrap_or(begun);
                match known.health {
                    HostHealth::Alive => prop_assert!(newest.is_some() && silence < ms(2000)),
                    HostHealth::Lost => prop_assert!(silence >= ms(2000)),
                    HostHealth::Suspected => prop_assert!(silence < ms(5000)),
                }
            }
        }
    }
}
