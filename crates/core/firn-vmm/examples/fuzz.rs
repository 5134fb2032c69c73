//! A fuzzer of all parsers of QEMU's output and of users' command lines.
//!
//! ```text
//!   cargo run --release -p firn-vmm --example fuzz -- --seconds 600 [--seed N]
//! ```
//!
//! Each round damages a real sample in a few positions and gives it to its parser. A parser may
//! refuse it; it must not panic, and must not take longer than a second. Rounds depend on the
//! seed alone, so a finding can be reproduced.

use std::io::Write;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use firn_vmm::command_line::{AddedPaths, plan_command};
use firn_vmm::qmp::{QmpClient, parse_reply};
use firn_vmm::{QemuVm, hmp};

const ROUND_MAX: Duration = Duration::from_secs(1);

const REPLIES: &str = concat!(
    r#"{"QMP": {"version": {"qemu": {"micro": 22, "minor": 2, "major": 7}}, "capabilities": ["oob"]}}"#,
    "\n",
    r#"{"error": {"class": "GenericError", "desc": "no \u00e9\ud83d\ude00"}, "id": 18446744073709551615}"#,
    "\n",
    r#"{"timestamp": {"seconds": 1, "microseconds": -1}, "event": "MIGRATION", "data": {"status": "completed"}}"#,
);

const MTREE: &str = "FlatView #0
 AS \"memory\", root: system
 AS \"cpu-memory-0\", root: system
 Root memory region: system
  0000000000000000-00000000000c2fff (prio 0, ram): ram KVM
  00000000000c3000-00000000000fffff (prio 0, rom): ram @00000000000c3000
  0000000000100000-000000007fffffff (prio 0, ram): ram @0000000000100000
  00000000fd000000-00000000fdffffff (prio 1, ram): vga.vram
  00000000fffc0000-00000000ffffffff (prio 0, rom): pc.bios
  0000000100000000-000000019fffffff (prio 0, ram): ram @0000000080000000
";

const RAMBLOCK: &str =
    "              Block Name    PSize              Offset               Used              Total
                     ram    4 KiB  0x0000000000000000 0x0000000120000000 0x0000000120000000
   0000:00:01.0/vga.vram    4 KiB  0x0000000120080000 0x0000000001000000 0x0000000001000000 0x00007fa032400000  rw
                 pc.bios    4 KiB  0x0000000120000000 0x0000000000040000 0x0000000000040000
";

const REGISTERS: &str = "
CPU#0
RIP=ffffffff81c0b5a0 RFL=00000246 [---Z-P-] CPL=0 II=0 A20=1 SMM=0 HLT=1
CR0=80050033 CR2=ff1438c58b001000 CR3=000000000a210000 CR4=00751eb0
EFER=0000000000000d01
CPU#1
CR0=00000011 CR2=00000000 CR3=00000000 CR4=00000000
";

const HVA: &str = "Host virtual address for 0x0 (ram) is 0x7fd46bfff000";

const COMMAND: &str = "qemu|-M|q35,memory-backend=a,,b|-m|size=1.5G,slots=2,maxmem=4G|-object|memory-backend-ram,\
    id=a,,b,size=1536M|-object|{\"qom-type\":\"memory-backend-file\",\"id\":\"m\",\"size\":1}|-numa|node,memdev=m|\
    -device|pc-dimm,memdev=m|-S|-append|x y";

/// Small random numbers (splitmix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit.max(1) as u64) as usize
    }

    /// A random range to cut, of at most 39 bytes.
    fn range(&mut self, length: usize) -> std::ops::Range<usize> {
        let start = self.below(length + 1);
        start..start + self.below((length - start + 1).min(40))
    }
}

/// Tokens that a parser is likely to get wrong.
const TOKENS: &[&[u8]] = &[
    b"0x",
    b"-",
    b"+",
    b"\xff",
    b"\0",
    b"\n",
    b"\r\n",
    b" ",
    b"\"",
    b"{",
    b"}",
    b"[",
    b",",
    b",,",
    b"=",
    b" @",
    b"): ",
    b"(prio ",
    b"ffffffffffffffff",
    b"18446744073709551616",
    b"-1",
    b"0",
    b"1e400",
    b"\\ud800",
    b"/",
    b"ram",
    b"CPU#",
    b"CR3=",
    b"\xf0\x9f\x98\x80",
    b"KiB",
    b"P",
];

fn damage(sample: &[u8], random: &mut Random) -> Vec<u8> {
    let mut bytes = sample.to_vec();
    for _ in 0..=random.below(4) {
        let range = random.range(bytes.len());
        match random.below(6) {
            0 => drop(bytes.drain(range)),
            1 => bytes.truncate(range.start),
            2 => drop(bytes.splice(range, TOKENS[random.below(TOKENS.len())].iter().copied())),
            3 => {
                let copy = bytes[range].to_vec();
                let at = random.below(bytes.len() + 1);
                bytes.splice(at..at, copy);
            }
            4 => bytes[range].iter_mut().for_each(|byte| *byte = random.next() as u8),
            _ => bytes[range].iter_mut().take(1).for_each(|byte| *byte ^= 1 << random.below(8)),
        }
    }
    bytes
}

/// Runs a whole QMP conversation: the damaged bytes are QEMU's side of it, in the order of Firn's
/// commands.
fn conversation() -> String {
    let text = |text: &str| serde_json::Value::from(text).to_string();
    let answers = [
        "{}".to_owned(),
        r#"{"qemu": {"micro": 0, "minor": 2, "major": 7}, "package": ""}"#.to_owned(),
        r#"[{"id": "ram", "size": 4831838208, "share": true}]"#.to_owned(),
        text(MTREE),
        text(RAMBLOCK),
        text(HVA),
        text(HVA),
        text(HVA),
        text(REGISTERS),
        r#"[{"cpu-index": 0, "thread-id": 1}]"#.to_owned(),
        r##"[{"node-name": "#b", "drv": "file", "file": "/x", "ro": true, "image": {"virtual-size": 1}}]"##.to_owned(),
    ];
    let line =
        |(at, answer): (usize, &String)| format!("{{\"return\": {answer}, \"id\": {}}}\n", at + 1);
    let answers: String = answers.iter().enumerate().map(line).collect();
    format!("{{\"QMP\": {{}}}}\n{answers}")
}

fn converse(bytes: &[u8]) {
    let Ok((ours, mut theirs)) = UnixStream::pair() else { return };
    let _ = theirs.write_all(bytes);
    let _ = theirs.shutdown(Shutdown::Write);
    let Ok(qmp) = QmpClient::negotiate(ours, ROUND_MAX / 2) else { return };
    let Ok(mut vm) = QemuVm::with_qmp(qmp) else { return };
    if let Ok(layout) = vm.layout() {
        assert!(layout.map.check_layout().is_ok(), "a map that its own check refuses");
        assert_eq!(layout.map.regions().len(), layout.locations.len());
    }
    let _ = vm.page_table_roots();
    let _ = vm.disks();
}

fn read_command(bytes: &[u8]) {
    let words: Vec<String> = String::from_utf8_lossy(bytes).split('|').map(str::to_owned).collect();
    let Ok(plan) = plan_command(&words) else { return };
    let paths = AddedPaths {
        qmp: "/q".into(),
        ram: vec!["/r".into(); plan.ram().len()],
        calls: "/c".into(),
        stores: None,
        cards: vec![0; plan.cards().len()],
    };
    let _ = plan.augment(&paths);
    let _ = plan.for_restore(&paths);
}

/// A sample and its parser.
type Target = (&'static str, Vec<u8>, fn(&[u8]));

fn targets() -> Vec<Target> {
    vec![
        ("reply", REPLIES.into(), |bytes| {
            bytes.split(|&byte| byte == b'\n').for_each(|line| drop(parse_reply(line)));
        }),
        ("mtree", MTREE.into(), |bytes| drop(hmp::parse_mtree(&String::from_utf8_lossy(bytes)))),
        ("ramblock", RAMBLOCK.into(), |bytes| {
            drop(hmp::parse_ramblock(&String::from_utf8_lossy(bytes)));
        }),
        ("registers", REGISTERS.into(), |bytes| {
            let vcpus = hmp::parse_registers(&String::from_utf8_lossy(bytes));
            for (_, registers) in &vcpus {
                let _ = (registers.table_levels(), registers.table_root());
            }
        }),
        ("hva", HVA.into(), |bytes| {
            let _ = hmp::parse_hva(&String::from_utf8_lossy(bytes));
        }),
        ("command line", COMMAND.into(), read_command),
        ("conversation", conversation().into(), converse),
    ]
}

/// Runs one round; `Err` describes the failure.
fn round(target: &Target, random: &mut Random) -> Result<(), String> {
    let input = damage(&target.1, random);
    let begun = Instant::now();
    let outcome = catch_unwind(AssertUnwindSafe(|| target.2(&input)));
    let fault = match outcome {
        Err(_) => "panicked",
        Ok(()) if begun.elapsed() > ROUND_MAX => "took too long",
        Ok(()) => return Ok(()),
    };
    Err(format!("{} {fault} on {:?}", target.0, String::from_utf8_lossy(&input)))
}

fn argument(name: &str, default: u64) -> u64 {
    let words: Vec<String> = std::env::args().collect();
    let value = words.iter().position(|word| word == name).and_then(|at| words.get(at + 1));
    value.and_then(|value| value.parse().ok()).unwrap_or(default)
}

fn main() -> ExitCode {
    let (seconds, seed) = (argument("--seconds", 10), argument("--seed", 1));
    let mut random = Random(seed);
    let targets = targets();
    let mut rounds = vec![0u64; targets.len()];
    let end = Instant::now() + Duration::from_secs(seconds);
    while Instant::now() < end {
        for (target, rounds) in targets.iter().zip(&mut rounds) {
            // A conversation costs some system calls; the others are cheap.
            let repeat = if target.0 == "conversation" { 1 } else { 20 };
            for _ in 0..repeat {
                if let Err(fault) = round(target, &mut random) {
                    eprintln!("seed {seed}: {fault}");
                    return ExitCode::FAILURE;
                }
                *rounds += 1;
            }
        }
    }
    for (target, rounds) in targets.iter().zip(rounds) {
        println!("{:>12}  {rounds} rounds, clean", target.0);
    }
    ExitCode::SUCCESS
}
