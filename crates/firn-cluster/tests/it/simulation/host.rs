//! A host: its clock, its guard, the VMs that it runs and the standbys that it has.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use firn_cluster::cut::{Arriving, Marker, Stamp};
use firn_cluster::epoch::{self, Arrival, Backup, Limits, Piece, Primary, Progress};
use firn_cluster::failover::{Action, Guard, Register, Terms};
use firn_cluster::output::{Accept, Flow, Inbox, Outbox, Sent, To};
use firn_cluster::{Epoch, Generation, Host, RequestNumber, Seq, Vm};

use super::Without;
use super::checks::Checks;
use super::network::{Message, Ms, Network};

/// A frame is identified by its own number.
pub type Frame = u32;

pub const TERMS: Terms = Terms { ttl: Duration::from_millis(300), drift_ppm_max: 500 };
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
    pub sent: BTreeMap<To, Vec<Frame>>,
    pub received: BTreeMap<Vm, Vec<Frame>>,
}

/// The backup's state of an epoch.
#[derive(Clone, Debug)]
pub struct Copy {
    pub guest: Guest,
    pub outbox: Outbox<Frame>,
    pub inbox: Inbox,
}

impl Copy {
    pub fn first() -> Self {
        let (outbox, inbox) = (Outbox::new(HELD_BYTES_MAX), Inbox::new(Epoch(0)));
        Self { guest: Guest::default(), outbox, inbox }
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
    primary: Primary,
    marker: Marker,
    sync: Sync,
    live: Copy,
    copies: BTreeMap<Epoch, Rc<Copy>>,
    acknowledged: BTreeMap<Vm, Seq>,
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
    pub backup: Backup,
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
    pub host: Host,
    pub health: Health,
    /// Its clock: how far it is ahead, and how much too fast it is.
    ahead_ms: u64,
    ppm: i64,
    guard: Guard,
    register: Rc<Register>,
    vms: BTreeMap<Vm, Running>,
    pub stores: BTreeMap<(Vm, Generation), Store>,
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

fn limits() -> Limits {
    Limits {
        interval_min: Duration::from_millis(50),
        interval_max: Duration::from_millis(200),
        pages_per_epoch: 100,
        buffer_pages: 400,
        resend_after: Duration::from_millis(100),
        ..Limits::default()
    }
}

impl Running {
    /// The number of epochs that its backup has to store, including the running one.
    fn kept(&self) -> u64 {
        self.primary.epoch().0 - self.globally.max(self.based).0
    }

    fn new(marker: Marker, epoch: Epoch, live: Copy, now: Duration) -> Self {
        Self {
            primary: Primary::new(limits(), epoch, now),
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
    pub fn new(host: Host, register: Rc<Register>, ahead_ms: u64, ppm: i64) -> Self {
        Self {
            host,
            health: Health::Well,
            ahead_ms,
            ppm,
            guard: Guard::new(host, TERMS),
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
        self.guard.runs()
    }

    pub fn guests(&self) -> impl Iterator<Item = (Vm, &Guest)> {
        self.vms.iter().map(|(vm, running)| (*vm, &running.live.guest))
    }

    pub fn tick(&mut self, around: &mut Around<'_>) {
        let now = around.net.now;
        if now >= self.renewed + RENEW_MS {
            self.renewed = now;
            let asked_ns = self.clock(now).as_nanos() as u64;
            around.net.send(Some(self.host), None, Message::Renew { host: self.host, asked_ns });
        }
        let vms: Vec<Vm> = self.vms.keys().copied().collect();
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

    fn guest_acts(&mut self, vm: Vm, around: &mut Around<'_>) {
        let Some(running) = self.vms.get_mut(&vm) else { return };
        if running.finished.is_some() || running.live.outbox.flow() == Flow::Stop {
            return;
        }
        if !around.net.dice.chance(25) {
            return;
        }
        let others: Vec<Vm> = self.register.places.keys().copied().filter(|v| *v != vm).collect();
        let to = match around.net.dice.chance(30) {
            true => Some(To::Outside),
            false => around.net.dice.pick(&others).map(To::Vm),
        };
        let Some(to) = to else { return };
        let frame = around.checks.new_frame();
        running.live.guest.sent.entry(to).or_default().push(frame);
        running.live.outbox.push(running.primary.epoch(), to, frame, 1);
        if to != To::Outside {
            running.talked = running.primary.epoch();
        }
    }

    fn epoch_ticks(&mut self, vm: Vm, around: &mut Around<'_>) {
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
                let actions = running.primary.wait(now);
                self.epoch_acts(vm, 0, actions, around);
            }
            Sync::Done => {
                let pages = around.net.dice.roll(200);
                let mut actions = running.primary.tick(now, pages);
                if running.marker.wants_cut() {
                    actions.extend(running.primary.cut_now(now));
                }
                self.epoch_acts(vm, pages, actions, around);
            }
        }
    }

    fn send_full(&mut self, vm: Vm, epoch: Epoch, copy: Rc<Copy>, around: &mut Around<'_>) {
        let Some(generation) = self.runs() else { return };
        let backup = self.register.places[&vm].backup;
        let message = Message::Full { vm, generation, from: self.host, epoch, copy };
        if backup.is_some() {
            around.net.send(Some(self.host), backup, message);
        }
    }

    fn epoch_acts(
        &mut self,
        vm: Vm,
        pages: u64,
        actions: Vec<epoch::Action>,
        around: &mut Around<'_>,
    ) {
        let now = self.clock(around.net.now);
        for action in actions {
            match action {
                epoch::Action::Cut(epoch) => {
                    self.copy_now(vm, epoch, around);
                    let Some(running) = self.vms.get_mut(&vm) else { return };
                    let after = running.primary.copied(now, pages);
                    self.epoch_acts(vm, pages, after, around);
                }
                epoch::Action::Send { epoch, last } => self.send_epoch(vm, epoch, last, around),
                epoch::Action::Free(_) | epoch::Action::Pace(_) => {}
                epoch::Action::Committed(epoch) => self.committed(vm, epoch),
            }
        }
    }

    /// The VM is paused at the end of an epoch.
    fn copy_now(&mut self, vm: Vm, epoch: Epoch, around: &mut Around<'_>) -> Option<Rc<Copy>> {
        let generation = self.runs()?;
        let running = self.vms.get_mut(&vm)?;
        running.live.inbox.cut(epoch);
        running.marker.cut(epoch);
        let copy = Rc::new(running.live.clone());
        running.copies.insert(epoch, copy.clone());
        around.checks.cut(generation, vm, epoch, &copy.guest);
        Some(copy)
    }

    fn send_epoch(&mut self, vm: Vm, epoch: Epoch, last: bool, around: &mut Around<'_>) {
        let (Some(generation), Some(running)) = (self.guard.runs(), self.vms.get(&vm)) else {
            return;
        };
        let (backup, copy) = (self.register.places[&vm].backup, running.copies.get(&epoch));
        let (Some(copy), true) = (copy, backup.is_some()) else { return };
        for index in 0..2 {
            let piece = Piece { epoch, index, of: 2, last };
            let (from, copy) = (self.host, copy.clone());
            let message = Message::Epoch { vm, generation, from, piece, copy };
            around.net.send(Some(self.host), backup, message);
        }
    }

    fn committed(&mut self, vm: Vm, epoch: Epoch) {
        let Some(running) = self.vms.get_mut(&vm) else { return };
        running.committed = epoch.max(running.committed);
        running.copies.retain(|kept, _| *kept > epoch);
        running.marker.committed(epoch);
    }

    fn report_drained(&mut self, vm: Vm, around: &mut Around<'_>) {
        let (Some(generation), Some(running)) = (self.runs(), self.vms.get(&vm)) else { return };
        if let Some(epoch) = running.finished.filter(|epoch| running.committed >= *epoch) {
            let drained = Message::Drained { vm, epoch, generation };
            around.net.send(Some(self.host), None, drained);
        }
    }

    /// Transmits frames that may leave: the only function in which frames leave for the first time.
    fn release(&mut self, vm: Vm, around: &mut Around<'_>) {
        if !self.may_send(around) {
            around.checks.tally.held_back += 1;
            return;
        }
        let Some(running) = self.vms.get_mut(&vm) else { return };
        let (now, mut globally) = (running.primary.epoch(), running.globally);
        if around.without == Without::OutputCommit {
            globally = now;
        }
        let inside = now.min(Epoch(running.globally.max(running.based).0 + HEARD_MAX));
        running.marker.sent(running.talked.min(inside));
        let mut sent = running.live.outbox.committed(inside);
        sent.extend(running.live.outbox.globally(globally));
        self.let_out(vm, sent, around);
    }

    fn may_send(&self, around: &Around<'_>) -> bool {
        match around.without {
            Without::LookingAtTheLease => self.runs().is_some(),
            _ => self.guard.may_send(self.clock(around.net.now)),
        }
    }

    fn let_out(&mut self, vm: Vm, sent: Vec<Sent<Frame>>, around: &mut Around<'_>) {
        let Some(stamp) = self.vms.get(&vm).map(|running| running.marker.stamp()) else { return };
        for Sent { to, seq, frame } in sent {
            match to {
                To::Outside => {
                    around.checks.outside(vm, stamp.generation, seq, frame);
                    if let Some(running) = self.vms.get_mut(&vm) {
                        running.live.outbox.trim(To::Outside, seq);
                    }
                }
                To::Vm(to) => {
                    let (place, back) = (self.register.places[&to], self.host);
                    let message = Message::Frame { from: vm, to, seq, frame, stamp, back };
                    around.net.send(Some(self.host), Some(place.primary), message);
                }
            }
        }
    }

    fn send_again(&mut self, around: &mut Around<'_>) {
        if !self.may_send(around) {
            return;
        }
        let peers: Vec<Vm> = self.register.places.keys().copied().collect();
        let vms: Vec<Vm> = self.vms.keys().copied().collect();
        for (vm, to) in vms.iter().flat_map(|vm| peers.iter().map(move |to| (*vm, *to))) {
            let Some(running) = self.vms.get(&vm) else { continue };
            let after = running.acknowledged.get(&to).copied().unwrap_or_default();
            let mut again = running.live.outbox.again(To::Vm(to), after, usize::MAX);
            again.truncate(8);
            self.let_out(vm, again, around);
        }
    }

    pub fn arrives(&mut self, message: Message, around: &mut Around<'_>) {
        match message {
            Message::Granted { asked_ns, register } => {
                let actions = self.guard.granted(Duration::from_nanos(asked_ns), &register);
                self.learned(&register, actions, around);
            }
            Message::Register(register) => {
                let actions = self.guard.learned(&register);
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
                    running.live.outbox.trim(To::Vm(to), seq);
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

    fn of(&mut self, vm: Vm, generation: Generation) -> Option<&mut Running> {
        let now = self.guard.runs() == Some(generation);
        self.vms.get_mut(&vm).filter(|_| now)
    }

    fn requested(&mut self, of: Generation, request: RequestNumber, around: &mut Around<'_>) {
        for running in self.vms.values_mut() {
            if let Some(answer) = running.marker.requested(of, request) {
                around.net.send(Some(self.host), None, Message::Answer(answer));
            }
        }
    }

    fn finish(&mut self, generation: Generation, around: &mut Around<'_>) {
        let now = self.clock(around.net.now);
        let vms: Vec<Vm> = self.vms.keys().copied().collect();
        for vm in vms {
            let Some(running) = self.of(vm, generation) else { return };
            if matches!(running.sync, Sync::Done) && running.finished.is_none() {
                running.finished = Some(running.primary.epoch());
                let actions = running.primary.finish(now);
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
        from: Vm,
        to: Vm,
        seq: Seq,
        frame: Frame,
        mut stamp: Stamp,
        around: &mut Around<'_>,
    ) -> Option<Seq> {
        let running = self.vms.get_mut(&to).filter(|running| running.finished.is_none())?;
        if around.without == Without::CuttingFirst {
            stamp.mark = RequestNumber::default();
        }
        // A frame that has to wait for a cut is sent again.
        (running.marker.arriving(stamp) == Arriving::Deliver).then_some(())?;
        match running.live.inbox.accept(from, seq) {
            Accept::Deliver => {
                around.checks.tally.inside += 1;
                running.live.guest.received.entry(from).or_default().push(frame);
                Some(seq)
            }
            Accept::Known => Some(running.live.inbox.received(from)),
            Accept::Missing(_) => None,
        }
    }

    fn learned(&mut self, register: &Rc<Register>, actions: Vec<Action>, around: &mut Around<'_>) {
        if register.version < self.register.version {
            return;
        }
        let before = std::mem::replace(&mut self.register, register.clone());
        for action in actions {
            match action {
                Action::Stop(_) => self.vms.clear(),
                Action::Stopped(generation) => {
                    let stopped = Message::Stopped { host: self.host, generation };
                    around.net.send(Some(self.host), None, stopped);
                }
                Action::Run { generation, vms } => self.run(generation, &vms, around),
            }
        }
        if self.runs() == Some(register.generation) {
            self.follow_layout(&before, around);
            self.follow_checkpoint(around);
        }
        self.fold(around);
    }

    fn run(&mut self, generation: Generation, vms: &BTreeMap<Vm, Epoch>, around: &mut Around<'_>) {
        let now = self.clock(around.net.now);
        let of = self.register.checkpoint.generation;
        for (&vm, &epoch) in vms {
            let first = (generation == Generation(0)).then(Copy::first);
            let restored = || {
                let store = self.stores.get_mut(&(vm, of))?;
                store.backup.restore(epoch).ok()?;
                store.copies.get(&epoch).map(|copy| (**copy).clone())
            };
            let Some(mut live) = first.or_else(restored) else {
                around.checks.fail(format!("{vm} can't be restored at {epoch} on {}", self.host));
                return;
            };
            live.outbox.roll_back(epoch);
            live.inbox.roll_back(epoch);
            around.checks.runs(generation, vm, epoch, &live.guest);
            let marker = Marker::new(generation, u64::MAX, vm, epoch);
            let mut running = Running::new(marker, epoch, live, now);
            if generation == Generation(0) {
                running.sync = Sync::Done;
            }
            self.vms.insert(vm, running);
        }
    }

    /// New backups get a full copy; the state of the old ones is dropped.
    fn follow_layout(&mut self, before: &Register, around: &mut Around<'_>) {
        let register = self.register.clone();
        let vms: Vec<Vm> = self.vms.keys().copied().collect();
        for vm in vms {
            let backup = register.places[&vm].backup;
            let same_timeline = before.generation == register.generation;
            let same = same_timeline && before.places[&vm].backup == backup;
            let Some(running) = self.vms.get_mut(&vm) else { continue };
            let is_kept = same && !matches!(running.sync, Sync::None);
            running.marker.rearranged(register.layout, !is_kept);
            if is_kept {
                continue;
            }
            running.sync = Sync::None;
            if backup.is_some() {
                self.start_copying(vm, around);
            }
        }
    }

    fn start_copying(&mut self, vm: Vm, around: &mut Around<'_>) {
        let now = self.clock(around.net.now);
        let Some(epoch) = self.vms.get(&vm).map(|running| running.primary.epoch()) else { return };
        let Some(copy) = self.copy_now(vm, epoch, around) else { return };
        if let Some(running) = self.vms.get_mut(&vm) {
            running.primary = Primary::new(limits(), epoch, now);
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
            for (from, seq) in running.live.inbox.globally(epoch) {
                let place = register.places[&from].primary;
                let trim = Message::Trim { from, to, seq, generation };
                around.net.send(Some(host), Some(place), trim);
            }
        }
    }

    /// Standbys for other hosts follow the newest checkpoint.
    fn fold(&mut self, around: &mut Around<'_>) {
        let register = self.register.clone();
        let checkpoint = &register.checkpoint;
        for ((vm, generation), store) in &mut self.stores {
            let mine = register.places[vm].backup == Some(self.host);
            if *generation != checkpoint.generation || !mine {
                continue;
            }
            let epoch = checkpoint.marks[vm];
            let folded = store.backup.globally(epoch);
            if folded.is_err() && register.is_protected() {
                around.checks.fail(format!("{vm} is marked at {epoch}, which isn't kept"));
            }
            let base = store.backup.base();
            store.copies.retain(|kept, _| *kept >= base);
        }
    }

    fn keep(
        &mut self,
        vm: Vm,
        generation: Generation,
        from: Host,
        piece: Piece,
        copy: Rc<Copy>,
        around: &mut Around<'_>,
    ) {
        let Some(store) = self.stores.get_mut(&(vm, generation)) else { return };
        match store.backup.arrived(piece) {
            Arrival::Refused => return,
            Arrival::Store => drop(store.copies.insert(piece.epoch, copy)),
            Arrival::Known => {}
        }
        let progress = store.backup.progress();
        let message = Message::Progress { vm, generation, from: self.host, full: None, progress };
        around.net.send(Some(self.host), Some(from), message);
    }

    fn keep_full(
        &mut self,
        vm: Vm,
        generation: Generation,
        from: Host,
        epoch: Epoch,
        copy: Rc<Copy>,
        around: &mut Around<'_>,
    ) {
        let known = self.stores.get(&(vm, generation));
        if known
            .is_none_or(|store| store.backup.base() < epoch && !store.copies.contains_key(&epoch))
        {
            let copies = BTreeMap::from([(epoch, copy)]);
            let store = Store { backup: Backup::new(epoch, KEPT_MAX), copies };
            self.stores.insert((vm, generation), store);
        }
        let progress = self.stores[&(vm, generation)].backup.progress();
        let full = Some(epoch);
        let message = Message::Progress { vm, generation, from: self.host, full, progress };
        around.net.send(Some(self.host), Some(from), message);
    }

    fn progress(
        &mut self,
        vm: Vm,
        generation: Generation,
        from: Host,
        full: Option<Epoch>,
        progress: Progress,
        around: &mut Around<'_>,
    ) {
        let now = self.clock(around.net.now);
        if self.register.places[&vm].backup != Some(from) {
            return;
        }
        let Some(running) = self.of(vm, generation) else { return };
        match running.sync {
            Sync::Copying(epoch, _) if full == Some(epoch) => {
                running.sync = Sync::Done;
                running.primary = Primary::new(limits(), epoch, now);
                self.committed(vm, epoch);
            }
            Sync::Done => {
                let actions = running.primary.acknowledged(now, progress);
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
