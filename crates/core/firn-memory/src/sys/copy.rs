//! Copies of memory that another process may be writing.

use std::arch::asm;

use memmap2::MmapRaw;

/// Fills `out` from a shared mapping, from byte `offset` on. Bytes that the other process writes
/// meanwhile are old or new.
///
/// # Panics
/// If the mapping ends before that.
pub(crate) fn copy_from_mapping(from: &MmapRaw, offset: usize, out: &mut [u8]) {
    let end = offset.checked_add(out.len());
    assert!(end.is_some_and(|end| end <= from.len()), "{offset} is past the mapping");
    let source = from.as_ptr().wrapping_add(offset);
    // SAFETY: the instruction reads `out.len()` bytes at `source`, which the assertion keeps inside
    // a mapping that is borrowed and so stays mapped, and writes as many to `out`, which is
    // borrowed uniquely. No reference to the source is made, and the compiler assumes nothing about
    // the bytes that are read there, so that other processes may write them. The ABI keeps the
    // direction flag clear. (Pages of the file that are truncated meanwhile kill the process with
    // SIGBUS; they do not make it continue with wrong data.)
    unsafe {
        asm!(
            "rep movsb",
            inout("rcx") out.len() => _,
            inout("rsi") source => _,
            inout("rdi") out.as_mut_ptr() => _,
            options(nostack, preserves_flags),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mapping() -> MmapRaw {
        let file = rustix::fs::memfd_create("copy", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let bytes: Vec<u8> = (0..8192u32).map(|byte| byte as u8).collect();
        rustix::io::write(&file, &bytes).unwrap();
        MmapRaw::map_raw(&file).unwrap()
    }

    #[test]
    fn copies_any_part() {
        let mapping = mapping();
        for (offset, len) in [(0, 8192), (4096, 4096), (13, 77), (8192, 0)] {
            let mut out = vec![0; len];
            copy_from_mapping(&mapping, offset, &mut out);
            assert!(out.iter().zip(offset..).all(|(&byte, at)| byte == at as u8));
        }
    }

    #[test]
    #[should_panic(expected = "past the mapping")]
    fn does_not_read_past_the_end() {
        copy_from_mapping(&mapping(), 4097, &mut [0; 4096]);
    }
}
