//! System calls that rustix and nix do not offer, each behind a function that is safe for every
//! argument.

#![allow(unsafe_code)]

pub(crate) mod collapse;
pub(crate) mod copy;
pub(crate) mod heap;
pub(crate) mod pagemap;
pub(crate) mod ptrace;
pub(crate) mod sched;
pub(crate) mod shared_words;
pub(crate) mod uffd;
