//! Arithmetic on memory: computes the result and the flags.

use iced_x86::{Instruction, Mnemonic, Register};

use super::mask;

const CARRY: u64 = 1 << 0;
const PARITY: u64 = 1 << 2;
const ADJUST: u64 = 1 << 4;
const ZERO: u64 = 1 << 6;
const SIGN: u64 = 1 << 7;
const OVERFLOW: u64 = 1 << 11;
/// The flags that arithmetic sets.
pub(crate) const FLAGS: u64 = CARRY | PARITY | ADJUST | ZERO | SIGN | OVERFLOW;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
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
pub(crate) struct Operation {
    kind: Kind,
    operand: u64,
    register: Register,
}

/// The result of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Outcome {
    /// The new value in memory.
    pub(crate) value: u64,
    pub(crate) flags: u64,
    /// A register that receives the old value in memory.
    pub(crate) old_to: Option<Register>,
}

impl Operation {
    pub(super) fn of(instruction: &Instruction, operand: u64) -> Option<Self> {
        let kind = match instruction.mnemonic() {
            Mnemonic::Add => Kind::Add,
            Mnemonic::Adc => Kind::AddCarry,
            Mnemonic::Sub => Kind::Subtract,
            Mnemonic::Sbb => Kind::SubtractBorrow,
            Mnemonic::And => Kind::And,
            Mnemonic::Or => Kind::Or,
            Mnemonic::Xor => Kind::Xor,
            Mnemonic::Inc => Kind::Increment,
            Mnemonic::Dec => Kind::Decrement,
            Mnemonic::Neg => Kind::Negate,
            Mnemonic::Not => Kind::Not,
            Mnemonic::Xchg => Kind::Exchange,
            Mnemonic::Xadd => Kind::ExchangeAdd,
            Mnemonic::Cmpxchg => Kind::CompareExchange,
            _ => return None,
        };
        Some(Self { kind, operand, register: instruction.op1_register() })
    }

    /// Computes the result for the old value `old`. Only `cmpxchg` uses `rax`.
    pub(crate) fn apply(&self, old: u64, size: usize, flags: u64, rax: u64) -> Outcome {
        let operand = self.operand & mask(size);
        let carry = flags & CARRY;
        let sum = |other, carry| (add(old, other, carry, size), None);
        let difference = |borrow| (subtract(old, operand, borrow, size), None);
        let keeping_carry = |(value, new): (u64, u64)| ((value, new & !CARRY | carry), None);
        let ((value, new), old_to) = match self.kind {
            Kind::Add => sum(operand, 0),
            Kind::AddCarry => sum(operand, carry),
            Kind::Subtract => difference(0),
            Kind::SubtractBorrow => difference(carry),
            Kind::And => (logic(old & operand, size), None),
            Kind::Or => (logic(old | operand, size), None),
            Kind::Xor => (logic(old ^ operand, size), None),
            Kind::Increment => keeping_carry(add(old, 1, 0, size)),
            Kind::Decrement => keeping_carry(subtract(old, 1, 0, size)),
            Kind::Negate => (subtract(0, old, 0, size), None),
            Kind::Not => ((!old & mask(size), flags & FLAGS), None),
            Kind::Exchange => ((operand, flags & FLAGS), Some(self.register)),
            Kind::ExchangeAdd => (add(old, operand, 0, size), Some(self.register)),
            Kind::CompareExchange => compare_exchange(old, operand, rax & mask(size), size),
        };
        Outcome { value, flags: flags & !FLAGS | new, old_to }
    }
}

fn compare_exchange(old: u64, new: u64, rax: u64, size: usize) -> ((u64, u64), Option<Register>) {
    let accumulator = match size {
        1 => Register::AL,
        2 => Register::AX,
        4 => Register::EAX,
        _ => Register::RAX,
    };
    let (_, flags) = subtract(rax, old, 0, size);
    match rax == old {
        true => ((new, flags), None),
        false => ((old, flags), Some(accumulator)),
    }
}

fn add(a: u64, b: u64, carry: u64, size: usize) -> (u64, u64) {
    let wide = u128::from(a) + u128::from(b) + u128::from(carry);
    let value = wide as u64 & mask(size);
    let carried = wide > u128::from(mask(size));
    let overflow = (a ^ value) & (b ^ value) & sign(size) != 0;
    (value, result_flags(value, size) | arithmetic_flags(a, b, value, carried, overflow))
}

fn subtract(a: u64, b: u64, borrow: u64, size: usize) -> (u64, u64) {
    let value = a.wrapping_sub(b).wrapping_sub(borrow) & mask(size);
    let borrowed = u128::from(a) < u128::from(b) + u128::from(borrow);
    let overflow = (a ^ b) & (a ^ value) & sign(size) != 0;
    (value, result_flags(value, size) | arithmetic_flags(a, b, value, borrowed, overflow))
}

fn logic(value: u64, size: usize) -> (u64, u64) {
    (value, result_flags(value, size))
}

fn sign(size: usize) -> u64 {
    1 << (size * 8 - 1)
}

fn set(flag: u64, condition: bool) -> u64 {
    if condition { flag } else { 0 }
}

fn result_flags(value: u64, size: usize) -> u64 {
    set(ZERO, value == 0)
        | set(SIGN, value & sign(size) != 0)
        | set(PARITY, (value as u8).count_ones() % 2 == 0)
}

fn arithmetic_flags(a: u64, b: u64, value: u64, carry: bool, overflow: bool) -> u64 {
    set(CARRY, carry) | set(OVERFLOW, overflow) | set(ADJUST, (a ^ b ^ value) & 16 != 0)
}
