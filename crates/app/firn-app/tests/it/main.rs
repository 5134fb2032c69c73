//! firn-app, used as its users do.

#[cfg(test)]
mod certificates;
#[cfg(test)]
mod fork;
#[cfg(test)]
mod log;
#[cfg(test)]
mod quiet;
#[cfg(test)]
mod session;
#[cfg(test)]
mod size;
#[cfg(test)]
mod standby;
#[cfg(test)]
mod trackers;
#[cfg(test)]
mod uses;
