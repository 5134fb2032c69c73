//! The unix sockets of this host, as the kernel lists them (sock_diag(7)): the file, state and peer
//! of each.
//!
//! ```text
//!   listener     /run/web.qmp  LISTEN       inode 11
//!   accepted     /run/web.qmp  ESTABLISHED  inode 12  peer 13      in QEMU
//!   its client                 ESTABLISHED  inode 13  peer 12      in the process that is connected
//! ```
//!
//! A connection that is not accepted yet is not listed. The list contains the sockets of this
//! process's network namespace.
//!
//! Source: Linux `include/uapi/linux/unix_diag.h`, `include/uapi/linux/netlink.h`.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::net::netlink::{SOCK_DIAG, SocketAddrNetlink};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

const SOCK_DIAG_BY_FAMILY: u16 = 20;
/// `NLM_F_REQUEST | NLM_F_DUMP`
const DUMP: u16 = 0x301;
const ERROR: u16 = 2;
const DONE: u16 = 3;
/// `UDIAG_SHOW_NAME | UDIAG_SHOW_VFS | UDIAG_SHOW_PEER`
const SHOW_NAME_VFS_PEER: u32 = 1 | 2 | 4;
const NAME: u16 = 0;
const FILE: u16 = 1;
const PEER: u16 = 2;
const LISTENING: u8 = 10;
const ESTABLISHED: u8 = 1;

/// Bytes of a netlink header and of a `unix_diag_msg`: both 16.
const HEADER: usize = 16;
/// Bytes of the header of an attribute.
const ATTRIBUTE: usize = 4;
/// More than the size of one answer of the kernel.
const ANSWER_BYTES: usize = 64 << 10;

/// A unix socket of a process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct UnixSocket {
    /// Its inode, as in `/proc/PID/fd`: `socket:[INODE]`.
    pub(crate) inode: u32,
    /// The inode of the socket that it is connected to.
    pub(crate) peer: Option<u32>,
    state: u8,
    /// The path that it was bound to, as the process gave it.
    path: Option<PathBuf>,
    /// The device and the inode of its file in the kernel, the inode shortened.
    file: Option<(u32, u32)>,
}

impl UnixSocket {
    /// Whether it accepts connections.
    pub(crate) fn is_listening(&self) -> bool {
        self.state == LISTENING
    }

    /// Whether the file at this path is the socket's own, or that of the socket that has accepted
    /// it.
    ///
    /// File systems with subvolumes report another device than the kernel: there the name decides.
    fn has_file(&self, path: &Path, (device, inode): (u32, u32)) -> bool {
        let Some(file) = self.file.filter(|file| file.1 == inode) else { return false };
        let named = |own: &PathBuf| own.file_name() == path.file_name();
        file.0 == device || self.path.as_ref().is_some_and(named)
    }
}

/// The listening sockets of a socket file, and the inodes of the clients that are connected to it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct SocketUsers {
    pub(crate) listeners: Vec<u32>,
    pub(crate) clients: Vec<u32>,
}

/// Finds the sockets at a socket file. There are none for a file that does not exist.
pub(crate) fn find_users(path: &Path) -> io::Result<SocketUsers> {
    let Ok(file) = path.metadata() else { return Ok(SocketUsers::default()) };
    let device = rustix::fs::major(file.dev()) << 20 | rustix::fs::minor(file.dev());
    let file = (device, file.ino() as u32);
    let found: Vec<_> = list_sockets()?.into_iter().filter(|it| it.has_file(path, file)).collect();
    let listeners = found.iter().filter(|it| it.is_listening()).map(|it| it.inode);
    let accepted = found.iter().filter(|it| it.state == ESTABLISHED);
    let clients = accepted.filter_map(|it| it.peer).filter(|&peer| peer != 0);
    Ok(SocketUsers { listeners: listeners.collect(), clients: clients.collect() })
}

/// Lists all unix sockets of this network namespace.
pub(crate) fn list_sockets() -> io::Result<Vec<UnixSocket>> {
    let (family, kind) = (AddressFamily::NETLINK, SocketType::RAW);
    let netlink = rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, Some(SOCK_DIAG))?;
    let kernel = SocketAddrNetlink::new(0, 0);
    rustix::net::sendto(&netlink, &dump_request(), SendFlags::empty(), &kernel)?;
    read_sockets(&netlink)
}

/// The dump request: a `nlmsghdr`, then a `unix_diag_req` for all states.
fn dump_request() -> Vec<u8> {
    let wanted = [u32::from(AddressFamily::UNIX.as_raw()), u32::MAX, 0, SHOW_NAME_VFS_PEER, 0, 0];
    let len = (HEADER + size_of_val(&wanted)) as u32;
    let mut bytes = len.to_ne_bytes().to_vec();
    bytes.extend(SOCK_DIAG_BY_FAMILY.to_ne_bytes());
    bytes.extend(DUMP.to_ne_bytes());
    bytes.extend([0; 8]);
    bytes.extend(wanted.iter().flat_map(|word| word.to_ne_bytes()));
    bytes
}

fn read_sockets(netlink: &OwnedFd) -> io::Result<Vec<UnixSocket>> {
    let mut sockets = Vec::new();
    let mut room = vec![0; ANSWER_BYTES];
    loop {
        let (len, _) = rustix::net::recv(netlink, room.as_mut_slice(), RecvFlags::empty())?;
        if len == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        for (kind, body) in parse_messages(&room[..len]) {
            match kind {
                DONE => return Ok(sockets),
                ERROR => return Err(kernel_error(body)),
                _ => sockets.extend(parse_socket(body)),
            }
        }
    }
}

/// The error in an answer, where the kernel has its negated number.
fn kernel_error(body: &[u8]) -> io::Error {
    let code = read_u32(body, 0).map_or(0, |code| (code as i32).saturating_neg());
    io::Error::from_raw_os_error(code)
}

/// The types and bodies of the messages of an answer.
fn parse_messages(bytes: &[u8]) -> Vec<(u16, &[u8])> {
    split_records(bytes, HEADER, |rest| Some((read_u32(rest, 0)? as usize, read_u16(rest, 4)?)))
}

/// Parses a `unix_diag_msg` and its attributes.
fn parse_socket(body: &[u8]) -> Option<UnixSocket> {
    let (state, inode) = (*body.get(2)?, read_u32(body, 4)?);
    let mut socket = UnixSocket { state, inode, ..UnixSocket::default() };
    let length = |rest: &[u8]| Some((usize::from(read_u16(rest, 0)?), read_u16(rest, 2)?));
    for (kind, value) in split_records(body.get(HEADER..)?, ATTRIBUTE, length) {
        match kind {
            NAME => socket.path = parse_path(value),
            FILE => socket.file = Some((read_u32(value, 4)?, read_u32(value, 0)?)),
            PEER => socket.peer = read_u32(value, 0),
            _ => {}
        }
    }
    Some(socket)
}

/// Parses a name; `None` if it is not that of a file.
fn parse_path(name: &[u8]) -> Option<PathBuf> {
    use std::os::unix::ffi::OsStrExt as _;
    let name = name.split(|&byte| byte == 0).next().filter(|name| !name.is_empty())?;
    Some(PathBuf::from(std::ffi::OsStr::from_bytes(name)))
}

/// Splits records, each of which begins with its length, header included, and is padded to four
/// bytes. `read` returns length and type.
fn split_records(
    mut rest: &[u8],
    header: usize,
    read: impl Fn(&[u8]) -> Option<(usize, u16)>,
) -> Vec<(u16, &[u8])> {
    let mut found = Vec::new();
    while let Some((len, kind)) = read(rest) {
        let Some(body) = rest.get(header..len) else { break };
        found.push((kind, body));
        rest = rest.get(len.next_multiple_of(4)..).unwrap_or_default();
    }
    found
}

fn read_u32(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn read_u16(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::{UnixListener, UnixStream};

    fn inode(socket: &impl std::os::fd::AsFd) -> u32 {
        rustix::fs::fstat(socket).unwrap().st_ino as u32
    }

    #[test]
    fn a_socket_file_has_its_listener_and_its_clients() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("monitor");
        assert_eq!(find_users(&path).unwrap(), SocketUsers::default());
        let listener = UnixListener::bind(&path).unwrap();
        let waiting = UnixStream::connect(&path).unwrap();
        let only = SocketUsers { listeners: vec![inode(&listener)], clients: Vec::new() };
        assert_eq!(find_users(&path).unwrap(), only);
        let (_accepted, _) = listener.accept().unwrap();
        assert_eq!(
            find_users(&path).unwrap(),
            SocketUsers { clients: vec![inode(&waiting)], ..only }
        );
    }

    #[test]
    fn another_socket_that_took_over_the_path_is_another() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("monitor");
        let _first = UnixListener::bind(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let second = UnixListener::bind(&path).unwrap();
        assert_eq!(find_users(&path).unwrap().listeners, [inode(&second)]);
    }

    #[test]
    fn truncated_answers_are_read_up_to_their_end() {
        assert_eq!(parse_messages(&[]), []);
        assert_eq!(parse_messages(&[200, 0, 0, 0, 20, 0, 0, 0]), []);
        assert_eq!(parse_socket(&[0; 7]), None);
        assert_eq!(parse_messages(&[0; 64]), []);
    }
}
