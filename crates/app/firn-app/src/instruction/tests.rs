use super::*;

fn registers() -> ProcessorState<'static> {
    let mut general = [0; 16];
    for (number, value) in general.iter_mut().enumerate() {
        *value = 0x1111_1111_1111_1111 * number as u64;
    }
    general[7] = 0x5000;
    ProcessorState { general, ip: 0x40_0000, flags: 0, xmm: None, ymm_high: None }
}

fn evaluated(code: &[u8]) -> DecodedStore {
    evaluate_store(code, &registers()).unwrap()
}

#[test]
fn moves_of_every_width() {
    // mov [rdi], rbx / ebx / bx / bl / bh
    for (code, size) in [
        (&[0x48, 0x89, 0x1f][..], 8),
        (&[0x89, 0x1f], 4),
        (&[0x66, 0x89, 0x1f], 2),
        (&[0x88, 0x1f], 1),
        (&[0x88, 0x3f], 1),
    ] {
        let store = evaluated(code);
        assert_eq!((store.address, store.size), (0x5000, size));
        let StoreAction::Bytes(bytes) = store.action else { panic!() };
        assert_eq!(bytes[..size], [0x33; 8][..size]);
        assert_eq!(store.next, 0x40_0000 + code.len() as u64);
    }
}

#[test]
fn addresses_have_four_parts() {
    // mov byte ptr [rdi + rcx*4 + 0x10], 7
    let store = evaluated(&[0xc6, 0x44, 0x8f, 0x10, 7]);
    assert_eq!(store.address, 0x5010_u64.wrapping_add(0x1111_1111_1111_1111 * 4));
    // mov dword ptr [rip + 0x100], 1
    let store = evaluated(&[0xc7, 0x05, 0, 1, 0, 0, 1, 0, 0, 0]);
    assert_eq!(store.address, 0x40_0000 + 10 + 0x100);
}

#[test]
fn an_unknown_instruction_is_refused() {
    // mov fs:[rdi], rax; cmpxchg16b [rdi]; shl qword ptr [rdi], 1; mov [edi], rax; nop; mov rax,
    // [rdi]
    for code in [
        &[0x64, 0x48, 0x89, 0x07][..],
        &[0x48, 0x0f, 0xc7, 0x0f],
        &[0x48, 0xd1, 0x27],
        &[0x67, 0x48, 0x89, 0x07],
        &[0x90],
        &[0x48, 0x8b, 0x07],
    ] {
        assert_eq!(
            evaluate_store(code, &registers()),
            Err(EvaluationError::Unsupported),
            "{code:x?}"
        );
    }
    assert_eq!(evaluate_store(&[0x48, 0x89], &registers()), Err(EvaluationError::Incomplete));
}

#[test]
fn strings() {
    // rep stosq; movsb
    let store = evaluated(&[0xf3, 0x48, 0xab]);
    assert_eq!((store.size, store.action), (8, StoreAction::Fill { value: 0, repeats: true }));
    let store = evaluated(&[0xa4]);
    let from = 0x6666_6666_6666_6666;
    assert_eq!((store.size, store.action), (1, StoreAction::Copy { from, repeats: false }));
    let backwards = ProcessorState { flags: DIRECTION_FLAG, ..registers() };
    assert_eq!(evaluate_store(&[0xa4], &backwards), Err(EvaluationError::Unsupported));
}

#[test]
fn narrow_registers_keep_the_rest() {
    let mut general = [u64::MAX; 16];
    set_general(&mut general, Register::AH, 0);
    assert_eq!(general[0], 0xffff_ffff_ffff_00ff);
    set_general(&mut general, Register::ECX, 5);
    assert_eq!(general[1], 5);
}

/// Arithmetic against the processor itself, flags included. Another crate's tests would need unsafe
/// code for that; this crate has it anyway.
mod processor {
    use super::*;
    use proptest::prelude::*;
    use std::arch::asm;

    macro_rules! real {
        ($instruction:literal, $old:ident, $operand:ident, $flags:ident) => {{
            let mut value = $old;
            let flags: u64;
            // SAFETY: reads and writes the two registers and, balanced, the stack. The flags set
            // are arithmetic ones.
            unsafe {
                asm!("push {f}", "popfq", $instruction, "pushfq", "pop {f}",
                    v = inout(reg) value, o = in(reg) $operand, f = inout(reg) $flags => flags);
            }
            (value, flags)
        }};
    }

    fn ours(code: &[u8], old: u64, operand: u64, flags: u64, size: usize) -> (u64, u64) {
        let mut registers = registers();
        registers.general[3] = operand;
        registers.flags = flags;
        let store = evaluate_store(code, &registers).unwrap();
        assert_eq!(store.size, size);
        let StoreAction::Modify(operation) = store.action else { panic!() };
        let outcome = operation.compute(old & byte_mask(size), size, flags, 0);
        (outcome.value, outcome.flags)
    }

    proptest! {
        #[test]
        fn agrees(old in edges(), operand in edges(), carry in 0_u64..2) {
            let flags = 0x202 | carry;
            let check = |name, code: &[u8], size, undefined: u64, (value, real): (u64, u64)| {
                let (got, new) = ours(code, old, operand, flags, size);
                assert_eq!(got, value & byte_mask(size), "{name} {old:x} {operand:x}");
                let defined = FLAGS & !undefined;
                assert_eq!(new & defined, real & defined, "{name} {old:x} {operand:x}");
            };
            const ADJUST: u64 = 16;
            check("add", &[0x48, 0x01, 0x1f], 8, 0, real!("add {v}, {o}", old, operand, flags));
            check("adc", &[0x48, 0x11, 0x1f], 8, 0, real!("adc {v}, {o}", old, operand, flags));
            check("sub", &[0x48, 0x29, 0x1f], 8, 0, real!("sub {v}, {o}", old, operand, flags));
            check("sbb", &[0x48, 0x19, 0x1f], 8, 0, real!("sbb {v}, {o}", old, operand, flags));
            check("sbb32", &[0x19, 0x1f], 4, 0, real!("sbb {v:e}, {o:e}", old, operand, flags));
            check("add16", &[0x66, 0x01, 0x1f], 2, 0, real!("add {v:x}, {o:x}", old, operand, flags));
            check("sub8", &[0x28, 0x1f], 1, 0, real!("sub {v:l}, {o:l}", old, operand, flags));
            check("and", &[0x48, 0x21, 0x1f], 8, ADJUST, real!("and {v}, {o}", old, operand, flags));
            check("or", &[0x48, 0x09, 0x1f], 8, ADJUST, real!("or {v}, {o}", old, operand, flags));
            check("xor32", &[0x31, 0x1f], 4, ADJUST, real!("xor {v:e}, {o:e}", old, operand, flags));
            check("inc", &[0x48, 0xff, 0x07], 8, 0, real!("inc {v} /* {o} */", old, operand, flags));
            check("dec8", &[0xfe, 0x0f], 1, 0, real!("dec {v:l} /* {o} */", old, operand, flags));
            check("neg", &[0x48, 0xf7, 0x1f], 8, 0, real!("neg {v} /* {o} */", old, operand, flags));
            check("not", &[0x48, 0xf7, 0x17], 8, 0, real!("not {v} /* {o} */", old, operand, flags));
        }
    }

    fn edges() -> impl Strategy<Value = u64> {
        prop_oneof![
            any::<u64>(),
            (0_u32..64, -2_i64..3).prop_map(|(bit, near)| (1_u64 << bit).wrapping_add(near as u64)),
        ]
    }
}
