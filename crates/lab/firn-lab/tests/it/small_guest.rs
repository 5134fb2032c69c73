//! Small guest under plain QEMU: tests everything that the other tests need.

use std::io::Write as _;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

use firn_guest::net::PORT;
use firn_guest::net::load::EchoLoad;
use firn_lab::guest::{
    GuestControl, GuestImage, HostForward, JobState, QemuArgs, RedisClient, RedisLoad,
    UnmanagedGuest, VirtioDisk, accel,
};
use firn_lab::prober::{Heartbeats, Prober, RedisPings};

use crate::place::{BOOT, GuestPlace};

fn args(place: &GuestPlace) -> QemuArgs {
    let disk = place.at("disk");
    std::fs::File::create(&disk).unwrap().set_len(16 << 20).unwrap();
    let image = GuestImage::small().unwrap();
    let forwards =
        [HostForward::tcp(place.redis.port(), 6379), HostForward::tcp(place.echo.port(), PORT)];
    place
        .common(QemuArgs::new(&image, accel::choose_accel().accel).memory_mib(256))
        .with_heartbeat_socket(&place.at("heartbeat"))
        .add_disk(VirtioDisk { file: disk, format: "raw", read_only: false })
        .add_network(&forwards)
        .add_network(&[HostForward::udp(place.echo.port(), PORT)])
}

#[test]
fn the_small_guest_runs_commands() {
    let place = GuestPlace::new();
    let mut machine = UnmanagedGuest::start(args(&place)).unwrap();
    machine.wait_ready(BOOT).unwrap();
    let mut control = GuestControl::connect(&place.at("agent"), BOOT).unwrap();
    assert!(control.run_program(&["uname", "-r"]).unwrap().contains("cloud-amd64"));
    assert!(control.run_program(&["false"]).is_err());

    let digest =
        control.run_program(&["firn-guest", "sha", "--rounds", "500", "--mib", "4"]).unwrap();
    // The same program prints this on any machine.
    assert_eq!(digest.trim(), "ce2e49977badcf5ad0313718ee49e83da4624d9736c38c5013d3e324de19e2d5");

    control.spawn_job("load", &["firn-guest", "writers", "--mib", "16"]).unwrap();
    control.wait_output("load", "ready", BOOT).unwrap();
    let report = control.run_program(&["firn-guest", "verify"]).unwrap();
    assert!(report.contains("\"wrong\":0"), "{report}");

    let mut redis = RedisClient::connect(place.redis, BOOT).unwrap();
    let load = RedisLoad::new(500, 1000);
    load.write_all(&mut redis).unwrap();
    assert_eq!(redis.count_keys().unwrap(), 500);
    assert!(load.verify_all(&mut redis).unwrap().is_right());

    devices_move_what_they_should(&place, &mut control);
    probes_see_a_pause(&place, &mut control);
}

fn devices_move_what_they_should(place: &GuestPlace, control: &mut GuestControl) {
    control.run_program(&["firn-guest", "disk-dma", "prepare"]).unwrap();
    control.run_program(&["firn-guest", "disk-dma", "read", "--seconds", "0.5"]).unwrap();
    control.run_program(&["firn-guest", "disk-dma", "write", "--seconds", "0.5"]).unwrap();
    assert!(control.run_program(&["firn-guest", "disk-dma", "read", "--seconds", "0.5"]).is_err());

    control.spawn_job("echo", &["firn-guest", "net-dma", "echo"]).unwrap();
    control.wait_output("echo", "ready", BOOT).unwrap();
    for udp in [true, false] {
        let mut load = EchoLoad::new(place.echo, udp, 1200);
        let report = load.run_for(Duration::from_secs(1), 0.0);
        assert!(report.echoed > 10 && report.wrong == 0, "udp {udp}: {report:?}");
    }
}

fn probes_see_a_pause(place: &GuestPlace, control: &mut GuestControl) {
    control.spawn_job("beat", &["firn-guest", "heartbeat", "--rate", "50"]).unwrap();
    let beats = Prober::start(Heartbeats::new(&place.at("heartbeat")), 0.0);
    let pings = Prober::start(RedisPings::new(place.redis), 50.0);
    sleep(Duration::from_secs(2));
    place.monitor("stop");
    let stopped = beats.now();
    sleep(Duration::from_secs(1));
    let resumed = beats.now();
    place.monitor("cont");
    for prober in [beats, pings] {
        wait_until(|| prober.timeline().first_after(resumed).is_some());
        let line = prober.finish();
        let steady = line.rate_in(stopped / 2..stopped);
        assert!(steady > 5.0, "{steady} replies per second");
        let gap = line.longest_gap(stopped..resumed);
        assert!(gap.as_secs_f64() > 0.9, "{gap:?} without a reply while the guest stood still");
    }
}

/// A client that disconnects, and a whole QEMU that ends, leave the agent and its programs running.
#[test]
fn the_agent_outlives_its_hypervisor() {
    let place = GuestPlace::new();
    let mut machine = UnmanagedGuest::start(args(&place)).unwrap();
    machine.wait_ready(BOOT).unwrap();
    let mut control = GuestControl::connect(&place.at("agent"), BOOT).unwrap();
    control.spawn_job("load", &["firn-guest", "writers", "--mib", "8", "--rate", "500"]).unwrap();
    control.wait_output("load", "ready", BOOT).unwrap();
    half_said(control, &place.at("agent"));

    let state = place.at("state");
    place.monitor(&format!("migrate \"exec:cat > {}\"", state.display()));
    wait_until(|| place.monitor("info status").contains("postmigrate"));
    machine.kill();

    let incoming = format!("exec:cat {}", state.display());
    let _machine = UnmanagedGuest::start(args(&place).add_args(&["-incoming", &incoming])).unwrap();
    let mut control = GuestControl::connect(&place.at("agent"), BOOT).unwrap();
    assert!(matches!(control.poll_job("load").unwrap(), JobState::Running { .. }));
    let report = control.run_program(&["firn-guest", "verify", "stop"]).unwrap();
    assert!(report.contains("\"wrong\":0"), "{report}");
    assert_eq!(control.wait_job("load", BOOT).unwrap().exit, 0);
}

/// A client that disconnects in the middle of a line does not damage the next client's line.
fn half_said(control: GuestControl, agent: &Path) {
    drop(control);
    let mut rude = UnixStream::connect(agent).unwrap();
    rude.write_all(b"{\"id\":1,\"do\":\"ru").unwrap();
    drop(rude);
    let mut control = GuestControl::connect(agent, BOOT).unwrap();
    assert!(control.run_program(&["true"]).is_ok());
}

fn wait_until(mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < BOOT, "not done after {} s", BOOT.as_secs());
        sleep(Duration::from_millis(20));
    }
}
