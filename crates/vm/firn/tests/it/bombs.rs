//! Small images that claim to be large ones, and images changed at random: every verb ends within 256 MiB and 5 seconds of
//! processor time, with one error or rightly.
//!
//! `FIRN_RUNS` is how many images are changed at random.

use std::process::{Command, Stdio};

use firn_image::{
    BlockOrganization, Codec, CompressedBlock, Geometry, Image, ImageDraft, ImageSections,
    ImageWriter, LocalityBlockPacker, compress_block,
};
use firn_types::{Block, BlockSize, RegionMap};
use serde_json::json;

use crate::forge::{
    ACCESS_ORDER, AUXILIARY, DEVICE_STATE, Forge, INDEX, METADATA, PARENT, REGIONS, ROOTS,
    WORKING_SET, index_of_zeros,
};
use crate::session::{Answer, Session};

/// Memory of a verb at most, in KiB, and processor time, in seconds.
const MEMORY_KIB: u64 = 256 << 10;
const SECONDS: u64 = 5;

/// Runs without `FIRN_RUNS`.
const RUNS: u64 = 60;

/// The largest page space, in pages.
const PAGES_MAX: u32 = u32::MAX - 64;

/// Every verb that reads an image and needs no VM; `@` is the image.
const VERBS: [&str; 12] = [
    "image inspect @",
    "image verify --restorable @",
    "image rebase child.firn --moved @ -o out.firn",
    "--json image inspect @",
    "image verify @",
    "image chain @",
    "image merge @ -o out.firn",
    "image reorder @ --by physical -o out.firn",
    "image reorder @ --by random --codec lz4 -o out.firn",
    "image rebase @ --parent good.firn -o out.firn",
    "image rebase good.firn --parent @ -o out.firn",
    "image rm @",
];

/// Verbs that need an image of a VM; tried on changed images of one that has only firmware. A changed image is of unknown
/// origin: the module `trust` restores such images without `--trust`.
const VERBS_OF_VMS: [&str; 3] = [
    "restore @ --name copy --mode eager --on-error kill --wait --trust",
    "restore @ --name copy --mode lazy --on-error kill --wait --trust",
    "image compare @ good.ram",
];

/// What a restore may end with besides: QEMU did not take the device state, or ended.
const CODES_OF_VMS: [i32; 7] = [0, 1, 2, 3, 5, 6, 8];

/// A shell that limits private writable memory and processor time, on one processor: threads have stacks of their own.
const LIMITS: &str = "ulimit -d $1 && ulimit -t $2 && shift 2 && exec \"$@\"";

/// Runs a verb on an image within the limits; it ends as it may.
#[track_caller]
fn try_verb(session: &Session, verb: &str, image: &str) {
    run_limited(session, verb, image, &[0, 2, 5, 6]);
}

/// Runs a verb on an image within the limits. Returns whether it did what it was to do.
#[track_caller]
fn run_limited(session: &Session, verb: &str, image: &str, codes: &[i32]) -> bool {
    let words: Vec<&str> =
        verb.split(' ').map(|word| if word == "@" { image } else { word }).collect();
    let answer = limited(session, &session.command(&words));
    let _ = std::fs::remove_file(session.path("out.firn"));
    assert!(
        codes.contains(&answer.code),
        "firn {verb} with {image}: exit {}: {}",
        answer.code,
        answer.err
    );
    if answer.code != 0 {
        let beginning = if verb.starts_with("--json") { "{\"error\":" } else { "firn: " };
        let errors = answer.err.lines().filter(|line| line.starts_with(beginning)).count();
        assert_eq!(errors, 1, "firn {verb} with {image}: {}", answer.err);
    }
    assert_eq!(session.files(".out"), [""; 0], "firn {verb} with {image}");
    answer.code == 0
}

/// Runs a command within the limits.
fn limited(session: &Session, inner: &Command) -> Answer {
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(64) as u64;
    let mut command = Command::new("sh");
    command.arg("-c").arg(LIMITS).arg("sh");
    command.args([(MEMORY_KIB + threads * 3 * 1024).to_string(), SECONDS.to_string()]);
    command.arg(inner.get_program()).args(inner.get_args()).current_dir(session.path(""));
    command.env("FIRN_RUNTIME_DIR", session.runtime_dir()).stdin(Stdio::null());
    command.env("FIRN_STATE_DIR", session.state_dir());
    Answer::of(command.output().unwrap())
}

fn regions(pages: u32) -> RegionMap {
    RegionMap::lay_out([("ram", u64::from(pages) * 4096)]).unwrap()
}

/// A good image with every section, some memory blocks of each kind, and room for mutations.
fn write_good(session: &Session, name: &str) {
    let geometry = Geometry {
        block_size: BlockSize::new(1).unwrap(),
        locality_block_bytes: 16 << 10,
        total_pages: 256,
    };
    let draft = ImageDraft::whole_image(geometry, BlockOrganization::Access);
    let mut writer = ImageWriter::create(&session.path(name), &draft).unwrap();
    let mut packer = LocalityBlockPacker::new(geometry);
    for block in 0..64u32 {
        let codec = [Codec::Lz4, Codec::Zstd { level: 1 }, Codec::Zlib { level: 1 }, Codec::None];
        let mut bytes = vec![block as u8 | 1; 4096];
        bytes[..1024].iter_mut().enumerate().for_each(|(at, byte)| *byte = (at * 7) as u8);
        let compressed = compress_block(codec[block as usize % 4], Block(block * 3), &bytes);
        if let CompressedBlock::Packed(packed) = compressed
            && let Some(full) = packer.push_block(packed)
        {
            writer.append(full).unwrap();
        }
    }
    writer.append(packer.take_filled().unwrap()).unwrap();
    (0..20).for_each(|block| writer.set_zero(Block(block * 3 + 1)));
    let aux = firn_image::AuxBlock { id: "vga.vram".into(), bytes: vec![7; 5000] };
    let sections = ImageSections {
        meta: json!({ "version": 1, "name": "web", "strings": ["a", "b"] }),
        regions: regions(256),
        device_state: b"state".repeat(100),
        aux_blocks: vec![aux],
        working_set: (0..30).map(|block| Block(block * 3)).collect(),
        page_table_roots: vec![firn_types::GuestPhys(0x1000); 4],
    };
    writer.finish(sections).unwrap();
}

/// An image that has all memory of the largest guest, none of it stored.
fn large(good: &Forge) -> Forge {
    let mut forge = good.clone();
    forge.set_geometry(1, 16 << 10, PAGES_MAX);
    forge.locality_blocks.clear();
    forge.sections.retain(|section| ![ACCESS_ORDER, WORKING_SET].contains(&section.kind));
    *forge.section(REGIONS) = serde_json::to_vec(&regions(PAGES_MAX)).unwrap();
    *forge.section(INDEX) = index_of_zeros(&[]);
    forge
}

/// A name, and how the image is made: one at a time, for some are large before they are compressed.
type Bomb<'a> = (&'static str, Box<dyn Fn() -> Forge + 'a>);

/// The image with another section.
fn with(base: &Forge, kind: u32, bytes: Vec<u8>) -> Forge {
    let mut forge = base.clone();
    *forge.section(kind) = bytes;
    forge
}

fn bombs(good: &Forge) -> Vec<Bomb<'_>> {
    let mut bombs: Vec<Bomb<'_>> = Vec::new();
    bombs.extend(bombs_of_zeros(good));
    bombs.extend(bombs_of_bytes(good));
    bombs.extend(bombs_of_json(good));
    bombs.extend(bombs_of_groups(good));
    bombs
}

/// Runs of zero blocks, so many, in so many places.
fn bombs_of_zeros(good: &Forge) -> Vec<Bomb<'_>> {
    let zeros = |count: u32, step: u32, len: u32| -> Box<dyn Fn() -> Forge + '_> {
        let runs = move || (0..count).map(|run| (run * step, len)).collect::<Vec<_>>();
        Box::new(move || with(&large(good), INDEX, index_of_zeros(&runs())))
    };
    vec![
        ("large", zeros(0, 0, 0)),
        ("all-zero", zeros(1, 0, PAGES_MAX)),
        ("scattered", zeros(350_000, 8192, 3)),
        ("more-scattered", zeros(270_000, 11_000, 900)),
        ("alternating", zeros(370_000, 4, 1)),
    ]
}

/// Sections that are large when decoded.
fn bombs_of_bytes(good: &Forge) -> Vec<Bomb<'_>> {
    let bytes = |kind: u32, mebibytes: usize| -> Box<dyn Fn() -> Forge + '_> {
        Box::new(move || with(good, kind, vec![0; mebibytes << 20]))
    };
    let of_large = |mebibytes: usize| -> Box<dyn Fn() -> Forge + '_> {
        Box::new(move || with(&large(good), WORKING_SET, vec![0; mebibytes << 20]))
    };
    vec![
        ("device-state", bytes(DEVICE_STATE, 300)),
        ("device-state-max", bytes(DEVICE_STATE, 31)),
        ("working-set", of_large(300)),
        ("working-set-max", of_large(15)),
        ("roots", bytes(ROOTS, 300)),
        ("parent", bytes(PARENT, 300)),
        ("aux", bytes_of(good, AUXILIARY, || auxiliary(300 << 20))),
        (
            "many-aux",
            bytes_of(good, AUXILIARY, || {
                [20_000_000u32.to_le_bytes().to_vec(), vec![0; 200_000_000]].concat()
            }),
        ),
    ]
}

fn bytes_of<'a>(good: &'a Forge, kind: u32, bytes: fn() -> Vec<u8>) -> Box<dyn Fn() -> Forge + 'a> {
    Box::new(move || with(good, kind, bytes()))
}

/// One auxiliary block of zeros.
fn auxiliary(len: usize) -> Vec<u8> {
    let mut bytes = [1u32.to_le_bytes().as_slice(), &1u16.to_le_bytes(), b"v"].concat();
    bytes.extend((len as u64).to_le_bytes());
    bytes.resize(bytes.len() + len, 0);
    bytes
}

/// Small values, many of them; deep values; long strings.
fn bombs_of_json(good: &Forge) -> Vec<Bomb<'_>> {
    const WHOLE: usize = 16 << 20;
    let values = |kind: u32, text: &'static str, bytes: usize| -> Box<dyn Fn() -> Forge + '_> {
        let json = move || format!("[{}0]", text.repeat(bytes / text.len() - 1)).into_bytes();
        Box::new(move || with(good, kind, json()))
    };
    let string = |count: usize| -> Box<dyn Fn() -> Forge + '_> {
        let json = move || format!("{{\"version\":\"{}\"}}", "\u{7f}".repeat(count)).into_bytes();
        Box::new(move || with(good, METADATA, json()))
    };
    vec![
        ("arrays", values(METADATA, "[0],", WHOLE)),
        ("objects", values(METADATA, "{\"\":0},", WHOLE)),
        ("numbers", values(METADATA, "0,", WHOLE)),
        ("arrays-max", values(METADATA, "[0],", 60_000)),
        ("objects-max", values(METADATA, "{\"\":0},", 70_000)),
        ("regions", values(REGIONS, "{\"\":0},", WHOLE)),
        ("string", string(WHOLE - 100)),
        ("string-max", string(7_000_000)),
        ("deep", bytes_of(good, METADATA, || [vec![b'['; 8 << 20], vec![b']'; 8 << 20]].concat())),
    ]
}

/// Groups of an access order.
fn bombs_of_groups(good: &Forge) -> Vec<Bomb<'_>> {
    let groups = |count: u32, blocks: u32| -> Box<dyn Fn() -> Forge + '_> {
        let order = move || {
            let mut order = [count, blocks].map(u32::to_le_bytes).concat();
            order.extend(vec![0; count as usize * 2]);
            order.extend((0..count).flat_map(|at| u32::from(at < blocks).to_le_bytes()));
            order.extend(vec![0; blocks as usize * 4]);
            order
        };
        Box::new(move || {
            let mut forge = with(good, ACCESS_ORDER, order());
            forge.header[12] = 1;
            forge
        })
    };
    vec![
        ("groups", groups(20_000_000, 0)),
        ("groups-max", groups(400_000, 400_000)),
        ("empty-groups", groups(600_000, 0)),
    ]
}

/// An image that needs another one, which may be elsewhere.
fn make_child(session: &Session) {
    let rebase = ["image", "rebase", "good.firn", "--parent", "other.firn", "-o", "child.firn"];
    session.firn(&rebase).succeeds();
}

#[test]
fn small_images_that_claim_to_be_large() {
    let session = Session::new();
    write_good(&session, "good.firn");
    // Another identity, so that either can be the parent of the other.
    write_good(&session, "other.firn");
    let good = Forge::read(&session.path("other.firn"));
    good.write(&session.path("same.firn"));
    session.firn(&["image", "verify", "same.firn"]).succeeds();
    make_child(&session);
    for (name, make) in bombs(&good) {
        make().write(&session.path(name));
        let bytes = std::fs::metadata(session.path(name)).unwrap().len();
        eprintln!("{name}: {bytes} bytes");
        assert!(bytes <= 1 << 20, "{name} has {bytes} bytes");
        VERBS.iter().for_each(|verb| try_verb(&session, verb, name));
        let _ = std::fs::remove_file(session.path(name));
    }
}

/// What a verb still does with images at the limits.
#[test]
fn images_at_the_limits_are_read() {
    let session = Session::new();
    write_good(&session, "good.firn");
    // Another identity, so that either can be the parent of the other.
    write_good(&session, "other.firn");
    let good = Forge::read(&session.path("other.firn"));
    for (name, make) in bombs(&good) {
        if ["large", "all-zero", "scattered", "device-state-max", "aux"].contains(&name) {
            make().write(&session.path(name));
            session.firn(&["image", "inspect", name]).succeeds();
        }
    }
    session.firn(&["image", "merge", "all-zero", "-o", "merged"]).succeeds();
    let merged = Image::open(&session.path("merged")).unwrap();
    assert_eq!(merged.summary().zero_blocks, PAGES_MAX);
}

/// Numbers that follow from a seed (SplitMix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() % end.max(1) as u64) as usize
    }
}

/// A number at a boundary, or any.
fn odd_number(random: &mut Random) -> u32 {
    let all = [0, 1, 255, 256, 4095, 4096, 65535, 65536, 1 << 24, 1 << 31, u32::MAX - 1, u32::MAX];
    match random.below(4) {
        0 => random.next() as u32,
        _ => all[random.below(all.len())],
    }
}

/// Changes some bytes of a part: one, four of a number, a range repeated or left out.
fn change(bytes: &mut Vec<u8>, random: &mut Random) {
    if bytes.is_empty() {
        return;
    }
    let at = random.below(bytes.len());
    match random.below(5) {
        0 => bytes[at] ^= 1 << random.below(8),
        1 | 2 => {
            let at = at & !3;
            let number = odd_number(random).to_le_bytes();
            bytes.iter_mut().skip(at).zip(number).for_each(|(byte, new)| *byte = new);
        }
        3 => bytes.truncate(at),
        _ => {
            let part = bytes[at..(at + random.below(64)).min(bytes.len())].to_vec();
            let part = part.repeat(random.below(1000));
            bytes.splice(at..at, part);
        }
    }
}

fn mutated(good: &Forge, random: &mut Random) -> Forge {
    let mut forge = good.clone();
    for _ in 0..1 + random.below(4) {
        match random.below(8) {
            0 => {
                let at = 8 + random.below(32);
                forge.header[at] = random.next() as u8;
            }
            1 => {
                let block_pages = [1, 2, 4, 8, 16][random.below(5)];
                let locality = 16384 << random.below(7);
                forge.set_geometry(block_pages, locality, odd_number(random));
            }
            2 => forge.set_version(1 + random.below(3) as u32),
            3 => {
                let at = random.below(forge.locality_blocks.len());
                forge.locality_blocks[at] = random.next() as u8;
            }
            _ => {
                let at = random.below(forge.sections.len());
                change(&mut forge.sections[at].bytes, random);
            }
        }
    }
    forge
}

#[test]
fn images_changed_at_random() {
    let session = Session::new();
    write_good(&session, "good.firn");
    // Another identity, so that either can be the parent of the other.
    write_good(&session, "other.firn");
    let good = Forge::read(&session.path("other.firn"));
    make_child(&session);
    let runs = std::env::var("FIRN_RUNS").ok().and_then(|runs| runs.parse().ok()).unwrap_or(RUNS);
    for seed in 0..runs {
        let mut random = Random(seed);
        mutated(&good, &mut random).write(&session.path("mutated.firn"));
        // Each verb has its turn.
        for verb in [VERBS[0], VERBS[1 + seed as usize % (VERBS.len() - 1)]] {
            eprintln!("seed {seed}: {verb}");
            try_verb(&session, verb, "mutated.firn");
        }
    }
}

/// Runs a VM that has only firmware, so that its image is small.
fn run_firmware(session: &Session, options: &[&str]) -> Answer {
    let qemu = "qemu-system-x86_64 -M pc -m 8 -accel tcg,tb-size=8 -nodefaults -display none";
    let qemu: Vec<&str> = qemu.split(' ').collect();
    limited(session, &session.command(&[&["run", "web"], options, &["--"], &qemu].concat()))
}

/// An image of a VM, which claims more than it has: no restore takes more than the limits, and no parent of a checkpoint.
#[test]
fn images_of_a_vm_that_claim_to_be_large() {
    let session = Session::new();
    run_firmware(&session, &[]).succeeds();
    session.firn(&["checkpoint", "web", "-o", "vm.firn", "--reference", "good.ram"]).succeeds();
    let good = Forge::read(&session.path("vm.firn"));
    let supervisor = session.status("web")["supervisor_pid"].clone();
    for (name, make) in bombs(&good) {
        make().write(&session.path(name));
        eprintln!("{name}");
        for verb in VERBS_OF_VMS {
            run_limited(&session, verb, name, &CODES_OF_VMS);
            if session.ls().len() > 1 && session.firn(&["stop", "copy"]).code != 0 {
                session.firn(&["rm", "copy"]).succeeds();
            }
        }
        let save = |verb| session.firn(&[verb, "web", "-o", "out.firn", "--parent", name]);
        let checkpoint = save("checkpoint");
        if checkpoint.code == 0 {
            // Its memory is as good as that of another.
            std::fs::remove_file(session.path("out.firn")).unwrap();
        } else {
            assert!([1, 2, 5, 6].contains(&checkpoint.code), "{name}: {}", checkpoint.err);
            assert_eq!(save("suspend").code, checkpoint.code, "{name}");
            assert_eq!(session.files("out.firn"), [""; 0]);
        }
        std::fs::remove_file(session.path(name)).unwrap();
    }
    assert_eq!(session.status("web")["supervisor_pid"], supervisor, "it lives within the limits");
    session.firn(&["checkpoint", "web", "-o", "out.firn", "--parent", "vm.firn"]).succeeds();
}

/// Files of other kinds, of at most 1 MiB.
#[test]
fn other_files_that_are_large_when_they_are_read() {
    let session = Session::new();
    let deep =
        |open: &str, close: &str| format!("{}{}", open.repeat(250_000), close.repeat(250_000));
    let write = |name: &str, text: &str| {
        assert!(text.len() <= 1 << 20, "{name}");
        std::fs::write(session.path(name), text).unwrap();
    };
    run_firmware(&session, &[]).succeeds();
    session.firn(&["checkpoint", "web", "-o", "vm.firn"]).succeeds();
    session.firn(&["stop", "web"]).succeeds();
    // What is learned of an image is no reason not to restore it.
    let restore = ["restore", "vm.firn", "--name", "web", "--mode", "auto", "--wait"];
    session.firn(&restore).succeeds();
    let record = std::fs::read(session.runtime_dir().join("web/restore.json")).unwrap();
    let record: serde_json::Value = serde_json::from_slice(&record).unwrap();
    session.firn(&["stop", "web"]).succeeds();
    let numbers = format!("[{}0]", "0,".repeat(400_000));
    let learned = format!("{{\"version\":1,\"image\":\"\",\"blocks\":{numbers}}}");
    for bomb in [deep("[", "]"), deep("{\"a\":", "}"), numbers.clone(), learned] {
        write("vm.firn.learned", &bomb[..bomb.len().min(1 << 20)]);
        let answer = limited(&session, &session.command(&restore));
        assert_eq!(answer.code, 0, "{}", answer.err);
        session.firn(&["stop", "web"]).succeeds();
    }
    // A run record: deep, long, and of a restore that took for ever.
    let mut endless = record.clone();
    endless["finished_us"] = ((1_u64 << 46) - 1).into();
    endless["prefilled_us"] = endless["finished_us"].clone();
    let many = {
        let fault =
            serde_json::json!({ "t_us": 1, "page": 1, "tid": 1, "wait_us": 1, "answered": "zero" });
        let mut many = record.clone();
        many["faults"] = vec![fault; 12_000].into();
        many
    };
    for bomb in
        [deep("[", "]"), deep("{\"a\":", "}"), numbers, endless.to_string(), many.to_string()]
    {
        write("run.json", &bomb[..bomb.len().min(1 << 20)]);
        run_limited(&session, "report @ -o out.html", "run.json", &[0, 2, 6]);
    }
    // A policy, and an agent's configuration.
    let tables = deep("[", "]");
    let toml = [
        format!("a = {tables}"),
        format!("a = {}", deep("{a=", "}")),
        "[a]\n".repeat(200_000),
        format!("[{}a]\n", "a.".repeat(400_000)),
        "a = 1\n".repeat(150_000),
    ];
    for bomb in toml {
        let bomb = &bomb[..bomb.len().min(1 << 20)];
        // Readable by the owner only, because a policy has keys: otherwise it is not parsed at all.
        firn_files::replace_private(&session.path("bomb.toml"), bomb.as_bytes()).unwrap();
        let refused = run_firmware(&session, &["--calls", "bomb.toml"]);
        assert_eq!(refused.code, 2, "{}", refused.err);
        let mut check = Command::new(Session::program_beside("firn-agent"));
        check.args(["check", "bomb.toml"]);
        let refused = limited(&session, &check);
        assert_eq!(refused.code, 2, "{}", refused.err);
        assert!(refused.err.len() < 10_000, "an error of {} bytes", refused.err.len());
    }
    assert_eq!(session.ls(), []);
}

/// The same for restores: of a VM that has only firmware, so that its image is small.
#[test]
fn images_of_a_vm_changed_at_random() {
    let session = Session::new();
    run_firmware(&session, &[]).succeeds();
    let save = ["checkpoint", "web", "-o", "vm.firn", "--reference", "good.ram"];
    session.firn(&save).succeeds();
    session.firn(&["stop", "web"]).succeeds();
    let bytes = std::fs::metadata(session.path("vm.firn")).unwrap().len();
    assert!(bytes <= 1 << 20, "it has {bytes} bytes");
    let good = Forge::read(&session.path("vm.firn"));
    let number = |name: &str| std::env::var(name).ok()?.parse::<u64>().ok();
    let (first, runs) = (number("FIRN_SEED").unwrap_or(0), number("FIRN_RUNS").unwrap_or(RUNS / 3));
    let mut restored = 0;
    for seed in first..first + runs {
        let mut random = Random(seed);
        mutated(&good, &mut random).write(&session.path("mutated.firn"));
        let verb = VERBS_OF_VMS[seed as usize % VERBS_OF_VMS.len()];
        eprintln!("seed {seed}: {verb}");
        let done = run_limited(&session, verb, "mutated.firn", &CODES_OF_VMS);
        if done && verb.starts_with("restore") {
            restored += 1;
        }
        if !session.ls().is_empty() && session.firn(&["stop", "copy"]).code != 0 {
            session.firn(&["rm", "copy"]).succeeds();
        }
        assert_eq!(session.ls(), [], "seed {seed}");
    }
    eprintln!("{restored} of {runs} were restored");
    // What was not changed restores.
    assert!(run_limited(&session, VERBS_OF_VMS[0], "vm.firn", &[0]));
    session.firn(&["stop", "copy"]).succeeds();
}
