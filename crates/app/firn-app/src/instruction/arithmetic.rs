//! Arithmetic on memory: computes the result and the flags.

use iced_x86::{Instruction, Mnemonic, Register};

use super::byte_mask;

const CARRY: u64 = 1 << 0;
const PARITY: u64 = 1 << 2;
const ADJUST: u64 = 1 << 4;
const ZERO: u64 = 1 << 6;
const SIGN: u64 = 1 << 7;
const OVERFLOW: u64 = 1 << 11;
/// The flags that arithmetic sets.
pub(crate) const FLAGS: u64 = CARRY | PARITY | ADJUST | ZERO | SIGN | OVERFLOW;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ArithmeticKind {
    Add,
    AddCarry,
    Subtract,
    SubtractBorrow,
    And,
    Or,
    Xor,
    Increment,
    Decrement,
    Negate,
    Not,
    Exchange,
    ExchangeAdd,
    CompareExchange,
}

/// An instruction that reads, computes and writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ArithmeticOperation {
    kind: ArithmeticKind,
    operand: u64,
    register: Register,
}

/// The result of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ArithmeticResult {
    /// The new value in memory.
    pub(crate) value: u64,
    pub(crate) flags: u64,
    /// A register that receives the old value in memory.
    pub(crate) old_to: Option<Register>,
}

impl ArithmeticOperation {
    pub(super) fn from_instruction(instruction: &Instruction, operand: u64) -> Option<Self> {
        let kind = match instruction.mnemonic() {
            Mnemonic::Add => ArithmeticKind::Add,
            Mnemonic::Adc => ArithmeticKind::AddCarry,
            Mnemonic::Sub => ArithmeticKind::Subtract,
            Mnemonic::Sbb => ArithmeticKind::SubtractBorrow,
            Mnemonic::And => ArithmeticKind::And,
            Mnemonic::Or => ArithmeticKind::Or,
            Mnemonic::Xor => ArithmeticKind::Xor,
            Mnemonic::Inc => ArithmeticKind::Increment,
            Mnemonic::Dec => ArithmeticKind::Decrement,
            Mnemonic::Neg => ArithmeticKind::Negate,
            Mnemonic::Not => ArithmeticKind::Not,
            Mnemonic::Xchg => ArithmeticKind::Exchange,
            Mnemonic::Xadd => ArithmeticKind::ExchangeAdd,
            Mnemonic::Cmpxchg => ArithmeticKind::CompareExchange,
            _ => return None,
        };
        Some(Self { kind, operand, register: instruction.op1_register() })
    }

    /// Computes the result for the old value `old`. Only `cmpxchg` uses `rax`.
    pub(crate) fn compute(&self, old: u64, size: usize, flags: u64, rax: u64) -> ArithmeticResult {
        let operand = self.operand & byte_mask(size);
        let carry = flags & CARRY;
        let sum = |other, carry| (add_with_carry(old, other, carry, size), None);
        let difference = |borrow| (subtract_with_borrow(old, operand, borrow, size), None);
        let keeping_carry = |(value, new): (u64, u64)| ((value, new & !CARRY | carry), None);
        let ((value, new), old_to) = match self.kind {
            ArithmeticKind::Add => sum(operand, 0),
            ArithmeticKind::AddCarry => sum(operand, carry),
            ArithmeticKind::Subtract => difference(0),
            ArithmeticKind::SubtractBorrow => difference(carry),
            ArithmeticKind::And => (logic_result(old & operand, size), None),
            ArithmeticKind::Or => (logic_result(old | operand, size), None),
            ArithmeticKind::Xor => (logic_result(old ^ operand, size), None),
            ArithmeticKind::Increment => keeping_carry(add_with_carry(old, 1, 0, size)),
            ArithmeticKind::Decrement => keeping_carry(subtract_with_borrow(old, 1, 0, size)),
            ArithmeticKind::Negate => (subtract_with_borrow(0, old, 0, size), None),
            ArithmeticKind::Not => ((!old & byte_mask(size), flags & FLAGS), None),
            ArithmeticKind::Exchange => ((operand, flags & FLAGS), Some(self.register)),
            ArithmeticKind::ExchangeAdd => {
                (add_with_carry(old, operand, 0, size), Some(self.register))
            }
            ArithmeticKind::CompareExchange => {
                compare_exchange(old, operand, rax & byte_mask(size), size)
            }
        };
        ArithmeticResult { value, flags: flags & !FLAGS | new, old_to }
    }
}

fn compare_exchange(old: u64, new: u64, rax: u64, size: usize) -> ((u64, u64), Option<Register>) {
    let accumulator = match size {
        1 => Register::AL,
        2 => Register::AX,
        4 => Register::EAX,
        _ => Register::RAX,
    };
    let (_, flags) = subtract_with_borrow(rax, old, 0, size);
    match rax == old {
        true => ((new, flags), None),
        false => ((old, flags), Some(accumulator)),
    }
}

fn add_with_carry(a: u64, b: u64, carry: u64, size: usize) -> (u64, u64) {
    let wide = u128::from(a) + u128::from(b) + u128::from(carry);
    let value = wide as u64 & byte_mask(size);
    let carried = wide > u128::from(byte_mask(size));
    let overflow = (a ^ value) & (b ^ value) & sign_bit(size) != 0;
    (value, result_flags(value, size) | arithmetic_flags(a, b, value, carried, overflow))
}

fn subtract_with_borrow(a: u64, b: u64, borrow: u64, size: usize) -> (u64, u64) {
    let value = a.wrapping_sub(b).wrapping_sub(borrow) & byte_mask(size);
    let borrowed = u128::from(a) < u128::from(b) + u128::from(borrow);
    let overflow = (a ^ b) & (a ^ value) & sign_bit(size) != 0;
    (value, result_flags(value, size) | arithmetic_flags(a, b, value, borrowed, overflow))
}

fn logic_result(value: u64, size: usize) -> (u64, u64) {
    (value, result_flags(value, size))
}

fn sign_bit(size: usize) -> u64 {
    1 << (size * 8 - 1)
}

fn flag_if(flag: u64, condition: bool) -> u64 {
    if condition { flag } else { 0 }
}

fn result_flags(value: u64, size: usize) -> u64 {
    flag_if(ZERO, value == 0)
        | flag_if(SIGN, value & sign_bit(size) != 0)
        | flag_if(PARITY, (value as u8).count_ones() % 2 == 0)
}

fn arithmetic_flags(a: u64, b: u64, value: u64, carry: bool, overflow: bool) -> u64 {
    flag_if(CARRY, carry) | flag_if(OVERFLOW, overflow) | flag_if(ADJUST, (a ^ b ^ value) & 16 != 0)
}
