"""What importing costs, and what it must not bring along. Fresh processes, since this one has imported everything."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tw_compile.calibration import LAYER, Calibration, MeasuredOn, store
from tw_compile.gating.table import Entry, Source, Table
from tw_compile.kernels.transports.selection import Step
from tw_compile.sources import source_digest
from tw_compile.torch_files import torch_version

HEAVY = ("triton", "vllm", "transformers")


def run(code: str, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        cwd="/",
        env=os.environ | variables,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_imports_bring_nothing_heavy() -> None:
    statements = [
        "import tw_compile",
        "from tw_compile import Config, TWCompilePass, make_backend",
        "import tw_compile.testing",
    ]
    # Inductor imports Triton when it is there, so the test is that nothing here needs it.
    lines = [f"import sys; sys.modules.update(dict.fromkeys({HEAVY}))"]
    for statement in statements:
        lines += [statement, f"print({statement!r}, [name for name in {HEAVY} if sys.modules[name]])"]
    assert run("\n".join(lines)).splitlines() == [f"{statement} []" for statement in statements]


def test_package_alone_does_not_import_torch() -> None:
    assert run("import sys, tw_compile; print('torch' in sys.modules, tw_compile.__version__)").startswith("False ")


@pytest.mark.parametrize(
    "statement",
    [
        "from tw_compile.config import Config; Config(transport='p2p')",
        "from tw_compile.kernels.collective.transports import TRANSPORTS; TRANSPORTS.names()",
        "from tw_compile.kernels.algorithms import ALGORITHMS; ALGORITHMS.names()",
        "from tw_compile.kernels.epilogues import EPILOGUES; EPILOGUES.names()",
        "from tw_compile.kernels.transports.selection import shipped_tables; assert shipped_tables()",
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


RUN_COMMAND = """
import sys
sys.argv = ["tw-compile", *{command}]
from tw_compile.cli import main
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
"""


@pytest.mark.parametrize(
    "command",
    [
        ["explain"],
        ["explain", "--json", "-"],
        ["explain", "--model", "llama-3.1-8b", "--tp", "2"],
        ["plan", "--model", "llama-3.3-70b", "--tp", "4"],
        ["plan", "--model", "mixtral-8x7b", "--tp", "2", "--tokens", "4096"],
        ["tune", "--dry-run"],
        ["tune", "--dry-run", "--device", "cpu"],
        ["tune", "--dry-run", "--transport", "host"],
        ["tune", "--dry-run", "--halves", "llama-3.3-70b"],
        ["--help"],
        ["--version"],
    ],
    ids=" ".join,
)
def test_commands_that_ask_no_device_do_not_import_torch(command: list[str]) -> None:
    code = RUN_COMMAND.format(command=command) + "print('torch:', 'torch' in sys.modules)"
    assert run(code).splitlines()[-1] == "torch: False"


def test_doctor_does_not_import_torch_where_there_is_no_driver() -> None:
    without = "import ctypes\nctypes.CDLL = lambda name, *rest, **more: (_ for _ in ()).throw(OSError(name))\n"
    code = without + RUN_COMMAND.format(command=["doctor"]) + "print('torch:', 'torch' in sys.modules)"
    lines = run(code).splitlines()
    assert "none that torch can use" in lines[lines.index("GPUs") + 1]
    assert lines[-1] == "torch: False"


def test_explain_reads_a_calibration_without_torch(tmp_path: Path) -> None:
    here = MeasuredOn("a GPU", "sm90", 8, True, False, "1.0", torch_version(), source_digest()[:12])
    step = Step(8, 2**20, "push_two_shot", 64)
    source = Source("here", "default", ("measured by a test",))
    entry = Entry(8, "any", 0, None, "fused", "p2p", source)
    calibration = Calibration(here, Table("", "sm90", (entry,)), (step,), (), (), (1.0, 1.0))
    assert store(tmp_path / "tw_compile" / LAYER, calibration) is not None
    code = RUN_COMMAND.format(command=["explain"]) + "print('torch:', 'torch' in sys.modules)"
    lines = run(code, XDG_CONFIG_HOME=str(tmp_path)).splitlines()
    assert any("measured by a test" in line for line in lines), "the table is used"
    assert lines[-1] == "torch: False"


def test_version_of_torch_is_told_without_importing_it() -> None:
    code = (
        "import sys; from tw_compile.torch_files import torch_version; print(torch_version(), 'torch' in sys.modules)"
    )
    assert run(code) == f"{torch.__version__} False"


@pytest.mark.parametrize("command", [["explain"], ["doctor"], ["tune", "--dry-run"]])
def test_commands_that_compile_nothing_import_neither_dynamo_nor_inductor(command: list[str]) -> None:
    code = f"""
{RUN_COMMAND.format(command=command)}
print("imported:", [name for name in ("torch._dynamo", "torch._inductor", "transformers") if name in sys.modules])
"""
    assert run(code).splitlines()[-1] == "imported: []"
