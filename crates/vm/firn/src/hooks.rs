//! Hooks: commands that run on the host before a checkpoint or after it, and in the guest after a restore.
//!
//! ```text
//!   firn checkpoint   --before  ->  [freeze  cut  thaw]  ->  --after, also if there is no checkpoint
//!   firn restore      the VM runs  ->  --guest-exec  ->  --after
//! ```
//!
//! This process runs the commands of the host, so they have the rights of the user who called it. What they
//! print goes to standard error: standard output has the facts.

use std::io;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use clap::Args as ClapArgs;
use firn_supervisor::{
    Failure, FailureContext as _, FailureKind, GuestProgramEnd, RuntimeDir, VmName, run_in_guest,
};
use serde_json::{Value, json};

use crate::clones::NUMBER;
use crate::units;

/// How often a hook is checked for its end.
const EXIT_POLL_INTERVAL: Duration = Duration::from_millis(10);

/// The hooks of a checkpoint.
#[derive(Debug, ClapArgs)]
pub struct CheckpointHooks {
    /// Run this command on the host first, by `sh -c`, with FIRN_VM and FIRN_IMAGE in its environment. If
    /// it fails, there is no checkpoint.
    #[arg(long, value_name = "COMMAND", conflicts_with = "every")]
    before: Option<String>,
    /// Run this command on the host after the checkpoint, also if it fails: FIRN_RESULT is ok or failed.
    /// Not after a --before that failed.
    #[arg(long, value_name = "COMMAND", conflicts_with = "every")]
    after: Option<String>,
    /// Have the guest agent freeze the guest's file systems for the cut, so that the disks have all that
    /// its programs wrote. Firn thaws them right after the cut, whatever fails.
    #[arg(long)]
    freeze: bool,
    /// How long a hook, or the guest from the freeze to the cut, may take.
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = parse_time_limit)]
    hook_timeout: Duration,
}

/// The hooks of a restore.
#[derive(Debug, ClapArgs)]
pub struct RestoreHooks {
    /// Have the guest agent run this program in the guest when the VM runs, and wait for its end:
    /// 'PROGRAM ARGUMENTS', without a shell. With --count, {} in it is the number of the clone.
    #[arg(long, value_name = "PROGRAM", value_parser = parse_guest_command)]
    guest_exec: Option<GuestCommand>,
    /// Then run this command on the host, by `sh -c`, with FIRN_VM and FIRN_IMAGE in its environment; with
    /// --count once for each clone. If a hook fails, the VM runs all the same.
    #[arg(long, value_name = "COMMAND")]
    after: Option<String>,
    /// How long a hook may take.
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = parse_time_limit)]
    hook_timeout: Duration,
}

/// A program and its arguments.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GuestCommand(Vec<String>);

fn parse_guest_command(text: &str) -> Result<GuestCommand, String> {
    let words = shlex::split(text).ok_or("a quote is not closed")?;
    match words.is_empty() {
        true => Err("give a program in the guest, and its arguments".to_owned()),
        false => Ok(GuestCommand(words)),
    }
}

fn parse_time_limit(text: &str) -> Result<Duration, String> {
    let time = units::parse_duration(text)?;
    if time.is_zero() { Err("give a time above 0".to_owned()) } else { Ok(time) }
}

impl CheckpointHooks {
    /// The time for which the guest may be frozen, in milliseconds, if it is to be.
    pub fn freeze_ms(&self) -> Option<u64> {
        let ms = u64::try_from(self.hook_timeout.as_millis()).unwrap_or(u64::MAX);
        self.freeze.then_some(ms)
    }

    /// Runs a checkpoint with the hooks around it. The failure of the checkpoint is the one that the user
    /// gets, if both fail.
    pub fn run_around(
        &self,
        name: &VmName,
        image: &str,
        checkpoint: impl FnOnce() -> Result<Value, Failure>,
    ) -> Result<(Value, Option<Failure>), Failure> {
        let hook = |option, command, result| HostHook {
            option,
            command,
            environment: [
                ("FIRN_VM", name.as_str()),
                ("FIRN_IMAGE", image),
                ("FIRN_RESULT", result),
            ],
            time_limit: self.hook_timeout,
        };
        if let Some(command) = &self.before {
            hook("--before", command, "").run()?;
        }
        let saved = checkpoint();
        let result = if saved.is_ok() { "ok" } else { "failed" };
        let after = self.after.as_ref().and_then(|it| hook("--after", it, result).run().err());
        match saved {
            Ok(facts) => {
                let explain = |it: Failure| it.while_doing(format!("{image} is complete"));
                Ok((facts, after.map(explain)))
            }
            Err(failure) => {
                after.iter().for_each(|it| eprintln!("firn: {it}"));
                Err(failure)
            }
        }
    }
}

impl RestoreHooks {
    /// Runs the hooks of a VM that was restored. `number` is that of a clone. Returns how the program in the
    /// guest ended, and what failed.
    pub fn run(
        &self,
        base: &RuntimeDir,
        (name, number): (&VmName, Option<usize>),
        (image, facts): (&str, &Value),
    ) -> (Value, Option<Failure>) {
        let mut guest = Value::Null;
        let ran = self.run_in_guest(base, (name, number), facts, &mut guest);
        let ran = ran.and_then(|()| match &self.after {
            Some(command) => HostHook {
                option: "--after",
                command,
                environment: [
                    ("FIRN_VM", name.as_str()),
                    ("FIRN_IMAGE", image),
                    ("FIRN_RESULT", "ok"),
                ],
                time_limit: self.hook_timeout,
            }
            .run(),
            None => Ok(()),
        });
        (guest, ran.err().map(|failure| failure.while_doing(format!("{name} was restored"))))
    }

    fn run_in_guest(
        &self,
        base: &RuntimeDir,
        (name, number): (&VmName, Option<usize>),
        facts: &Value,
        end: &mut Value,
    ) -> Result<(), Failure> {
        let Some(GuestCommand(words)) = &self.guest_exec else { return Ok(()) };
        let fill_in = |word: &String| match number {
            Some(number) => word.replace(NUMBER, &number.to_string()),
            None => word.clone(),
        };
        let words: Vec<String> = words.iter().map(fill_in).collect();
        let Some((program, arguments)) = words.split_first() else { return Ok(()) };
        if facts["paused"].is_string() {
            let text = "the VM is paused as it was saved, so no program runs in its guest";
            return Err(Failure::new(FailureKind::Refused, text).with_hint("start it: --run"));
        }
        let ran = run_in_guest(&base.vm_dir(name), program, arguments, self.hook_timeout)
            .map_err(|failure| failure.while_doing(format!("running {program} in the guest")))?;
        *end = json!(ran);
        end["program"] = json!(program);
        check_guest_end(program, &ran)
    }
}

fn check_guest_end(program: &str, end: &GuestProgramEnd) -> Result<(), Failure> {
    let how = match (end.exit_code, end.signal) {
        (_, Some(signal)) => format!("was ended by signal {signal}"),
        (Some(0) | None, None) => return Ok(()),
        (Some(code), None) => format!("ended with exit code {code}"),
    };
    let text = format!("{program} in the guest {how}");
    let failure = Failure::new(FailureKind::Other, text);
    match end.err.lines().next() {
        Some(line) => Err(Failure::new(FailureKind::Other, line).while_doing(failure.to_string())),
        None => Err(failure),
    }
}

/// What `firn` prints about a program in a guest.
pub fn describe_guest_end(end: &Value) -> String {
    let Some(program) = end["program"].as_str() else { return String::new() };
    let code = end["exit_code"].as_i64().map_or("-".to_owned(), |code| code.to_string());
    let output = [&end["out"], &end["err"]].map(|it| it.as_str().unwrap_or_default());
    let lines = output.iter().flat_map(|text| text.lines());
    let lines: String = lines.map(|line| format!("  {line}\n")).collect();
    format!("{program} in the guest: exit code {code}\n{lines}")
}

/// A command of the user's on this host.
struct HostHook<'a> {
    option: &'static str,
    command: &'a str,
    environment: [(&'static str, &'a str); 3],
    time_limit: Duration,
}

impl HostHook<'_> {
    fn run(&self) -> Result<(), Failure> {
        let mut command = Command::new("sh");
        command.args(["-c", self.command]).stdin(Stdio::null()).stdout(io::stderr());
        command.envs(self.environment.iter().filter(|(_, value)| !value.is_empty()).copied());
        // So that it can be ended with all that it started.
        command.process_group(0);
        let starting = || format!("starting the command of {}", self.option);
        let mut child = command.spawn().while_doing(starting())?;
        let Some(status) = self.wait(&mut child).while_doing(starting())? else {
            let seconds = self.time_limit.as_secs_f64();
            let text = format!("the command of {} was ended: it ran for {seconds} s", self.option);
            return Err(Failure::new(FailureKind::Other, text)
                .with_hint("give it more time: --hook-timeout 5m"));
        };
        match status.success() {
            true => Ok(()),
            false => {
                let text = format!("the command of {} failed: {status}", self.option);
                Err(Failure::new(FailureKind::Other, text))
            }
        }
    }

    /// `None` if its time was over.
    fn wait(&self, child: &mut Child) -> io::Result<Option<ExitStatus>> {
        let deadline = Instant::now() + self.time_limit;
        loop {
            if let Some(status) = child.try_wait()? {
                return Ok(Some(status));
            }
            if Instant::now() >= deadline {
                let group = rustix::process::Pid::from_child(child);
                rustix::process::kill_process_group(group, rustix::process::Signal::KILL)?;
                child.wait()?;
                return Ok(None);
            }
            thread::sleep(EXIT_POLL_INTERVAL);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(command: &str, time_limit: Duration) -> Result<(), Failure> {
        let environment = [("FIRN_VM", "web"), ("FIRN_IMAGE", "/i"), ("FIRN_RESULT", "")];
        HostHook { option: "--before", command, environment, time_limit }.run()
    }

    #[test]
    fn a_command_has_its_vm_in_the_environment() {
        let limit = Duration::from_secs(30);
        run("test $FIRN_VM$FIRN_IMAGE = web/i && test -z \"${FIRN_RESULT+x}\"", limit).unwrap();
        let failed = run("exit 7", limit).unwrap_err().to_string();
        assert_eq!(failed, "the command of --before failed: exit status: 7");
    }

    #[test]
    fn a_command_that_takes_too_long_is_ended_with_what_it_started() {
        let begun = Instant::now();
        let failed = run("sleep 60 & sleep 60", Duration::from_millis(100)).unwrap_err();
        assert!(failed.to_string().contains("was ended: it ran for 0.1 s"), "{failed}");
        assert!(begun.elapsed() < Duration::from_secs(30));
    }

    #[test]
    fn a_program_in_a_guest_has_words() {
        let GuestCommand(words) = parse_guest_command("/bin/hostname 'box {}'").unwrap();
        assert_eq!(words, ["/bin/hostname", "box {}"]);
        assert!(parse_guest_command(" ").is_err() && parse_guest_command("'a").is_err());
    }
}
