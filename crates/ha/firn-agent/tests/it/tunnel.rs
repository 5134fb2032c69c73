//! Streams between hosts: they arrive complete, no faster than they are read, and end as on one
//! host.

use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::{Duration, Instant};

use sha2::{Digest, Sha256};

use crate::host::{eventually, name, pair, protected};

/// Bytes that don't repeat.
struct Noise(u64);

impl Noise {
    fn next(&mut self, into: &mut [u8]) {
        for bytes in into.chunks_mut(8) {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            bytes.copy_from_slice(&(self.0 ^ (self.0 >> 29)).to_le_bytes()[..bytes.len()]);
        }
    }
}

fn send(mut to: UnixStream, mut noise: Noise, bytes: usize) -> Vec<u8> {
    let (mut sum, mut piece) = (Sha256::new(), vec![0; 65_536]);
    for _ in 0..bytes / piece.len() {
        noise.next(&mut piece);
        sum.update(&piece);
        to.write_all(&piece).unwrap();
    }
    to.shutdown(Shutdown::Write).unwrap();
    sum.finalize().to_vec()
}

fn receive(mut from: UnixStream) -> (usize, Vec<u8>) {
    let (mut sum, mut piece, mut bytes) = (Sha256::new(), vec![0; 100_000], 0);
    loop {
        match from.read(&mut piece).unwrap() {
            0 => return (bytes, sum.finalize().to_vec()),
            count => {
                sum.update(&piece[..count]);
                bytes += count;
            }
        }
    }
}

#[test]
fn bytes_are_relayed_in_both_directions() {
    const BYTES: usize = 100 << 20;
    let [a, b] = pair();
    let [primary, standby] = protected(&a, &b);
    let since = Instant::now();
    let [copy, back] = [&primary, &standby].map(|end| end.try_clone().unwrap());
    let forth = thread::spawn(move || send(primary, Noise(1), BYTES));
    let answers = thread::spawn(move || send(back, Noise(2), BYTES / 4));
    let heard = thread::spawn(move || receive(copy));
    assert_eq!(receive(standby), (BYTES, forth.join().unwrap()));
    assert_eq!(heard.join().unwrap(), (BYTES / 4, answers.join().unwrap()));
    eprintln!("100 MiB there, 25 MiB back: {:?}", since.elapsed());
    eventually("nothing is carried", || a.cluster().vms.iter().all(|vm| vm.backup.is_none()));
}

/// Writes until nothing is accepted for a while.
fn fill(to: &mut UnixStream, noise: &mut Noise, sum: &mut Sha256, most: usize) -> usize {
    to.set_write_timeout(Some(Duration::from_secs(1))).unwrap();
    let (mut piece, mut bytes) = (vec![0; 65_536], 0);
    while bytes < most {
        noise.next(&mut piece);
        let mut rest = &piece[..];
        while !rest.is_empty() {
            match to.write(rest) {
                Ok(count) => {
                    sum.update(&rest[..count]);
                    (rest, bytes) = (&rest[count..], bytes + count);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return bytes,
                Err(error) => panic!("{error}"),
            }
        }
    }
    bytes
}

#[test]
fn nothing_is_taken_that_is_not_taken_at_the_other_end() {
    const MUCH: usize = 256 << 20;
    let [a, b] = pair();
    let [mut primary, standby] = protected(&a, &b);
    let (mut noise, mut sum) = (Noise(3), Sha256::new());
    let bytes = fill(&mut primary, &mut noise, &mut sum, MUCH);
    eprintln!("{} KiB wait on the way", bytes >> 10);
    // Most of it is in the kernel's TCP buffers: tcp_wmem and tcp_rmem.
    assert!(bytes < 64 << 20, "{bytes} bytes were taken that nobody had read");
    // And heartbeats are not delayed by it.
    assert!(a.peer("b").round_trip_ms.unwrap() < 2000.0);
    let reader = thread::spawn(move || receive(standby));
    primary.shutdown(Shutdown::Write).unwrap();
    assert_eq!(reader.join().unwrap(), (bytes, sum.finalize().to_vec()));
}

#[test]
fn an_end_of_one_direction_leaves_the_other() {
    let [a, b] = pair();
    let [mut primary, mut standby] = protected(&a, &b);
    primary.write_all(b"all").unwrap();
    primary.shutdown(Shutdown::Write).unwrap();
    let mut said = String::new();
    standby.read_to_string(&mut said).unwrap();
    assert_eq!(said, "all");
    // After that, and a while later.
    for word in ["still", "here"] {
        standby.write_all(word.as_bytes()).unwrap();
        let mut heard = vec![0; word.len()];
        primary.read_exact(&mut heard).unwrap();
        assert_eq!(heard, word.as_bytes());
    }
    drop(standby);
    assert_eq!(primary.read(&mut [0]).unwrap(), 0);
}

/// A standby that accepts no more bytes sends the reason, and ends: its primary receives that while
/// it is still sending.
#[test]
fn the_last_message_arrives_on_a_busy_stream() {
    let [a, b] = pair();
    let words = vec![7; 300_000];
    for _ in 0..10 {
        let [mut primary, mut standby] = protected(&a, &b);
        let mut to = primary.try_clone().unwrap();
        let busy = thread::spawn(move || while to.write_all(&[1; 65_536]).is_ok() {});
        standby.read_exact(&mut vec![0; 1 << 20]).unwrap();
        standby.write_all(&words).unwrap();
        drop(standby);
        let mut heard = Vec::new();
        // It ends. Because the standby left much unread, that may be an error.
        let _ = primary.read_to_end(&mut heard);
        assert_eq!((heard.len(), heard == words), (words.len(), true));
        primary.shutdown(Shutdown::Both).unwrap();
        busy.join().unwrap();
    }
}

/// A standby that reads no more still sends.
#[test]
fn a_half_closed_stream_still_sends() {
    let [a, b] = pair();
    let [mut primary, mut standby] = protected(&a, &b);
    standby.shutdown(Shutdown::Read).unwrap();
    for _ in 0..100 {
        primary.write_all(&[1; 10_000]).unwrap();
    }
    standby.write_all(b"the VM is about to run here").unwrap();
    drop(standby);
    let mut heard = String::new();
    let _ = primary.read_to_string(&mut heard);
    assert_eq!(heard, "the VM is about to run here");
}

/// The last bytes of a primary that died reach its standby, though the standby is slow, and has
/// sent answers that no process read.
#[test]
fn bytes_in_flight_arrive_after_the_primary_died() {
    let [a, b] = pair();
    for round in 0..4 {
        let [mut primary, standby] = protected(&a, &b);
        let (mut noise, mut sum) = (Noise(round), Sha256::new());
        let mut answers = standby.try_clone().unwrap();
        answers.write_all(&[1; 1000]).unwrap();
        let bytes = fill(&mut primary, &mut noise, &mut sum, 64 << 20);
        drop(primary);
        let answering = thread::spawn(move || {
            // As the standby answers each epoch.
            while answers.write_all(&[1; 1000]).is_ok() {
                thread::sleep(Duration::from_millis(1));
            }
        });
        thread::sleep(Duration::from_millis(300));
        let copy = standby.try_clone().unwrap();
        assert_eq!(receive(standby), (bytes, sum.finalize().to_vec()));
        copy.shutdown(Shutdown::Both).unwrap();
        answering.join().unwrap();
    }
}

/// The stream ends, with or without an error: no more bytes arrive.
fn ends(end: &mut UnixStream) -> Duration {
    let since = Instant::now();
    match end.read(&mut [0]) {
        Ok(count) => assert_eq!(count, 0),
        Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{error}"),
    }
    since.elapsed()
}

#[test]
fn a_supervisor_that_dies_ends_the_stream_at_the_other_end() {
    let [a, b] = pair();
    let [primary, mut standby] = protected(&a, &b);
    drop(primary);
    eprintln!("the standby knows after {:?}", ends(&mut standby));
    let [mut primary, standby] = protected(&a, &b);
    primary.write_all(&[0; 1000]).unwrap();
    drop(standby);
    eprintln!("the primary knows after {:?}", ends(&mut primary));
}

/// A standby keeps its end open for as long as it waits to be run: the primary's agent does not
/// wait for that.
#[test]
fn a_primary_that_goes_is_carried_no_more_though_its_standby_stays() {
    let [a, b] = pair();
    let [mut primary, mut standby] = protected(&a, &b);
    let is_carried = || a.cluster().vms.iter().any(|vm| vm.backup.is_some());
    eventually("it is carried", &is_carried);
    primary.write_all(&[1; 100_000]).unwrap();
    drop(primary);
    let mut bytes = Vec::new();
    standby.read_to_end(&mut bytes).unwrap();
    assert_eq!(bytes.len(), 100_000, "what was said before is heard");
    eventually("it is over", || !is_carried());
    drop(standby);
    // While that lasts, it may be protected again.
    let [primary, standby] = protected(&a, &b);
    eventually("it is carried", &is_carried);
    drop(primary);
    let _ends = protected(&a, &b);
    drop(standby);
    thread::sleep(Duration::from_millis(300));
    assert!(is_carried(), "the end of the last one is none of the next");
}

#[test]
fn an_agent_that_dies_ends_the_stream_at_both_ends() {
    for dies in [0, 1] {
        let mut hosts = pair();
        let [mut primary, mut standby] = protected(&hosts[0], &hosts[1]);
        hosts[dies].kill();
        let took = [ends(&mut primary), ends(&mut standby)];
        eprintln!("agent {dies} died: the ends know after {took:?}");
    }
}

#[test]
fn it_is_known_whom_a_vm_is_protected_by() {
    let [a, b] = pair();
    let _ends = protected(&a, &b);
    eventually("it is known", || a.cluster().vms.iter().any(|vm| vm.backup == Some(name("b"))));
    // Each end gets the identity of the other.
    let hosts: Vec<String> = a.cluster().vms.iter().map(|vm| vm.host.to_string()).collect();
    assert_eq!(hosts, ["a", "b"]);
}

#[test]
fn the_reason_for_a_missing_standby_is_returned() {
    let [a, mut b] = pair();
    let failure = a.protect("refused", "b").unwrap_err();
    assert!(
        failure.to_string().contains("asking host b for a standby: there is a VM called that"),
        "{failure}"
    );
    assert_eq!(failure.kind, firn_supervisor::FailureKind::Busy);
    // It may be the only copy of the VM.
    let failure = a.protect("kept", "b").unwrap_err();
    assert!(failure.to_string().contains("which may be made to run"), "{failure}");
    let failure = a.protect("web", "c").unwrap_err();
    assert_eq!(failure.hint.as_deref(), Some("its peers are b"));
    b.kill();
    let failure = a.protect("web", "b").unwrap_err();
    assert!(failure.to_string().contains("connecting to host b at 127.0.0.1"), "{failure}");
    // And it can be tried again.
    assert_eq!(a.protect("web", "b").unwrap_err().kind, failure.kind);
}
