//! Clients that violate the protocol get one error, or their connection ends; the server continues.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::process::Command;
use std::sync::Arc;

use firn_disks::LoggedDisk;
use firn_disks::nbd::{NbdExports, NbdServer};

use crate::client::{Client, GO, READ, TRIM, WRITE, ZEROES};
use crate::served::Place;

const SIZE: u64 = 1 << 20;
const EINVAL: u32 = 22;
const ENOSPC: u32 = 28;

fn check(breaks: impl Fn(&Place)) {
    let place = Place::raw(SIZE);
    let _server = place.serve(&place.disk());
    breaks(&place);
    place.io_ok("raw", &["write -P 1 0 4k", "read -P 1 0 4k"]);
}

#[test]
fn garbage_ends_the_connection() {
    check(|place| {
        let mut flags = Client::connect(&place.socket());
        flags.0.write_all(&[255; 4]).unwrap();
        assert!(flags.ended());
        let mut option = Client::connect(&place.socket());
        option.0.write_all(&[0, 0, 0, 3]).unwrap();
        option.0.write_all(&[255; 16]).unwrap();
        assert!(option.ended());
        let mut request = Client::ready(&place.socket());
        request.0.write_all(&[255; 28]).unwrap();
        assert!(request.ended());
    });
}

#[test]
fn huge_and_endless_options_end_the_connection() {
    check(|place| {
        let mut huge = Client::connect(&place.socket());
        huge.0.write_all(&[0, 0, 0, 3]).unwrap();
        huge.option(GO, b"", Some(u32::MAX));
        assert!(huge.ended());
        let mut endless = Client::connect(&place.socket());
        endless.0.write_all(&[0, 0, 0, 3]).unwrap();
        for _ in 0..64 {
            endless.option(99, b"", None);
            assert_eq!(endless.option_reply().0, 1 << 31 | 1);
        }
        assert!(endless.ended());
    });
}

#[test]
fn wrong_requests_have_an_error_and_the_next_one_is_served() {
    check(|place| {
        let mut client = Client::ready(&place.socket());
        for (command, flags, at, length, error) in [
            (READ, 0, SIZE, 1, EINVAL),
            (READ, 0, u64::MAX, 4096, EINVAL),
            (READ, 0, 0, u32::MAX, EINVAL),
            (READ, 2, 0, 1, EINVAL),
            (TRIM, 0, SIZE - 1, 2, EINVAL),
            (ZEROES, 0, SIZE - 1, u32::MAX, ENOSPC),
            (ZEROES, 16, 0, 1, EINVAL),
            (77, 0, 0, 0, EINVAL),
            (ZEROES, 0, 0, 0, 0),
        ] {
            client.request(command, flags, at, length, b"");
            assert_eq!(client.reply(at), error, "{command} {flags} {at} {length}");
        }
        client.request(WRITE, 0, SIZE - 2, 4, b"abcd");
        assert_eq!(client.reply(SIZE - 2), ENOSPC, "and its data is passed over");
        let long = vec![1; (4 << 20) + 1];
        client.request(WRITE, 0, 0, long.len() as u32, &long);
        assert_eq!(client.reply(0), EINVAL);
        client.request(READ, 0, SIZE - 2, 2, b"");
        assert_eq!((client.reply(SIZE - 2), client.take(2)), (0, vec![0; 2]));
    });
}

#[test]
fn a_client_may_go_in_the_middle_of_anything() {
    check(|place| {
        drop(Client::connect(&place.socket()));
        let mut option = Client::connect(&place.socket());
        option.0.write_all(&[0, 0, 0, 3]).unwrap();
        option.option(GO, b"\0\0", Some(100));
        drop(option);
        let mut request = Client::ready(&place.socket());
        request.0.write_all(&[0x25, 0x60]).unwrap();
        drop(request);
        let mut data = Client::ready(&place.socket());
        data.request(WRITE, 0, 0, 1 << 20, b"only this");
        data.0.shutdown(Shutdown::Write).unwrap();
        assert!(data.ended());
        let mut reads = Client::ready(&place.socket());
        (0..16).for_each(|_| reads.request(READ, 0, 0, SIZE as u32, b""));
        drop(reads);
        assert!(place.bytes().iter().all(|&byte| byte == 0), "half a write is none");
    });
}

/// Large replies that a client does not read are made one at a time for each client.
#[test]
fn clients_that_do_not_read_take_little_memory() {
    let place = Place::raw(8 << 20);
    let served = place.child(None);
    let ask = |_| {
        let mut client = Client::ready(&place.socket());
        (0..4).for_each(|at| client.request(READ, 0, at, 4 << 20, b""));
        client
    };
    let all: Vec<_> = (0..16).map(ask).collect();
    // Until it stops.
    let mut before = 0;
    while before < served.memory_kib() {
        before = served.memory_kib();
        std::thread::sleep(std::time::Duration::from_secs(1));
    }
    assert!(before < 128 << 10, "{before} KiB");
    drop(all);
}

#[test]
fn more_clients_than_there_may_be_are_turned_away() {
    check(|place| {
        let mut all: Vec<_> = (0..32).map(|_| Client::ready(&place.socket())).collect();
        let one_more = std::os::unix::net::UnixStream::connect(place.socket()).unwrap();
        assert!(Client(one_more).ended());
        all[0].request(READ, 0, 0, 4, b"");
        assert_eq!(all[0].reply(0), 0);
        drop(all);
        // The server forgets them one by one.
        while std::os::unix::net::UnixStream::connect(place.socket())
            .map(|stream| Client(stream).ended_at_once())
            .unwrap()
        {}
    });
}

impl Client {
    /// Without having been greeted.
    fn ended_at_once(mut self) -> bool {
        std::io::Read::read(&mut self.0, &mut [0; 18]).map_or(true, |count| count == 0)
    }
}

/// A server for one process accepts no other.
#[test]
fn only_the_process_that_a_server_is_for_may_connect() {
    let exports: NbdExports =
        [("d".to_owned(), Arc::new(LoggedDisk::new_mirrored(1 << 20)))].into_iter().collect();
    let mut other = Command::new("sleep").arg("60").spawn().unwrap();
    for (pid, is_accepted) in [(std::process::id(), true), (other.id(), false)] {
        let (_server, name) = NbdServer::start_for_process(pid as i32, exports.clone()).unwrap();
        let address = SocketAddr::from_abstract_name(&name).unwrap();
        let mut client = UnixStream::connect_addr(&address).unwrap();
        let mut greeting = [0; 18];
        assert_eq!(client.read_exact(&mut greeting).is_ok(), is_accepted);
    }
    other.kill().unwrap();
    other.wait().unwrap();
}
