//! A followed area: the physical addresses of its pages, and which of them were written.

use firn_types::Page;

use crate::message::{AreaId, Refusal, Run};
use crate::noting::NotedArea;

/// A followed area of one address space.
#[derive(Debug)]
pub(super) struct Area {
    pub(super) start: u64,
    /// The physical page of each of its pages at the last translation, if it was mapped.
    places: Vec<Option<Page>>,
    /// The inverse map: physical page, and page of the area.
    by_place: Vec<(Page, u32)>,
    /// Pages written since the last reply.
    fresh: Vec<bool>,
    /// Pages reported in a reply that may not have arrived.
    told: Vec<bool>,
}

impl Area {
    pub(super) fn new(start: u64, places: Vec<Page>) -> Self {
        let none = vec![false; places.len()];
        let mut area = Self {
            start,
            places: places.into_iter().map(Some).collect(),
            by_place: Vec::new(),
            fresh: none.clone(),
            told: none,
        };
        area.sort();
        area
    }

    fn sort(&mut self) {
        let pages = self.places.iter().zip(0..);
        self.by_place = pages.filter_map(|(place, page)| Some(((*place)?, page))).collect();
        self.by_place.sort_unstable();
    }

    pub(super) fn pages(&self) -> u32 {
        self.places.len() as u32
    }

    /// The physical pages, in ascending order.
    pub(super) fn places(&self) -> impl Iterator<Item = Page> + '_ {
        self.by_place.iter().map(|(place, _)| *place)
    }

    /// Updates the physical pages. The guest's kernel may have moved some, or unmapped them for a
    /// while. Firn has not observed writes to them meanwhile, so they count as written.
    pub(super) fn moved(&mut self, now: &[Result<Page, Refusal>]) {
        let mut changed = false;
        for (page, now) in now.iter().enumerate().take(self.places.len()) {
            let now = now.ok();
            self.fresh[page] |= now.is_none() || now != self.places[page];
            changed |= now != self.places[page];
            self.places[page] = now;
        }
        if changed {
            self.sort();
        }
    }

    /// The area in the form that the plugin needs to note stores; `None` if it is too large for
    /// that.
    pub(super) fn noted(&self, id: AreaId) -> Option<NotedArea> {
        let (start, pages) = (self.start, self.pages());
        (pages <= NotedArea::PAGES_MAX).then_some(NotedArea { id, start, pages })
    }

    /// Records that these physical pages, in ascending order, were written.
    pub(super) fn note(&mut self, written: &[Page]) {
        for place in written {
            let from = self.by_place.partition_point(|(it, _)| it < place);
            for (_, page) in self.by_place[from..].iter().take_while(|(it, _)| it == place) {
                self.fresh[*page as usize] = true;
            }
        }
    }

    /// Records that all pages may have been written.
    pub(super) fn note_all(&mut self) {
        self.fresh.fill(true);
    }

    /// Records that the last reply has arrived.
    pub(super) fn acknowledge(&mut self) {
        self.told.fill(false);
    }

    /// Adds the runs of pages to report.
    pub(super) fn tell(&mut self, id: AreaId, runs: &mut Vec<Run>) {
        for (page, (told, fresh)) in (0..).zip(self.told.iter_mut().zip(&mut self.fresh)) {
            *told |= std::mem::take(fresh);
            if !*told {
                continue;
            }
            match runs.last_mut() {
                Some(run) if run.area == id && run.first + run.pages == page => run.pages += 1,
                _ => runs.push(Run { area: id, first: page, pages: 1 }),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(area: &mut Area) -> Vec<(u32, u32)> {
        let mut runs = Vec::new();
        area.tell(AreaId(0), &mut runs);
        runs.into_iter().map(|run| (run.first, run.pages)).collect()
    }

    #[test]
    fn tells_until_it_has_come() {
        let mut area = Area::new(0, [9, 4, 5, 4].map(Page).to_vec());
        assert_eq!(told(&mut area), []);
        area.note(&[Page(4), Page(7)]);
        assert_eq!(told(&mut area), [(1, 1), (3, 1)], "a page that is there twice");
        area.note(&[Page(5)]);
        assert_eq!(told(&mut area), [(1, 3)], "the answer before may not have come");
        area.acknowledge();
        assert_eq!(told(&mut area), []);
    }

    #[test]
    fn what_moved_may_have_been_written() {
        let mut area = Area::new(0, [1, 2, 3].map(Page).to_vec());
        area.moved(&[Ok(Page(1)), Ok(Page(8)), Err(Refusal::Unmapped(0))]);
        assert_eq!(told(&mut area), [(1, 2)]);
        area.acknowledge();
        assert_eq!(area.places().collect::<Vec<_>>(), [Page(1), Page(8)]);
        area.moved(&[Ok(Page(1)), Ok(Page(8)), Err(Refusal::Unmapped(0))]);
        assert_eq!(told(&mut area), [(2, 1)], "as long as it is away");
    }
}
