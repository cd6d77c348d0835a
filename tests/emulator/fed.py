"""Calls whose rows a GEMM is fed, in the emulator: the kernel that makes them and the GEMM, on all ranks."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from emulator.grouped import NOT_WRITTEN, TileDriver, bits_of
from emulator.joint import narrow_behind
from emulator.kernels import ALGORITHMS, FP32, Call, Form, Machine, make_call, partial_sums, table
from emulator.memory import bits
from tw_compile import compat
from tw_compile.kernels.algorithms.push.fed_push import FedPush, FedPushParams
from tw_compile.kernels.algorithms.push.push import part_bytes, threads_for
from tw_compile.kernels.collective.cuda_variant import row_defines, statistics_bytes
from tw_compile.kernels.collective.slot import FED, INBOX, NOT_ARRIVED
from tw_compile.kernels.collective.spec import row_range, rows_per_rank
from tw_compile.kernels.gemm import joint_mm as module
from tw_compile.kernels.gemm.fed import ROWS_OFFSET, STATE_WORDS, FedRows, rows_in
from tw_compile.kernels.runtime import bindings
from tw_compile.kernels.runtime.program import HEADERS
from tw_compile.planning.joint_tiles import BOX

HERE = Path(__file__).parent
FORM = Form(residual="sharded", residual_out="sharded", residual_dtype=FP32)
WIDTH = 192
COLUMNS = (200, 64)
"""Of the matrices: a tile that is not full, and two matrices."""
GATED_COLUMNS = (104, 104)


def sources(folder: Path, file: str = "", changes: Sequence[tuple[str, str]] = ()) -> Path:
    """All that is compiled, in ``folder``, with ``changes`` in one file, each of which applies."""
    for one in (HERE / "fed.cu", ALGORITHMS / "push" / "push.cu", Path(module.__file__).with_name("joint_mm.cu")):
        shutil.copy(one, folder)
    for header in HEADERS.glob("*.cuh"):
        shutil.copy(header, folder)
    for old, new in changes:
        text = (folder / file).read_text()
        assert old in text
        (folder / file).write_text(text.replace(old, new))
    return folder / "fed.cu"


class FedMachine(Machine):
    """A slot on every rank; ``numbered``: calls that came before, on all ranks; ``shared``: tiles may be of two matrices."""

    def __init__(
        self,
        source: Path,
        world_size: int,
        hidden_size: int,
        *,
        most_tokens: int,
        seed: int,
        spin_limit: int = 0,
        numbered: int = 0,
        gated: bool = False,
        shared: bool = False,
        **options: Any,
    ) -> None:
        self.threads, self.spin_limit = threads_for(hidden_size, world_size), spin_limit
        self.gated, self.shared = gated, shared
        xs = partial_sums(world_size, most_tokens, hidden_size, FORM.dtype, 0)
        example = make_call(FORM, xs, 0).ranks[0].request
        defines = row_defines(example, world_size, spin_limit) | {
            "ONE_SHOT": 0,
            "FED": 1,
            "CTAS_PER_SM": 1,
            "CLUSTER": 1,
        }
        defines |= {"PUSH_THREADS": self.threads, "GEMM_COLUMNS": WIDTH, "BIASED": 0, "GATED": int(gated)}
        super().__init__(source, defines, FORM, hidden_size, world_size, seed, **options)
        needs = FedPush().needs(example, world_size)
        self.part_bytes = part_bytes(needs[INBOX])
        self.inboxes = self.symmetric(needs[INBOX], NOT_ARRIVED, INBOX)
        self.memory = self.symmetric(needs[FED], 0, FED)
        self.tables = table(self.inboxes), table(self.memory)
        self.push_states, self.fed_states, self.statuses = self.private(4), self.private(STATE_WORDS), self.status()
        for rank in range(world_size):
            for words in (self.fed_states[rank][:1], bits(self.memory[rank])[:ROWS_OFFSET].view(torch.int32)):
                words.fill_(numbered - 2**32 if numbered >= 2**31 else numbered)
        self.launches: list[int] = []
        self.products: list[tuple[Call, list[list[torch.Tensor]], list[torch.Tensor]]] = []

    def call(self, tokens: int, max_sms: int, *, sms: int = 4, whole: int = 99, skip: Sequence[int] = ()) -> None:
        """Queues a call and the GEMM behind it, on ``sms`` SMs, with ``whole`` pairs that are not narrow."""
        call = self.add_call(self.random_x(tokens))
        generator = torch.Generator().manual_seed(self.next_seed())
        shapes = [(one, self.hidden_size) for one in (GATED_COLUMNS if self.gated else COLUMNS)]
        matrices = [torch.randn(shape, generator=generator).to(torch.bfloat16) for shape in shapes]
        found: list[list[torch.Tensor]] = [[] for _ in range(self.world_size)]
        for rank, own in enumerate(call.ranks):
            if rank in skip:
                continue
            rows = rows_in(bits(self.memory[rank]), tokens, self.hidden_size)
            local = rows_per_rank(tokens, self.world_size)
            params = FedPushParams(
                inboxes=self.tables[0].data_ptr(),
                state=self.push_states[rank].data_ptr(),
                status=self.statuses[rank].data_ptr(),
                part_bytes=self.part_bytes,
                begin=0,
                end=local,
                fed=self.fed_states[rank].data_ptr(),
                **(self.shared_parameters(rank, own) | {"hidden": rows.data_ptr()}),
            )
            shared_bytes = statistics_bytes(own.request, 1, self.threads // 32)
            grid = min(local, max_sms)
            self._launch(rank, grid, self.threads, shared_bytes, params, is_gemm=False, programmatic=True)
            fed = FedRows(
                rows,
                self.tables[1],
                self.fed_states[rank],
                self.statuses[rank],
                rank,
                self.world_size,
                *row_range(tokens, self.world_size, rank),
                self.spin_limit,
            )
            copies = [matrix.clone() for matrix in matrices]
            with self._launched_on(rank, copies, found[rank], sms, whole):
                transposed = [one.t() for one in copies]
                if self.gated:
                    found[rank].append(module.fed_gated_mm(fed, *transposed))
                else:
                    found[rank] += module.fed_joint_mm(fed, transposed, [])
            # What the rows are when the GEMM has ended.
            last = self.launches[-1]
            self.emulator.read_behind(last, rows.data_ptr(), own.hidden)
        self.products.append((call, found, matrices))

    def _launch(
        self,
        rank: int,
        grid: int,
        block: int,
        shared_bytes: int,
        params: ctypes.Structure,
        *,
        is_gemm: bool,
        **options: Any,
    ) -> None:
        size = ctypes.sizeof(module.FedJointMmParams)
        both = bytes(params).ljust(size, b"\0") + int(is_gemm).to_bytes(4, "little") + bytes(60)
        launch = self.emulator.launch(rank, 0, grid, block, shared_bytes, both, **options)
        self.launches.append(launch)

    @contextmanager
    def _launched_on(
        self, rank: int, matrices: list[torch.Tensor], found: list[torch.Tensor], sms: int, whole: int
    ) -> Iterator[None]:
        """What is launched by the host's code is queued for this rank."""

        def launch(params: Any, *, stream: int, grid: int, block: int, shared_bytes: int, **options: Any) -> None:
            for index, matrix in enumerate(matrices):
                self.emulator.alloc(rank, matrix, name=f"matrix {index}")
                if self.gated and index:
                    continue
                out = bits_of(params.out[index], params.rows * len(matrix))
                out.fill(NOT_WRITTEN)
                self.emulator.alloc(rank, out, name=f"out {index}")
            self._launch(rank, grid, block, shared_bytes, params, is_gemm=True, **options)

        kernels = {WIDTH: SimpleNamespace(launch=launch)}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(bindings, "load", lambda name: TileDriver())
            patch.setattr(module, "tensor_map", module.tensor_map.__wrapped__)
            patch.setattr(module, "fed_kernels", lambda device, form, spin_limit: kernels)
            patch.setattr(module, "sms_of", lambda device: sms)
            patch.setattr(compat, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
            multiple = BOX if self.shared else WIDTH
            patch.setattr(
                module, "tiling", lambda rows, columns, _: narrow_behind(whole, rows, columns, WIDTH, multiple)
            )
            yield

    def run(self) -> None:
        """As :meth:`Machine.run`; products are right to the bit, gated ones within a rounding, and the same on all ranks."""
        super().run()
        for call, found, matrices in self.products:
            rows = call.ranks[0].hidden
            want = [product(rows, matrix) for matrix in matrices]
            if self.gated:
                gate, up = (rows.double() @ matrix.double().t() for matrix in matrices)
                want = [found[0][0]]
                exact = torch.nn.functional.silu(gate) * up
                torch.testing.assert_close(want[0].double(), exact, rtol=2**-7, atol=1e-4)
            for rank, outs in enumerate(found):
                assert len(outs) == len(want)
                for out, expected in zip(outs, want, strict=True):
                    wrong = out.view(torch.int16) != expected.view(torch.int16)
                    assert not wrong.any(), f"rank {rank}: {int(wrong.sum())} products are wrong"
        for state in self.fed_states:
            assert not state[3:].any(), "rows of a block are still counted"


def product(rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """``rows @ matrix.t()`` with the sums of the emulated matmuls: of 16 products each, in float32, which are added up."""
    a, b = rows.float(), matrix.float()
    total = torch.zeros(len(a), len(b))
    for begin in range(0, a.shape[1], 16):
        sums = torch.zeros_like(total)
        for k in range(begin, begin + 16):
            sums = sums + a[:, k : k + 1] * b[:, k : k + 1].t()
        total = total + sums
    return total.to(torch.bfloat16)
