//! A guest with 256 GiB of RAM, of which little was ever written: saves, increments and restores cost by
//! what is used.
//!
//! ```text
//!   0        192 MiB                    5 GiB        100 GiB                      255 GiB
//!   |-kernel-|--------- nothing ---------x--------------x---- nothing ---------------x|
//!                                        words that the test has the guest write
//! ```
//!
//! The guest's kernel manages the first 192 MiB only (`mem=`), so that it needs no descriptors of 64 million
//! pages. What is above, its programs reach through `/dev/mem`.

use crate::vm::Vm;

const RAM_MIB: u32 = 256 << 10;
const GIB: u64 = 1 << 30;
/// Guest-physical addresses of words.
const WORDS: [u64; 4] = [5 * GIB, 5 * GIB + 4096, 100 * GIB, 255 * GIB + 4];
/// Maximum size of an image of this guest, and of an increment.
const IMAGE_MAX: u64 = GIB / 2;
const INCREMENT_MAX: u64 = GIB / 8;

fn write_word(vm: &Vm, address: u64, word: u32) {
    let (address, word) = (format!("{address:#x}"), format!("{word:#x}"));
    vm.control().run_program(&["devmem", &address, "32", &word]).unwrap();
}

fn read_word(vm: &Vm, address: u64) -> u32 {
    let printed = vm.control().run_program(&["devmem", &format!("{address:#x}"), "32"]).unwrap();
    u32::from_str_radix(printed.trim().trim_start_matches("0x"), 16).unwrap()
}

/// Saves the VM. Returns the size of the image.
fn save(vm: &Vm, image: &str, more: &[&str]) -> u64 {
    let saved = vm.session.json(&[&["checkpoint", "web", "-o", image], more].concat());
    eprintln!("{image}: {}", saved["report"]);
    vm.session.firn(&["image", "verify", image]).succeeds();
    std::fs::metadata(vm.image(image)).unwrap().len()
}

#[test]
fn a_sparse_guest_is_saved_restored_and_saved_again_as_an_increment() {
    let vm =
        Vm::new().with_memory_mib(RAM_MIB).with_kernel_words("mem=192M").booted(&["--mib", "16"]);
    for (word, address) in (1..).zip(WORDS) {
        write_word(&vm, address, word);
    }
    assert!(save(&vm, "full.firn", &[]) < IMAGE_MAX);
    write_word(&vm, WORDS[2], 7);
    assert!(save(&vm, "second.firn", &["--parent", "full.firn"]) < INCREMENT_MAX);
    vm.session.firn(&["stop", "web"]).succeeds();

    let restored = vm.session.json(&["restore", "second.firn", "--wait"]);
    eprintln!("restored: {}, {}", restored["timings_ms"], restored["run"]);
    let words: Vec<u32> = WORDS.iter().map(|&address| read_word(&vm, address)).collect();
    assert_eq!(words, [1, 2, 7, 4]);
    assert_eq!(read_word(&vm, 200 * GIB), 0, "no program wrote it");
    vm.is_well();

    write_word(&vm, 200 * GIB, 9);
    assert!(save(&vm, "third.firn", &["--parent", "second.firn"]) < INCREMENT_MAX);
    vm.session.firn(&["stop", "web"]).succeeds();
    vm.session.firn(&["restore", "third.firn", "--mode", "lazy"]).succeeds();
    assert_eq!(read_word(&vm, 200 * GIB), 9);
    assert_eq!(read_word(&vm, WORDS[3]), 4);
    vm.is_well();
}
