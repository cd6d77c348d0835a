"""The token rule of ``auto_functionalized``, by which graphs call operators that write to arguments."""

from __future__ import annotations

from tw_compile.passes.fusion.forms import functionalised
from tw_compile.passes.reasons import JoinReason
from tw_compile.passes.split.analysis.layout import Verdict
from tw_compile.passes.split.rules.registry import OperatorCall, registered_name, token_rule


@token_rule("higher_order::auto_functionalized", enters=True)
def _auto_functionalised(call: OperatorCall) -> Verdict:
    """Apply the rule of the operator that is called."""
    form = functionalised(call.node)
    if form is None:
        return call.join(JoinReason.UNKNOWN_OPERATOR, "an operator that writes to its arguments")
    rule = registered_name(form.name, writes=True)
    return call.join(JoinReason.UNKNOWN_OPERATOR, form.name) if rule is None else rule.rule(call)
