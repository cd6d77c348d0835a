"""Forms of calls that a group has served before, with the prepared launch for each: the short way to a launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tw_compile import compat
from tw_compile.kernels.collective.call import Call
from tw_compile.kernels.collective.fed_call import started_by
from tw_compile.kernels.collective.side_stream import fork_and_join
from tw_compile.kernels.collective.spec import Operands
from tw_compile.kernels.collective.transport import Started

MOST_FORMS = 4096
"""The most forms that a group remembers. Every number of tokens is another form."""


@dataclass(frozen=True)
class Known:
    """How to serve one form of calls on a slot.

    ``buffer``: where a matmul writes the message ``[tokens, hidden]``; None: the matmul allocates memory for it.
    ``overlap_sms``: see :class:`Request`. ``in_turn``: see
    :func:`~tw_compile.kernels.collective.side_stream.fork_and_join`.
    """

    call: Call
    device: torch.device
    group_name: str
    slot: int
    overlap_sms: int
    buffer: torch.Tensor | None
    in_turn: bool = False

    def start(self, operands: Operands, prefetch: Sequence[torch.Tensor] | None = None) -> Started:
        """As :meth:`Transport.start`."""
        if torch.cuda.current_device() != self.device.index:
            with torch.cuda.device(self.device):
                return self.start(operands, prefetch)
        call = self.call
        if not self.overlap_sms:
            return started_by(call, operands, None, compat.current_stream(self.device).cuda_stream, prefetch)
        allocated = call.allocate()

        def launch(side: torch.cuda.Stream) -> Started:
            return Started(*call.enqueue(operands, allocated, side.cuda_stream))

        kept = (operands, allocated)
        return fork_and_join(self.device, self.group_name, self.slot, self.overlap_sms, kept, launch, self.in_turn)
