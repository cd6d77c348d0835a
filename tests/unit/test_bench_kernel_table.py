"""Tables of kernels that ``tw-compile bench kernel --table`` makes of measured rows."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from tw_compile.benchmark.results import Row
from tw_compile.benchmark.tune import steps_by_transport, steps_from, table_of
from tw_compile.gating.table import Source
from tw_compile.kernels.transports.selection import Step, step_for
from tw_compile.tuning.measured import KernelRun
from tw_compile.tuning.tables import decide, shipped_gate


def timed(algorithm: str, sms: int, nbytes: int, us: float, hidden: int = 8192, numerics: str = "ok") -> Row:
    size = (nbytes // 2 // hidden, hidden, nbytes)
    found = Row("ours", "ours", *size, 1, "", sms, "timed", None, numerics, 0.9 * us, us, 1.1 * us)
    return replace(found, algorithm=algorithm, max_sms=sms)


@pytest.mark.parametrize(("of_one_shot", "kernel"), [(0.99, "host_two_shot"), (0.95, "host_one_shot")])
def test_what_a_node_without_tables_uses_stays_unless_another_kernel_is_faster_by_more_than_noise(
    of_one_shot: float, kernel: str
) -> None:
    """Also over host memory. Where the default changes kernels, at 8 MiB, both are as fast here."""
    rows = []
    for nbytes, us in ((2**21, 84.0), (2**23, 250.0), (2**26, 1750.0)):
        one_shot = of_one_shot if nbytes > 2**23 else 1.0
        rows += [timed("host_one_shot", 8, nbytes, us * one_shot), timed("host_two_shot", 8, nbytes, us)]
    run = KernelRun(2, "A GPU", Source("here", "default", ("a run",)), tuple(rows))
    decided = decide([run], shipped_gate("generic"))
    assert step_for(decided.steps, 2**24).algorithm == kernel  # type: ignore[union-attr]
    assert step_for(decided.steps, 2**21).algorithm == "host_one_shot"  # type: ignore[union-attr]


def test_a_table_takes_the_fastest_kernel_of_each_size_and_meets_half_way() -> None:
    rows = [
        timed("push_one_shot", 64, 2**18, 8.0),
        timed("stream", 16, 2**18, 12.0),
        timed("push_one_shot", 64, 2**20, 20.0),
        timed("stream", 16, 2**20, 15.0),
        timed("stream", 16, 2**24, 85.0),
        timed("two_shot", 32, 2**24, 30.0, numerics="failed"),
    ]
    assert steps_from(rows, 4) == [Step(4, 2**19, "push_one_shot", 64), Step(4, 2**24, "stream", 16)]


def test_a_table_spends_ctas_and_changes_kernels_for_more_than_noise() -> None:
    rows = [
        timed("stream", 8, 2**20, 10.1),
        timed("stream", 32, 2**20, 10.0),
        timed("stream", 8, 2**22, 30.5),
        timed("push_two_shot", 8, 2**22, 30.0),
    ]
    assert steps_from(rows, 2) == [Step(2, 2**22, "stream", 8)]


def test_a_shipped_choice_that_is_as_good_stays_with_its_bound() -> None:
    shipped = (Step(2, 1_500_000, "push_one_shot", 64), Step(2, 2**22, "push_two_shot", 64))
    rows = [
        timed("push_one_shot", 64, 2**20, 10.1),
        timed("stream", 8, 2**20, 10.0),
        timed("push_two_shot", 64, 2**21, 20.0),
        timed("stream", 8, 2**21, 20.1),
        timed("push_two_shot", 64, 2**24, 90.0),
        timed("stream", 8, 2**24, 80.0),
    ]
    half_way = 5_931_641  # between 2 and 16 MiB, in the logarithm
    assert steps_from(rows, 2, shipped) == [
        *shipped[:1],
        Step(2, half_way, "push_two_shot", 64),
        Step(2, 2**24, "stream", 8),
    ]
    assert steps_from(rows, 2) == [Step(2, 2**24, "stream", 8)]


def test_a_table_weighs_hidden_sizes_of_the_same_bytes_alike() -> None:
    rows = [
        timed("stream", 8, 2**20, 10.0, hidden=4096),
        timed("push_two_shot", 8, 2**20, 11.0, hidden=4096),
        timed("stream", 8, 2**20, 150.0, hidden=8192),
        timed("push_two_shot", 8, 2**20, 100.0, hidden=8192),
    ]
    assert steps_from(rows, 2) == [Step(2, 2**20, "push_two_shot", 8)]


def test_kernels_of_one_transport_leave_no_hole_in_the_table_of_another() -> None:
    rows = [
        timed("push_one_shot", 64, 2**18, 8.0),
        timed("multimem", 16, 2**18, 9.0),
        timed("stream", 16, 2**24, 85.0),
        timed("multimem", 16, 2**24, 50.0),
    ]
    assert steps_by_transport(rows, 4) == [
        Step(4, 2**21, "push_one_shot", 64),
        Step(4, 2**24, "stream", 16),
        Step(4, 2**24, "multimem", 16),
    ]


def test_a_table_needs_a_kernel_that_it_can_name() -> None:
    peer = Row("nccl+norm", "peer", 16, 8192, 2**18, 1, "", None, "timed", None, "ok", 4.5, 5.0, 6.0)
    with pytest.raises(ValueError, match="no kernel that a table can name"):
        table_of({"rows": [asdict(peer)], "world_size": 4})
