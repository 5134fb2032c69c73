//! Evaluation of one x86-64 instruction that stores to memory: decoded by iced-x86, evaluated here,
//! performed elsewhere.
//!
//! Evaluation touches no memory, allocates nothing and takes no lock (once [`prepare_decoder`] has
//! run), so that a signal handler may do it, and a test may do it without a signal handler.
//!
//! Supported are the instructions that compilers and `memcpy` use to store: moves of all widths
//! from registers and immediates, vector moves up to 256 bits, `stos` and `movs` with and without
//! `rep`, and arithmetic on memory with its atomic forms. Any other instruction is an
//! [`EvaluationError`].

mod arithmetic;

use iced_x86::{
    Code, Decoder, DecoderError, DecoderOptions, Instruction, Mnemonic, OpKind, Register,
};

pub(crate) use arithmetic::{ArithmeticOperation, FLAGS};

/// The maximum length of an instruction in bytes.
pub(crate) const INSTRUCTION_BYTES_MAX: usize = 15;
const DIRECTION_FLAG: u64 = 1 << 10;

/// The processor state that an instruction reads.
#[derive(Clone, Debug)]
pub(crate) struct ProcessorState<'a> {
    /// In the order of the architecture: rax, rcx, rdx, rbx, rsp, rbp, rsi, rdi, r8 to r15.
    pub(crate) general: [u64; 16],
    pub(crate) ip: u64,
    pub(crate) flags: u64,
    /// The lower halves of the vector registers.
    pub(crate) xmm: Option<&'a [[u8; 16]; 16]>,
    /// The upper halves.
    pub(crate) ymm_high: Option<&'a [[u8; 16]; 16]>,
}

/// The effect of an instruction on memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DecodedStore {
    pub(crate) address: u64,
    /// Bytes per element.
    pub(crate) size: usize,
    pub(crate) action: StoreAction,
    /// The address of the next instruction.
    pub(crate) next: u64,
}

/// The source of the bytes that are stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum StoreAction {
    /// The first `size` of these bytes.
    Bytes([u8; 32]),
    /// The result of an operation on the bytes in memory.
    Modify(ArithmeticOperation),
    /// `stos`: this word, repeatedly if it repeats.
    Fill { value: u64, repeats: bool },
    /// `movs`: from this address, element by element if it repeats.
    Copy { from: u64, repeats: bool },
}

/// Why an instruction cannot be evaluated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EvaluationError {
    /// The bytes end before the instruction does.
    Incomplete,
    /// The instruction is not supported.
    Unsupported,
}

/// Builds the decoder's tables. Otherwise the decoder builds them at its first use, which must not
/// be in a signal handler.
pub(crate) fn prepare_decoder() {
    let _ = Decoder::with_ip(64, &[0x48, 0x89, 0x07], 0, DecoderOptions::NONE).decode();
}

/// Evaluates the store of the instruction at the start of `code`.
pub(crate) fn evaluate_store(
    code: &[u8],
    registers: &ProcessorState<'_>,
) -> Result<DecodedStore, EvaluationError> {
    let mut decoder = Decoder::with_ip(64, code, registers.ip, DecoderOptions::NONE);
    let instruction = decoder.decode();
    match decoder.last_error() {
        DecoderError::None => {}
        DecoderError::NoMoreBytes => return Err(EvaluationError::Incomplete),
        _ => return Err(EvaluationError::Unsupported),
    }
    store_of(&instruction, registers).ok_or(EvaluationError::Unsupported)
}

fn store_of(instruction: &Instruction, registers: &ProcessorState<'_>) -> Option<DecodedStore> {
    let next = instruction.next_ip();
    if let Some((size, copies)) = string_store(instruction.code()) {
        let action = registers.string_action(instruction, size, copies)?;
        return Some(DecodedStore { address: registers.general[7], size, action, next });
    }
    if instruction.op0_kind() != OpKind::Memory || instruction.op_count() > 3 {
        return None;
    }
    let address = registers.operand_address(instruction)?;
    let size = instruction.memory_size().size();
    let action = match vector_half(instruction.mnemonic()) {
        Some(half) => StoreAction::Bytes(registers.vector_bytes(instruction.op1_register(), half)?),
        None => registers.scalar_action(instruction, size)?,
    };
    (1..=32).contains(&size).then_some(DecodedStore { address, size, action, next })
}

/// Element size of a string store, and whether it copies.
fn string_store(code: Code) -> Option<(usize, bool)> {
    Some(match code {
        Code::Stosb_m8_AL => (1, false),
        Code::Stosw_m16_AX => (2, false),
        Code::Stosd_m32_EAX => (4, false),
        Code::Stosq_m64_RAX => (8, false),
        Code::Movsb_m8_m8 => (1, true),
        Code::Movsw_m16_m16 => (2, true),
        Code::Movsd_m32_m32 => (4, true),
        Code::Movsq_m64_m64 => (8, true),
        _ => return None,
    })
}

/// For moves from vector registers: whether they store the upper half of the lower 128 bits.
fn vector_half(mnemonic: Mnemonic) -> Option<bool> {
    use Mnemonic::*;
    Some(match mnemonic {
        Movaps | Movapd | Movups | Movupd | Movdqa | Movdqu | Movntps | Movntpd | Movntdq
        | Movss | Movsd | Movlps | Movlpd | Vmovaps | Vmovapd | Vmovups | Vmovupd | Vmovdqa
        | Vmovdqu | Vmovntps | Vmovntpd | Vmovntdq | Vmovss | Vmovsd | Vmovlps | Vmovlpd | Movq
        | Movd | Vmovq | Vmovd => false,
        Movhps | Movhpd | Vmovhps | Vmovhpd => true,
        _ => return None,
    })
}

impl ProcessorState<'_> {
    fn operand_address(&self, instruction: &Instruction) -> Option<u64> {
        if matches!(instruction.segment_prefix(), Register::FS | Register::GS) {
            return None;
        }
        if instruction.is_ip_rel_memory_operand() {
            return Some(instruction.ip_rel_memory_address());
        }
        let part = |register: Register| match register {
            Register::None => Some(0),
            register if register.is_gpr64() => Some(self.general[register.number()]),
            // 32-bit and vector addressing.
            _ => None,
        };
        let base = part(instruction.memory_base())?;
        let index = part(instruction.memory_index())?;
        let scaled = index.wrapping_mul(u64::from(instruction.memory_index_scale()));
        Some(base.wrapping_add(scaled).wrapping_add(instruction.memory_displacement64()))
    }

    fn string_action(
        &self,
        instruction: &Instruction,
        size: usize,
        copies: bool,
    ) -> Option<StoreAction> {
        let segment = instruction.segment_prefix();
        let narrow = match copies {
            true => instruction.op1_kind() != OpKind::MemorySegRSI,
            false => false,
        } || instruction.op0_kind() != OpKind::MemoryESRDI;
        if self.flags & DIRECTION_FLAG != 0 || segment != Register::None || narrow {
            return None;
        }
        let repeats = instruction.has_rep_prefix() || instruction.has_repne_prefix();
        Some(match copies {
            true => StoreAction::Copy { from: self.general[6], repeats },
            false => StoreAction::Fill { value: self.general[0] & byte_mask(size), repeats },
        })
    }

    fn vector_bytes(&self, register: Register, upper: bool) -> Option<[u8; 32]> {
        let mut bytes = [0; 32];
        if register.is_mm() || register.is_gpr() {
            return None;
        }
        let number = register.number();
        bytes[..16].copy_from_slice(self.xmm?.get(number)?);
        if register.is_ymm() {
            bytes[16..].copy_from_slice(self.ymm_high?.get(number)?);
        }
        if upper {
            bytes.copy_within(8..16, 0);
        }
        Some(bytes)
    }

    fn scalar_action(&self, instruction: &Instruction, size: usize) -> Option<StoreAction> {
        if size > 8 {
            return None;
        }
        let value = || match instruction.op1_kind() {
            OpKind::Register => self.register_value(instruction.op1_register()),
            OpKind::Immediate8
            | OpKind::Immediate16
            | OpKind::Immediate32
            | OpKind::Immediate8to16
            | OpKind::Immediate8to32
            | OpKind::Immediate8to64
            | OpKind::Immediate32to64 => Some(instruction.immediate(1)),
            _ => None,
        };
        if matches!(instruction.mnemonic(), Mnemonic::Mov | Mnemonic::Movnti) {
            let mut bytes = [0; 32];
            bytes[..8].copy_from_slice(&value()?.to_le_bytes());
            return Some(StoreAction::Bytes(bytes));
        }
        let operand = if instruction.op_count() > 1 { value()? } else { 0 };
        ArithmeticOperation::from_instruction(instruction, operand).map(StoreAction::Modify)
    }

    /// The value of a general register of any width.
    pub(crate) fn register_value(&self, register: Register) -> Option<u64> {
        let (number, shift, size) = register_position(register)?;
        Some(self.general[number] >> shift & byte_mask(size))
    }
}

/// The position of a general register: number, first bit, bytes.
fn register_position(register: Register) -> Option<(usize, u32, usize)> {
    Some(match register {
        Register::AH | Register::CH | Register::DH | Register::BH => {
            (register.full_register().number(), 8, 1)
        }
        register if register.is_gpr() => (register.full_register().number(), 0, register.size()),
        _ => return None,
    })
}

/// Sets a general register as the architecture does: a write of 32 bits clears the upper half, a
/// narrower one keeps the other bits.
pub(crate) fn set_general(general: &mut [u64; 16], register: Register, value: u64) {
    let Some((number, shift, size)) = register_position(register) else { return };
    let kept = match size {
        4 | 8 => 0,
        _ => general[number] & !(byte_mask(size) << shift),
    };
    general[number] = kept | (value & byte_mask(size)) << shift;
}

/// A mask of the lowest `size` bytes.
pub(crate) fn byte_mask(size: usize) -> u64 {
    match size {
        8.. => u64::MAX,
        _ => (1 << (size * 8)) - 1,
    }
}

#[cfg(test)]
mod tests;
