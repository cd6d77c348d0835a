"""What other tests find in machine code is there."""

from __future__ import annotations

from machine_code import MEMORY_ACCESSES, MEMORY_BARRIERS, loops, smallest_loop_with

CODE = {0x00: "NOP", 0x10: "@!P0 BRA 0x60", 0x20: "HGMMA", 0x30: "@P1 BRA 0x10", 0x40: "EXIT"}
CODE |= {0x60: "MEMBAR.ALL.GPU", 0x70: "BRA 0x20", 0x80: "BRA 0x80"}


def test_loops_are_found_with_the_blocks_that_lie_elsewhere() -> None:
    assert smallest_loop_with(CODE, "HGMMA") == [CODE[at] for at in (0x10, 0x20, 0x30, 0x60, 0x70)]
    assert len(loops(CODE)) == 2


def test_the_smallest_loop_is_of_those_that_have_a_name_often_enough() -> None:
    code = {0x00: "NOP", 0x10: "LOAD", 0x20: "@P0 BRA 0x10", 0x30: "LOAD", 0x40: "@P1 BRA 0x00", 0x50: "EXIT"}
    assert smallest_loop_with(code, "LOAD") == ["LOAD", "@P0 BRA 0x10"]
    assert len(smallest_loop_with(code, "LOAD", 2)) == 5


def test_barriers_and_accesses_of_memory_are_known() -> None:
    for text in ("MEMBAR.ALL.GPU", "@P0 CCTL.IVALL", "ERRBAR", "FENCE.VIEW.ASYNC.S"):
        assert MEMORY_BARRIERS.search(text)
    for text in ("LDG.E R4, desc[UR4][R2.64]", "@!P1 STL [R1], R0", "ATOMG.E.ADD", "ST.E.128"):
        assert MEMORY_ACCESSES.search(text)
    for text in ("LDS R0, [R1]", "LDC R1, c[0x0][0x28]", "SYNCS.ARRIVE.TRANS64.RED.A1T0 RZ, [R2], RZ"):
        assert not MEMORY_BARRIERS.search(text) and not MEMORY_ACCESSES.search(text)
