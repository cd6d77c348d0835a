"""What README and docs show: their code runs as pasted, and what they list is what the code has."""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import typer
from fork_servers import run_script

from tw_compile.cli.app import app
from tw_compile.hosts.vllm import reasons as vllm
from tw_compile.passes import reasons
from tw_compile.passes.fusion.fuse import GATED_ABOVE, GATED_BELOW, GATED_FASTER_UNFUSED, GATED_OFF
from tw_compile.passes.split.schedule.windows import Exposure
from tw_compile.planning.plan import Off

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"(?:<!-- run(?:: ([\w ,]+))? -->\n)?```(\w*)\n(.*?)```", re.DOTALL)
MARKED = re.compile(r"<!-- run(?:: [\w ,]+)? -->\n")


@dataclass(frozen=True)
class Block:
    """One code block; ``how`` is what its mark says, None where it has none."""

    page: str
    line: int
    language: str
    code: str
    how: str | None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for found in BLOCK.finditer(text):
        line = text.count("\n", 0, found.start()) + 1
        how = (found[1] or "") if found[0].startswith("<!--") else None
        yield Block(str(page.relative_to(ROOT)), line, found[2], found[3], how)


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
PYTHON = [block for block in BLOCKS if block.language == "python"]
RUN = [block for block in PYTHON if block.how is not None]
COMMANDS = [
    (str(block), line.split("  #")[0].strip())
    for block in BLOCKS
    if block.language == "bash"
    for line in block.code.splitlines()
    if re.match(r"(uv run )?tw-compile\b", line)
] + [
    (page.name, command)
    for page in PAGES
    for command in re.findall(r"`(tw-compile [a-z][^`]*)`", page.read_text())
    if page.name not in ("commands.md", "json.md")
]


def run(folder: Path, code: str, ranks: int = 1) -> str:
    """Run ``code`` as a script in ``folder``; the output, both streams."""
    script = folder / "script.py"
    script.write_text(code)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "cache"))
        return run_script(folder, script, ranks=ranks)


WITH_CHECKPOINT = """
import torch
from tw_compile import collect_reports
from transformers.generation.configuration_utils import CompileConfig as _CompileConfig

torch.distributed.init_process_group("gloo")
_CompileConfig._compile_all_devices = True  # transformers would not compile on a CPU
_collecting = collect_reports()
_reports = _collecting.__enter__()
torch.set_grad_enabled(False)
{code}
if "tokens" not in globals():
    model(torch.arange(9).unsqueeze(0), use_cache=False)
print("counts", *(report.counts for report in _reports))
torch.distributed.destroy_process_group()
"""


def test_marks_stand_before_blocks_and_are_known() -> None:
    assert sum(len(MARKED.findall(page.read_text())) for page in PAGES) == len(RUN)
    assert {block.how for block in RUN} == {"", "pytest", "torchrun, all fused", "torchrun with a checkpoint"}


@pytest.mark.full
@pytest.mark.parametrize("block", [block for block in RUN if block.how == ""], ids=str)
def test_script_runs(block: Block, tmp_path: Path) -> None:
    run(tmp_path, block.code)


@pytest.mark.full
@pytest.mark.parametrize("block", [block for block in RUN if block.how == "pytest"], ids=str)
def test_test_passes(block: Block, tmp_path: Path) -> None:
    (tmp_path / "test_pasted.py").write_text(block.code)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    # Guarded, as processes that a test spawns import this script, too.
    output = run(tmp_path, "import pytest\nif __name__ == '__main__':\n    exit(pytest.main(['-q', 'test_pasted.py']))")
    assert re.search(r"[1-9]\d* passed", output), output


@pytest.mark.full
@pytest.mark.parametrize("block", [block for block in RUN if block.how == "torchrun, all fused"], ids=str)
def test_example_fuses_every_all_reduce(block: Block, tmp_path: Path) -> None:
    output = run(tmp_path, block.code, ranks=2)
    found = re.search(r"'all_reduce': (\d+), 'fused': (\d+).*\n?.*uncompiled model ([\d.]+)%", output)
    assert found is not None, output
    all_reduces, fused, percent = found.groups()
    assert all_reduces == fused
    assert int(fused) >= 4
    assert float(percent) < 2


@pytest.mark.full
@pytest.mark.parametrize("block", [block for block in RUN if block.how == "torchrun with a checkpoint"], ids=str)
def test_five_lines_fuse_every_all_reduce_of_a_checkpoint(block: Block, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "CHECKPOINT")
    output = run(tmp_path, WITH_CHECKPOINT.format(code=block.code), ranks=2)
    counts = re.findall(r"'all_reduce': (\d+), 'fused': (\d+)", output)
    assert counts and all(all_reduces == fused and int(fused) >= 4 for all_reduces, fused in counts), output


def write_checkpoint(folder: Path) -> None:
    """A small Llama with random weights, and a tokenizer of words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8}
    # No token ends a text: the first one would in one run of 512, before anything is compiled.
    config = LlamaConfig(**sizes, vocab_size=512, eos_token_id=None)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({"Hello": 3, "<unk>": 0}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(folder)


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_python_can_be_parsed_and_imports_what_is_there(block: Block) -> None:
    for node in ast.walk(ast.parse(block.code)):
        if isinstance(node, ast.Import):
            for name in node.names:
                assert importlib.util.find_spec(name.name) is not None, name.name
        if isinstance(node, ast.ImportFrom):
            assert node.module is not None
            module = importlib.import_module(node.module)
            for name in node.names:
                assert hasattr(module, name.name), f"{node.module} has no {name.name}"


@pytest.mark.parametrize("where, command", COMMANDS, ids=lambda text: text)
def test_command_has_the_options_that_it_is_shown_with(where: str, command: str) -> None:
    words = shlex.split(command.removeprefix("uv run "))[1:]
    known = typer.main.get_command(app)
    while words and hasattr(known, "commands"):
        name = words.pop(0)
        assert name in known.commands, f"{where}: {command}"
        known = known.commands[name]
    if words:
        known.make_context("tw-compile", words)  # parses, and runs nothing


def test_every_reason_is_explained() -> None:
    rows = re.findall(r"^\| ([^|]+?) \| `(\w+)` \|", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)
    assert len(rows) == len(set(rows))
    listed: dict[str, set[str]] = {}
    for where, reason in rows:
        listed.setdefault(where, set()).add(reason)
    gates = {GATED_ABOVE, GATED_BELOW, GATED_FASTER_UNFUSED, GATED_OFF}
    assert listed == {
        "site": {*reasons.Refusal, *gates},
        "float8": {*reasons.QuantRefusal},
        "wire": {*reasons.WireRefusal},
        "feed": {*reasons.FeedRefusal},
        "split": {*reasons.SplitRefusal, *Off},
        "join": {*reasons.JoinReason},
        "exposed": {*Exposure},
        "vLLM": {*vllm.HostRefusal},
        "vLLM groups": {*vllm.GroupRefusal},
        "vLLM FlashInfer": {*vllm.FlashInferShare},
        "vLLM attention": {*vllm.WholeAttention},
        "vLLM residual": {*vllm.WholeResidual},
    }


def test_every_result_file_that_is_linked_is_there_and_marked_if_dirty() -> None:
    """In README and results in the same line, as tables of figures; on other pages under the same heading."""
    linked = 0
    for page in [*PAGES, *(ROOT / "benchmarks").glob("*.md")]:
        of_figures = page in (ROOT / "README.md", ROOT / "docs" / "results.md")
        for part in page.read_text().splitlines() if of_figures else re.split(r"^#+ ", page.read_text(), flags=re.M):
            for target in re.findall(r"\]\(((?:\.\./)*(?:benchmarks/)?results/[^)#]+)\)", part):
                file = (page.parent / target).resolve()
                assert file.is_file(), f"{page}: {target}"
                linked += 1
                if file.suffix in (".csv", ".json", ".txt"):
                    assert "-dirty" not in file.read_text() or "dirty" in part, f"{page}: {target} is dirty"
    assert linked > 50


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 180
