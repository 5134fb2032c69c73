//! The open files of an image, which the guards of a restore keep for the supervisor's successor.
//!
//! ```text
//!   supervisor -- socket, standard input of a guard: descriptors --> guard, watcher
//!        '- dies: its successor receives them in the same way, and can read an image without a name
//! ```
//!
//! A guard closes them once the restore is over according to the journal, so that they do not keep
//! storage in use longer than necessary.

use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

use crate::journal::{Journal, VmPhase};
use crate::runtime::VmDir;

/// Descriptors in one message; the kernel accepts at most 253 (unix(7)).
const FILES_PER_MESSAGE: usize = 64;

/// The interval at which a guard checks whether the restore is over.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Sends descriptors, in order.
pub(crate) fn send_files(socket: &UnixStream, files: &[File]) -> io::Result<()> {
    for files in files.chunks(FILES_PER_MESSAGE) {
        let fds: Vec<_> = files.iter().map(AsFd::as_fd).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES_PER_MESSAGE))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !control.push(SendAncillaryMessage::ScmRights(&fds)) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        sendmsg(socket, &[IoSlice::new(&[0])], &mut control, SendFlags::NOSIGNAL)?;
    }
    Ok(())
}

/// Receives descriptors until the other end is closed.
pub(crate) fn receive_files(from: impl AsFd) -> io::Result<Vec<File>> {
    let mut files = Vec::new();
    while let Some(more) = receive_once(&from)? {
        files.extend(more.into_iter().map(File::from));
    }
    Ok(files)
}

fn receive_once(from: &impl AsFd) -> io::Result<Option<Vec<OwnedFd>>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES_PER_MESSAGE))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    let mut room = [IoSliceMut::new(&mut byte)];
    let received = recvmsg(from, &mut room, &mut control, RecvFlags::CMSG_CLOEXEC)?;
    if received.bytes == 0 {
        return Ok(None);
    }
    let fds = |message| match message {
        RecvAncillaryMessage::ScmRights(fds) => fds.collect(),
        _ => Vec::new(),
    };
    Ok(Some(control.drain().flat_map(fds).collect()))
}

/// The image files that a guard keeps.
#[derive(Clone, Debug, Default)]
pub(crate) struct KeptImageFiles {
    files: Arc<Mutex<Vec<File>>>,
}

impl KeptImageFiles {
    /// Receives files from standard input and keeps them until the restore is over.
    pub(crate) fn from_stdin(vm: &VmDir) -> Self {
        let held = Self::default();
        let (keeping, vm) = (held.clone(), vm.clone());
        let thread = thread::Builder::new().name("held".into());
        // If there is no thread, a successor can only open the image by its name.
        let _ = thread.spawn(move || keeping.keep_until_restored(&vm));
        held
    }

    fn keep_until_restored(&self, vm: &VmDir) {
        while let Ok(Some(fds)) = receive_once(&rustix::stdio::stdin()) {
            self.lock_files().extend(fds.into_iter().map(File::from));
        }
        while !self.lock_files().is_empty() {
            thread::sleep(CHECK_INTERVAL);
            if !is_restoring(vm) {
                self.lock_files().clear();
            }
        }
    }

    /// Copies of the files, for a successor.
    pub(crate) fn clone_files(&self) -> Vec<File> {
        self.lock_files().iter().filter_map(|file| file.try_clone().ok()).collect()
    }

    fn lock_files(&self) -> std::sync::MutexGuard<'_, Vec<File>> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether a restore runs. If the journal can't be read, the files are kept as long as the VM
/// exists.
fn is_restoring(vm: &VmDir) -> bool {
    match Journal::load(&vm.journal_file()) {
        Ok(journal) => journal.is_some_and(|it| {
            matches!(it.phase, VmPhase::Starting { .. } | VmPhase::Restoring { .. })
        }),
        Err(_) => vm.exists(),
    }
}

/// Receives the files from the guard that started this supervisor: none if standard input is no
/// socket.
pub(crate) fn receive_from_guard() -> Vec<File> {
    let files = receive_files(rustix::stdio::stdin()).unwrap_or_default();
    // The supervisor must not keep the socket open by accident.
    if let Ok(null) = File::open("/dev/null") {
        let _ = rustix::stdio::dup2_stdin(&null);
    }
    files
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write as _;

    #[test]
    fn files_arrive_in_order_however_many_there_are() {
        let (to, from) = UnixStream::pair().unwrap();
        let files: Vec<File> = (0..150)
            .map(|number| {
                let mut file = tempfile::tempfile().unwrap();
                write!(file, "{number}").unwrap();
                file
            })
            .collect();
        send_files(&to, &files).unwrap();
        drop((to, files));
        let received = receive_files(&from).unwrap();
        assert_eq!(received.len(), 150);
        for (number, file) in received.iter().enumerate() {
            let mut text = [0; 3];
            let len = std::os::unix::fs::FileExt::read_at(file, &mut text, 0).unwrap();
            assert_eq!(text[..len], *number.to_string().as_bytes());
        }
    }
}
