//! Guest calls: the thread that answers calls of applications in the guest.
//!
//! `firn_calls` decides which application may do what. This module does the rest: the memory of the
//! device, the guest's page tables, and the writes that [`DirtyTracking`] tracks. No state outlives
//! the supervisor: after its death an application opens a new session.
//!
//! The thread polls for requests, because nothing announces them. Right after a request it polls
//! without a break, because a transaction seldom comes alone; then less and less often, down to a
//! few hundred times a second, which costs a thousandth of a processor.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use firn_calls::{
    CallLogEvent, CallPolicy, CallRefusal, CallWindow, GuestAccess, Nonce, PartMapping, PartNumber,
    PartTranslation, PluginOrder, Proof, SessionServer,
};
use firn_memory::guest_pages::{
    GuestPhysRead, PART_PAGES, PageAccessError, PageLookup, PartPath, VirtPage, kernel_half_roots,
};
use firn_memory::{GuestMemory, SharedWords};
use firn_types::{GuestPhys, PAGE_SIZE, Page};
use firn_vmm::PageTableRoot;

use crate::hypervisor::qemu;
use crate::hypervisor::store_plugin::StorePluginClient;
use crate::operations::dirty_tracking::DirtyTracking;
use crate::processes::runtime::VmDir;
use crate::records::failure::{Failure, FailureContext, FailureKind};
use crate::records::journal::HypervisorRecord;

/// The time after a request during which the thread polls without a break.
const BUSY_POLL_TIME: Duration = Duration::from_millis(1);
/// The maximum sleep. The thread sleeps for a tenth of the time since the last request.
const SLEEP_MAX: Duration = Duration::from_millis(3);
/// The maximum time that QEMU's monitor may take.
const MONITOR_WAIT: Duration = Duration::from_millis(500);
/// The interval between searches for sessions of processes that have ended.
const SWEEP_INTERVAL: Duration = Duration::from_secs(5);
/// The number of refusals that are logged one by one.
const LOGGED_MAX: u64 = 16;

/// The maximum size of a file that names the applications that may call, in bytes.
const POLICY_BYTES_MAX: u64 = 1 << 20;

/// Reads the file that names the applications that may call. It has their keys, so a file that others
/// can read is refused.
pub(crate) fn read_policy(path: &Path) -> Result<CallPolicy, Failure> {
    let text = firn_files::read_secret(path, POLICY_BYTES_MAX).and_then(|bytes| {
        String::from_utf8(bytes).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
    });
    let policy = match &text {
        Ok(text) => {
            CallPolicy::parse(text).map_err(|it| Failure::from_error(FailureKind::Usage, &it))
        }
        Err(error) => Err(Failure::from_error(FailureKind::Usage, error)),
    };
    policy.map_err(|it| it.while_doing(format!("reading the call policy {}", path.display())))
}

/// The service for a VM's guest calls, if it runs.
#[derive(Default)]
pub(crate) struct CallService(Mutex<Option<ServiceThread>>);

struct ServiceThread {
    end: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl CallService {
    /// Starts to answer, if the VM's applications may call and the service does not run yet.
    pub(crate) fn start_service(
        &self,
        hypervisor_record: &HypervisorRecord,
        vm: &VmDir,
        changes: &Arc<DirtyTracking>,
    ) -> Result<(), Failure> {
        let Some(file) = &hypervisor_record.calls else { return Ok(()) };
        let mut service = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if service.as_ref().is_some_and(|service| !service.thread.is_finished()) {
            return Ok(());
        }
        let words =
            map_words(&vm.calls_file()).while_doing("opening the memory for guest calls")?;
        // Whatever fails from here on, no application waits for an earlier service.
        CallWindow::new(words.words()).while_doing("opening the memory for guest calls")?.clear();
        let server = SessionServer::new(read_policy(file)?);
        let (_, memory) = qemu::open_journaled(hypervisor_record)?;
        memory.open_window().while_doing("mapping the guest's memory")?;
        let (hypervisor_record, changes) = (hypervisor_record.clone(), Arc::clone(changes));
        let plugin = StorePluginClient::at_socket(vm.stores_socket());
        let guest = CallingGuest { hypervisor_record, memory, changes, plugin, levels: 4 };
        let end = Arc::new(AtomicBool::new(false));
        let thread = thread::Builder::new().name("firn-calls".into());
        let is_over = Arc::clone(&end);
        let thread = thread
            .spawn(move || serve_calls(&words, server, guest, &is_over))
            .while_doing("starting a thread")?;
        *service = Some(ServiceThread { end, thread });
        Ok(())
    }

    /// Ends the service.
    pub(crate) fn stop_service(&self) {
        let service = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(ServiceThread { end, thread }) = service {
            end.store(true, Ordering::Relaxed);
            let _ = thread.join();
        }
    }
}

fn map_words(path: &Path) -> std::io::Result<SharedWords> {
    SharedWords::map_file(&File::options().read(true).write(true).open(path)?)
}

fn serve_calls(
    words: &SharedWords,
    server: SessionServer,
    guest: CallingGuest,
    is_over: &AtomicBool,
) {
    let window = match CallWindow::new(words.words()) {
        Ok(window) => window,
        Err(error) => return tracing::error!("guest calls are not answered: {error}"),
    };
    let service = u32::from_le_bytes(random_bytes());
    let _served = EndServiceOnDrop(window);
    let mut serving = CallServer {
        window,
        server,
        guest,
        asked: vec![0; window.slot_count()],
        refused: Default::default(),
    };
    let (mut last, mut swept) = (Instant::now(), Instant::now());
    let mut suspects = Vec::new();
    while !is_over.load(Ordering::Relaxed) {
        window.announce_service(service);
        if serving.answer_all() {
            last = Instant::now();
        }
        if swept.elapsed() >= SWEEP_INTERVAL {
            suspects = serving.free_slots(&suspects);
            swept = Instant::now();
        }
        pause_polling(last.elapsed());
    }
}

/// Marks the service as ended in the window, however the thread ends.
struct EndServiceOnDrop<'w>(CallWindow<'w>);

impl Drop for EndServiceOnDrop<'_> {
    fn drop(&mut self) {
        self.0.end_service();
    }
}

fn pause_polling(idle: Duration) {
    match idle < BUSY_POLL_TIME {
        true => thread::yield_now(),
        false => thread::sleep((idle / 10).min(SLEEP_MAX)),
    }
}

struct CallServer<'w> {
    window: CallWindow<'w>,
    server: SessionServer,
    guest: CallingGuest,
    /// The last request of each slot.
    asked: Vec<u32>,
    /// Refusals: of strangers, and of applications.
    refused: [u64; 2],
}

impl CallServer<'_> {
    /// Answers all requests. False if no request came from an application with a key: strangers do
    /// not keep a processor busy.
    fn answer_all(&mut self) -> bool {
        (0..self.window.slot_count()).filter(|&number| self.answer_slot(number)).count() > 0
    }

    fn answer_slot(&mut self, number: usize) -> bool {
        let Some(slot) = self.window.slot(number) else { return false };
        let asked = slot.request_number();
        if std::mem::replace(&mut self.asked[number], asked) == asked {
            return false;
        }
        let request = slot.read_request();
        let answered =
            self.server.answer_request(number as u32, asked, request.as_deref(), &mut self.guest);
        slot.write_reply(asked, &answered.bytes);
        self.log_event(answered.event);
        answered.is_known
    }

    /// Frees unused slots: those that have an owner but were not in use, now and at the last sweep.
    fn free_slots(&mut self, suspects: &[(usize, u32)]) -> Vec<(usize, u32)> {
        let (in_use, events) = self.server.sweep_sessions(&mut self.guest);
        events.into_iter().for_each(|event| self.log_event(Some(event)));
        let owned = |number| Some((number, self.window.slot(number)?.owner()));
        let taken =
            (0..self.window.slot_count()).filter_map(owned).filter(|(_, owner)| *owner != 0);
        let unused = taken.filter(|(number, _)| !in_use.contains(&(*number as u32)));
        let (free, wait): (Vec<_>, Vec<_>) = unused.partition(|slot| suspects.contains(slot));
        for (number, owner) in free {
            self.window.slot(number).into_iter().for_each(|slot| slot.release_from(owner));
        }
        wait
    }

    /// Logs an event. A guest whose calls are refused repeatedly does not fill the disk.
    fn log_event(&mut self, event: Option<CallLogEvent>) {
        match event {
            None => {}
            Some(CallLogEvent::Opened { name }) => tracing::info!("application {name} may call"),
            Some(CallLogEvent::Closed { name }) => {
                tracing::info!("application {name} has ended its session")
            }
            Some(CallLogEvent::Refused { name, refusal }) => {
                let refused = &mut self.refused[usize::from(name.is_some())];
                *refused += 1;
                if *refused <= LOGGED_MAX || refused.is_power_of_two() {
                    let name = name.as_deref().unwrap_or("a stranger");
                    tracing::warn!("refused a call of {name:?}: {refusal} (refusal {refused})");
                }
            }
        }
    }
}

/// The guest, as the server accesses it.
struct CallingGuest {
    hypervisor_record: HypervisorRecord,
    memory: Arc<GuestMemory>,
    changes: Arc<DirtyTracking>,
    plugin: StorePluginClient,
    levels: u8,
}

impl CallingGuest {
    /// The page tables that the vCPUs use now, which show the format of this guest's page tables.
    fn page_table_roots(&self) -> Result<Vec<PageTableRoot>, Failure> {
        // A save may have the monitor, and other callers do not wait for it.
        let mut vm = qemu::connect_within(&self.hypervisor_record, MONITOR_WAIT)?;
        vm.page_table_roots().while_doing("querying the vCPUs' page tables")
    }

    /// Finds the address spaces of a caller. It most likely runs now and polls for the answer: all
    /// of RAM is searched only if it does not.
    fn find_spaces(&mut self, at: u64, proof: &Proof) -> Result<Vec<GuestPhys>, Failure> {
        let running = self.page_table_roots()?;
        let Some(first) = running.first() else { return Ok(Vec::new()) };
        self.levels = first.levels;
        let own = running.iter().map(|root| GuestPhys(root.gpa.0 & !(PAGE_SIZE as u64 - 1)));
        let found = self.retain_matching(own.collect(), at, proof);
        match found.is_empty() {
            true => {
                Ok(self.retain_matching(kernel_half_roots(&*self.memory, first.gpa), at, proof))
            }
            false => Ok(found),
        }
    }

    fn retain_matching(
        &mut self,
        mut roots: Vec<GuestPhys>,
        at: u64,
        proof: &Proof,
    ) -> Vec<GuestPhys> {
        roots.sort_unstable();
        roots.dedup();
        roots.retain(|&root| self.has_proof(root, at, proof));
        roots
    }
}

impl GuestAccess for CallingGuest {
    fn random_number(&mut self) -> Nonce {
        random_bytes()
    }

    fn find_spaces(&mut self, at: u64, proof: &Proof) -> Vec<GuestPhys> {
        let found = self.find_spaces(at, proof).unwrap_or_else(|failure| {
            tracing::warn!("{failure}");
            Vec::new()
        });
        match found[..] {
            // With page-table isolation a process has two tables, side by side; the first maps the
            // kernel too.
            [one, other] if other.0 == one.0 | PAGE_SIZE as u64 => vec![one],
            _ => found,
        }
    }

    fn has_proof(&mut self, space: GuestPhys, at: u64, proof: &Proof) -> bool {
        let page = VirtPage(at / PAGE_SIZE as u64);
        // A page that it shares with a child, or that belongs to the kernel, proves nothing.
        let Ok(page) = PageLookup::new(&*self.memory, space, self.levels).writable_page(page)
        else {
            return false;
        };
        let mut bytes = vec![0; PAGE_SIZE];
        let offset = (at % PAGE_SIZE as u64) as usize;
        let is_read = GuestPhysRead::read_pages(&*self.memory, page, &mut bytes);
        is_read && bytes.get(offset..offset + proof.len()) == Some(&proof[..])
    }

    fn find_mappings(&mut self, space: GuestPhys, parts: &[PartNumber]) -> Vec<PartMapping> {
        let mut lookup = PageLookup::new(&*self.memory, space, self.levels);
        parts.iter().map(|part| to_mapping(lookup.part_path(part.0), &self.memory)).collect()
    }

    fn translate_part(&mut self, space: GuestPhys, part: PartNumber) -> PartTranslation {
        let mut lookup = PageLookup::new(&*self.memory, space, self.levels);
        let path = lookup.part_path(part.0);
        let mapping = to_mapping(path, &self.memory);
        let pages = match path {
            Ok(path) => lookup.part_pages(part.0, path),
            Err(why) => vec![Err(why); PART_PAGES as usize],
        };
        let pages = (part.first_page()..).map(VirtPage).zip(pages);
        let pages = pages.map(|(at, page)| page.map_err(|why| to_refusal(why, at))).collect();
        PartTranslation { mapping, pages }
    }

    fn take_written(&mut self, pages: &[Range<Page>]) -> Option<(u64, Vec<Page>)> {
        self.changes.written_among(pages)
    }

    fn order_plugin(&mut self, order: &PluginOrder) -> bool {
        self.plugin.send_order(order)
    }
}

const _: () = assert!(PART_PAGES == PartNumber::PAGES);

fn to_mapping(path: Result<PartPath, PageAccessError>, memory: &GuestMemory) -> PartMapping {
    match path {
        Ok(path) => PartMapping { table: path.table_page(memory), entry: path.number() },
        // The entry of no path is 0: its entry is present.
        Err(_) => PartMapping { table: None, entry: 0 },
    }
}

fn to_refusal(why: PageAccessError, page: VirtPage) -> CallRefusal {
    let at = page.address();
    match why {
        PageAccessError::Unmapped => CallRefusal::Unmapped(at),
        PageAccessError::Kernel => CallRefusal::Kernel(at),
        PageAccessError::ReadOnly => CallRefusal::ReadOnly(at),
        PageAccessError::NotRam => CallRefusal::NotRam(at),
    }
}

/// Unpredictable bytes (getrandom(2)).
fn random_bytes<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    let mut filled = 0;
    while filled < N {
        // It fails only if it is interrupted.
        filled +=
            rustix::rand::getrandom(&mut bytes[filled..], rustix::rand::GetRandomFlags::empty())
                .unwrap_or(0);
    }
    bytes
}
