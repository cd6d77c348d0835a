"""The token rule of an operator of the toy host's that is neither all_reduce nor norm."""

from __future__ import annotations

from tw_compile.passes.split import OperatorCall, Verdict, token_rule


@token_rule("toy::double_rows")
def _double_rows(call: OperatorCall) -> Verdict:
    return call.row_wise_over(0, dim=0)
