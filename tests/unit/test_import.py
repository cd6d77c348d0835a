"""What importing costs, and what it must not bring along. Fresh processes, since this one has imported everything."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("triton", "vllm", "transformers")


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=120, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    "statement",
    ["import tw_compile", "from tw_compile import Config, TWCompilePass, make_backend", "import tw_compile.testing"],
)
def test_import_brings_nothing_heavy(statement: str) -> None:
    # Inductor imports Triton when it is there, so the test is that nothing here needs it.
    blocked = f"import sys; sys.modules.update(dict.fromkeys({HEAVY}))"
    assert run(f"{blocked}\n{statement}\nprint([name for name in {HEAVY} if sys.modules[name]])") == "[]"


def test_package_alone_does_not_import_torch() -> None:
    assert run("import sys, tw_compile; print('torch' in sys.modules, tw_compile.__version__)").startswith("False ")


@pytest.mark.parametrize(
    "statement",
    [
        "from tw_compile.config import Config; Config(transport='p2p')",
        "from tw_compile.kernels.collective.transports import TRANSPORTS; TRANSPORTS.names()",
        "from tw_compile.kernels.algorithms import ALGORITHMS; ALGORITHMS.names()",
        "from tw_compile.kernels.epilogues import EPILOGUES; EPILOGUES.names()",
    ],
)
def test_registries_and_options_do_not_import_torch(statement: str) -> None:
    assert run(f"import sys\n{statement}\nprint([name for name in ('torch', 'triton') if name in sys.modules])") == "[]"


def test_names_are_importable_and_others_are_not() -> None:
    import tw_compile

    for name in tw_compile.__all__:
        assert getattr(tw_compile, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = tw_compile.nothing


@pytest.mark.parametrize("command", [["explain"], ["doctor"], ["tune", "--dry-run"]])
def test_commands_that_compile_nothing_import_neither_dynamo_nor_inductor(command: list[str]) -> None:
    code = f"""
import sys
sys.argv = ["tw-compile", *{command}]
from tw_compile.cli import main
try:
    main()
except SystemExit as end:
    assert not end.code
print("imported:", [name for name in ("torch._dynamo", "torch._inductor", "transformers") if name in sys.modules])
"""
    assert run(code).splitlines()[-1] == "imported: []"
