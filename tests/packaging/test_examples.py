"""The examples run: on two ranks of a CPU, or without vLLM as far as they come."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from fork_servers import run_script

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.full
def test_generate_fuses_every_all_reduce_of_a_checkpoint(tmp_path: Path) -> None:
    from test_readme import write_checkpoint

    write_checkpoint(tmp_path / "CHECKPOINT")
    # Not by torchrun: now and then a gloo thread aborts a rank that finalises Python, see ``tw_compile/leave.py``.
    output = run_script(tmp_path, EXAMPLES / "generate.py", "CHECKPOINT", "Hello", ranks=2)
    counts = re.findall(r"(\d+) of (\d+) all_reduces fused", output)
    assert counts and all(fused == total and int(fused) >= 4 for fused, total in counts), output


@pytest.mark.full
def test_a_host_with_a_pipeline_of_its_own_gets_the_fused_operator(tmp_path: Path) -> None:
    output = run_script(tmp_path, EXAMPLES / "own_pipeline.py", ranks=2)
    assert output.count("'all_reduce': 1, 'fused': 1") == 2 and output.count("nodes before the passes") == 2, output


@pytest.mark.full
def test_the_graph_test_passes(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        f"import pytest\nexit(pytest.main({['-q', '-p', 'no:cacheprovider', str(EXAMPLES / 'test_graph.py')]}))"
    )
    assert "1 passed" in run_script(tmp_path, script)


def test_the_example_of_vllm_gives_options_that_there_are() -> None:
    from tw_compile import Config

    tree = ast.parse((EXAMPLES / "vllm_offline.py").read_text())
    (table,) = [
        node for node in ast.walk(tree) if isinstance(node, ast.Dict) and ast.unparse(node.keys[0]) == "'tw_compile'"
    ]
    Config.from_mapping(ast.literal_eval(table)["tw_compile"])
