//! Parser of `info registers -a`: the control registers of every vCPU, as far as paging needs them.
//!
//! ```text
//!   CPU#0
//!   ...
//!   CR0=80050033 CR2=00007f1ab8400000 CR3=0000000003a1c000 CR4=000006f0
//!   ...
//!   EFER=0000000000000d01
//! ```

use firn_types::{GuestPhys, VcpuId};

use super::parse_hex;

/// The registers that determine how a vCPU walks its page tables (Intel SDM volume 3, section 4.1).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VcpuRegisters {
    /// CR0; bit 31 turns paging on.
    pub cr0: u64,
    /// CR3: the root's address, with flags or an address-space number in the low 12 bits.
    pub cr3: u64,
    /// CR4; bit 12 selects five levels.
    pub cr4: u64,
    /// EFER; bit 10 is set when long mode is active.
    pub efer: u64,
}

/// The address bits of CR3 (Intel SDM volume 3, table 4-12).
const ROOT_ADDRESS: u64 = 0x000f_ffff_ffff_f000;

impl VcpuRegisters {
    /// The address of the top-level page table.
    pub fn table_root(&self) -> GuestPhys {
        GuestPhys(self.cr3 & ROOT_ADDRESS)
    }

    /// Levels of the page table in long mode, 4 or 5; `None` where the vCPU is not in long mode.
    pub fn table_levels(&self) -> Option<u8> {
        let long_mode = self.cr0 >> 31 & 1 == 1 && self.efer >> 10 & 1 == 1;
        long_mode.then_some(if self.cr4 >> 12 & 1 == 1 { 5 } else { 4 })
    }
}

/// Parses the registers of every vCPU. Registers that are not printed stay zero.
pub fn parse_registers(printed: &str) -> Vec<(VcpuId, VcpuRegisters)> {
    let mut vcpus: Vec<(VcpuId, VcpuRegisters)> = Vec::new();
    for line in printed.lines().map(str::trim) {
        if let Some(id) = line.strip_prefix("CPU#").and_then(|id| id.parse().ok()) {
            vcpus.push((VcpuId(id), VcpuRegisters::default()));
        } else if let Some((_, registers)) = vcpus.last_mut() {
            line.split_ascii_whitespace().for_each(|field| read_field(field, registers));
        }
    }
    vcpus
}

fn read_field(field: &str, registers: &mut VcpuRegisters) {
    let Some((name, value)) = field.split_once('=') else { return };
    let Some(value) = parse_hex(value) else { return };
    match name {
        "CR0" => registers.cr0 = value,
        "CR3" => registers.cr3 = value,
        "CR4" => registers.cr4 = value,
        "EFER" => registers.efer = value,
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn reads_paging_registers_of_each_vcpu() {
        let printed = "\r\nCPU#0\r\nRIP=ffffffff81 RFL=00000246 [---Z-P-] CPL=0 II=0 A20=1 SMM=0 HLT=1\r\n\
            CR0=80050033 CR2=0000000000000000 CR3=0000000003a1c003 CR4=000016f0\r\nEFER=0000000000000d01\r\n\
            CPU#1\r\nCR0=00000011 CR2=00000000 CR3=00000000 CR4=00000000\r\n";
        let vcpus = parse_registers(printed);
        assert_eq!(vcpus[0].0, VcpuId(0));
        assert_eq!((vcpus[0].1.cr3, vcpus[0].1.table_levels()), (0x3a1c003, Some(5)));
        assert_eq!((vcpus[1].0, vcpus[1].1.table_levels()), (VcpuId(1), None));
    }

    proptest! {
        #[test]
        fn any_text_is_read(text in "(CPU#[0-9]{1,7}\n(CR[034]=[0-9a-fx+]{0,20} ?)*\n?){0,4}.*") {
            let _ = parse_registers(&text);
        }
    }
}
