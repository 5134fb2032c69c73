//! A host: its clock, its guard, the VMs that it runs and the standbys that it has.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use firn_cluster::cut::{CutMarker, FrameStamp, StampDecision};
use firn_cluster::epoch::{
    self, BackupEpochs, EpochLimits, EpochPieceHeader, EpochProgress, PieceHandling, PrimaryEpochs,
};
use firn_cluster::failover::{FailoverRecord, GuardAction, HostGuard, LeaseTerms};
use firn_cluster::output::{
    FrameDestination, FrameOutbox, InputFlow, ReceiveCounters, ReceiveDecision, SentFrame,
};
use firn_cluster::{Epoch, FrameNumber, Generation, HostId, RequestNumber, VmId};

use super::Without;
use super::checks::Checks;
use super::network::{Message, Ms, Network};

/// A frame is identified by its own number.
pub type Frame = u32;

pub const TERMS: LeaseTerms = LeaseTerms { ttl: Duration::from_millis(300), drift_ppm_max: 500 };
pub const TICK_MS: Ms = 20;
const RENEW_MS: Ms = 80;
const RESEND_MS: Ms = 120;
const HELD_BYTES_MAX: usize = 40;
/// Epochs since the newest global checkpoint: the maximum that a backup stores, the number from
/// which on a VM is cut only to be moved, and the number from which on its output is held back.
const KEPT_MAX: u64 = 12;
const CUT_MAX: u64 = 10;
const HEARD_MAX: u64 = 8;

/// The actions of a guest, which are all its state.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Guest {
    pub sent: BTreeMap<FrameDestination, Vec<Frame>>,
    pub received: BTreeMap<VmId, Vec<Frame>>,
}

/// The backup's state of an epoch.
#[derive(Clone, Debug)]
pub struct Copy {
    pub guest: Guest,
    pub outbox: FrameOutbox<Frame>,
    pub counters: ReceiveCounters,
}

impl Copy {
    pub fn first() -> Self {
        let (outbox, counters) = (FrameOutbox::new(HELD_BYTES_MAX), ReceiveCounters::new(Epoch(0)));
        Self { guest: Guest::default(), outbox, counters }
    }
}

/// How a VM's backup gets its first copy.
#[derive(Clone, Debug)]
enum Sync {
    None,
    Copying(Epoch, Rc<Copy>),
    Done,
}

/// A VM that runs here.
#[derive(Debug)]
struct Running {
    primary: PrimaryEpochs,
    marker: CutMarker,
    sync: Sync,
    live: Copy,
    copies: BTreeMap<Epoch, Rc<Copy>>,
    acknowledged: BTreeMap<VmId, FrameNumber>,
    committed: Epoch,
    globally: Epoch,
    /// The first copy of its backup.
    based: Epoch,
    /// The newest epoch in which it has sent a frame to another VM.
    talked: Epoch,
    finished: Option<Epoch>,
}

/// A VM whose standby is here.
#[derive(Debug)]
pub struct Store {
    pub backup: BackupEpochs,
    pub copies: BTreeMap<Epoch, Rc<Copy>>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Health {
    Well,
    Frozen,
    Crashed,
}

#[derive(Debug)]
pub struct Node {
    pub host: HostId,
    pub health: Health,
    /// Its clock: how far it is ahead, and how much too fast it is.
    ahead_ms: u64,
    ppm: i64,
    guard: HostGuard,
    register: Rc<FailoverRecord>,
    vms: BTreeMap<VmId, Running>,
    pub stores: BTreeMap<(VmId, Generation), Store>,
    renewed: Ms,
    resent: Ms,
    /// The messages that arrive while it is frozen.
    pub waiting: Vec<Message>,
}

/// The objects that a host may change besides itself.
pub struct Around<'a> {
    pub net: &'a mut Network,
    pub checks: &'a mut Checks,
    pub without: Without,
}

fn limits() -> EpochLimits {
    EpochLimits {
        interval_min: Duration::from_millis(50),
        interval_max: Duration::from_millis(200),
        pages_per_epoch: 100,
        buffer_pages: 400,
        resend_after: Duration::from_millis(100),
        ..EpochLimits::default()
    }
}

impl Running {
    /// The number of epochs that its backup has to store, including the running one.
    fn kept(&self) -> u64 {
        self.primary.running_epoch().0 - self.globally.max(self.based).0
    }

    fn new(marker: CutMarker, epoch: Epoch, live: Copy, now: Duration) -> Self {
        Self {
            primary: PrimaryEpochs::new(limits(), epoch, now),
            marker,
            sync: Sync::None,
            live,
            copies: BTreeMap::new(),
            acknowledged: BTreeMap::new(),
            committed: epoch,
            globally: epoch,
            based: epoch,
            talked: epoch,
            finished: None,
        }
    }
}

impl Node {
    pub fn new(host: HostId, register: Rc<FailoverRecord>, ahead_ms: u64, ppm: i64) -> Self {
        Self {
            host,
            health: Health::Well,
            ahead_ms,
            ppm,
            guard: HostGuard::new(host, TERMS),
            register,
            vms: BTreeMap::new(),
            stores: BTreeMap::new(),
            renewed: 0,
            resent: 0,
            waiting: Vec::new(),
        }
    }

    /// The time on this host's clock.
    pub fn clock(&self, now: Ms) -> Duration {
        clock(now, self.ahead_ms, self.ppm)
    }

    pub fn runs(&self) -> Option<Generation> {
        self.guard.running_generation()
    }

    pub fn guests(&self) -> impl Iterator<Item = (VmId, &Guest)> {
        self.vms.iter().map(|(vm, running)| (*vm, &running.live.guest))
    }

    pub fn tick(&mut self, around: &mut Around<'_>) {
        let now = around.net.now;
        if now >= self.renewed + RENEW_MS {
            self.renewed = now;
            let asked_ns = self.clock(now).as_nanos() as u64;
            around.net.send(Some(self.host), None, Message::Renew { host: self.host, asked_ns });
        }
        let vms: Vec<VmId> = self.vms.keys().copied().collect();
        for vm in vms {
            self.guest_acts(vm, around);
            self.epoch_ticks(vm, around);
            self.report_drained(vm, around);
            self.release(vm, around);
        }
        if now >= self.resent + RESEND_MS {
            self.resent = now;
            self.send_again(around);
        }
    }

    fn guest_acts(&mut self, vm: VmId, around: &mut Around<'_>) {
        let Some(running) = self.vms.get_mut(&vm) else { return };
        if running.finished.is_some() || running.live.outbox.input_flow() == InputFlow::Stop {
            return;
        }
        if !around.net.dice.chance(25) {
            return;
        }
        let others: Vec<VmId> =
            self.register.placements.keys().copied().filter(|v| *v != vm).collect();
        let to = match around.net.dice.chance(30) {
            true => Some(FrameDestination::Outside),
            false => around.net.dice.pick(&others).map(FrameDestination::Vm),
        };
        let Some(to) = to else { return };
        let frame = around.checks.new_frame();
        running.live.guest.sent.entry(to).or_default().push(frame);
        running.live.outbox.push_frame(running.primary.running_epoch(), to, frame, 1);
        if to != FrameDestination::Outside {
            running.talked = running.primary.running_epoch();
        }
    }

    fn epoch_ticks(&mut self, vm: VmId, around: &mut Around<'_>) {
        let now = self.clock(around.net.now);
        let Some(running) = self.vms.get_mut(&vm) else { return };
        match &running.sync {
            Sync::None => {}
            Sync::Copying(epoch, copy) => {
                if around.net.dice.chance(30) {
                    let (epoch, copy) = (*epoch, copy.clone());
                    self.send_full(vm, epoch, copy, around);
                }
            }
            Sync::Done if running.kept() > CUT_MAX => {
                let actions = running.primary.advance_without_cut(now);
                self.epoch_acts(vm, 0, actions, around);
            }
            Sync::Done => {
                let pages = around.net.dice.roll(200);
                let mut actions = running.primary.advance_time(now, pages);
                if running.marker.is_cut_needed() {
                    actions.extend(running.primary.request_cut(now));
                }
                self.epoch_acts(vm, pages, actions, around);
            }
        }
    }

    fn send_full(&mut self, vm: VmId, epoch: Epoch, copy: Rc<Copy>, around: &mut Around<'_>) {
        let Some(generation) = self.runs() else { return };
        let backup = self.register.placements[&vm].backup;
        let message = Message::Full { vm, generation, from: self.host, epoch, copy };
        if backup.is_some() {
            around.net.send(Some(self.host), backup, message);
        }
    }

    fn epoch_acts(
        &mut self,
        vm: VmId,
        pages: u64,
        actions: Vec<epoch::PrimaryAction>,
        around: &mut Around<'_>,
    ) {
        let now = self.clock(around.net.now);
        for action in actions {
            match action {
                epoch::PrimaryAction::Cut(epoch) => {
                    self.copy_now(vm, epoch, around);
                    let Some(running) = self.vms.get_mut(&vm) else { return };
                    let after = running.primary.finish_cut(now, pages);
                    self.epoch_acts(vm, pages, after, around);
                }
                epoch::PrimaryAction::Send { epoch, last } => {
                    self.send_epoch(vm, epoch, last, around)
                }
                epoch::PrimaryAction::Free(_) | epoch::PrimaryAction::SetSpeed(_) => {}
                epoch::PrimaryAction::Committed(epoch) => self.committed(vm, epoch),
            }
        }
    }

    /// The VM is paused at the end of an epoch.
    fn copy_now(&mut self, vm: VmId, epoch: Epoch, around: &mut Around<'_>) -> Option<Rc<Copy>> {
        let generation = self.runs()?;
        let running = self.vms.get_mut(&vm)?;
        running.live.counters.record_cut(epoch);
        running.marker.record_cut(epoch);
        let copy = Rc::new(running.live.clone());
        running.copies.insert(epoch, copy.clone());
        around.checks.cut(generation, vm, epoch, &copy.guest);
        Some(copy)
    }

    fn send_epoch(&mut self, vm: VmId, epoch: Epoch, last: bool, around: &mut Around<'_>) {
        let (Some(generation), Some(running)) =
            (self.guard.running_generation(), self.vms.get(&vm))
        else {
            return;
        };
        let (backup, copy) = (self.register.placements[&vm].backup, running.copies.get(&epoch));
        let (Some(copy), true) = (copy, backup.is_some()) else { return };
        for index in 0..2 {
            let piece = EpochPieceHeader { epoch, index, pieces: 2, is_last_epoch: last };
            let (from, copy) = (self.host, copy.clone());
            let message = Message::Epoch { vm, generation, from, piece, copy };
            around.net.send(Some(self.host), backup, message);
        }
    }

    fn committed(&mut self, vm: VmId, epoch: Epoch) {
        let Some(running) = self.vms.get_mut(&vm) else { return };
        running.committed = epoch.max(running.committed);
        running.copies.retain(|kept, _| *kept > epoch);
        running.marker.record_commit(epoch);
    }

    fn report_drained(&mut self, vm: VmId, around: &mut Around<'_>) {
        let (Some(generation), Some(running)) = (self.runs(), self.vms.get(&vm)) else { return };
        if let Some(epoch) = running.finished.filter(|epoch| running.committed >= *epoch) {
            let drained = Message::Drained { vm, epoch, generation };
            around.net.send(Some(self.host), None, drained);
        }
    }

    /// Transmits frames that may leave: the only function in which frames leave for the first time.
    fn release(&mut self, vm: VmId, around: &mut Around<'_>) {
        if !self.may_send(around) {
            around.checks.tally.held_back += 1;
            return;
        }
        let Some(running) = self.vms.get_mut(&vm) else { return };
        let (now, mut globally) = (running.primary.running_epoch(), running.globally);
        if around.without == Without::OutputCommit {
            globally = now;
        }
        let inside = now.min(Epoch(running.globally.max(running.based).0 + HEARD_MAX));
        running.marker.record_sent(running.talked.min(inside));
        let mut sent = running.live.outbox.release_inside(inside);
        sent.extend(running.live.outbox.release_outside(globally));
        self.let_out(vm, sent, around);
    }

    fn may_send(&self, around: &Around<'_>) -> bool {
        match around.without {
            Without::LookingAtTheLease => self.runs().is_some(),
            _ => self.guard.may_send(self.clock(around.net.now)),
        }
    }

    fn let_out(&mut self, vm: VmId, sent: Vec<SentFrame<Frame>>, around: &mut Around<'_>) {
        let Some(stamp) = self.vms.get(&vm).map(|running| running.marker.current_stamp()) else {
            return;
        };
        for SentFrame { to, seq, frame } in sent {
            match to {
                FrameDestination::Outside => {
                    around.checks.outside(vm, stamp.generation, seq, frame);
                    if let Some(running) = self.vms.get_mut(&vm) {
                        running.live.outbox.trim_up_to(FrameDestination::Outside, seq);
                    }
                }
                FrameDestination::Vm(to) => {
                    let (placement, back) = (self.register.placements[&to], self.host);
                    let message = Message::Frame { from: vm, to, seq, frame, stamp, back };
                    around.net.send(Some(self.host), Some(placement.primary), message);
                }
            }
        }
    }

    fn send_again(&mut self, around: &mut Around<'_>) {
        if !self.may_send(around) {
            return;
        }
        let peers: Vec<VmId> = self.register.placements.keys().copied().collect();
        let vms: Vec<VmId> = self.vms.keys().copied().collect();
        for (vm, to) in vms.iter().flat_map(|vm| peers.iter().map(move |to| (*vm, *to))) {
            let Some(running) = self.vms.get(&vm) else { continue };
            let after = running.acknowledged.get(&to).copied().unwrap_or_default();
            let mut again =
                running.live.outbox.released_after(FrameDestination::Vm(to), after, usize::MAX);
            again.truncate(8);
            self.let_out(vm, again, around);
        }
    }

    pub fn arrives(&mut self, message: Message, around: &mut Around<'_>) {
        match message {
            Message::Granted { asked_ns, register } => {
                let actions = self.guard.record_grant(Duration::from_nanos(asked_ns), &register);
                self.learned(&register, actions, around);
            }
            Message::Register(register) => {
                let actions = self.guard.learn_record(&register);
                self.learned(&register, actions, around);
            }
            Message::Request { generation, request } => self.requested(generation, request, around),
            Message::Finish(generation) => self.finish(generation, around),
            Message::Frame { from, to, seq, frame, stamp, back } => {
                if let Some(seq) = self.frame(from, to, seq, frame, stamp, around) {
                    let generation = stamp.generation;
                    let received = Message::Received { from, to, seq, generation };
                    around.net.send(Some(self.host), Some(back), received);
                }
            }
            Message::Received { from, to, seq, generation } => {
                if let Some(running) = self.of(from, generation) {
                    let known = running.acknowledged.entry(to).or_default();
                    *known = seq.max(*known);
                }
            }
            Message::Trim { from, to, seq, generation } => {
                if let Some(running) = self.of(from, generation) {
                    running.live.outbox.trim_up_to(FrameDestination::Vm(to), seq);
                }
            }
            Message::Epoch { vm, generation, from, piece, copy } => {
                self.keep(vm, generation, from, piece, copy, around);
            }
            Message::Full { vm, generation, from, epoch, copy } => {
                self.keep_full(vm, generation, from, epoch, copy, around);
            }
            Message::Progress { vm, generation, from, full, progress } => {
                self.progress(vm, generation, from, full, progress, around);
            }
            _ => {}
        }
    }

    fn of(&mut self, vm: VmId, generation: Generation) -> Option<&mut Running> {
        let now = self.guard.running_generation() == Some(generation);
        self.vms.get_mut(&vm).filter(|_| now)
    }

    fn requested(&mut self, of: Generation, request: RequestNumber, around: &mut Around<'_>) {
        for running in self.vms.values_mut() {
            if let Some(answer) = running.marker.request_mark(of, request) {
                around.net.send(Some(self.host), None, Message::Answer(answer));
            }
        }
    }

    fn finish(&mut self, generation: Generation, around: &mut Around<'_>) {
        let now = self.clock(around.net.now);
        let vms: Vec<VmId> = self.vms.keys().copied().collect();
        for vm in vms {
            let Some(running) = self.of(vm, generation) else { return };
            if matches!(running.sync, Sync::Done) && running.finished.is_none() {
                running.finished = Some(running.primary.running_epoch());
                let actions = running.primary.begin_final_cut(now);
                self.epoch_acts(vm, 10, actions, around);
                if let Some(running) = self.vms.get(&vm) {
                    around.checks.finished(generation, vm, &running.live.guest);
                }
            }
        }
    }

    /// Handles a frame from another VM, or from one here. Returns the acknowledgements.
    fn frame(
        &mut self,
        from: VmId,
        to: VmId,
        seq: FrameNumber,
        frame: Frame,
        mut stamp: FrameStamp,
        around: &mut Around<'_>,
    ) -> Option<FrameNumber> {
        let running = self.vms.get_mut(&to).filter(|running| running.finished.is_none())?;
        if around.without == Without::CuttingFirst {
            stamp.mark = RequestNumber::default();
        }
        // A frame that has to wait for a cut is sent again.
        (running.marker.check_frame(stamp) == StampDecision::Deliver).then_some(())?;
        match running.live.counters.accept_frame(from, seq) {
            ReceiveDecision::Deliver => {
                around.checks.tally.inside += 1;
                running.live.guest.received.entry(from).or_default().push(frame);
                Some(seq)
            }
            ReceiveDecision::Known => Some(running.live.counters.newest_received(from)),
            ReceiveDecision::Missing(_) => None,
        }
    }

    fn learned(
        &mut self,
        register: &Rc<FailoverRecord>,
        actions: Vec<GuardAction>,
        around: &mut Around<'_>,
    ) {
        if register.version < self.register.version {
            return;
        }
        let before = std::mem::replace(&mut self.register, register.clone());
        for action in actions {
            match action {
                GuardAction::Stop(_) => self.vms.clear(),
                GuardAction::Stopped(generation) => {
                    let stopped = Message::Stopped { host: self.host, generation };
                    around.net.send(Some(self.host), None, stopped);
                }
                GuardAction::Run { generation, vms } => self.run(generation, &vms, around),
            }
        }
        if self.runs() == Some(register.generation) {
            self.follow_layout(&before, around);
            self.follow_checkpoint(around);
        }
        self.fold(around);
    }

    fn run(
        &mut self,
        generation: Generation,
        vms: &BTreeMap<VmId, Epoch>,
        around: &mut Around<'_>,
    ) {
        let now = self.clock(around.net.now);
        let of = self.register.checkpoint.generation;
        for (&vm, &epoch) in vms {
            let first = (generation == Generation(0)).then(Copy::first);
            let restored = || {
                let store = self.stores.get_mut(&(vm, of))?;
                store.backup.roll_back_to(epoch).ok()?;
                store.copies.get(&epoch).map(|copy| (**copy).clone())
            };
            let Some(mut live) = first.or_else(restored) else {
                around.checks.fail(format!("{vm} can't be restored at {epoch} on {}", self.host));
                return;
            };
            live.outbox.roll_back(epoch);
            live.counters.roll_back(epoch);
            around.checks.runs(generation, vm, epoch, &live.guest);
            let marker = CutMarker::new(generation, u64::MAX, vm, epoch);
            let mut running = Running::new(marker, epoch, live, now);
            if generation == Generation(0) {
                running.sync = Sync::Done;
            }
            self.vms.insert(vm, running);
        }
    }

    /// New backups get a full copy; the state of the old ones is dropped.
    fn follow_layout(&mut self, before: &FailoverRecord, around: &mut Around<'_>) {
        let register = self.register.clone();
        let vms: Vec<VmId> = self.vms.keys().copied().collect();
        for vm in vms {
            let backup = register.placements[&vm].backup;
            let same_timeline = before.generation == register.generation;
            let same = same_timeline && before.placements[&vm].backup == backup;
            let Some(running) = self.vms.get_mut(&vm) else { continue };
            let is_kept = same && !matches!(running.sync, Sync::None);
            running.marker.change_layout(register.layout, !is_kept);
            if is_kept {
                continue;
            }
            running.sync = Sync::None;
            if backup.is_some() {
                self.start_copying(vm, around);
            }
        }
    }

    fn start_copying(&mut self, vm: VmId, around: &mut Around<'_>) {
        let now = self.clock(around.net.now);
        let Some(epoch) = self.vms.get(&vm).map(|running| running.primary.running_epoch()) else {
            return;
        };
        let Some(copy) = self.copy_now(vm, epoch, around) else { return };
        if let Some(running) = self.vms.get_mut(&vm) {
            running.primary = PrimaryEpochs::new(limits(), epoch, now);
            running.based = epoch;
            running.sync = Sync::Copying(epoch, copy.clone());
            running.finished = None;
        }
        self.send_full(vm, epoch, copy, around);
    }

    fn follow_checkpoint(&mut self, around: &mut Around<'_>) {
        let (register, host) = (self.register.clone(), self.host);
        let (checkpoint, generation) = (&register.checkpoint, register.generation);
        if checkpoint.generation != generation {
            return;
        }
        for (&to, running) in &mut self.vms {
            let epoch = checkpoint.marks[&to];
            running.globally = epoch.max(running.globally);
            for (from, seq) in running.live.counters.drop_cuts_before(epoch) {
                let placement = register.placements[&from].primary;
                let trim = Message::Trim { from, to, seq, generation };
                around.net.send(Some(host), Some(placement), trim);
            }
        }
    }

    /// Standbys for other hosts follow the newest checkpoint.
    fn fold(&mut self, around: &mut Around<'_>) {
        let register = self.register.clone();
        let checkpoint = &register.checkpoint;
        for ((vm, generation), store) in &mut self.stores {
            let mine = register.placements[vm].backup == Some(self.host);
            if *generation != checkpoint.generation || !mine {
                continue;
            }
            let epoch = checkpoint.marks[vm];
            let folded = store.backup.fold_up_to(epoch);
            if folded.is_err() && register.is_protected() {
                around.checks.fail(format!("{vm} is marked at {epoch}, which isn't kept"));
            }
            let base = store.backup.base_epoch();
            store.copies.retain(|kept, _| *kept >= base);
        }
    }

    fn keep(
        &mut self,
        vm: VmId,
        generation: Generation,
        from: HostId,
        piece: EpochPieceHeader,
        copy: Rc<Copy>,
        around: &mut Around<'_>,
    ) {
        let Some(store) = self.stores.get_mut(&(vm, generation)) else { return };
        match store.backup.receive_piece(piece) {
            PieceHandling::Refuse => return,
            PieceHandling::Store => drop(store.copies.insert(piece.epoch, copy)),
            PieceHandling::Drop => {}
        }
        let progress = store.backup.progress();
        let message = Message::Progress { vm, generation, from: self.host, full: None, progress };
        around.net.send(Some(self.host), Some(from), message);
    }

    fn keep_full(
        &mut self,
        vm: VmId,
        generation: Generation,
        from: HostId,
        epoch: Epoch,
        copy: Rc<Copy>,
        around: &mut Around<'_>,
    ) {
        let known = self.stores.get(&(vm, generation));
        if known.is_none_or(|store| {
            store.backup.base_epoch() < epoch && !store.copies.contains_key(&epoch)
        }) {
            let copies = BTreeMap::from([(epoch, copy)]);
            let store = Store { backup: BackupEpochs::new(epoch, KEPT_MAX), copies };
            self.stores.insert((vm, generation), store);
        }
        let progress = self.stores[&(vm, generation)].backup.progress();
        let full = Some(epoch);
        let message = Message::Progress { vm, generation, from: self.host, full, progress };
        around.net.send(Some(self.host), Some(from), message);
    }

    fn progress(
        &mut self,
        vm: VmId,
        generation: Generation,
        from: HostId,
        full: Option<Epoch>,
        progress: EpochProgress,
        around: &mut Around<'_>,
    ) {
        let now = self.clock(around.net.now);
        if self.register.placements[&vm].backup != Some(from) {
            return;
        }
        let Some(running) = self.of(vm, generation) else { return };
        match running.sync {
            Sync::Copying(epoch, _) if full == Some(epoch) => {
                running.sync = Sync::Done;
                running.primary = PrimaryEpochs::new(limits(), epoch, now);
                self.committed(vm, epoch);
            }
            Sync::Done => {
                let actions = running.primary.record_progress(now, progress);
                self.epoch_acts(vm, 0, actions, around);
            }
            _ => {}
        }
        self.release(vm, around);
    }
}

/// The time that a clock shows at a true time.
pub fn clock(now: Ms, ahead_ms: u64, ppm: i64) -> Duration {
    let micros = (now as i64 * 1000) + now as i64 * ppm / 1000;
    Duration::from_millis(ahead_ms) + Duration::from_micros(micros as u64)
}
