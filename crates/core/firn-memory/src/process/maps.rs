//! The list of mappings in `/proc/PID/maps` (proc(5)).
//!
//! ```text
//!   7f1c40000000-7f1c80000000 rw-s 00000000 00:01 2049    /memfd:ram (deleted)
//!   start        end          perms offset  device inode  path
//! ```

/// One mapping of an address space.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MemoryMapping {
    /// Its first byte.
    pub(crate) start: u64,
    /// One past its last byte.
    pub(crate) end: u64,
    /// Whether other processes see writes to it.
    pub(crate) shared: bool,
    /// Whether the process may write to it.
    pub(crate) writable: bool,
    /// Whether it holds code.
    pub(crate) executable: bool,
    /// Its offset in the file, in bytes.
    pub(crate) offset: u64,
    /// The device of the file, as `(major, minor)`.
    pub(crate) device: (u32, u32),
    /// The inode of the file; 0 for anonymous memory.
    pub(crate) inode: u64,
    /// The path of the file, or a name in brackets; empty for anonymous memory.
    pub(crate) path: String,
}

/// Parses the whole list. Skips lines of an unknown form.
pub(crate) fn parse_maps(text: &str) -> Vec<MemoryMapping> {
    text.lines().filter_map(parse_line).collect()
}

fn parse_line(line: &str) -> Option<MemoryMapping> {
    let mut fields = line.splitn(6, ' ');
    let (start, end) = fields.next()?.split_once('-')?;
    let permissions = fields.next()?.as_bytes();
    let offset = fields.next()?;
    let (major, minor) = fields.next()?.split_once(':')?;
    let inode = fields.next()?;
    let path = fields.next().unwrap_or("");
    Some(MemoryMapping {
        start: parse_hex(start)?,
        end: parse_hex(end)?,
        writable: *permissions.get(1)? == b'w',
        executable: *permissions.get(2)? == b'x',
        shared: *permissions.get(3)? == b's',
        offset: parse_hex(offset)?,
        device: (parse_hex(major)? as u32, parse_hex(minor)? as u32),
        inode: inode.parse().ok()?,
        path: path.trim_start().to_owned(),
    })
}

fn parse_hex(digits: &str) -> Option<u64> {
    u64::from_str_radix(digits, 16).ok()
}

/// The mappings that hold `len` bytes from `start`, if they cover all of them.
pub(crate) fn find_covering(
    mappings: &[MemoryMapping],
    start: u64,
    len: u64,
) -> Option<&[MemoryMapping]> {
    let end = start.checked_add(len)?;
    let first = mappings.partition_point(|mapping| mapping.end <= start);
    let past = mappings.partition_point(|mapping| mapping.start < end);
    let inside = mappings.get(first..past)?;
    let without_gap = inside.windows(2).all(|pair| pair[0].end == pair[1].start);
    let covered = inside.first()?.start <= start && end <= inside.last()?.end;
    (without_gap && covered).then_some(inside)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const TEXT: &str = "\
7f0000000000-7f0000200000 rw-s 00001000 00:01 2049                       /memfd:ram of a vm (deleted)
7f0000200000-7f0000300000 rw-p 00000000 00:00 0 
ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0                  [vsyscall]
";

    #[test]
    fn reads_what_the_kernel_writes() {
        let mappings = parse_maps(TEXT);
        assert_eq!(mappings.len(), 3);
        assert!(mappings[0].shared && !mappings[0].executable);
        assert_eq!(
            (mappings[0].offset, mappings[0].device, mappings[0].inode),
            (4096, (0, 1), 2049)
        );
        assert_eq!(mappings[0].path, "/memfd:ram of a vm (deleted)");
        assert_eq!((mappings[1].shared, mappings[1].path.as_str()), (false, ""));
        assert!(mappings[2].executable);
    }

    #[test]
    fn a_range_is_covered_without_gaps_or_not_at_all() {
        let mappings = parse_maps(TEXT);
        let start = mappings[0].start;
        assert_eq!(find_covering(&mappings, start + 4096, 4096), Some(&mappings[..1]));
        assert_eq!(find_covering(&mappings, start, 0x30_0000), Some(&mappings[..2]));
        assert_eq!(find_covering(&mappings, start, 0x30_1000), None);
        assert_eq!(find_covering(&mappings, start - 1, 2), None);
        assert_eq!(find_covering(&mappings, u64::MAX, 2), None);
        assert_eq!(find_covering(&[], 0, 1), None);
    }

    proptest! {
        #[test]
        fn garbage_is_left_out(text in "\\PC*") {
            parse_maps(&text);
        }
    }
}
