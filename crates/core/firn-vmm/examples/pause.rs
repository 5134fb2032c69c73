//! Measurement of the pause for a save of device state: Firn's calls, and the same three commands
//! in a bare loop over a socket, alternately, so that a busy host slows all of them equally.
//!
//! ```text
//!   cargo run --release -p firn-vmm --example pause -- QMP_SOCKET ANOTHER_QMP_SOCKET [ROUNDS]
//! ```

use std::error::Error;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use firn_vmm::QemuVm;

/// The lower bound: no parsing beyond the check for a reply, a file on tmpfs, nothing read back.
struct Bare(BufReader<UnixStream>);

impl Bare {
    fn connect(path: &Path) -> Result<Self, Box<dyn Error>> {
        let mut bare = Self(BufReader::new(UnixStream::connect(path)?));
        bare.0.read_line(&mut String::new())?;
        bare.execute(r#"{"execute":"qmp_capabilities"}"#)?;
        Ok(bare)
    }

    fn execute(&mut self, command: &str) -> Result<(), Box<dyn Error>> {
        self.0.get_mut().write_all(command.as_bytes())?;
        let mut line = String::new();
        while !line.starts_with("{\"return\"") {
            line.clear();
            self.0.read_line(&mut line)?;
        }
        Ok(())
    }

    fn pause(&mut self) -> Result<(), Box<dyn Error>> {
        let file = "/dev/shm/firn-vmm-pause";
        self.execute(r#"{"execute":"stop"}"#)?;
        self.execute(&format!(
            r#"{{"execute":"xen-save-devices-state","arguments":{{"filename":"{file}","live":false}}}}"#
        ))?;
        self.execute(r#"{"execute":"cont"}"#)
    }
}

fn one_by_one(vm: &mut QemuVm) -> Result<(), Box<dyn Error>> {
    vm.stop()?;
    vm.save_device_state()?;
    Ok(vm.cont()?)
}

fn together(vm: &mut QemuVm) -> Result<(), Box<dyn Error>> {
    vm.stop_and_save_device_state()?;
    Ok(vm.cont()?)
}

fn timed(pause: impl FnOnce() -> Result<(), Box<dyn Error>>) -> Result<Duration, Box<dyn Error>> {
    let begun = Instant::now();
    pause()?;
    let taken = begun.elapsed();
    std::thread::sleep(Duration::from_millis(20));
    Ok(taken)
}

fn print(name: &str, mut times: Vec<Duration>) {
    times.sort_unstable();
    let at = |percent: usize| times[(times.len() * percent / 100).min(times.len() - 1)];
    println!("{name:>10}  min {:?}  p50 {:?}  p95 {:?}", times[0], at(50), at(95));
}

fn main() -> Result<(), Box<dyn Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [socket, another, rest @ ..] = &words[..] else { return Err("which two sockets?".into()) };
    let rounds: usize = rest.first().map_or(Ok(40), |rounds| rounds.parse())?;
    let mut bare = Bare::connect(Path::new(socket))?;
    let mut vm = QemuVm::connect(Path::new(another))?;
    vm.prepare_save()?;
    let mut times = [Vec::new(), Vec::new(), Vec::new()];
    for _ in 0..rounds {
        times[0].push(timed(|| bare.pause())?);
        times[1].push(timed(|| one_by_one(&mut vm))?);
        times[2].push(timed(|| together(&mut vm))?);
    }
    let names = ["bare", "one by one", "together"];
    names.into_iter().zip(times).for_each(|(name, times)| print(name, times));
    std::fs::remove_file("/dev/shm/firn-vmm-pause")?;
    Ok(())
}
