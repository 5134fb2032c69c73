//! A daemon that answers as a test has written down.

use std::io::Read as _;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};

use crate::message::{MONITOR_EVENT, Procedure};
use crate::xdr::{XdrReader, XdrWriter};

/// The daemon's end of a connection.
pub(crate) struct TestDaemon(pub(crate) UnixStream);

/// A call that the daemon has received.
pub(crate) struct ReceivedCall {
    pub(crate) procedure: i32,
    pub(crate) serial: u32,
    pub(crate) payload: Vec<u8>,
    pub(crate) fds: Vec<OwnedFd>,
}

impl TestDaemon {
    pub(crate) fn read_call(&mut self) -> ReceivedCall {
        let mut length = [0; 4];
        self.0.read_exact(&mut length).unwrap();
        let mut call = vec![0; u32::from_be_bytes(length) as usize - 4];
        self.0.read_exact(&mut call).unwrap();
        let mut reader = XdrReader(&call);
        let numbers: Vec<u32> = (0..6).map(|_| reader.number().unwrap()).collect();
        let fds = if numbers[3] == 4 { reader.number().unwrap() } else { 0 };
        let payload = reader.0.to_vec();
        let fds = (0..fds).map(|_| self.read_fd()).collect();
        ReceivedCall { procedure: numbers[2] as i32, serial: numbers[4], payload, fds }
    }

    fn read_fd(&self) -> OwnedFd {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut byte = [0];
        let mut parts = [std::io::IoSliceMut::new(&mut byte)];
        rustix::net::recvmsg(&self.0, &mut parts, &mut control, RecvFlags::empty()).unwrap();
        let message = control.drain().next().unwrap();
        let RecvAncillaryMessage::ScmRights(mut fds) = message else { panic!("no descriptor") };
        fds.next().unwrap()
    }

    /// Expects a call of this procedure, and replies to it.
    pub(crate) fn answer(&mut self, procedure: Procedure, payload: XdrWriter) -> ReceivedCall {
        let call = self.read_call();
        assert_eq!(call.procedure, procedure.number, "{}", procedure.name);
        self.send(procedure.program, procedure.number, (1, call.serial, 0), &payload.0);
        call
    }

    pub(crate) fn refuse(&mut self, procedure: Procedure, serial: u32, code: i32, text: &str) {
        let payload = XdrWriter::default().signed(code).signed(10).optional_string(Some(text));
        self.send(procedure.program, procedure.number, (1, serial, 1), &payload.0);
    }

    pub(crate) fn send_event(&mut self, name: &str, details: Option<&str>) {
        let event =
            XdrWriter::default().signed(1).string("web").uuid(&[7; 16]).signed(1).string(name);
        let event = event.number(0).number(1700).number(20).optional_string(details);
        self.send(MONITOR_EVENT.program, MONITOR_EVENT.number, (2, 0, 0), &event.0);
    }

    fn send(&mut self, program: u32, number: i32, kind: (u32, u32, u32), payload: &[u8]) {
        let message = XdrWriter::default().number(28 + payload.len() as u32).number(program);
        let message = message.number(1).signed(number).number(kind.0).number(kind.1).number(kind.2);
        let mut message = message.0;
        message.extend(payload);
        std::io::Write::write_all(&mut self.0, &message).unwrap();
    }
}
