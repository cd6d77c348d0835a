"""What can be read from a kernel's machine code without a GPU."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import triton

from tw_compile.kernels.runtime.program import Program

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
REGISTERS_OF_AN_SM = 64 * 1024
MEMORY_BARRIERS = re.compile(r"MEMBAR|CCTL|ERRBAR|FENCE")
MEMORY_ACCESSES = re.compile(r"\b(LDG|STG|LDL|STL|LD|ST|ATOM\w*)\b")


def dump(cubin: bytes, folder: Path, option: str) -> str:
    """What cuobjdump says of it."""
    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    return subprocess.run([str(CUOBJDUMP), option, str(file)], check=True, capture_output=True, text=True).stdout


def instructions(cubin: bytes, folder: Path) -> dict[int, str]:
    """By their address, with predicates and operands."""
    sass = dump(cubin, folder, "-sass")
    found = {int(at, 16): text for at, text in re.findall(r"/\*([0-9a-f]{4,5})\*/ +([@A-Z][^;]*?) *;", sass)}
    assert found
    return found


def check_end(code: Mapping[int, str]) -> None:
    """Behind its wait for the kernel before it, a kernel waits for no memory barrier and no atomic; it ends with a store.

    Its one addition, which has no answer, comes when the CTA's threads have met, each with what it has loaded.
    """
    text = list(code.values())
    text = text[text.index("ACQBULK") :]
    assert not [one for one in text if MEMORY_BARRIERS.search(one) or re.search(r"\bATOM", one)]
    (met,) = (at for at, one in enumerate(text) if "BAR.RED" in one)
    assert re.search(r"BAR\.RED\S* .*, !?U?P\d$", text[met]), f"{text[met]}: waits for nothing that a thread has loaded"
    (answered,) = (at for at, one in enumerate(text) if "B2R.RESULT" in one)
    (added,) = (at for at, one in enumerate(text) if re.search(r"(?<!\.)\bRED", one))
    assert met < answered < added
    end = next(at for at, one in enumerate(text) if "PREEXIT" in one)
    assert text[end + 1] == "EXIT"  # what lies behind is for warps whose lanes are apart, on their way
    accesses = [one for one in text[:end] if MEMORY_ACCESSES.search(one)]
    assert "STG" in accesses[-1]


def _branch_target(text: str) -> int | None:
    found = re.search(r"\bBRA\b[^;]*?0x([0-9a-f]+)$", text)
    return int(found[1], 16) if found else None


def loops(code: Mapping[int, str]) -> list[list[str]]:
    """From each branch back to its target, and all from which it is reached without the target; blocks elsewhere included."""
    before: dict[int, set[int]] = {at: set() for at in code}
    for at, following in pairwise(code):
        if not re.match(r"(BRA|EXIT|RET)\b(?!\.U|\.DIV)", code[at]):
            before[following].add(at)
    back = []
    for at, text in code.items():
        target = _branch_target(text)
        if target is not None:
            before[target].add(at)
            back += [(target, at)] * (target < at)
    found = []
    for head, last in back:
        inside, open_ends = {head}, [last]
        while open_ends:
            at = open_ends.pop()
            if at not in inside:
                inside.add(at)
                open_ends += before[at]
        found.append([code[at] for at in sorted(inside)])
    return found


def count(code: Mapping[int, str] | list[str], name: str) -> int:
    """Instructions with ``name`` in them."""
    return sum(name in text for text in (code.values() if isinstance(code, Mapping) else code))


def smallest_loop_with(code: Mapping[int, str], name: str, times: int = 1) -> list[str]:
    """The shortest of the loops that have ``name`` so many times or more."""
    with_it = [loop for loop in loops(code) if count(loop, name) >= times]
    assert with_it, f"no loop has {name}"
    return min(with_it, key=len)


def resources(cubin: bytes, folder: Path) -> dict[str, int]:
    """Of a thread: REG, STACK and LOCAL."""
    usage = dump(cubin, folder, "-res-usage")
    return {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}


def moved_registers(code: Mapping[int, str]) -> tuple[list[int], list[int]]:
    """What each of a thread's registers' changes leaves it with: those that take some, and those that give some."""
    taken, given = (
        [int(number, 16) for text in code.values() for number in re.findall(rf"USETMAXREG\.{kind}.* (0x\w+)$", text)]
        for kind in ("TRY_ALLOC", "DEALLOC")
    )
    return taken, given


def ptx_with(program: Program, folder: Path, *facts: str) -> str:
    """PTX of a program with ``facts`` checked by the compiler."""
    source = folder / program.source.name
    source.write_text(program.source.read_text() + "".join(f'static_assert({fact}, "{fact}");\n' for fact in facts))
    return replace(program, source=source).ptx()
