"""PTX as people write it: what nvcc does not emit but ptxas takes."""

from __future__ import annotations

import pytest

from gpufleet.virtual.ptx import Module, PtxError, parse
from gpufleet.virtual.ptx.syntax import (
    Address,
    CallTarget,
    Discard,
    Immediate,
    Instruction,
    Label,
    Location,
    Negated,
    Pair,
    Register,
    Special,
    Symbol,
    Targets,
    Vector,
)

HEADER = ".version 8.5\n.target sm_90\n.address_size 64\n"


def body_of(text: str, outside: str = "") -> list[Instruction]:
    return module_of(text, outside).kernels["k"].body.instructions


def module_of(text: str, outside: str = "") -> Module:
    registers = ".reg .pred %p<5>; .reg .b16 %rs<4>; .reg .b32 %r<9>; .reg .f32 %f<9>;"
    registers += " .reg .b64 %rd<9>; .reg .f64 %fd<4>;"
    parameters = ".param .u64 p0, .param .align 8 .b8 st[24]"
    return parse(f"{HEADER}{outside}\n.visible .entry k({parameters})\n{{ {registers}\n{text}\n}}")


def refused(text: str, outside: str = "", code: str = "INVALID_PTX") -> PtxError:
    with pytest.raises(PtxError) as caught:
        module_of(text, outside).check()
    assert caught.value.code == code
    return caught.value


@pytest.mark.parametrize(
    ("literal", "type", "bits"),
    [
        ("0x1F", "u32", 0x1F),
        ("0x1FU", "u32", 0x1F),
        ("0b101", "u32", 5),
        ("017", "u32", 15),
        ("-1", "s32", 0xFFFFFFFF),
        ("5000000000", "u32", 5000000000 & 0xFFFFFFFF),
        ("(1 << 4) | 3", "u32", 19),
        ("(7 - 2) * -3", "s32", (-15) & 0xFFFFFFFF),
        ("-7 / 2", "s32", (-3) & 0xFFFFFFFF),
        ("-7 % 3", "s32", 0xFFFFFFFF),
        ("WARP_SZ", "u32", 32),
        ("1 < 2 ? 10 : 20", "u32", 10),
        ("!0 + ~0", "u32", 0),
        ("-1 >> 60", "s64", 0xFFFFFFFFFFFFFFFF),
        ("(.u64)(-1) >> 60", "u64", 15),
        ("0f3F800000", "f32", 0x3F800000),
        ("0f7FABCDEF", "f32", 0x7FABCDEF),
        ("1.5", "f32", 0x3FC00000),
        ("-2.0", "f64", 0xC000000000000000),
        ("1e300", "f32", 0x7F800000),
        ("0d3FF8000000000000", "f32", 0x3FC00000),
        ("0f3FC00000", "f64", 0x3FF8000000000000),
        ("0d7FF4000000000001", "f64", 0x7FF4000000000001),
    ],
)
def test_literals_become_the_bits_of_the_type(literal: str, type: str, bits: int) -> None:
    register = {"f32": "%f1", "f64": "%fd1"}.get(type, "%rd1" if type.endswith("64") else "%r1")
    (instruction, _) = body_of(f"mov.{type} {register}, {literal}; ret;")
    assert instruction.operands[1] == Immediate(bits, type)


@pytest.mark.parametrize(
    "text",
    [
        "add.f32 %f1, %f2, 1;",  # an integer where a float stands, as ptxas refuses it
        "add.s32 %r1, %r2, 1.5;",
        "mov.b32 %r1, 1.5;",
        "add.s32 %f1, %r2, %r3;",
        "add.s32 %rd1, %r2, %r3;",
        "mov.u32 %f1, %r1;",
        "cvt.rzi.u32.f32 %f1, %f2;",
        "st.global.u64 [%rd1], %r1;",
        "shl.b64 %rd1, %rd2, %rd3;",
        "ld.global.u32 %f1, [%rd2];",
        "add.s32 %r1, %r2;",
        "add.s32 %r1, %r2, %r3, %r4;",
        "add.s32 %r1, %r2, %nobody;",
        "bra NOWHERE;",
        "bogus.u32 %r1;",
        "add.u33 %r1, %r2, %r3;",
        "setp.eq.s32 %r1, %r2, %r3;",
        "@%r1 bra L; L:",
        "mov.u32 %r1, 1",
        "L: L: ret;",
        "ld.global.v4.u32 {%r1, %r2}, [%rd1];",
        "call nobody;",
        ".reg .b33 %x;",
        "{ { }",
        "add.s32 %r1, %r2, 1 +;",
        "add.s32 %r1, %r2, 1 / 0;",
    ],
)
def test_what_ptxas_refuses_is_refused(text: str) -> None:
    refused(text)


@pytest.mark.parametrize(
    "text",
    [
        "add.f32 %r1, %r2, %r3;",  # untyped registers fit every type of their size
        "mov.f32 %f1, %r1;",
        "mov.b32 %f1, %r1;",
        "ld.param.u32 %rd1, [p0];",  # wider registers, for ld, st and cvt
        "ld.global.f32 %rd1, [%rd2];",
        "cvt.u32.u64 %rd1, %rd2;",
        "st.global.u8 [%rd1], %r1;",
        "mov.u16 %rs1, %tid.x;",
        "ld .global .u32 %r1, [%rd1];",
        "ld.u32.global %r1, [%rd1];",
        "add.ftz.rn.f32 %f1, %f2, %f3;",
        "ld.global.u32 %r1, [%rd1+4+4];",
        "ld.global.u32 %r1, [%rd1+-4];",
        "and.pred %p1, %p2, 1;",
        "mov.b64 {%r1, _}, %rd1;",
        "mov.b64 %rd1, {1, %r2};",
        "selp.b32 %r1, %r2, %r3, !%p1;",
    ],
)
def test_what_ptxas_takes_is_taken(text: str) -> None:
    assert all(i.operation.shapes is not None for i in body_of(text))


def test_operands() -> None:
    text = """
    setp.lt.and.s32 %p1|%p2, %r1, -2, !%p3;
    ld.global.v2.f32 {%f1, _}, [%rd1+16];
    atom.global.cas.b32 %r1, [v], %r2, %r3;
    mov.u32 %r1, %tid.x;
    mov.u64 %rd1, v+8;
    ret;
    """
    setp, ld, atom, tid, symbol, _ = body_of(text, ".global .u32 v[4];")
    p = [Register(f"%p{i}", "pred", i) for i in range(5)]
    assert setp.operands == (
        Pair(p[1], p[2]),
        register("%r1", setp),
        Immediate(0xFFFFFFFE, "s32"),
        Negated(p[3]),
    )
    assert setp.operation.get("compare") == "lt"
    assert setp.operation.get("boolean") == "and"
    assert setp.operation.types == ("s32",)
    assert ld.operands[0] == Vector((register("%f1", ld), Discard()))
    assert ld.operands[1] == Address(register("%rd1", ld), 16)
    assert (ld.operation.space, ld.operation.lanes) == ("global", 2)
    assert atom.operands[1] == Address(Symbol("v", "global"), 0)
    assert tid.operands[1] == Special("%tid.x", "u32")
    assert symbol.operands[1] == Symbol("v", "global", 8)


def register(name: str, instruction: Instruction) -> Register:
    from gpufleet.virtual.ptx.flow import registers_of

    return next(r for o in instruction.operands for r in registers_of(o) if r.name == name)


def test_names_are_scoped() -> None:
    text = """
    { .reg .b32 %r1; .param .b32 a; st.param.b32 [a], %r1; L: bra L; }
    { .param .b32 a; st.param.b32 [a], %r1; L: bra L; }
    """
    body = module_of(text).kernels["k"].body
    first, jump, second, jump_again, *_ = body.instructions
    assert first.operands == (
        Address(Symbol("a", "param"), 0),
        Register("%r1", "b32", len(body.registers) - 1),
    )
    assert second.operands[0] == Address(Symbol("a#2", "param"), 0)
    assert second.operands[1] != first.operands[1], "the outer %r1 again"
    assert set(body.variables) == {"a", "a#2"}
    labels = [i.operands[0] for i in (jump, jump_again)]
    assert all(isinstance(label, Label) for label in labels)
    assert labels[0] != labels[1]


def test_vector_registers() -> None:
    text = ".reg .v4 .f32 %v; ld.global.v4.f32 %v, [%rd1]; mov.f32 %f1, %v.z; ret;"
    load, move, _ = body_of(text)
    assert isinstance(load.operands[0], Vector)
    assert [e.name for e in load.operands[0].elements if isinstance(e, Register)] == [
        "%v.x",
        "%v.y",
        "%v.z",
        "%v.w",
    ]
    assert move.operands[1] == load.operands[0].elements[2]


def test_calls_and_indirect_branches() -> None:
    outside = """
    .func (.param .b32 r) f(.param .b32 a, .param .b64 b) { ret; }
    .func (.reg .u32 r) g(.reg .u32 a) { add.u32 r, a, 1; ret; }
    .alias other, g;
    """
    text = """
    { .param .b32 a; .param .b64 b; .param .b32 r;
      call.uni (r), f, (a, b);
      proto: .callprototype (.param .b32 _) _ (.param .b32 _, .param .align 8 .b8 _[16]);
      call (r), %rd1, (a, b), proto;
      call (%r1), other, (7);
      call noreturn_function;
    }
    ts: .branchtargets A, B;
    @%p1 brx.idx %r1, ts;
    A: B: ret;
    """
    found = module_of(text, outside + ".func noreturn_function .noreturn { trap; }")
    direct, indirect, by_register, plain, brx, _ = found.kernels["k"].body.instructions
    (target,) = direct.operands
    assert isinstance(target, CallTarget)
    assert target.target == Symbol("f", "code")
    assert [getattr(a, "name", None) for a in (*target.results, *target.arguments)] == ["r", "a", "b"]
    (target,) = indirect.operands
    assert isinstance(target, CallTarget)
    assert target.prototype is not None
    assert [p.size for p in target.prototype.parameters] == [4, 16]
    (target,) = by_register.operands
    assert isinstance(target, CallTarget)
    assert target.arguments == (Immediate(7, "b64"),)
    assert found.function("other") is found.functions["g"]
    assert found.functions["noreturn_function"].noreturn
    assert plain.operation.name == "call"
    assert isinstance(brx.operands[1], Targets)
    assert [label.name for label in brx.operands[1].labels] == ["A", "B"]
    assert brx.guard is not None


def test_directives_around_functions() -> None:
    text = f"""{HEADER}
    .file 1 "a b//c.cu", 123, 45
    .extern .func (.param .b32 r) vprintf (.param .b64 a, .param .b64 b);
    .weak .global .align 8 .u64 table[3] = {{f, generic(v)+8, 07}};
    .global .f32 nested[2][2] = {{ {{0f3F800000, 1.5}}, {{-2.0}} }};
    .global .b32 v = (1<<4)|WARP_SZ;
    .visible .global .attribute(.managed) .v4 .f32 managed;
    .func f() {{ ret; }}
    .visible .entry k() .reqntid 16, 16 .minnctapersm 2
    {{ .loc 1 12 3 /* a comment
      of two lines */
      .loc 1 13 3, function_name $L__info, inlined_at 1 20 5
      .pragma "nounroll";
      trap; }}
    .entry limited() .maxntid 128 {{ ret; }}
    .section .debug_str {{ info: .b8 1,2,3; .b32 0x33 }}
    """
    found = parse(text)
    assert found.variables["table"].relocations == ((0, "f", 0), (8, "v", 8))
    assert found.variables["table"].initial[16:] == (7).to_bytes(8, "little")
    assert found.variables["nested"].initial == bytes.fromhex("0000803f 0000c03f 000000c0")
    assert found.variables["nested"].size == 16
    assert found.variables["v"].initial == (48).to_bytes(4, "little")
    assert found.variables["managed"].size == 16
    assert found.functions["vprintf"].build is None
    assert found.kernels["k"].required_block == (16, 16, 1)
    assert found.kernels["k"].max_threads == 256
    assert found.kernels["limited"].max_threads == 128
    trap = found.kernels["k"].body.instructions[0]
    assert trap.source == Location("a b//c.cu", 13)
    assert str(trap.source) == "a b//c.cu:13"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", "INVALID_PTX"),
        ("this is not a module", "INVALID_PTX"),
        (
            ".version 7.0\n.target sm_75\n.address_size 64\n.visible .entry k(){ bogus.u32 %r1; ret; }\n\0",
            "INVALID_PTX",
        ),
        (".version 99.0\n.target sm_75\n.visible .entry k(){ ret; }", "UNSUPPORTED_PTX_VERSION"),
        (".version 10.0\n.target sm_75", "UNSUPPORTED_PTX_VERSION"),
        (".version 8.0\n.target gfx90a", "INVALID_PTX"),
        (".version 8.0\n.target sm_75\n.global .u32 x = {1, 2};", "INVALID_PTX"),
        (".version 8.0\n.target sm_75\n.global .b8 x[8] = {0xff(y)};", "NOT_SUPPORTED"),
        ("é", "INVALID_PTX"),
    ],
)
def test_malformed_modules(text: str, code: str) -> None:
    with pytest.raises(PtxError) as caught:
        parse(text)
    assert caught.value.code == code


def test_errors_say_where() -> None:
    error = refused("mov.u32 %r1, 1;\n\nadd.s32 %r1, %r2;")
    assert error.line == 9
    assert str(error).startswith("line 9: ")


def test_the_newest_known_version_is_accepted() -> None:
    assert parse(".version 9.9\n.target sm_120a").target_features == "a"


def test_instructions_without_forms_parse_and_keep_their_text() -> None:
    mma, _ = body_of("mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {%f1}, {%r1}, {%r2}, {%f2}; ret;")
    assert mma.operation.shapes is None
    assert mma.opcode == "mma"
