"""The compiled filter does for every call number what the rules say, on both machines."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.sandbox.seccomp import BOX_RULES, SANDBOX_RULES, SeccompRules, compile_filter

ARCHITECTURES = {"x86_64": 0xC000_003E, "aarch64": 0xC000_00B7}
ALLOW, REFUSE, UNKNOWN = 0x7FFF_0000, 0x0005_0001, 0x0005_0026


def decide(program: bytes, number: int, arguments: tuple[int, ...] = (), architecture: int = 0) -> int:
    """What the kernel's interpreter of classic BPF returns."""
    data = struct.pack("IIQ6Q", number, architecture, 0, *(*arguments, 0, 0, 0, 0, 0, 0)[:6])
    steps = list(struct.iter_unpack("HBBI", program))
    at, loaded = 0, 0
    while True:
        code, when_true, when_false, operand = steps[at]
        at += 1
        if code == 0x20:
            (loaded,) = struct.unpack_from("I", data, operand)
        elif code == 0x06:
            return int(operand)
        elif code == 0x05:
            at += operand
        else:
            tests = {0x15: loaded == operand, 0x35: loaded >= operand, 0x45: bool(loaded & operand)}
            at += when_true if tests[code] else when_false


def numbers(calls: str, machine: str) -> set[int]:
    column = 1 + list(ARCHITECTURES).index(machine)
    words = [call.split()[column] for call in calls.split(",") if call.strip()]
    return {int(each) for each in words if each != "-"}


@pytest.mark.parametrize("machine", ARCHITECTURES)
@pytest.mark.parametrize("rules", [SANDBOX_RULES, BOX_RULES], ids=["sandbox", "box"])
def test_every_number_is_treated_as_its_rule_says(rules: SeccompRules, machine: str) -> None:
    program = compile_filter(rules, machine)
    assert program is not None
    assert len(program) // 8 < 4096  # the kernel's limit
    allowed, refused = numbers(rules.calls, machine), numbers(rules.refused, machine)
    unknown = numbers(",".join(rules.unknown), machine)
    checked = numbers(",".join(each.call for each in rules.checks), machine)
    for number in range(700):
        if number in checked:
            continue
        wanted = ALLOW if number in allowed else UNKNOWN if number in unknown else REFUSE
        if rules.refused:
            wanted = REFUSE if number in refused else UNKNOWN if number in unknown else ALLOW
        assert decide(program, number, architecture=ARCHITECTURES[machine]) == wanted, number


@given(number=st.integers(0, 2**32 - 1))
def test_other_numberings_are_refused(number: int) -> None:
    program = compile_filter(SANDBOX_RULES, "x86_64")
    assert program is not None
    assert decide(program, 0x4000_0000 | number, architecture=ARCHITECTURES["x86_64"]) == REFUSE
    assert decide(program, number, architecture=0x4000_0003) == REFUSE


@given(flags=st.integers(0, 2**32 - 1), command=st.integers(0, 2000))
def test_arguments_decide_where_a_rule_names_them(flags: int, command: int) -> None:
    program = compile_filter(SANDBOX_RULES, "x86_64")
    assert program is not None
    machine = ARCHITECTURES["x86_64"]
    assert (decide(program, 56, (flags,), machine) == ALLOW) == bool(flags & 0x0001_0000)
    wanted = (
        0x0005_0000 if command in (6, 7) else ALLOW if command in (0, 1, 2, 3, 4, 5, 1030, 1032) else REFUSE
    )
    assert decide(program, 72, (0, command), machine) == wanted
