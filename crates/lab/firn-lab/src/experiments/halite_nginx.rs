//! `halite-nginx`: how soon a web server answers after a boot, and after a restore.
//!
//! Reproduces Figure 7 and Table 2 of Halite (section 8.2.3), with nginx and the full guest's 5000
//! generated pages in the place of Apache and 10,000 pages of an encyclopedia.
//!
//! **What varies**: how the server starts. `boot`: QEMU boots the guest. `lazy`: restored as ESXi
//! did, one page of 4 KiB per fault from an image in physical order that is not compressed.
//! `locality`: by locality block, as in the paper. `auto`: Firn's default mode.
//!
//! **What is held equal**: the guest, its memory, the disk (`hdd15k`). The guest's disk and the
//! image, both cold, are on it, and QEMU, or `firn` with all processes it starts, reads through the
//! throttle. QEMU and the guest's kernel are warm, as on a host that has just run other guests.
//! Both images are of the same checkpoint. It was made while two clients sent requests, after a
//! client had requested enough pages to warm the guest's page cache.
//!
//! **What is measured**: a client requests pages at random with a Gaussian distribution, the same
//! ones in each system of a round. `first_response_s`: from the command (QEMU, or `firn restore`)
//! until the first page was read. `pages_s`: until all pages were read, the others on one
//! connection. `response_avg_ms` and `response_max_s` (Table 2): over all but the first page.
//!
//! A request that reaches a guest before its network works is lost, and QEMU's user networking
//! repeats it only after seconds, which depends on nothing in the guest. So every client repeats
//! its request on another connection each time that [`RETRY_INTERVAL`] has passed, until one of
//! them has its page. The client of a booting guest starts at the boot's begin, that of a restored
//! one when `firn restore` returns, which is once the guest runs.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use firn_image::{BlockOrganization, Codec, Image, ReorderOptions, reorder_image};
use firn_types::BlockSize;
use serde_json::{Value, json};

use crate::disk_profile::{DiskProfile, DiskThrottle, make_cold, warm_file};
use crate::firn::SaveArgs;
use crate::guest::{GuestImage, HostForward, QemuArgs, UnmanagedGuest, accel, free_tcp_port};
use crate::lab::{Lab, run_interleaved};
use crate::report::Report;
use crate::stats::Sample;
use crate::web::{GaussianPages, WebClient, WebLoad, wait_for_page};
use firn_report::plot::BarPlot;

const PROFILE: DiskProfile = DiskProfile::Hdd15k;
/// Name of the VM under Firn.
const VM: &str = "web";
const HTTP: u16 = 80;
/// Number of clients at the time of the checkpoint.
const CLIENTS: u64 = 2;
/// How long they have sent requests by then.
const LOAD_TIME: Duration = Duration::from_secs(2);
/// How long a client waits before it requests its first page again.
const RETRY_INTERVAL: Duration = Duration::from_millis(250);
/// How long a client waits for any other page.
const PAGE_TIMEOUT: Duration = Duration::from_secs(120);
/// How long a guest may take until its first page.
const LIMIT: Duration = Duration::from_secs(300);

/// How the server is started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ServerStart {
    Boot,
    Lazy,
    Locality,
    Auto,
}

impl ServerStart {
    const ALL: [Self; 4] = [Self::Boot, Self::Lazy, Self::Locality, Self::Auto];

    fn name(self) -> &'static str {
        match self {
            Self::Boot => "boot",
            Self::Lazy => "lazy",
            Self::Locality => "locality",
            Self::Auto => "auto",
        }
    }
}

/// Runs the experiment.
pub fn run(lab: &Lab) -> Result<Report> {
    let mut report = lab.vm_report("halite-nginx");
    let Some(throttle) = lab.throttle_disk(PROFILE, &mut report) else {
        let why = "needs a disk that can be throttled";
        each_key(|_, _, key| report.add_missing(key, why));
        return Ok(report);
    };
    let guest = WebGuest::new(lab)?;
    guest.checkpoint_under_load(&mut report)?;
    guest.reorder_image()?;
    run_interleaved(lab.extent.runs(1, 5), &ServerStart::ALL, |round, system| {
        guest.measure_responses(*system, &throttle, round, &mut report)
    })?;
    add_numbers(&mut report)?;
    Ok(report)
}

/// The guest, and the address of its web server.
struct WebGuest<'a> {
    lab: &'a Lab,
    image: GuestImage,
    disk: PathBuf,
    args: QemuArgs,
    address: SocketAddr,
    /// Number of pages that a client requests in each run.
    pages: usize,
}

impl<'a> WebGuest<'a> {
    /// Copies the guest's disk: the cached original may be on a device that is not throttled.
    fn new(lab: &'a Lab) -> Result<Self> {
        let mut image = GuestImage::full()?;
        let disk = lab.file("disk.qcow2");
        fs::copy(image.disk.as_ref().context("the guest has no disk")?, &disk)?;
        image.disk = Some(disk.clone());
        let port = free_tcp_port()?;
        let args = QemuArgs::new(&image, accel::choose_accel().accel)
            .memory_mib(1024)
            .vcpus(2)
            .append_kernel_arg("firn.services=nginx")
            .root_in_memory(&image)
            .with_console(&lab.file("console"))
            .add_network(&[HostForward::tcp(port, HTTP)]);
        let pages = lab.extent.pick(2000, 10_000);
        Ok(Self { lab, image, disk, args, address: (Ipv4Addr::LOCALHOST, port).into(), pages })
    }

    /// Checkpoints the guest while clients send requests.
    fn checkpoint_under_load(&self, report: &mut Report) -> Result<()> {
        self.lab.firn().run_vm(VM, &self.args)?;
        let mut pages = GaussianPages::new(self.lab.extent.seed);
        let first = pages.next().unwrap_or_default();
        wait_for_page(self.address, first, RETRY_INTERVAL, LIMIT).context("no page")?;
        request_pages(WebClient::new(self.address, PAGE_TIMEOUT), pages.take(self.pages))?;
        self.lab.log_progress("the guest's page cache is warm");
        let load = WebLoad::start(self.address, CLIENTS, self.lab.extent.seed + 1, PAGE_TIMEOUT);
        thread::sleep(LOAD_TIME);
        let save_output = self.lab.firn().checkpoint(
            VM,
            &self.image_file(ServerStart::Locality),
            &SaveArgs::default(),
        )?;
        self.lab.firn().stop(VM);
        drop(load);
        self.lab.log_progress(&format!("checkpointed in {:.1} s", save_output.took.as_secs_f64()));
        report.add_repetition(json!({ "system": "save", "facts": save_output.facts }));
        Ok(())
    }

    fn image_file(&self, system: ServerStart) -> PathBuf {
        self.lab.file(if system == ServerStart::Lazy { "lazy.firn" } else { "locality.firn" })
    }

    fn reorder_image(&self) -> Result<()> {
        let (codec, block_size) = (Some(Codec::None), Some(BlockSize::new(1)?));
        let single = ReorderOptions {
            codec,
            block_size,
            ..ReorderOptions::for_organization(BlockOrganization::Physical)
        };
        let source = Image::open(&self.image_file(ServerStart::Locality))?;
        reorder_image(&source, &single, &self.image_file(ServerStart::Lazy), &|_, _| ())?;
        Ok(())
    }

    /// Measures one system in one round.
    fn measure_responses(
        &self,
        system: ServerStart,
        throttle: &DiskThrottle,
        round: usize,
        report: &mut Report,
    ) -> Result<()> {
        self.prepare_caches(system)?;
        let mut pages = GaussianPages::new(self.lab.extent.seed + 100 + round as u64);
        let first = pages.next().unwrap_or_default();
        let start = Instant::now();
        let running = self.start_server(system, throttle)?;
        wait_for_page(self.address, first, RETRY_INTERVAL, LIMIT)
            .with_context(|| format!("{}: no page", system.name()))?;
        let first_response = start.elapsed();
        let client = WebClient::new(self.address, PAGE_TIMEOUT);
        let responses = request_pages(client, pages.take(self.pages - 1))?;
        let pages_s = start.elapsed().as_secs_f64();
        let first_response_s = first_response.as_secs_f64();
        let name = system.name();
        self.lab.log_progress(&format!(
            "{name}: first page {first_response_s:.2} s, all {pages_s:.1} s"
        ));
        report.add_repetition(json!({ "system": name, "round": round,
            "first_response_s": first_response_s, "pages_s": pages_s,
            "response_avg_ms": responses.mean() * 1e3, "response_max_s": responses.max(),
            "restore_ms": running.timings_ms() }));
        Ok(())
    }

    /// Evicts the guest's disk and the image from the page cache, and reads everything else into
    /// it.
    fn prepare_caches(&self, system: ServerStart) -> Result<()> {
        make_cold([self.disk.as_path()])?;
        if system != ServerStart::Boot {
            make_cold([self.image_file(system).as_path()])?;
        }
        [&self.image.kernel, &self.image.initrd]
            .into_iter()
            .try_for_each(|file| warm_file(file))?;
        Ok(())
    }

    fn start_server(
        &self,
        system: ServerStart,
        throttle: &DiskThrottle,
    ) -> Result<RunningServer<'_>> {
        let restore = |mode: &str| {
            let image: &Path = &self.image_file(system);
            self.lab.firn().restore(image, VM, &["--mode", mode], throttle)
        };
        let output = match system {
            ServerStart::Boot => {
                return Ok(RunningServer::Booted(UnmanagedGuest::start_throttled(
                    self.args.clone(),
                    throttle,
                )?));
            }
            ServerStart::Lazy => restore("lazy")?,
            ServerStart::Locality => restore("locality")?,
            ServerStart::Auto => restore("auto")?,
        };
        Ok(RunningServer::Restored(self.lab, output.facts["timings_ms"].clone()))
    }
}

/// Requests pages one after another; returns the duration of each, in seconds.
fn request_pages(mut client: WebClient, pages: impl Iterator<Item = u32>) -> Result<Sample> {
    let mut responses = Vec::new();
    for page in pages {
        let start = Instant::now();
        client.get_page(page)?;
        responses.push(start.elapsed().as_secs_f64());
    }
    Sample::new(responses).context("no page was requested")
}

/// A running server; dropping it ends the server.
enum RunningServer<'a> {
    Booted(#[expect(dead_code, reason = "it is held to be dropped")] UnmanagedGuest),
    Restored(&'a Lab, Value),
}

impl RunningServer<'_> {
    /// Durations of the restore's steps, as `firn restore` reports them.
    fn timings_ms(&self) -> &Value {
        match self {
            Self::Booted(_) => &Value::Null,
            Self::Restored(_, timings_ms) => timings_ms,
        }
    }
}

impl Drop for RunningServer<'_> {
    fn drop(&mut self) {
        if let Self::Restored(lab, _) = self {
            lab.firn().stop(VM);
        }
    }
}

/// Visits the keys of every system: measured quantity, system, key.
fn each_key(mut visit: impl FnMut(&str, ServerStart, String)) {
    for measured in ["first_response_s", "pages_s", "response_avg_ms", "response_max_s"] {
        for system in ServerStart::ALL {
            visit(measured, system, format!("{measured}.{}", system.name()));
        }
    }
}

fn add_numbers(report: &mut Report) -> Result<()> {
    each_key(|measured, system, key| {
        let runs = report.repetitions().iter().filter(|run| run["system"] == system.name());
        let values: Vec<f64> = runs.filter_map(|run| run[measured].as_f64()).collect();
        report.add_sample(key, values);
    });
    let first = |system: ServerStart| {
        report.figure_value(&format!("first_response_s.{}", system.name())).unwrap_or(f64::NAN)
    };
    let drawing = figure_7(ServerStart::ALL.map(first))?;
    let [boot, lazy, locality, auto] = ServerStart::ALL.map(first);
    report.add_number("first_response_s.boot_to_locality", boot / locality);
    report.add_number("first_response_s.lazy_to_locality", lazy / locality);
    report.add_number("first_response_s.boot_to_auto", boot / auto);
    report.add_number("first_response_s.lazy_to_auto", lazy / auto);
    report.add_drawing("halite-figure-7", drawing);
    Ok(())
}

fn figure_7(first_response_s: [f64; 4]) -> Result<String> {
    let plot = BarPlot {
        title: "Time until the first page (Halite, Figure 7)".into(),
        y: "seconds from the command".into(),
        groups: ServerStart::ALL.map(|system| system.name().to_owned()).into(),
        series: vec![(PROFILE.to_string(), first_response_s.into())],
    };
    plot.to_svg().context("Figure 7")
}
