"""The passes inside vLLM: a pass for its compiler, a plugin that installs this pass, and what both decide.

:mod:`.options` and :mod:`.plan` import no vLLM. :mod:`.plugin` is the entry point of ``vllm.general_plugins``;
:mod:`.inductor_pass` has the pass, which ``tw_compile.vllm_pass`` stands for. Facts about vLLM are those of 0.24.
"""
