"""The kernels of the spike on the CPU, on two emulated ranks that run at once: small sizes, all kinds of stores.

    PYTHONPATH=tests python benchmarks/spikes/carried/emulate.py [--seeds 3]

It runs what carried_mm.py gives the kernels. The emulator has no additions to memory of peers: counters lie with the sender.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))

import carried_mm as spike
from emulator import Emulator
from emulator.grouped import NOT_WRITTEN, STALL_LIMIT, TileDriver, whole_numbers

from tw_compile.kernels.runtime import bindings, wgmma
from tw_compile.planning.joint_tiles import Tiling

SOURCE = Path(spike.__file__).with_name("carried_mm.cu")


def check(contender: spike.Contender, shape: spike.Shape, whole: int, clusters: int, seed: int, calls: int = 2) -> None:
    """Every element of every rank is what it must be, to the bit, where it must be; counters have their totals."""
    high, wide = shape.tokens // 256, -(-shape.hidden // spike.WIDTH)
    tiles = Tiling(spike.WIDTH, min(whole, high * wide), 2 * max(high * wide - whole, 0), 0, 0.0)
    defines = {"COLUMNS": spike.WIDTH, "SEND": contender.send, "SIGNAL": int(contender.signal)}
    options = {"resident": 16, "stall_limit": STALL_LIMIT, "defines": defines}
    emulator = Emulator(SOURCE, "carried_mm", spike.WORLD, seed, **options)
    a, matrix, out, inbox, counters = [], [], [], [], []
    for rank in range(spike.WORLD):
        a.append(whole_numbers(shape.tokens, shape.depth, seed=4 * seed + rank))
        matrix.append(whole_numbers(shape.hidden, shape.depth, seed=4 * seed + 2 + rank))
        out.append(np.full((shape.tokens, shape.hidden), NOT_WRITTEN, np.uint16))
        inbox.append(np.full((shape.half, shape.hidden), NOT_WRITTEN, np.uint16))
        counters.append(np.zeros(spike.BLOCKS, np.uint32))
        for name, buffer in (
            ("a", a[rank]),
            ("matrix", matrix[rank]),
            ("out", out[rank]),
            ("counters", counters[rank]),
        ):
            emulator.alloc(rank, buffer, name=name)
        emulator.alloc(rank, inbox[rank], symmetric=True, name="inbox")
    for rank in range(spike.WORLD):
        begin = (1 - rank) * shape.half
        to = out[rank][begin:].ctypes.data if contender.local else inbox[1 - rank].ctypes.data
        addresses = a[rank].data_ptr(), matrix[rank].data_ptr(), out[rank].ctypes.data, to, counters[rank].ctypes.data
        params = spike.carried_params(shape, tiles, clusters, rank, contender.order, *addresses)
        for _ in range(calls):
            grid, shared = spike.carried_grid(tiles, clusters), spike.carried_shared_bytes(contender.send)
            emulator.launch(rank, 0, grid, spike.THREADS, shared, params, cluster=2)
    emulator.run()
    for rank in range(spike.WORLD):
        peer = 1 - rank
        mine, theirs = (slice(one * shape.half, (one + 1) * shape.half) for one in (rank, peer))
        want = [(a[one].float() @ matrix[one].float().t()).to(torch.bfloat16).view(torch.int16) for one in range(2)]
        found = torch.from_numpy(out[rank].view(np.int16))
        came = torch.from_numpy(inbox[rank].view(np.int16))
        assert torch.equal(found[mine], want[rank][mine]), "own rows"
        if contender.sends:
            assert torch.equal(came, want[peer][mine]), "rows that came"
            assert bool((found[theirs] == -1).all()), "the peer's rows were stored here, too"
        else:
            assert torch.equal(found[theirs], want[rank][theirs]), "the peer's rows"
            assert bool((came == -1).all()), "the inbox was written"
        total = np.zeros(spike.BLOCKS, np.uint32)
        if contender.counts:
            total[theirs.start // 128 : theirs.stop // 128] = calls * 8 * shape.hidden
        assert (counters[rank] == total).all(), f"counters {counters[rank]}, not {total}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=2)
    bindings.load = lambda name: TileDriver()  # type: ignore[assignment]
    spike.tensor_map = wgmma.tensor_map.__wrapped__
    for seed in range(parser.parse_args().seeds):
        for tokens, hidden, depth, whole, clusters in (
            (512, 512, 320, 99, 2),
            (512, 392, 192, 0, 3),
            (1024, 776, 64, 9, 2),
            (1536, 264, 448, 6, 4),
        ):
            for contender in spike.CARRIED:
                check(contender, spike.Shape("small", tokens, depth, hidden), whole, clusters, seed)
                print(seed, tokens, hidden, depth, whole, clusters, contender.label, "ok", flush=True)


if __name__ == "__main__":
    main()
