//! Full guest under plain QEMU: each of its workloads runs and has the right result.

use std::time::Duration;

use firn_lab::guest::{GuestControl, GuestImage, HostForward, QemuArgs, UnmanagedGuest, accel};
use firn_lab::prober::{HttpGets, Prober};

use crate::place::{BOOT, GuestPlace};

#[test]
#[ignore = "builds the full guest first: minutes"]
fn every_workload_works() {
    let place = GuestPlace::new();
    let image = GuestImage::full().unwrap();
    let args = QemuArgs::new(&image, accel::choose_accel().accel)
        .memory_mib(1024)
        .add_network(&[HostForward::tcp(place.web.port(), 80)])
        .root_in_memory(&image);
    let mut machine = UnmanagedGuest::start(place.common(args)).unwrap();
    machine.wait_ready(BOOT).unwrap();
    let mut control = GuestControl::connect(&place.at("agent"), BOOT).unwrap();

    database(&mut control);
    pages(&place);
    let ring = control.run_program(&["mpirun", "-n", "2", "firn-mpi-ring", "20"]).unwrap();
    assert_eq!(ring.trim(), "a3ea7b8a4e4415af");
    control.run_program(&["make", "-s", "-C", "/usr/src/zlib", "clean", "adler32.o"]).unwrap();
    control
        .run_program(&["mpv", "--really-quiet", "--vo=null", "--ao=null", "--length=1", CLIP])
        .unwrap();
    control.run_program(&["java", "-cp", "/usr/lib/firn/java", "Cache", "16", "2"]).unwrap();
}

const CLIP: &str = "/var/lib/firn/clip.mkv";

fn database(control: &mut GuestControl) {
    let in_postgres = "/usr/lib/firn/in-postgres";
    let socket = ["-h", "/run/postgresql"];
    let bench = [in_postgres, "pgbench", socket[0], socket[1], "-n", "-t", "20", "bench"];
    let said = control.run_program(&bench).unwrap();
    assert!(said.contains("processed: 20/20"), "{said}");
    let query =
        "select sum(abalance) = (select sum(delta) from pgbench_history) from pgbench_accounts";
    let sums = [in_postgres, "psql", socket[0], socket[1], "-Atc", query, "bench"];
    assert_eq!(control.run_program(&sums).unwrap().trim(), "t", "balances and history disagree");
}

fn pages(place: &GuestPlace) {
    let prober = Prober::start(HttpGets::new(place.web, 5000), 20.0);
    std::thread::sleep(Duration::from_secs(3));
    assert!(prober.finish().replies().len() > 10);
}
