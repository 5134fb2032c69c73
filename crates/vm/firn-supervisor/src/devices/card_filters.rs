//! Filters for the network cards that a user's own QEMU has: added when the VM is protected, removed
//! when nothing has to be buffered any more (`firn_vmm::FilterSide` has a picture).
//!
//! ```text
//!   protect    journal: number, back end
//!              socket and filter "released", the supervisor connects
//!              socket and filter "captured", the supervisor connects    from here on all frames pass through the supervisor
//!              the first cut                                            from here on they are buffered
//!   successor  both filters are there and output is blocked: connect    while no supervisor lived, QEMU dropped frames
//!              else: remove
//!   release    the output is open; wait until it is sent
//!              remove "captured"                                        from here on frames pass the supervisor by
//!              wait until the rest is sent, and "released" has read it
//!              remove "released", the sockets, the journal's entry
//! ```
//!
//! So no frame of an uncommitted epoch leaves: before the first cut there is nothing that could be
//! undone, and from then on the output buffer decides. No released frame is lost by the removal.
//!
//! A filter stays as long as its card's output is blocked, or needs a lease.

use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::time::Duration;

use firn_net::port::NicPort;
use firn_vmm::command_line::{self, OtherCard};
use firn_vmm::{ConnectedCard, FilterSide, QemuVm, QmpError};

use crate::processes::runtime::VmDir;
use crate::records::device_records::{CardFilter, NetworkCard};
use crate::records::failure::{Failure, FailureContext};
use crate::records::journal::{HypervisorRecord, Journal, JournalFile};

/// The maximum wait for released frames when filters are removed.
const DRAIN_WAIT: Duration = Duration::from_secs(1);

/// A card whose frames pass through the supervisor by filters.
#[derive(Debug)]
pub(crate) struct FilteredCard {
    pub(crate) filter: CardFilter,
    pub(crate) port: NicPort,
}

/// What adding and removing filters needs.
pub(crate) struct FilterContext<'a> {
    pub(crate) qemu: &'a mut QemuVm,
    pub(crate) vm: &'a VmDir,
    pub(crate) journal: &'a JournalFile,
}

impl FilterContext<'_> {
    /// Adds filters to the cards that are not Firn's own, and have none yet. Returns the new ones,
    /// and a text about each card that can't have any.
    pub(crate) fn add_filters(
        &mut self,
        hypervisor_record: &HypervisorRecord,
        present: &[FilteredCard],
    ) -> Result<(Vec<FilteredCard>, Vec<String>), Failure> {
        let others = other_cards(hypervisor_record);
        let cards = self.qemu.connected_cards().while_doing("querying the VM's network cards")?;
        let (mut added, mut unfiltered) = (Vec::new(), Vec::new());
        for card in foreign_cards(cards, &hypervisor_record.cards) {
            let is_present = |it: &FilteredCard| it.filter.netdev == card.netdev;
            if present.iter().any(is_present) {
                continue;
            }
            let filter = CardFilter { number: self.next_number(), netdev: card.netdev.clone() };
            let filtered = match find_bypass(&card, &others) {
                Some(why) => Err(why.to_owned()),
                None => self.add_card(filter)?,
            };
            match filtered {
                Ok(card) => added.push(card),
                Err(why) => unfiltered.push(describe_unfiltered(&card, &others, &why)),
            }
        }
        Ok((added, unfiltered))
    }

    /// Connects to the filters that a dead supervisor has added, if they are complete and are to
    /// stay. Removes all others.
    pub(crate) fn take_over(
        &mut self,
        stays: bool,
        is_open: bool,
    ) -> Result<Vec<FilteredCard>, Failure> {
        let mut taken = Vec::new();
        for filter in self.journal.current_journal().filters {
            if !stays || !self.is_complete(&filter)? {
                self.remove_objects(&filter)?;
                continue;
            }
            let port = || -> io::Result<NicPort> {
                let [captured, released] = [FilterSide::Captured, FilterSide::Released]
                    .map(|side| UnixStream::connect(self.vm.filter_socket(filter.number, side)));
                let path = self.vm.filter_socket(filter.number, FilterSide::Released);
                NicPort::open_filters(captured?, released?, &path, is_open)
            };
            let port = port().while_doing(connecting(&filter))?;
            taken.push(FilteredCard { filter, port });
        }
        Ok(taken)
    }

    /// Removes filters of cards whose output is open. Frames that were released still leave.
    pub(crate) fn remove_filters(&mut self, cards: Vec<FilteredCard>) -> Result<(), Failure> {
        for FilteredCard { filter, port } in cards {
            port.wait_until_sent(DRAIN_WAIT);
            let removed = self.qemu.remove_filter(filter.number, FilterSide::Captured);
            removed.while_doing(removing(&filter))?;
            firn_fault::pass_point("filter.opened");
            if !port.finish_filters(DRAIN_WAIT) {
                tracing::warn!("frames of the card at {} are lost: QEMU reads none", filter.netdev);
            }
            self.remove_objects(&filter)?;
            firn_fault::pass_point("filter.removed");
        }
        Ok(())
    }

    /// Adds both filters of a card. The inner error is QEMU's reason why it has none for it.
    fn add_card(&mut self, filter: CardFilter) -> Result<Result<FilteredCard, String>, Failure> {
        let record = |journal: &mut Journal| journal.filters.push(filter.clone());
        self.journal.update(record).while_doing("writing the journal")?;
        firn_fault::pass_point("filter.recorded");
        // Of a Firn that is gone with its journal.
        self.remove_old_objects(&filter)?;
        let added = self.add_both(&filter);
        match added {
            Ok(port) => Ok(Ok(FilteredCard { filter, port })),
            Err(AddError::Refused(why)) => {
                self.remove_objects(&filter)?;
                Ok(Err(why))
            }
            Err(AddError::Failed(failure)) => {
                if let Err(failure) = self.remove_objects(&filter) {
                    tracing::warn!("{failure}");
                }
                Err(failure)
            }
        }
    }

    fn add_both(&mut self, filter: &CardFilter) -> Result<NicPort, AddError> {
        let released = self.add_socket(filter, FilterSide::Released)?;
        self.add_filter(filter, FilterSide::Released)?;
        firn_fault::pass_point("filter.half-added");
        let captured = self.add_socket(filter, FilterSide::Captured)?;
        let path = self.vm.filter_socket(filter.number, FilterSide::Released);
        let port = NicPort::open_filters(captured, released, &path, true)
            .while_doing(connecting(filter))?;
        self.add_filter(filter, FilterSide::Captured)?;
        firn_fault::pass_point("filter.added");
        Ok(port)
    }

    /// Makes the socket of a filter, hands it over and connects to it.
    fn add_socket(&mut self, filter: &CardFilter, side: FilterSide) -> Result<UnixStream, Failure> {
        let path = self.vm.filter_socket(filter.number, side);
        let doing = connecting(filter);
        let listener = UnixListener::bind(&path).while_doing(&doing)?;
        self.qemu.add_filter_socket(filter.number, side, listener.as_fd()).while_doing(&doing)?;
        UnixStream::connect(&path).while_doing(&doing)
    }

    fn add_filter(&mut self, filter: &CardFilter, side: FilterSide) -> Result<(), AddError> {
        match self.qemu.add_filter(&filter.netdev, filter.number, side) {
            Ok(()) => Ok(()),
            Err(QmpError::Refused { desc, .. }) => Err(AddError::Refused(desc)),
            Err(error) => {
                let failed: Result<(), Failure> = Err(error).while_doing(connecting(filter));
                failed.map_err(AddError::Failed)
            }
        }
    }

    fn is_complete(&mut self, filter: &CardFilter) -> Result<bool, Failure> {
        let mut has = |side| {
            self.qemu.has_filter(filter.number, side).while_doing("querying the filters of a card")
        };
        Ok(has(FilterSide::Captured)? && has(FilterSide::Released)?)
    }

    /// Removes what is there of a card's filters, and then their entry in the journal.
    fn remove_objects(&mut self, filter: &CardFilter) -> Result<(), Failure> {
        self.remove_old_objects(filter)?;
        let forget = |journal: &mut Journal| journal.filters.retain(|it| it != filter);
        self.journal.update(forget).while_doing("writing the journal")
    }

    fn remove_old_objects(&mut self, filter: &CardFilter) -> Result<(), Failure> {
        let sides = [FilterSide::Captured, FilterSide::Released];
        let number = filter.number;
        for side in sides {
            self.qemu.remove_filter(number, side).while_doing(removing(filter))?;
        }
        for side in sides {
            self.qemu.remove_filter_socket(number, side).while_doing(removing(filter))?;
            // QEMU removes the name of its socket, if it sees this directory.
            remove_name(self.vm.filter_socket(number, side)).while_doing(removing(filter))?;
        }
        Ok(())
    }

    /// A number that no filter of the VM has.
    fn next_number(&self) -> u32 {
        let used = self.journal.current_journal().filters;
        (0..).find(|number| used.iter().all(|it| it.number != *number)).unwrap_or_default()
    }
}

/// Why a filter was not added.
enum AddError {
    Refused(String),
    Failed(Failure),
}

impl From<Failure> for AddError {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure)
    }
}

/// A text about each card that can't have filters, as far as the command line shows it.
pub(crate) fn predict_unfiltered(
    qemu: &mut QemuVm,
    hypervisor_record: &HypervisorRecord,
) -> Result<Vec<String>, Failure> {
    let others = other_cards(hypervisor_record);
    let cards = qemu.connected_cards().while_doing("querying the VM's network cards")?;
    let describe = |card: ConnectedCard| {
        find_bypass(&card, &others).map(|why| describe_unfiltered(&card, &others, why))
    };
    Ok(foreign_cards(cards, &hypervisor_record.cards).filter_map(describe).collect())
}

fn other_cards(hypervisor_record: &HypervisorRecord) -> Vec<OtherCard> {
    command_line::plan_command(&hypervisor_record.meta.qemu.user_args)
        .map(|plan| plan.other_cards())
        .unwrap_or_default()
}

/// The cards that are not Firn's own.
fn foreign_cards(
    cards: Vec<ConnectedCard>,
    own: &[NetworkCard],
) -> impl Iterator<Item = ConnectedCard> {
    let own: Vec<String> = own.iter().map(|card| card.id.clone()).collect();
    cards.into_iter().filter(move |card| !own.contains(&card.netdev))
}

fn option_of<'a>(card: &ConnectedCard, others: &'a [OtherCard]) -> Option<&'a OtherCard> {
    others.iter().find(|other| other.id.as_ref() == Some(&card.netdev))
}

fn find_bypass(card: &ConnectedCard, others: &[OtherCard]) -> Option<&'static str> {
    match &*card.kind {
        "vhost-user" | "vhost-vdpa" => Some("with vhost its frames do not pass through QEMU"),
        _ => option_of(card, others).and_then(|other| other.bypass),
    }
}

fn describe_unfiltered(card: &ConnectedCard, others: &[OtherCard], why: &str) -> String {
    match option_of(card, others) {
        Some(other) => format!("{} ({why})", other.option),
        None => format!("{} at {} ({}, {why})", card.name, card.netdev, card.kind),
    }
}

fn connecting(filter: &CardFilter) -> String {
    format!("adding filters to the network card at {}", filter.netdev)
}

fn removing(filter: &CardFilter) -> String {
    format!("removing the filters of the network card at {}", filter.netdev)
}

fn remove_name(path: PathBuf) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn card(netdev: &str, kind: &str) -> ConnectedCard {
        let (name, netdev, kind) = ("v.0".to_owned(), netdev.to_owned(), kind.to_owned());
        ConnectedCard { name, netdev, kind }
    }

    #[test]
    fn a_card_without_filters_is_named_with_the_reason() {
        let words =
            ["q", "-netdev", "tap,id=a,vhost=on", "-netdev", "user,id=b"].map(str::to_owned);
        let others = command_line::plan_command(&words).unwrap().other_cards();
        let why = find_bypass(&card("a", "tap"), &others).unwrap();
        let text = describe_unfiltered(&card("a", "tap"), &others, why);
        assert!(text.starts_with("-netdev tap,id=a,vhost=on (with vhost"), "{text}");
        assert_eq!(find_bypass(&card("b", "user"), &others), None);
        let why = find_bypass(&card("hot", "vhost-user"), &others).unwrap();
        let text = describe_unfiltered(&card("hot", "vhost-user"), &others, why);
        assert!(text.starts_with("v.0 at hot (vhost-user, with vhost"), "{text}");
    }
}
