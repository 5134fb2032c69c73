//! Peer group: processes that compute together. Each two have a TCP connection.
//!
//! ```text
//!   rank r listens at its own address, connects to all lower ranks, and sends its rank (4 bytes)
//!   a message: length (4 bytes), then this count of bytes: words of 8 in sums, of 4 in parcels; little-endian
//! ```
//!
//! Rank 0 computes sums and sends them to all, always in the order of ranks: floats give the same
//! result each time. An exchange has steps: in step s each process sends to the process s ranks
//! higher and receives from the process s ranks lower (modulo the count of processes).

use std::io::{self, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use thiserror::Error;

/// The maximum time that other processes may take to start.
const START_TIMEOUT: Duration = Duration::from_secs(120);

/// Why the group of processes cannot communicate.
#[derive(Debug, Error)]
pub enum PeersError {
    /// Another process cannot be reached, or its connection is lost.
    #[error("cannot communicate with process {rank}")]
    Gone {
        /// The process.
        rank: usize,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// This process cannot listen at its own address.
    #[error("cannot listen at {address}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// There is no such process.
    #[error("there are {size} processes, and none of rank {rank}")]
    Rank {
        /// The rank.
        rank: usize,
        /// The count of processes.
        size: usize,
    },
}

/// The communication that the benchmarks need.
pub trait Communicator {
    /// This process's rank, from 0.
    fn rank(&self) -> usize;
    /// The count of processes.
    fn size(&self) -> usize;
    /// Replaces numbers by their sums over all processes.
    ///
    /// # Errors
    /// If the connection to one is lost.
    fn sum_numbers(&mut self, numbers: &mut [u64]) -> Result<(), PeersError>;
    /// The same with floats as well, in the same messages.
    ///
    /// # Errors
    /// If the connection to one is lost.
    fn sum_both(&mut self, floats: &mut [f64], numbers: &mut [u64]) -> Result<(), PeersError>;
    /// Sends a parcel to each process, and returns the received ones, by rank.
    ///
    /// # Errors
    /// If the connection to one is lost.
    fn exchange_parcels(&mut self, parcels: Vec<Vec<u32>>) -> Result<Vec<Vec<u32>>, PeersError>;
}

/// A group of one process.
#[derive(Clone, Copy, Debug)]
pub struct SingleProcess;

impl Communicator for SingleProcess {
    fn rank(&self) -> usize {
        0
    }

    fn size(&self) -> usize {
        1
    }

    fn sum_numbers(&mut self, _: &mut [u64]) -> Result<(), PeersError> {
        Ok(())
    }

    fn sum_both(&mut self, _: &mut [f64], _: &mut [u64]) -> Result<(), PeersError> {
        Ok(())
    }

    fn exchange_parcels(&mut self, parcels: Vec<Vec<u32>>) -> Result<Vec<Vec<u32>>, PeersError> {
        Ok(parcels)
    }
}

/// A group of processes at addresses.
#[derive(Debug)]
pub struct PeerGroup {
    rank: usize,
    /// Connections by rank; none to itself.
    connections: Vec<Option<TcpStream>>,
}

impl PeerGroup {
    /// Connects to the processes at these addresses, one for each rank.
    ///
    /// # Errors
    /// If one of them does not start within two minutes.
    pub fn connect_all(rank: usize, addresses: &[SocketAddr]) -> Result<Self, PeersError> {
        let size = addresses.len();
        let own = *addresses.get(rank).ok_or(PeersError::Rank { rank, size })?;
        let listen = |source| PeersError::Listen { address: own, source };
        let listener = TcpListener::bind(own).map_err(listen)?;
        let mut peers = Self { rank, connections: addresses.iter().map(|_| None).collect() };
        for (lower, address) in addresses[..rank].iter().enumerate() {
            let line = connect_to(*address, rank).map_err(connection_lost(lower))?;
            peers.connections[lower] = Some(line);
        }
        for _ in rank + 1..size {
            let (higher, line) = accept_peer(&listener).map_err(listen)?;
            match peers.connections.get_mut(higher).filter(|_| higher > rank) {
                Some(slot) => *slot = Some(line),
                None => return Err(PeersError::Rank { rank: higher, size }),
            }
        }
        Ok(peers)
    }

    fn connection(&self, rank: usize) -> Result<&TcpStream, PeersError> {
        let none = || connection_lost(rank)(io::ErrorKind::NotConnected.into());
        self.connections.get(rank).and_then(Option::as_ref).ok_or_else(none)
    }

    fn send_words(
        &self,
        to: usize,
        words: impl Iterator<Item: AsRef<[u8]>>,
    ) -> Result<(), PeersError> {
        let mut message = vec![0; 4];
        words.for_each(|word| message.extend_from_slice(word.as_ref()));
        let length = (message.len() - 4) as u32;
        message[..4].copy_from_slice(&length.to_le_bytes());
        self.connection(to)?.write_all(&message).map_err(connection_lost(to))
    }

    fn receive_words<T, const BYTES: usize>(
        &self,
        from: usize,
        word: fn([u8; BYTES]) -> T,
    ) -> Result<Vec<T>, PeersError> {
        let mut line = self.connection(from)?;
        let mut length = [0; 4];
        line.read_exact(&mut length).map_err(connection_lost(from))?;
        let mut bytes = vec![0; u32::from_le_bytes(length) as usize];
        line.read_exact(&mut bytes).map_err(connection_lost(from))?;
        let words = bytes.chunks_exact(BYTES).filter_map(|bytes| bytes.try_into().ok());
        Ok(words.map(word).collect())
    }

    fn send_numbers(&self, to: usize, numbers: &[u64]) -> Result<(), PeersError> {
        self.send_words(to, numbers.iter().map(|number| number.to_le_bytes()))
    }

    fn receive_numbers(&self, from: usize) -> Result<Vec<u64>, PeersError> {
        self.receive_words(from, u64::from_le_bytes)
    }

    /// Combines the values of all processes at rank 0, and sends the result to all.
    fn reduce_all(
        &self,
        own: Vec<u64>,
        mut add: impl FnMut(&mut [u64], &[u64]),
    ) -> Result<Vec<u64>, PeersError> {
        if self.rank > 0 {
            self.send_numbers(0, &own)?;
            return self.receive_numbers(0);
        }
        let mut all = own;
        for rank in 1..self.size() {
            add(&mut all, &self.receive_numbers(rank)?);
        }
        (1..self.size()).try_for_each(|rank| self.send_numbers(rank, &all))?;
        Ok(all)
    }
}

fn connection_lost(rank: usize) -> impl Fn(io::Error) -> PeersError {
    move |source| PeersError::Gone { rank, source }
}

fn connect_to(address: SocketAddr, rank: usize) -> io::Result<TcpStream> {
    let since = Instant::now();
    let mut line = loop {
        match TcpStream::connect(address) {
            Ok(line) => break line,
            Err(error) if since.elapsed() > START_TIMEOUT => return Err(error),
            Err(_) => thread::sleep(Duration::from_millis(100)),
        }
    };
    line.set_nodelay(true)?;
    line.write_all(&(rank as u32).to_le_bytes())?;
    Ok(line)
}

fn accept_peer(listener: &TcpListener) -> io::Result<(usize, TcpStream)> {
    let (mut line, _) = listener.accept()?;
    line.set_nodelay(true)?;
    let mut rank = [0; 4];
    line.read_exact(&mut rank)?;
    Ok((u32::from_le_bytes(rank) as usize, line))
}

impl Communicator for PeerGroup {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.connections.len()
    }

    fn sum_numbers(&mut self, numbers: &mut [u64]) -> Result<(), PeersError> {
        self.sum_both(&mut [], numbers)
    }

    fn sum_both(&mut self, floats: &mut [f64], numbers: &mut [u64]) -> Result<(), PeersError> {
        let own = floats.iter().map(|float| float.to_bits()).chain(numbers.iter().copied());
        let split = floats.len();
        let add = |all: &mut [u64], other: &[u64]| {
            for (index, (all, other)) in all.iter_mut().zip(other).enumerate() {
                *all = match index < split {
                    true => (f64::from_bits(*all) + f64::from_bits(*other)).to_bits(),
                    false => all.wrapping_add(*other),
                };
            }
        };
        let all = self.reduce_all(own.collect(), add)?;
        floats.iter_mut().zip(&all).for_each(|(float, all)| *float = f64::from_bits(*all));
        numbers.iter_mut().zip(all.iter().skip(split)).for_each(|(number, all)| *number = *all);
        Ok(())
    }

    fn exchange_parcels(
        &mut self,
        mut parcels: Vec<Vec<u32>>,
    ) -> Result<Vec<Vec<u32>>, PeersError> {
        let (rank, size) = (self.rank, self.size());
        let mut come = vec![Vec::new(); size];
        come[rank] = std::mem::take(&mut parcels[rank]);
        for step in 1..size {
            let (to, from) = ((rank + step) % size, (rank + size - step) % size);
            let (this, parcel) = (&*self, &parcels[to]);
            let (sent, received) = thread::scope(|scope| {
                let words = parcel.iter().map(|word| word.to_le_bytes());
                let sent = scope.spawn(move || this.send_words(to, words));
                let received = this.receive_words(from, u32::from_le_bytes);
                (sent.join(), received)
            });
            sent.unwrap_or_else(|_| Err(connection_lost(to)(io::ErrorKind::Other.into())))?;
            come[from] = received?;
        }
        Ok(come)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Runs work among so many processes, here threads, and gives what each gave.
    pub(crate) fn among<T: Send>(size: usize, work: impl Fn(PeerGroup) -> T + Sync) -> Vec<T> {
        // Ports that are free now.
        let listeners: Vec<_> =
            (0..size).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
        let addresses: Vec<_> = listeners.iter().map(|it| it.local_addr().unwrap()).collect();
        drop(listeners);
        let (work, addresses) = (&work, &addresses);
        thread::scope(|scope| {
            let run =
                |rank| scope.spawn(move || work(PeerGroup::connect_all(rank, addresses).unwrap()));
            let running: Vec<_> = (0..size).map(run).collect();
            running.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    #[test]
    fn all_get_the_sums_and_each_its_parcels() {
        let came = among(4, |mut peers| {
            let rank = peers.rank() as u64;
            let (mut numbers, mut floats) = ([rank, 10], [0.5 * rank as f64]);
            peers.sum_both(&mut floats, &mut numbers).unwrap();
            assert_eq!((numbers, floats), ([6, 40], [3.0]));
            peers.sum_numbers(&mut numbers).unwrap();
            assert_eq!(numbers, [24, 160]);
            let parcels = (0..4).map(|to| vec![rank as u32 * 10 + to; 100_000]).collect();
            peers.exchange_parcels(parcels).unwrap()
        });
        for (rank, came) in came.into_iter().enumerate() {
            for (from, parcel) in came.into_iter().enumerate() {
                assert_eq!(parcel, vec![from as u32 * 10 + rank as u32; 100_000]);
            }
        }
    }

    #[test]
    fn a_process_that_is_gone_is_an_error() {
        let gone = among(2, |mut peers| match peers.rank() {
            0 => Some(peers.sum_numbers(&mut [1]).unwrap_err().to_string()),
            _ => None,
        });
        assert_eq!(gone[0].as_deref(), Some("cannot communicate with process 1"));
        let own = "127.0.0.1:1".parse().unwrap();
        assert!(matches!(
            PeerGroup::connect_all(3, &[own]),
            Err(PeersError::Rank { rank: 3, size: 1 })
        ));
    }
}
