//! Subject: a guest that works, to be checkpointed in the middle of its work.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

use crate::experiments::synthetic::split_words;
use crate::firn::{CommandOutput, SaveArgs};
use crate::guest::{GuestControl, GuestImage, QemuArgs, accel};
use crate::lab::Lab;

/// Name of the VM under Firn.
pub(super) const VM: &str = "subject";
/// Name of the work in the guest.
const JOB: &str = "work";
/// How long a guest may take to boot, to compile its work, and to begin it.
const BOOT: Duration = Duration::from_secs(300);
/// How long the guest works before the experiment does anything with it.
const SETTLE: (Duration, Duration) = (Duration::from_secs(5), Duration::from_secs(15));
/// How long its accesses are scanned by access bits.
const ROUND: (Duration, Duration) = (Duration::from_secs(15), Duration::from_secs(75));
/// The JVM's program.
const WAREHOUSES: &str = include_str!("Warehouses.java");
/// The address of the host in QEMU's user networking.
const HOST: &str = "10.0.2.2";

/// The work of a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SubjectWork {
    /// Nothing, after booting.
    Idle,
    /// Processes orders of two warehouses in a JVM, like SPECjbb.
    Jvm,
    /// Plays a film at 30 frames a second.
    Video,
    /// Reads random pages of this percentage of its memory.
    Random(u32),
    /// A Redis that gets requests as fast as it answers.
    Redis,
    /// One vCPU walks through memory, and reports its progress continuously.
    Walk,
}

/// Memory of a guest, in MiB, in quick and in full runs.
struct SubjectMemory {
    ram: (u32, u32),
    /// Memory that the work uses.
    work: (u32, u32),
}

impl SubjectWork {
    pub(super) fn name(self) -> String {
        match self {
            Self::Idle => "idle".to_owned(),
            Self::Jvm => "jvm".to_owned(),
            Self::Video => "video".to_owned(),
            Self::Random(percent) => format!("random{percent}"),
            Self::Redis => "redis".to_owned(),
            Self::Walk => "walk".to_owned(),
        }
    }

    fn memory_sizes(self) -> SubjectMemory {
        match self {
            Self::Idle => SubjectMemory { ram: (256, 512), work: (0, 0) },
            Self::Jvm => SubjectMemory { ram: (640, 1024), work: (384, 768) },
            Self::Video => SubjectMemory { ram: (512, 512), work: (0, 0) },
            Self::Random(_) => SubjectMemory { ram: (320, 768), work: (192, 512) },
            Self::Walk => SubjectMemory { ram: (256, 512), work: (128, 256) },
            Self::Redis => SubjectMemory { ram: (384, 1024), work: (128, 512) },
        }
    }

    /// Number of vCPUs. A JVM has one, as in the paper; so has a Redis, which executes one request
    /// at a time anyway.
    fn vcpu_count(self) -> u32 {
        match self {
            Self::Jvm | Self::Walk | Self::Redis => 1,
            Self::Idle | Self::Video | Self::Random(_) => 2,
        }
    }

    fn guest_image(self) -> Result<GuestImage> {
        Ok(match self {
            Self::Jvm | Self::Video => GuestImage::full()?,
            Self::Idle | Self::Random(_) | Self::Redis | Self::Walk => GuestImage::small()?,
        })
    }
}

/// A guest under Firn that works.
pub(super) struct SubjectGuest<'a> {
    lab: &'a Lab,
    work: SubjectWork,
    agent: PathBuf,
}

impl<'a> SubjectGuest<'a> {
    /// Boots the guest and starts its work. A JVM sends its throughput to this UDP port of the
    /// host, a film sends each frame.
    pub(super) fn boot_and_start(lab: &'a Lab, work: SubjectWork, port: u16) -> Result<Self> {
        let (agent, image) = (lab.file("agent"), work.guest_image()?);
        let SubjectMemory { ram, work: used } = work.memory_sizes();
        let args = QemuArgs::new(&image, accel::choose_accel().accel)
            .memory_mib(lab.extent.pick(ram.0, ram.1))
            .vcpus(work.vcpu_count())
            .append_kernel_arg("firn.services=none")
            .root_in_memory(&image)
            .add_network(&[])
            .with_console(&lab.file("console"))
            .with_agent_socket(&agent)
            .with_heartbeat_socket(&Self::heartbeats_of(lab));
        lab.firn().run_vm(VM, &args)?;
        let subject = Self { lab, work, agent };
        subject.start_work(lab.extent.pick(used.0, used.1), port)?;
        subject.let_settle();
        subject.is_at_work()?;
        lab.log_progress(&format!("{}: the guest works", work.name()));
        Ok(subject)
    }

    /// Waits while the guest works.
    pub(super) fn let_settle(&self) {
        std::thread::sleep(self.lab.extent.pick(SETTLE.0, SETTLE.1));
    }

    fn start_work(&self, mib: u32, port: u16) -> Result<()> {
        let mut control = GuestControl::connect(&self.agent, BOOT)?;
        match self.work {
            SubjectWork::Idle => return Ok(()),
            SubjectWork::Jvm => {
                let put = ["sh", "-c", "cat > /tmp/Warehouses.java"];
                let compiled = ["javac", "-d", "/tmp", "/tmp/Warehouses.java"];
                run_checked(&mut control, &put, WAREHOUSES)?;
                run_checked(&mut control, &compiled, "")?;
                let line =
                    format!("java -Xms{mib}m -Xmx{mib}m -cp /tmp Warehouses 2 {HOST} {port}");
                control.spawn_job(JOB, &split_words(&line))?;
            }
            SubjectWork::Video => {
                run_checked(&mut control, &["sh", "-c", "cat > /tmp/frames.lua"], FRAMES)?;
                control.spawn_job(JOB, &["bash", "-c", &film_script(port)])?;
            }
            SubjectWork::Random(percent) => {
                let line =
                    format!("firn-guest random --mib {mib} --percent {percent} --progress-ms 0");
                control.spawn_job(JOB, &split_words(&line))?;
            }
            SubjectWork::Walk => {
                control.spawn_job(JOB, &["sh", "-c", &walk_script(mib)])?;
            }
            SubjectWork::Redis => control.spawn_job(JOB, &["sh", "-c", &redis_script(mib)])?,
        }
        control.wait_output(JOB, "ready", BOOT).map(drop).context(self.work.name())
    }

    /// The socket of a guest's heartbeats, also before the guest runs.
    pub(super) fn heartbeats_of(lab: &Lab) -> PathBuf {
        lab.file("heartbeats")
    }

    /// Fails if the work has ended.
    fn is_at_work(&self) -> Result<()> {
        if self.work == SubjectWork::Idle {
            return Ok(());
        }
        let state = GuestControl::connect(&self.agent, BOOT)?.poll_job(JOB)?;
        let works = matches!(state, crate::guest::JobState::Running { .. });
        ensure!(works, "{}: the work has ended: {state:?}", self.work.name());
        Ok(())
    }

    /// Scans the guest's accesses by access bits, for at least a round.
    pub(super) fn scan_access(&self) -> Result<()> {
        self.lab.firn().detach(VM)?;
        self.lab.firn().attach(VM, &["--working-set", "access-bits"])?;
        std::thread::sleep(self.lab.extent.pick(ROUND.0, ROUND.1));
        Ok(())
    }

    /// Checkpoints the guest, which continues its work.
    pub(super) fn checkpoint(&self, file: &Path, how: &SaveArgs) -> Result<CommandOutput> {
        let save_output = self.lab.firn().checkpoint(VM, file, how)?;
        let (work, took) = (self.work.name(), save_output.took.as_secs_f64());
        self.lab.log_progress(&format!("{work}: checkpointed in {took:.1} s"));
        Ok(save_output)
    }
}

impl Drop for SubjectGuest<'_> {
    fn drop(&mut self) {
        self.lab.firn().stop(VM);
    }
}

/// Shell script that walks through memory again and again and reports its progress a hundred times
/// a second. A visit takes much longer than reading the page from memory, so that the rate is
/// steady, whatever other load the machine has.
fn walk_script(mib: u32) -> String {
    format!(
        "for port in /sys/class/virtio-ports/*; do \
         grep -qx firn.heartbeat $port/name && heard=/dev/${{port##*/}}; done; \
         echo ready; exec firn-guest synthetic --mib {mib} --working-set-mib {mib} --stride 1 --count 0 --work 4 \
         --progress-ms 10 > $heard"
    )
}

/// Shell script that plays a film over and over, at 30 frames a second whatever its own rate. It
/// sends each frame to the host.
fn film_script(port: u16) -> String {
    format!(
        "echo ready; exec 3> /dev/udp/{HOST}/{port}; \
         mpv --no-config --really-quiet --vo=null --ao=null --no-audio --no-correct-pts --fps=30 --script=/tmp/frames.lua \
         --loop-file=inf /var/lib/firn/clip.mkv < /dev/null | while read -r frame; do echo $frame >&3; done"
    )
}

/// Player script that prints a line for each frame: the time of the film changes with it.
const FRAMES: &str = r#"
io.stdout:setvbuf("line")
mp.observe_property("time-pos", "number", function() io.stdout:write("1\n") end)
"#;

/// Shell script that fills Redis with values of 1 KiB, then requests them as fast as they arrive.
///
/// It waits for the server first: a benchmark that starts before the server listens sometimes loops
/// for ever.
fn redis_script(mib: u32) -> String {
    let keys = mib * 900;
    let client = format!("redis-benchmark -q -d 1000 -r {keys}");
    format!(
        "until timeout 5 redis-benchmark -q -c 1 -n 1 -t ping > /dev/null 2>&1; do sleep 0.1; done; \
         {client} -n {keys} -P 32 -t set > /dev/null && echo ready && exec {client} -t get,set -c 4 -l > /dev/null"
    )
}

fn run_checked(control: &mut GuestControl, argv: &[&str], stdin: &str) -> Result<()> {
    let ended = control.run_within(argv, stdin, BOOT)?;
    ensure!(
        ended.exit == 0,
        "{}: exit {}: {}{}",
        argv.join(" "),
        ended.exit,
        ended.stdout,
        ended.stderr
    );
    Ok(())
}
