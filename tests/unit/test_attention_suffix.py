"""Attention of the last tokens of a sequence: its reference, its kernel compiled for sm_90, and the kernel interpreted."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from itertools import product
from typing import Any

import pytest
import torch

from tw_compile.kernels.attention import suffix as module
from tw_compile.kernels.attention.suffix import attention_suffix
from tw_compile.testing import assert_within_budget

Operands = list[torch.Tensor]

SIZES = [(1, 0), (2, 1), (64, 0), (63, 64), (65, 63), (100, 1), (130, 200), (1, 300)]
"""Queries, and the keys before them."""


def operands(
    queries: int,
    earlier: int,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 64,
    batch: int = 1,
    dtype: torch.dtype = torch.bfloat16,
) -> Operands:
    """query, key, value and what is earlier, laid out as projections write them."""
    generator = torch.Generator().manual_seed(queries * 1000 + earlier)

    def rows(count: int, of: int) -> torch.Tensor:
        return torch.randn(batch, count, of, head_dim, generator=generator).to(dtype).transpose(1, 2)

    made = [rows(queries, heads[0]), *(rows(queries, heads[1]) for _ in range(2))]
    return made + ([rows(earlier, heads[1]) for _ in range(2)] if earlier else [])


def expected(given: Operands, scale: float | None = None) -> torch.Tensor:
    """In float64, by SDPA with a mask that says which tokens come before."""
    query, *others = (one.double() for one in given)
    keys, values = (torch.cat([*others[2 + index : 3 + index], others[index]], 2) for index in (0, 1))
    queries, count = query.shape[2], keys.shape[2]
    seen = torch.arange(count) <= torch.arange(count - queries, count).unsqueeze(1)
    return torch.nn.functional.scaled_dot_product_attention(query, keys, values, seen, scale=scale, enable_gqa=True)


def rounded_twice(given: Operands, scale: float | None = None) -> torch.Tensor:
    """The error that a fused kernel has: weights are rounded to the operands' dtype, and so is the result."""
    query, *others = (one.float() for one in given)
    keys, values = (torch.cat([*others[2 + index : 3 + index], others[index]], 2) for index in (0, 1))
    keys, values = (one.repeat_interleave(query.shape[1] // one.shape[1], 1) for one in (keys, values))
    queries, count = query.shape[2], keys.shape[2]
    hidden = torch.ones(queries, count, dtype=torch.bool).triu(count - queries + 1)
    scores = query @ keys.mT * (query.shape[3] ** -0.5 if scale is None else scale)
    scores = scores.masked_fill(hidden, -torch.inf)
    weights = (scores - scores.amax(3, keepdim=True)).exp()
    return (weights.to(given[0].dtype).float() @ values / weights.sum(3, keepdim=True)).to(given[0].dtype)


# --- the operator ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (3, 1)])
@pytest.mark.parametrize(("queries", "earlier"), SIZES)
def test_query_i_sees_the_earlier_keys_and_its_own_up_to_i(queries: int, earlier: int, heads: tuple[int, int]) -> None:
    for dtype, head_dim, batch, scale in ((torch.float32, 64, 1, None), (torch.bfloat16, 80, 2, 0.3)):
        given = operands(queries, earlier, heads, head_dim, batch, dtype)
        result = attention_suffix(*given, scale=scale)
        assert result.shape == given[0].shape and result.dtype == dtype
        tolerance = 1e-5 if dtype == torch.float32 else 8e-3
        torch.testing.assert_close(result.double(), expected(given, scale), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_result_is_laid_out_as_projections_read_it(device: str) -> None:
    given = [one.to(device) for one in operands(5, 3, batch=2)]
    turned = attention_suffix(*given).transpose(1, 2)
    assert turned.shape == (2, 5, 4, 64) and turned.is_contiguous()


def test_it_is_kept_in_compiled_graphs_and_nothing_is_copied_for_it() -> None:
    given = operands(5, 3)
    found = torch.compile(lambda *given: attention_suffix(*given) + 1, fullgraph=True)(*given)
    torch.testing.assert_close(found, attention_suffix(*given) + 1)
    assert torch.Tag.flexible_layout in attention_suffix.tags


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda given: [given[0][0], *given[1:]],
            r"query: expected \[batch, heads, queries, head_dim\], got \[4, 5, 64\]",
        ),
        (lambda given: [given[0][:, :3], *given[1:]], "key: expected 4 dims and a number of heads that divides 3"),
        (
            lambda given: [given[0], given[1][:, :, 1:], *given[2:]],
            r"key: expected \[1, 2, 5, 64\], got \[1, 2, 4, 64\]",
        ),
        (
            lambda given: [*given[:4], given[4][:, :, 1:]],
            r"earlier_value: expected \[1, 2, 3, 64\], got \[1, 2, 2, 64\]",
        ),
        (
            lambda given: [*given[:2], given[2].float(), *given[3:]],
            "value: expected the dtype of query, torch.bfloat16",
        ),
        (lambda given: [*given[:4], None], "earlier_value: expected a tensor where earlier_key is one"),
        (lambda given: [*given, -1.0], "scale: expected a positive number, got -1.0"),
    ],
)
def test_operands_that_do_not_fit_are_refused(change: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attention_suffix(*change(operands(5, 3)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": torch.float32}, "query: expected bfloat16 or float16, got torch.float32"),
        ({"head_dim": 256}, "query: expected a head_dim of at most 128, got 256"),
    ],
)
def test_the_kernel_refuses_what_it_is_not_written_for(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        module.attend_on_cuda(*operands(5, 3, **options))


def test_rows_that_are_not_dense_are_copied_and_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    from tw_compile.kernels.attention import suffix_kernel as attention_suffix_kernel

    seen: Operands = []
    monkeypatch.setattr(
        attention_suffix_kernel,
        "launch",
        lambda query, own, earlier, scale, out, blocks: seen.extend([query, *own, *earlier]),
    )
    given = operands(5, 3)
    given[4] = given[4].transpose(2, 3).contiguous().transpose(2, 3)
    module.attend_on_cuda(*given)
    assert [one is before for one, before in zip(seen, given, strict=True)] == [True] * 4 + [False]
    assert seen[4].stride(3) == 1 and torch.equal(seen[4], given[4])


# --- the kernel, compiled --------------------------------------------------------------------------------------------


def compiled(blocks: Any, has_earlier: bool, head_dim: int, dtype: str = "*bf16", arch: int = 90) -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from tw_compile.kernels.attention.suffix_kernel import attention_suffix_kernel as kernel
    from tw_compile.kernels.attention.suffix_kernel import width_of

    constants: dict[str, Any] = {"HEADS": 16, "GROUP": 8, "HEAD_DIM": head_dim, "WIDTH": width_of(head_dim)}
    constants |= {"HAS_EARLIER": has_earlier, "BLOCK_ROWS": blocks.rows, "BLOCK_KEYS": blocks.keys}
    if not has_earlier:
        constants |= {"earlier_key": None, "earlier_value": None}
    pointers = ("query", "key", "value", "earlier_key", "earlier_value", "out")
    types = {name: dtype if name in pointers else "i32" for name in kernel.arg_names} | {"scale": "fp32"}
    types |= dict.fromkeys(constants, "constexpr")
    attributes = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(kernel.arg_names)
        if types[name] in (dtype, "i32") and name not in ("queries", "earlier")
    }
    source = ASTSource(kernel, types, constants, attributes)
    options = {"num_warps": blocks.warps, "num_stages": blocks.stages}
    return compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def stack_bytes(made: Any, folder: Any) -> int:
    import triton

    cuobjdump = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    binary = folder / "kernel.cubin"
    binary.write_bytes(made.asm["cubin"])
    shown = subprocess.run([cuobjdump, "-res-usage", binary], capture_output=True, text=True, check=True, timeout=60)
    found = re.search(r"STACK:(\d+)", shown.stdout + shown.stderr)
    assert found
    return int(found[1])


@pytest.mark.full
@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("has_earlier", [True, False])
def test_for_sm_90_it_multiplies_by_warp_groups_and_spills_nothing(
    has_earlier: bool, head_dim: int, tmp_path: Any
) -> None:
    from tw_compile.kernels.attention.suffix_kernel import SMALL, WIDE, width_of

    for blocks in (SMALL, WIDE):
        made = compiled(blocks, has_earlier, head_dim)
        assert "wgmma.mma_async" in made.asm["ptx"]
        assert re.search(r"cp\.async\.c[ag]\.shared\.global \[[^]]*\], \[[^]]*\], 0x10", made.asm["ptx"]), (
            "16 bytes each"
        )
        assert made.metadata.shared <= 227 * 1024
        # Where columns are masked, too, a few addresses; accumulators would be hundreds of bytes.
        assert stack_bytes(made, tmp_path) <= (0 if width_of(head_dim) == head_dim else 64)


def test_blocks_are_those_that_were_measured_to_be_faster() -> None:
    from tw_compile.kernels.attention.suffix_kernel import SMALL, WIDE, blocks_for

    small = ((1, 1), (512, 512), (512, 1024), (1280, 2048), (1024, 2048), (2048, 2048))
    assert {blocks_for(queries, keys, 16) for queries, keys in small} == {SMALL}
    assert {blocks_for(queries, keys, 16) for queries, keys in ((2048, 4096), (4096, 4096))} == {WIDE}
    assert blocks_for(2048, 2048, 32) is WIDE


# --- the kernel, interpreted -----------------------------------------------------------------------------------------


def run_interpreted() -> None:
    """All sizes in blocks of three shapes; AssertionError says what differs. float16, which numpy has."""
    from triton.runtime import interpreter

    from tw_compile.kernels.attention.suffix_kernel import SMALL, Blocks, launch

    patch_tensor = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        """The interpreter's own conversion of a number of loops is refused by numpy 2.4."""
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched
    several = (((4, 2), 64, 1, None), ((3, 1), 80, 2, 0.3), ((2, 2), 20, 1, 0.05))
    for (queries, earlier), (heads, head_dim, batch, scale) in product(SIZES, several):
        given = operands(queries, earlier, heads, head_dim, batch, torch.float16)
        want, base = expected(given, scale), rounded_twice(given, scale)
        for blocks in (SMALL, Blocks(32, 64, 4, 1), Blocks(64, 16, 4, 1)):
            out = torch.full((batch, queries + 1, heads[0], head_dim), float("nan"), dtype=torch.float16)
            launch(
                given[0], (given[1], given[2]), (given[3], given[4]) if earlier else None,
                head_dim**-0.5 if scale is None else scale, out, blocks,
            )  # fmt: skip
            beyond = out.view(-1)[batch * queries * heads[0] * head_dim :]
            assert beyond.isnan().all(), "nothing is written behind the result"
            found = out.view(-1)[: beyond.storage_offset()].view(batch, queries, heads[0], head_dim).transpose(1, 2)
            assert_within_budget(found, base, want)
    # A score that outweighs all others by far, behind and before ones that are not masked.
    given = operands(70, 70, dtype=torch.float16)
    given[3][:, :, 5] *= 100.0
    given[1][:, :, 33] *= 100.0
    out = torch.empty(1, 70, 4, 64, dtype=torch.float16)
    launch(given[0], (given[1], given[2]), (given[3], given[4]), 1.0, out, SMALL)
    torch.testing.assert_close(out.transpose(1, 2).double(), expected(given, 1.0), rtol=2e-3, atol=2e-3)


@pytest.mark.full
def test_the_interpreted_kernel_is_within_the_budget_of_fused_attention() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, __file__], capture_output=True, text=True, timeout=200, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.strip() == "done"


if __name__ == "__main__":
    run_interpreted()
    print("done")
