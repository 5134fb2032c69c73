//! Open files that one process sends to another over a socket: `SCM_RIGHTS` of `unix(7)`.

use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

/// Descriptors in one message; the kernel accepts at most 253 (unix(7)).
const FILES_PER_MESSAGE: usize = 64;

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

/// Receives one message of descriptors; `None` if the other end is closed.
pub(crate) fn receive_once(from: &impl AsFd) -> io::Result<Option<Vec<OwnedFd>>> {
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
