//! Running program: runs a random program on critical data areas and, at the same time, on plain
//! memory, and compares the two.
//!
//! ```text
//!                  areas (tracked)                        plain memory
//!   each step      the same writes                        the same writes
//!   commit         the session's changes are applied      its content is copied to `committed`
//!                  to `image`, as a backup does
//!   abort          the session restores the areas         is set back to `committed`
//!   then           areas = plain memory                   image = committed
//! ```

use std::ptr::NonNull;
use std::thread;

use firn_app::{Area, AreaId, Error, Session};

use crate::SessionVariant;
use crate::program::{AreaPlan, ProgramStep, RandomProgram, perform_write, thread_range};

/// A range of memory that starts at a given offset in a page, with other data of the program before
/// and after it.
struct ProgramMemory {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

impl ProgramMemory {
    /// Zeros, with the length and the offset of the plan.
    fn new(plan: &AreaPlan) -> Self {
        let bytes = vec![0; plan.len + 3 * 4096];
        // Not the first page: there must be data before the area.
        let to_page = bytes.as_ptr().align_offset(4096) + 4096;
        Self { bytes, start: to_page + plan.misaligned, len: plan.len }
    }

    /// The first byte of the range.
    fn start(&mut self) -> *mut u8 {
        self.bytes[self.start..].as_mut_ptr()
    }

    /// The bytes of the range.
    fn content(&self) -> &[u8] {
        &self.bytes[self.start..][..self.len]
    }

    /// Writes the bytes just before and just after the range, which are on its first and last page.
    /// These bytes belong to no area.
    fn write_neighbors(&mut self, value: u8) {
        self.bytes[self.start - 1] = value;
        let end = self.start + self.len;
        self.bytes[end] = value;
    }
}

/// An area of either kind: allocated by the library, or memory of the program.
enum TestedArea {
    Allocated(Area),
    Own(AreaId, ProgramMemory),
}

impl TestedArea {
    /// Makes an area for a plan. If the plan's offset is even, registers memory of the program. A
    /// tracker that follows only memory of the library refuses that ([`Error::Foreign`]). Then, and
    /// if the offset is odd, the library allocates the area.
    fn new(session: &mut Session, name: &str, plan: &AreaPlan) -> Self {
        if plan.misaligned % 2 == 0 {
            let mut own = ProgramMemory::new(plan);
            let start = NonNull::new(own.start()).unwrap();
            // SAFETY: the vector lives until the session is dropped (see `run_program`), and only
            // `perform_write` accesses it.
            match unsafe { session.register(name, start, plan.len) } {
                Ok(id) => return Self::Own(id, own),
                Err(Error::Foreign { .. }) => {}
                Err(error) => panic!("{error}"),
            }
        }
        Self::Allocated(session.allocate(name, plan.len).unwrap())
    }

    /// The area's id in the session.
    fn id(&self) -> AreaId {
        match self {
            Self::Allocated(area) => area.id(),
            Self::Own(id, _) => *id,
        }
    }

    /// The first byte of the area.
    fn start(&mut self) -> *mut u8 {
        match self {
            Self::Allocated(area) => area.as_ptr(),
            Self::Own(_, own) => own.start(),
        }
    }
}

/// A running program: areas, the same program on plain memory, and the committed state.
struct RunningProgram {
    session: Session,
    areas: Vec<TestedArea>,
    /// The expected content of the areas.
    plain: Vec<ProgramMemory>,
    /// All changes that the session has reported, applied to zeros: the content of a backup.
    image: Vec<Vec<u8>>,
    /// The content at the last commit.
    committed: Vec<Vec<u8>>,
}

impl RunningProgram {
    /// Makes the areas, and plain memory of the same lengths and offsets. All of it is zeros.
    fn new(mut session: Session, plans: &[AreaPlan]) -> Self {
        let area = |(n, plan)| TestedArea::new(&mut session, &format!("area {n}"), plan);
        let areas: Vec<_> = plans.iter().enumerate().map(area).collect();
        let misaligned = |(plan, area): (&AreaPlan, &TestedArea)| match area {
            TestedArea::Allocated(_) => {
                ProgramMemory::new(&AreaPlan { misaligned: 0, ..plan.clone() })
            }
            TestedArea::Own(..) => ProgramMemory::new(plan),
        };
        let plain = plans.iter().zip(&areas).map(misaligned).collect();
        let zeros: Vec<_> = plans.iter().map(|plan| vec![0; plan.len]).collect();
        Self { session, areas, plain, image: zeros.clone(), committed: zeros }
    }

    /// Runs one transaction on the areas and on plain memory. It commits if the step commits, or if
    /// the session's tracker cannot abort; otherwise it aborts.
    fn run_step(&mut self, step: &ProgramStep, can_abort: bool) {
        self.session.begin().unwrap().detach();
        self.write_areas(step);
        for area in &mut self.areas {
            if let TestedArea::Own(_, own) = area {
                own.write_neighbors(step.writes.len() as u8);
            }
        }
        let transaction = self.session.open_transaction().unwrap();
        if step.commits || !can_abort {
            transaction.commit().unwrap();
            self.committed = self.plain.iter().map(|plain| plain.content().to_vec()).collect();
            self.apply_changes();
        } else {
            transaction.abort().unwrap();
            for (plain, committed) in self.plain.iter_mut().zip(&self.committed) {
                let range = plain.start..plain.start + plain.len;
                plain.bytes[range].copy_from_slice(committed);
            }
        }
    }

    /// Makes the writes of a step, on the areas and on plain memory. Each thread has a part of
    /// every area to itself.
    fn write_areas(&mut self, step: &ProgramStep) {
        let threads = step.threads;
        thread::scope(|scope| {
            for thread in 0..threads {
                let mine = step.writes.iter().skip(thread).step_by(threads);
                let targets: Vec<_> = mine
                    .map(|write| {
                        let n = write.area.index(self.areas.len());
                        let part = thread_range(self.plain[n].len, thread, threads);
                        let starts = [self.areas[n].start(), self.plain[n].start()];
                        (
                            write.clone(),
                            starts.map(|s| s.wrapping_add(part.start).expose_provenance()),
                            part.len(),
                        )
                    })
                    .collect();
                let work = move || {
                    for (write, starts, len) in targets {
                        for start in starts {
                            // SAFETY: part of an area or of plain memory that no other thread
                            // accesses.
                            unsafe {
                                perform_write(
                                    &write,
                                    std::ptr::with_exposed_provenance_mut(start),
                                    len,
                                )
                            };
                        }
                    }
                };
                match threads {
                    1 => work(),
                    _ => drop(scope.spawn(work)),
                }
            }
        });
    }

    /// Applies the changes that the session reports to `image`, as a backup would.
    fn apply_changes(&mut self) {
        let mut bytes = Vec::new();
        self.session.copy_changes(&mut bytes);
        let mut rest = bytes.as_slice();
        for change in self.session.changes().iter() {
            let n = self.areas.iter().position(|area| area.id() == change.area).unwrap();
            let (now, later) = rest.split_at(change.bytes.len());
            self.image[n][change.bytes.clone()].copy_from_slice(now);
            rest = later;
        }
        assert_eq!(rest, b"");
    }

    /// Checks that the areas equal plain memory, and that `image` equals `committed`. `what` is
    /// named if they differ.
    fn check_memory(&mut self, what: &dyn std::fmt::Debug) {
        for (n, area) in self.areas.iter().enumerate() {
            let now = self.session.area_bytes(area.id()).unwrap();
            assert_same(now, self.plain[n].content(), "memory", n, what);
            assert_same(&self.image[n], &self.committed[n], "committed image", n, what);
        }
    }
}

/// Panics if a byte differs from the expected one: with its position, and the bytes from there on.
fn assert_same(got: &[u8], expected: &[u8], which: &str, area: usize, what: &dyn std::fmt::Debug) {
    if got == expected {
        return;
    }
    if let Some(at) = (0..expected.len()).find(|&at| got[at] != expected[at]) {
        let near = |bytes: &[u8]| bytes[at..bytes.len().min(at + 16)].to_vec();
        panic!(
            "{which} of area {area} differs at {at}: {:x?}, not {:x?}: {what:?}",
            near(got),
            near(expected)
        );
    }
}

/// Runs a program in a session of this variant, and checks memory and image after each transaction.
pub(crate) fn run_program(variant: SessionVariant<'_>, program: &RandomProgram) {
    let mut running = RunningProgram::new((variant.open)(), &program.areas);
    for step in &program.steps {
        running.run_step(step, variant.can_abort);
        running.check_memory(step);
    }
    let RunningProgram { session, mut areas, .. } = running;
    drop(session);
    // The session has ended: the program can write again to the memory that the session followed.
    for area in &mut areas {
        // SAFETY: an area has at least one byte, and no other code uses it.
        unsafe { area.start().write_volatile(1) };
    }
}
