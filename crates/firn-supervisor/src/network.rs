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
//! **Leased.** Where hosts agree which of them may run a VM (`firn-membership`), frames leave only
//! while this host's lease is held, as a page states that the agent writes (`firn_net::lease`). The
//! journal has the generation that the lease must belong to.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use crossbeam_channel::Receiver;
use firn_cluster::cut::Answer;
use firn_cluster::member::{Kept, Membership, OfEpoch};
use firn_cluster::switch::Mac;
use firn_cluster::{Epoch, Seq};
use firn_memory::{Process, heap};
use firn_net::lease::Lease;
use firn_net::port::{self, Port};
use firn_net::uplink::Uplink;
use firn_vmm::command_line::{self, CardPlan, Uplink as Named};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::failure::{Context, Failure, FailureKind};
use crate::journal::Machine;
use crate::name::NetworkName;
use crate::percentiles::Percentiles;
use crate::protocol::{MemberCard, MemberRequest};
use crate::qemu;
use crate::runtime::VmDir;

/// The maximum wait for a mark, and the interval at which it is polled.
const MARK_WAIT: Duration = Duration::from_secs(5);
const MARK_LOOK: Duration = Duration::from_millis(2);

/// The note to the user of a VM whose output is blocked.
pub(crate) const HELD: &str =
    "; its output is blocked, because its standby may run: `firn release` releases it";

/// A network card whose frames pass through Firn.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Card {
    /// Its back end's id on QEMU's command line.
    pub id: String,
    /// The socket that its frames go to; absolute.
    pub uplink: PathBuf,
    /// The number in QEMU of the supervisor's end of the socket pair.
    pub descriptor: i32,
    /// The inode of that socket, because the number may come to mean another file.
    pub inode: u64,
    /// The number and inode of QEMU's end.
    #[serde(default)]
    pub theirs: Option<(i32, u64)>,
}

/// The part of `firn status` about a network card.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CardStatus {
    /// Its back end's id on QEMU's command line.
    pub id: String,
    /// The socket that its frames go to.
    pub uplink: PathBuf,
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

/// The sockets for the cards of a VM that is being started.
#[derive(Debug, Default)]
pub(crate) struct Sockets(Vec<Pair>);

#[derive(Debug)]
struct Pair {
    id: String,
    uplink: PathBuf,
    theirs: OwnedFd,
    ours: OwnedFd,
    /// A connection that was made to check whether the uplink accepts one.
    first: Option<Uplink>,
}

impl Sockets {
    /// Creates a pair for each card of a VM. Relative paths of sockets start in `directory`.
    pub(crate) fn make(plans: &[CardPlan], directory: &Path, vm: &VmDir) -> Result<Self, Failure> {
        let pair = |plan: &CardPlan| {
            let (theirs, ours) = port::pair().doing("making sockets for a network card")?;
            let (id, uplink) = (plan.id.clone(), path(&plan.uplink, directory, vm)?);
            Ok(Pair { id, uplink, theirs, ours, first: None })
        };
        Ok(Self(plans.iter().map(pair).collect::<Result<_, Failure>>()?))
    }

    /// Connects to each uplink, because a user's new command line may be wrong.
    pub(crate) fn connect(&mut self) -> Result<(), Failure> {
        for Pair { id, uplink, first, .. } in &mut self.0 {
            let connected = Uplink::connect(uplink)
                .doing_or(FailureKind::Usage, format!("connecting {id} to {}", uplink.display()));
            let hint = "start the process that takes the VM's frames first, such as `passt --socket PATH`, or `firn-agent` for \
                its networks";
            *first = Some(connected.map_err(|failure| failure.hint(hint))?);
        }
        Ok(())
    }

    /// QEMU's descriptor numbers for the ends that it uses.
    pub(crate) fn numbers(&self) -> Vec<i32> {
        self.0.iter().map(|pair| pair.theirs.as_raw_fd()).collect()
    }

    /// The descriptors that QEMU has to inherit.
    pub(crate) fn all(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.0.iter().flat_map(|pair| [pair.theirs.as_fd(), pair.ours.as_fd()])
    }

    /// The cards, as the journal records them for a successor.
    pub(crate) fn cards(&self) -> Result<Vec<Card>, Failure> {
        let card = |pair: &Pair| {
            let (id, uplink) = (pair.id.clone(), pair.uplink.clone());
            let theirs = Some((pair.theirs.as_raw_fd(), inode(&pair.theirs)?));
            let (descriptor, inode) = (pair.ours.as_raw_fd(), inode(&pair.ours)?);
            Ok(Card { id, uplink, descriptor, inode, theirs })
        };
        self.0.iter().map(card).collect()
    }

    /// The connections to uplinks that were made.
    pub(crate) fn connections(self) -> Vec<Option<Uplink>> {
        self.0.into_iter().map(|pair| pair.first).collect()
    }
}

/// The socket that leads to the destination of a card's frames.
fn path(uplink: &Named, directory: &Path, vm: &VmDir) -> Result<PathBuf, Failure> {
    match uplink {
        Named::Socket(path) => Ok(directory.join(path)),
        Named::Network(name) => {
            let name = NetworkName::new(name).doing_or(FailureKind::Usage, "naming a network")?;
            Ok(vm.base().network(&name))
        }
    }
}

fn inode(socket: &OwnedFd) -> Result<u64, Failure> {
    Ok(rustix::fs::fstat(socket).doing("examining a network card's socket")?.st_ino)
}

/// All network cards of a VM.
#[derive(Debug, Default)]
pub(crate) struct Network(Vec<(Card, Port)>);

impl Network {
    /// Copies the sockets from the hypervisor. `connections` are the existing ones; with `is_open`,
    /// frames leave at once.
    pub(crate) fn open(
        pid: i32,
        cards: &[Card],
        connections: Vec<Option<Uplink>>,
        is_open: bool,
    ) -> Result<Self, Failure> {
        if cards.is_empty() {
            return Ok(Self::default());
        }
        let process = Process::open(pid).doing("reaching the hypervisor process")?;
        let connections = connections.into_iter().chain(std::iter::repeat_with(|| None));
        let open = |(card, first): (&Card, Option<Uplink>)| {
            let socket = socket_of(&process, card, (card.descriptor, card.inode))?;
            let theirs = card.theirs.map(|it| socket_of(&process, card, it)).transpose()?;
            let port = Port::open(socket, theirs, &card.uplink, first, is_open)
                .doing(format!("opening the network card {}", card.id))?;
            Ok((card.clone(), port))
        };
        Ok(Self(cards.iter().zip(connections).map(open).collect::<Result<_, Failure>>()?))
    }

    /// Connects each card to its uplink.
    pub(crate) fn plug(&self) {
        self.ports().for_each(Port::plug);
    }

    /// Begins to buffer output, for a protection.
    pub(crate) fn begin(&self) {
        self.ports().for_each(Port::begin);
    }

    /// Makes room for the VM's frames, because it is about to be stopped.
    pub(crate) fn stopping(&self) {
        self.ports().for_each(Port::stopping);
    }

    /// Ends what [`Self::prepare_stop`] began: the VM was not stopped, or it continues.
    pub(crate) fn goes_on(&self) {
        self.ports().for_each(Port::goes_on);
    }

    /// Ends an epoch while the VM is paused.
    pub(crate) fn cut(&self, epoch: Epoch) -> Option<OfEpoch> {
        self.ports().fold(None, |of, port| port.cut(epoch).or(of))
    }

    /// Releases the output of an epoch that is committed.
    pub(crate) fn committed(&self, epoch: Epoch) {
        self.ports().for_each(|port| port.committed(epoch));
    }

    /// Answers a request of the coordinator of a cluster's global checkpoints.
    pub(crate) fn member(
        &self,
        request: &MemberRequest,
        machine: &Machine,
    ) -> Result<Value, Failure> {
        let [(card, port)] = &self.0[..] else { return Err(no_card()) };
        let done = |is_done: bool| is_done.then_some(Value::Null);
        match request {
            MemberRequest::Card => {
                let mac = match port.membership() {
                    Some(of) => of.members.iter().find(|(vm, _)| *vm == of.own).map(|it| it.1),
                    None => address(card, machine)?,
                };
                let mac = mac.ok_or_else(no_card)?;
                let facts = MemberCard { mac, is_settled: port.is_settled() };
                serde_json::to_value(facts).doing("describing the card")
            }
            MemberRequest::Join(of) => done(port.join(of.clone())).ok_or_else(held),
            MemberRequest::Mark { generation, number } => {
                let of = port.membership().filter(|of| of.generation == *generation);
                let answer = of.and_then(|_| marked(|| port.requested(*generation, *number)));
                let answer = answer.ok_or_else(no_mark)?;
                serde_json::to_value(answer).doing("describing the mark")
            }
            MemberRequest::Globally { generation, epoch } => {
                done(port.globally(*generation, *epoch)).ok_or_else(no_mark)
            }
            MemberRequest::Leave => {
                let left = done(port.leave()).ok_or_else(held);
                // The frames that were kept are many small blocks.
                heap::give_back();
                left
            }
        }
    }

    /// Prepares the cards of a VM that is about to run as a member of a cluster.
    pub(crate) fn go_on(&self, of: &Membership, base: Epoch, kept: &Kept) {
        self.ports().for_each(|port| port.go_on(of.clone(), base, kept.clone()));
    }

    /// The membership of the VM's card, if the VM belongs to a cluster.
    pub(crate) fn membership(&self) -> Option<Membership> {
        self.ports().find_map(Port::membership)
    }

    /// Whether a protection can begin.
    pub(crate) fn is_new(&self) -> bool {
        self.ports().all(Port::is_new)
    }

    /// The newest epoch of a member that a global checkpoint includes.
    pub(crate) fn global(&self) -> Epoch {
        self.ports().map(Port::global).max().unwrap_or_default()
    }

    /// Whether a frame of another member waits until the running epoch is cut.
    pub(crate) fn wants_cut(&self) -> bool {
        self.ports().any(Port::wants_cut)
    }

    /// Wakes the thread that cuts the epochs of a member, which has one card.
    pub(crate) fn news(&self) -> Receiver<()> {
        self.ports().next().map_or_else(crossbeam_channel::never, Port::news)
    }

    /// The newest frame of a member to the outside that has left.
    pub(crate) fn gone(&self) -> Seq {
        self.ports().map(Port::gone).max().unwrap_or_default()
    }

    /// Releases all output: no failover can undo what sent it any more.
    pub(crate) fn let_out(&self) {
        self.ports().for_each(Port::let_out);
    }

    /// Sets the lease that frames need from now on, by the page that holds it; with `None` they
    /// need none.
    pub(crate) fn obey(&self, page: &Path, lease: Option<u32>) {
        self.ports()
            .for_each(|port| port.obey(lease.map(|generation| Lease::new(page, generation))));
    }

    /// Whether there are cards whose output is buffered.
    pub(crate) fn is_shut(&self) -> bool {
        self.ports().any(|port| !port.is_open())
    }

    /// The status of each card.
    pub(crate) fn now(&self) -> Vec<CardStatus> {
        self.0.iter().map(|(card, port)| status(card, &port.now())).collect()
    }

    fn ports(&self) -> impl Iterator<Item = &Port> {
        self.0.iter().map(|(_, port)| port)
    }
}

/// The MAC address of a card. QEMU is queried, because it assigns addresses to cards that have none
/// on its command line.
fn address(card: &Card, machine: &Machine) -> Result<Option<Mac>, Failure> {
    let plan =
        command_line::plan(&machine.meta.qemu.user_args).doing("reading the VM's command line")?;
    if !plan.other_cards().is_empty() {
        return Ok(None);
    }
    let address = qemu::connect(machine)?.address(&card.id);
    Ok(address.doing("querying the card's address from QEMU")?.map(Mac))
}

fn no_card() -> Failure {
    let text = "a VM of a cluster has one network card of type `-netdev firn`, and no other";
    Failure::new(FailureKind::Refused, text)
}

fn held() -> Failure {
    let text = "the VM's output is buffered, because the cluster can still be rolled back";
    Failure::new(FailureKind::Refused, text)
        .hint("`firn cluster release`, or `firn release` if its backup never runs it")
}

/// Waits for a mark: the epoch that ends with it has to end, and to be copied.
fn marked(mut ask: impl FnMut() -> Option<Answer>) -> Option<Answer> {
    let since = Instant::now();
    loop {
        let answer = ask();
        if answer.is_some() || since.elapsed() > MARK_WAIT {
            return answer;
        }
        thread::sleep(MARK_LOOK);
    }
}

fn no_mark() -> Failure {
    let text = "the VM has no mark: it is not protected in that generation of its cluster";
    Failure::new(FailureKind::Refused, text).hint("`firn cluster protect` begins a new one")
}

fn socket_of(
    process: &Process,
    card: &Card,
    (number, expected): (i32, u64),
) -> Result<OwnedFd, Failure> {
    let socket = process.copy_descriptor(number).doing("copying a network card's socket")?;
    match inode(&socket)? == expected {
        true => Ok(socket),
        false => {
            let text = format!("QEMU has closed the socket of its network card {}", card.id);
            Err(Failure::new(FailureKind::Other, text))
        }
    }
}

fn status(card: &Card, now: &port::Now) -> CardStatus {
    CardStatus {
        id: card.id.clone(),
        uplink: card.uplink.clone(),
        connected: now.is_connected,
        open: now.is_open,
        waits_for_lease: now.waits_for_lease,
        held_frames: now.held.frames,
        held_bytes: now.held.bytes,
        delay_ms: Percentiles::of(now.delays.iter().map(|delay| delay.as_secs_f64() * 1e3)),
        frames_out: now.left,
        frames_in: now.came,
    }
}
