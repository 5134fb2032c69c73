//! Several VMs of one image that share memory: `firn restore --count`, `firn fork`.

use std::fmt::Write;
use std::path::Path;
use std::str::FromStr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use firn_restore::FillChoices;
use firn_supervisor::{
    CommandOverrides, Failure, FailureKind, FamilyRecord, NewFamily, RuntimeDir, SupervisorPlan,
    SupervisorRequest, VmName, check_clones, quick_status, send_request, start_supervisor,
};
use firn_types::make_printable;
use serde_json::{Value, json};

use crate::hooks::describe_guest_end;
use crate::overrides::number_overrides;
use crate::units;

/// What stands for a clone's number in its name and in the values of its command line.
pub const NUMBER: &str = "{}";

/// The number of clones, at most.
pub const COUNT_MAX: u64 = 1000;

/// The name of a VM, or a pattern for the names of clones.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamePattern(String);

impl FromStr for NamePattern {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let name = VmName::new(text.replace(NUMBER, "1"));
        name.map(|_| Self(text.to_owned())).map_err(|error| error.to_string())
    }
}

impl NamePattern {
    /// A pattern for clones of the VM of this name.
    pub fn for_clones_of(name: &VmName) -> Self {
        Self(format!("{name}-{NUMBER}"))
    }

    /// The name of a single VM.
    pub fn single_name(&self) -> Result<VmName, Failure> {
        if self.0.contains(NUMBER) {
            let text = format!("{:?} is a pattern for the names of several VMs", self.0);
            let failure = Failure::new(FailureKind::Usage, text);
            return Err(failure.with_hint("--count N starts N of them"));
        }
        parse_name(&self.0)
    }

    /// The names of this many clones.
    pub fn list_names(&self, count: u32) -> Result<Vec<VmName>, Failure> {
        if count > 1 && !self.0.contains(NUMBER) {
            let text = format!("{count} VMs can't all have the name {:?}", self.0);
            let hint = format!(
                "give a pattern in which {NUMBER} stands for a number: --name '{}-{NUMBER}'",
                self.0
            );
            return Err(Failure::new(FailureKind::Usage, text).with_hint(hint));
        }
        let name = |number: u32| parse_name(&self.0.replace(NUMBER, &number.to_string()));
        (1..=count).map(name).collect()
    }
}

fn parse_name(text: &str) -> Result<VmName, Failure> {
    VmName::new(text).map_err(|error| Failure::new(FailureKind::Usage, error.to_string()))
}

/// Checks whether all names are free, before anything is started.
pub fn check_names(base: &RuntimeDir, names: &[VmName]) -> Result<(), Failure> {
    let is_taken = |name: &&VmName| match quick_status(&base.vm_dir(name)) {
        Ok(status) => status.state != "ended",
        Err(failure) => failure.kind != FailureKind::NoSuchVm,
    };
    let taken: Vec<&str> = names.iter().filter(is_taken).map(VmName::as_str).collect();
    match taken.is_empty() {
        true => Ok(()),
        false => {
            let text = format!("these names are taken: {}", taken.join(", "));
            let hint = "choose another pattern: --name 'other-{}'; `firn ls` lists the VMs";
            Err(Failure::new(FailureKind::Busy, text).with_hint(hint))
        }
    }
}

/// The clones to start.
pub struct CloneOrder<'a> {
    /// The image; absolute.
    pub image: &'a Path,
    /// Load first what earlier restores of the image had to read on demand.
    pub learn: bool,
    /// When and how fast their memory is filled in the background.
    pub fill: FillChoices,
    /// The user trusts the image, whatever its origin is.
    pub trust: bool,
    /// The name of each clone.
    pub names: &'a [VmName],
    /// The changes to the command line, before numbers are put in.
    pub overrides: &'a CommandOverrides,
}

/// Makes the plan of a clone, with its changes to the command line.
pub type PlanMaker<'a> =
    dyn Fn(CommandOverrides, FamilyRecord) -> Result<SupervisorPlan, Failure> + Sync + 'a;

/// Starts a clone under each name, several at the same time. After a failure no more clones are
/// started; those that run are listed.
pub fn start_clones(
    base: &RuntimeDir,
    order: &CloneOrder<'_>,
    make_plan: &PlanMaker<'_>,
) -> Result<Value, Failure> {
    let CloneOrder { image, learn, fill, trust, names, overrides } = *order;
    let overrides: Vec<CommandOverrides> =
        (1..=names.len() as u32).map(|number| number_overrides(overrides, number)).collect();
    check_clones(image, &overrides, trust)?;
    let family = NewFamily::start(base, image, learn, fill)?;
    let start_one = |at: usize| {
        make_plan(overrides[at].clone(), family.record().clone())
            .and_then(|plan| start_supervisor(base, &names[at], &plan, &mut |_| ()))
    };
    let (mut clones, mut failed) = (Vec::new(), None);
    for (at, started) in start_each(names.len(), &start_one) {
        match started {
            Ok(facts) => clones.push(facts),
            Err(failure) => drop(failed.get_or_insert((at, failure))),
        }
    }
    match failed {
        Some((at, failure)) => Err(explain_failure(&names[at], failure, &clones)),
        None => Ok(json!({ "image": image, "family": family.record().id, "clones": clones })),
    }
}

/// The results of starts by number. After a failure no further start begins.
fn start_each(
    count: usize,
    start_one: &(dyn Fn(usize) -> Result<Value, Failure> + Sync),
) -> Vec<(usize, Result<Value, Failure>)> {
    let next = AtomicUsize::new(0);
    let start_next = || {
        let mut started = Vec::new();
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            if at >= count {
                return started;
            }
            let result = start_one(at);
            if result.is_err() {
                next.store(count, Ordering::Relaxed);
            }
            started.push((at, result));
        }
    };
    let mut started = thread::scope(|scope| {
        let threads: Vec<_> = (0..thread_count(count))
            .filter_map(|_| thread::Builder::new().spawn_scoped(scope, start_next).ok())
            .collect();
        threads.into_iter().flat_map(|it| it.join().unwrap_or_default()).collect::<Vec<_>>()
    });
    started.sort_by_key(|(at, _)| *at);
    started
}

/// Waits until all memory of these clones is loaded.
pub fn wait_for_clones(base: &RuntimeDir, names: &[VmName]) -> Result<(), Failure> {
    let watch = SupervisorRequest::Watch;
    names.iter().try_for_each(|name| send_request(base, name, &watch, &mut |_| ()).map(drop))
}

/// The number of clones that start at the same time: each of them uses more than one process.
fn thread_count(clones: usize) -> usize {
    let processors = thread::available_parallelism().map_or(1, usize::from);
    (2 * processors).max(4).min(clones)
}

fn explain_failure(name: &VmName, failure: Failure, clones: &[Value]) -> Failure {
    let running: Vec<&str> = clones.iter().filter_map(|facts| facts["name"].as_str()).collect();
    let rest = match running.is_empty() {
        true => "no clone runs".to_owned(),
        false => format!("these run: {}", running.join(", ")),
    };
    failure.while_doing(format!("the clone {name} did not start; {rest}"))
}

/// What `firn` prints about clones that have been started.
pub fn describe_clones(facts: &Value) -> String {
    let mut text = String::new();
    let clones = facts["clones"].as_array().map(Vec::as_slice).unwrap_or_default();
    for clone in clones {
        let name = make_printable(clone["name"].as_str().unwrap_or("?"));
        let total = units::format_ms(clone["timings_ms"]["total"].as_f64().unwrap_or(0.0));
        let _ = match clone["paused"].as_str() {
            Some(state) => {
                writeln!(text, "{name} is paused after {total}, as it was saved ({state})")
            }
            None => writeln!(text, "{name} runs: process {}, after {total}", clone["pid"]),
        };
        text += &describe_guest_end(&clone["guest_exec"]);
    }
    let image = make_printable(facts["image"].as_str().unwrap_or("?"));
    let _ = writeln!(text, "{} clones of {image} share its memory", clones.len());
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(pattern: &str, count: u32) -> Result<Vec<String>, Failure> {
        let pattern: NamePattern = pattern.parse().unwrap();
        Ok(pattern.list_names(count)?.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn clones_are_numbered_from_one() {
        assert_eq!(names("web-{}", 3).unwrap(), ["web-1", "web-2", "web-3"]);
        assert_eq!(names("web", 1).unwrap(), ["web"]);
    }

    #[test]
    fn one_name_is_not_enough_for_two() {
        assert_eq!(names("web", 2).unwrap_err().kind, FailureKind::Usage);
        assert!("a b-{}".parse::<NamePattern>().is_err());
        let long: NamePattern = format!("{}{{}}", "a".repeat(46)).parse().unwrap();
        assert!(long.list_names(99).is_ok() && long.list_names(100).is_err());
    }

    #[test]
    fn a_pattern_is_no_name() {
        let pattern: NamePattern = "web-{}".parse().unwrap();
        assert_eq!(pattern.single_name().unwrap_err().kind, FailureKind::Usage);
        let name: NamePattern = "web".parse().unwrap();
        assert_eq!(name.single_name().unwrap().as_str(), "web");
    }
}
