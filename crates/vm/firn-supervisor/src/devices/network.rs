//! The network cards of a VM whose frames pass through its supervisor (`firn-net`).
//!
//! ```text
//!   launch:     a pair of sockets per card; QEMU inherits both ends       journal: card, uplink, QEMU's number for our end
//!   supervisor: copies our end from QEMU, carries frames
//!   successor:  the same
//! ```
//!
//! The first supervisor gets its end in the same way as each successor, so there is only one way.
//!
//! **Shut.** Once a protection has buffered output, the VM's standby may run it, and no process on
//! this host can know whether it does: a lost connection looks the same if the standby is dead and
//! if it has failed over. So no frame leaves any more until a release states that this VM is the
//! one that continues. The journal records that too, for a successor.
//!
//! **Filtered.** A card that is not Firn's own has filters of QEMU while it is protected
//! (`card_filters`), and a port like the others.
//!
//! **Leased.** Where hosts agree which of them may run a VM (`firn-membership`), frames leave only
//! while this host's lease is held, as a page states that the agent writes (`firn_net::lease`). The
//! journal has the generation that the lease must belong to.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crossbeam_channel::Receiver;
use firn_cluster::cut::MarkAnswer;
use firn_cluster::member::{ClusterMembership, NicEpoch, StandbyNic};
use firn_cluster::switch::MacAddress;
use firn_cluster::{Epoch, FrameNumber};
use firn_memory::{Process, heap};
use firn_net::lease::OutputLease;
use firn_net::port::{self, NicPort};
use firn_net::uplink::UplinkStream;
use firn_vmm::command_line::{self, CardPlan, CardUplink as Named};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::devices::card_filters::{FilterContext, FilteredCard};
use crate::hypervisor::qemu;
use crate::processes::runtime::VmDir;
use crate::records::control_protocol::{MemberCard, MemberRequest};
use crate::records::device_records::NetworkCard;
use crate::records::failure::{Failure, FailureContext, FailureKind};
use crate::records::journal::HypervisorRecord;
use crate::records::name::NetworkName;
use crate::records::percentiles::Percentiles;

/// The maximum wait for a mark, and the interval at which it is polled.
const MARK_WAIT: Duration = Duration::from_secs(5);
const MARK_POLL_INTERVAL: Duration = Duration::from_millis(2);

/// The note to the user of a VM whose output is blocked.
pub(crate) const OUTPUT_BLOCKED: &str =
    "; its output is blocked, because its standby may run: `firn release` releases it";

/// The part of `firn status` about a network card.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CardStatus {
    /// Its back end's id on QEMU's command line.
    pub id: String,
    /// The socket that its frames go to; empty if the card has filters.
    pub uplink: PathBuf,
    /// The card is not Firn's own: filters of QEMU pass its frames to Firn.
    #[serde(default)]
    pub filtered: bool,
    /// A process at the uplink is connected.
    pub connected: bool,
    /// Frames leave at once. Otherwise they wait until their epoch is committed.
    pub open: bool,
    /// No frame leaves, because the required lease has expired.
    #[serde(default)]
    pub waits_for_lease: bool,
    /// The frames that wait.
    pub held_frames: usize,
    /// Their bytes.
    pub held_bytes: usize,
    /// The delay from the VM to the uplink, in milliseconds, of the newest thousand frames since
    /// output has been buffered, or has not been.
    pub delay_ms: Percentiles,
    /// Frames that have left the VM.
    pub frames_out: u64,
    /// Frames that have been delivered to the VM.
    pub frames_in: u64,
}

/// The interval at which is checked whether all released frames have left.
const SENT_POLL_INTERVAL: Duration = Duration::from_millis(1);

/// The sockets for the cards of a VM that is being started.
#[derive(Debug, Default)]
pub(crate) struct CardSockets(Vec<CardSocketPair>);

#[derive(Debug)]
struct CardSocketPair {
    id: String,
    uplink: PathBuf,
    theirs: OwnedFd,
    ours: OwnedFd,
    /// A connection that was made to check whether the uplink accepts one.
    first: Option<UplinkStream>,
}

impl CardSockets {
    /// Creates a pair for each card of a VM. Relative paths of sockets start in `directory`.
    pub(crate) fn create_pairs(
        plans: &[CardPlan],
        directory: &Path,
        vm: &VmDir,
    ) -> Result<Self, Failure> {
        let pair = |plan: &CardPlan| {
            let (theirs, ours) =
                port::create_socket_pair().while_doing("making sockets for a network card")?;
            let (id, uplink) = (plan.id.clone(), uplink_path(&plan.uplink, directory, vm)?);
            Ok(CardSocketPair { id, uplink, theirs, ours, first: None })
        };
        Ok(Self(plans.iter().map(pair).collect::<Result<_, Failure>>()?))
    }

    /// Connects to each uplink, because a user's new command line may be wrong.
    pub(crate) fn connect_uplinks(&mut self) -> Result<(), Failure> {
        for CardSocketPair { id, uplink, first, .. } in &mut self.0 {
            let connected = UplinkStream::connect(uplink).while_doing_as(
                FailureKind::Usage,
                format!("connecting {id} to {}", uplink.display()),
            );
            let hint = "start the process that takes the VM's frames first, such as `passt --socket PATH`, or `firn-agent` for \
                its networks";
            *first = Some(connected.map_err(|failure| failure.with_hint(hint))?);
        }
        Ok(())
    }

    /// QEMU's descriptor numbers for the ends that it uses.
    pub(crate) fn descriptor_numbers(&self) -> Vec<i32> {
        self.0.iter().map(|pair| pair.theirs.as_raw_fd()).collect()
    }

    /// The descriptors that QEMU has to inherit.
    pub(crate) fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.0.iter().flat_map(|pair| [pair.theirs.as_fd(), pair.ours.as_fd()])
    }

    /// The cards, as the journal records them for a successor.
    pub(crate) fn card_records(&self) -> Result<Vec<NetworkCard>, Failure> {
        let card = |pair: &CardSocketPair| {
            let (id, uplink) = (pair.id.clone(), pair.uplink.clone());
            let theirs = Some((pair.theirs.as_raw_fd(), socket_inode(&pair.theirs)?));
            let (descriptor, inode) = (pair.ours.as_raw_fd(), socket_inode(&pair.ours)?);
            Ok(NetworkCard { id, uplink, descriptor, inode, theirs })
        };
        self.0.iter().map(card).collect()
    }

    /// The connections to uplinks that were made.
    pub(crate) fn uplink_connections(self) -> Vec<Option<UplinkStream>> {
        self.0.into_iter().map(|pair| pair.first).collect()
    }
}

/// The socket that leads to the destination of a card's frames.
fn uplink_path(uplink: &Named, directory: &Path, vm: &VmDir) -> Result<PathBuf, Failure> {
    match uplink {
        Named::Socket(path) => Ok(directory.join(path)),
        Named::Network(name) => {
            let name =
                NetworkName::new(name).while_doing_as(FailureKind::Usage, "naming a network")?;
            Ok(vm.runtime_dir().network_socket(&name))
        }
    }
}

fn socket_inode(socket: &OwnedFd) -> Result<u64, Failure> {
    Ok(rustix::fs::fstat(socket).while_doing("examining a network card's socket")?.st_ino)
}

/// All network cards of a VM whose frames pass through Firn.
#[derive(Debug, Default)]
pub(crate) struct VmNetwork {
    /// Firn's own cards.
    cards: Vec<(NetworkCard, NicPort)>,
    /// Cards that have filters.
    filtered: Mutex<Vec<FilteredCard>>,
}

impl VmNetwork {
    /// Copies the sockets from the hypervisor. `connections` are the existing ones; with `is_open`,
    /// frames leave at once.
    pub(crate) fn open_cards(
        pid: i32,
        cards: &[NetworkCard],
        connections: Vec<Option<UplinkStream>>,
        is_open: bool,
    ) -> Result<Self, Failure> {
        if cards.is_empty() {
            return Ok(Self::default());
        }
        let process = Process::open(pid).while_doing("reaching the hypervisor process")?;
        let connections = connections.into_iter().chain(std::iter::repeat_with(|| None));
        let open = |(card, first): (&NetworkCard, Option<UplinkStream>)| {
            let socket = socket_of(&process, card, (card.descriptor, card.inode))?;
            let theirs = card.theirs.map(|it| socket_of(&process, card, it)).transpose()?;
            let port = NicPort::open(socket, theirs, &card.uplink, first, is_open)
                .while_doing(format!("opening the network card {}", card.id))?;
            Ok((card.clone(), port))
        };
        let cards = cards.iter().zip(connections).map(open).collect::<Result<_, Failure>>()?;
        Ok(Self { cards, filtered: Mutex::default() })
    }

    /// Adds filters to the cards that are not Firn's own, before a protection. Returns a text about
    /// each card that can't have any.
    pub(crate) fn add_filters(
        &self,
        mut context: FilterContext<'_>,
        hypervisor_record: &HypervisorRecord,
    ) -> Result<Vec<String>, Failure> {
        let mut filtered = self.lock_filtered();
        let (added, unfiltered) = context.add_filters(hypervisor_record, &filtered)?;
        filtered.extend(added);
        Ok(unfiltered)
    }

    /// Continues with the filters of a dead supervisor: see [`FilterContext::take_over`].
    pub(crate) fn take_over_filters(
        &self,
        mut context: FilterContext<'_>,
        stays: bool,
        is_open: bool,
    ) -> Result<(), Failure> {
        self.lock_filtered().extend(context.take_over(stays, is_open)?);
        Ok(())
    }

    /// Removes all filters. The output is open.
    pub(crate) fn remove_filters(&self, mut context: FilterContext<'_>) -> Result<(), Failure> {
        let filtered = std::mem::take(&mut *self.lock_filtered());
        context.remove_filters(filtered)
    }

    /// Whether any card has filters.
    pub(crate) fn has_filters(&self) -> bool {
        !self.lock_filtered().is_empty()
    }

    fn lock_filtered(&self) -> MutexGuard<'_, Vec<FilteredCard>> {
        self.filtered.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Applies a function to all ports.
    fn for_each_port(&self, apply: impl Fn(&NicPort)) {
        self.ports().for_each(&apply);
        self.lock_filtered().iter().for_each(|card| apply(&card.port));
    }

    /// Connects each card to its uplink.
    pub(crate) fn plug_uplinks(&self) {
        self.ports().for_each(NicPort::connect_uplink);
    }

    /// Begins to buffer output, for a protection.
    pub(crate) fn begin_protection(&self) {
        self.for_each_port(NicPort::begin_protection);
    }

    /// Makes room for the VM's frames, because it is about to be paused.
    pub(crate) fn prepare_pause(&self) {
        self.for_each_port(NicPort::prepare_pause);
    }

    /// Ends what [`Self::prepare_pause`] began: the VM could not be paused, or it continues.
    pub(crate) fn end_pause(&self) {
        self.for_each_port(NicPort::finish_pause);
    }

    /// Ends an epoch while the VM is paused.
    pub(crate) fn cut_epoch(&self, epoch: Epoch) -> Option<NicEpoch> {
        // A member of a cluster has no card with filters.
        self.lock_filtered().iter().for_each(|card| drop(card.port.cut_epoch(epoch)));
        self.ports().fold(None, |of, port| port.cut_epoch(epoch).or(of))
    }

    /// Releases the output of an epoch that is committed.
    pub(crate) fn commit_epoch(&self, epoch: Epoch) {
        self.for_each_port(|port| port.commit_epoch(epoch));
    }

    /// Answers a request of the coordinator of a cluster's global checkpoints.
    pub(crate) fn answer_member_request(
        &self,
        request: &MemberRequest,
        hypervisor_record: &HypervisorRecord,
    ) -> Result<Value, Failure> {
        let [(card, port)] = &self.cards[..] else { return Err(no_card()) };
        let done = |is_done: bool| is_done.then_some(Value::Null);
        match request {
            MemberRequest::Card => {
                let mac = match port.membership() {
                    Some(of) => of.members.iter().find(|(vm, _)| *vm == of.own).map(|it| it.1),
                    None => card_address(card, hypervisor_record)?,
                };
                let mac = mac.ok_or_else(no_card)?;
                let facts = MemberCard { mac, is_settled: port.is_output_received() };
                serde_json::to_value(facts).while_doing("describing the card")
            }
            MemberRequest::Join(of) => {
                done(port.join_cluster(of.clone())).ok_or_else(buffered_output)
            }
            MemberRequest::Mark { generation, number } => {
                let of = port.membership().filter(|of| of.generation == *generation);
                of.ok_or_else(not_in_generation)?;
                let answer = wait_for_mark(|| port.request_mark(*generation, *number))?;
                serde_json::to_value(answer).while_doing("describing the mark")
            }
            MemberRequest::Globally { generation, epoch } => {
                done(port.record_global_checkpoint(*generation, *epoch))
                    .ok_or_else(not_in_generation)
            }
            MemberRequest::Leave => {
                let left = done(port.leave_cluster()).ok_or_else(buffered_output);
                // The frames that were kept are many small blocks.
                heap::trim_heap();
                left
            }
        }
    }

    /// Prepares the cards of a VM that is about to run as a member of a cluster.
    pub(crate) fn resume_as_member(&self, of: &ClusterMembership, base: Epoch, kept: &StandbyNic) {
        self.ports().for_each(|port| port.resume_member(of.clone(), base, kept.clone()));
    }

    /// The membership of the VM's card, if the VM belongs to a cluster.
    pub(crate) fn membership(&self) -> Option<ClusterMembership> {
        self.ports().find_map(NicPort::membership)
    }

    /// Whether a protection can begin.
    pub(crate) fn is_new(&self) -> bool {
        self.ports().all(NicPort::is_new)
    }

    /// The newest epoch of a member that a global checkpoint includes.
    pub(crate) fn global_epoch(&self) -> Epoch {
        self.ports().map(NicPort::global_epoch).max().unwrap_or_default()
    }

    /// Whether a frame of another member waits until the running epoch is cut.
    pub(crate) fn is_cut_needed(&self) -> bool {
        self.ports().any(NicPort::is_cut_needed)
    }

    /// Wakes the thread that cuts the epochs of a member, which has one card.
    pub(crate) fn wakeups(&self) -> Receiver<()> {
        self.ports().next().map_or_else(crossbeam_channel::never, NicPort::member_events)
    }

    /// The newest frame of a member to the outside that has left.
    pub(crate) fn last_released_frame(&self) -> FrameNumber {
        self.ports().map(NicPort::released_up_to).max().unwrap_or_default()
    }

    /// Releases all output: no failover can undo what sent it any more.
    pub(crate) fn release_output(&self) {
        self.for_each_port(NicPort::release_output);
    }

    /// Waits until all released frames have left; `false` if they have not in this time.
    pub(crate) fn wait_until_sent(&self, wait: Duration) -> bool {
        let is_waiting = || {
            let is_behind = |port: &NicPort| port.port_status().has_released_frames;
            let filtered = self.lock_filtered();
            self.ports().any(is_behind) || filtered.iter().any(|card| is_behind(&card.port))
        };
        let deadline = Instant::now() + wait;
        while is_waiting() {
            if Instant::now() >= deadline {
                return false;
            }
            thread::sleep(SENT_POLL_INTERVAL);
        }
        true
    }

    /// Sets the lease that frames need from now on, by the page that holds it; with `None` they
    /// need none.
    pub(crate) fn set_lease(&self, page: &Path, lease: Option<u32>) {
        self.for_each_port(|port| {
            port.set_lease(lease.map(|generation| OutputLease::new(page, generation)))
        });
    }

    /// Whether there are cards whose output is buffered.
    pub(crate) fn is_output_blocked(&self) -> bool {
        self.ports().any(|port| !port.is_open())
            || self.lock_filtered().iter().any(|card| !card.port.is_open())
    }

    /// The status of each card.
    pub(crate) fn card_statuses(&self) -> Vec<CardStatus> {
        let own = self.cards.iter();
        let mut statuses: Vec<CardStatus> = own
            .map(|(card, port)| card_status(&card.id, &card.uplink, &port.port_status()))
            .collect();
        let filtered = self.lock_filtered();
        statuses.extend(filtered.iter().map(|card| {
            let netdev = &card.filter.netdev;
            let status = card_status(netdev, Path::new(""), &card.port.port_status());
            CardStatus { filtered: true, ..status }
        }));
        statuses
    }

    fn ports(&self) -> impl Iterator<Item = &NicPort> {
        self.cards.iter().map(|(_, port)| port)
    }
}

/// The MAC address of a card. QEMU is queried, because it assigns addresses to cards that have none
/// on its command line.
fn card_address(
    card: &NetworkCard,
    hypervisor_record: &HypervisorRecord,
) -> Result<Option<MacAddress>, Failure> {
    let plan = command_line::plan_command(&hypervisor_record.meta.qemu.user_args)
        .while_doing("reading the VM's command line")?;
    if !plan.other_cards().is_empty() {
        return Ok(None);
    }
    let address = qemu::connect_monitor(hypervisor_record)?.mac_address(&card.id);
    Ok(address.while_doing("querying the card's address from QEMU")?.map(MacAddress))
}

fn no_card() -> Failure {
    let text = "a VM of a cluster has one network card of type `-netdev firn`, and no other";
    Failure::new(FailureKind::Refused, text)
}

fn buffered_output() -> Failure {
    let text = "the VM's output is buffered, because the cluster can still be rolled back";
    Failure::new(FailureKind::Refused, text)
        .with_hint("`firn cluster release`, or `firn release` if its backup never runs it")
}

/// Waits for a mark: the epoch that ends with it has to end, and to be copied.
fn wait_for_mark(mut ask: impl FnMut() -> Option<MarkAnswer>) -> Result<MarkAnswer, Failure> {
    let since = Instant::now();
    loop {
        if let Some(answer) = ask() {
            return Ok(answer);
        }
        if since.elapsed() > MARK_WAIT {
            return Err(no_mark_yet());
        }
        thread::sleep(MARK_POLL_INTERVAL);
    }
}

fn not_in_generation() -> Failure {
    let text = "the VM has no mark: it is not protected in that generation of its cluster";
    Failure::new(FailureKind::Refused, text).with_hint("`firn cluster protect` begins a new one")
}

fn no_mark_yet() -> Failure {
    let seconds = MARK_WAIT.as_secs();
    let text = format!("the VM has no mark yet: its epoch was not committed within {seconds} s");
    Failure::new(FailureKind::Busy, text).with_hint("try again, or see `firn status` for its lag")
}

fn socket_of(
    process: &Process,
    card: &NetworkCard,
    (number, expected): (i32, u64),
) -> Result<OwnedFd, Failure> {
    let socket = process.copy_descriptor(number).while_doing("copying a network card's socket")?;
    match socket_inode(&socket)? == expected {
        true => Ok(socket),
        false => {
            let text = format!("QEMU has closed the socket of its network card {}", card.id);
            Err(Failure::new(FailureKind::Other, text))
        }
    }
}

fn card_status(id: &str, uplink: &Path, now: &port::PortStatus) -> CardStatus {
    CardStatus {
        id: id.to_owned(),
        uplink: uplink.to_owned(),
        filtered: false,
        connected: now.is_connected,
        open: now.is_open,
        waits_for_lease: now.waits_for_lease,
        held_frames: now.held.frames,
        held_bytes: now.held.bytes,
        delay_ms: Percentiles::from_values(
            now.delays.iter().map(|delay| delay.as_secs_f64() * 1e3),
        ),
        frames_out: now.left,
        frames_in: now.came,
    }
}
