"""Reports that are kept beside Inductor's cache: whose they are, and what is shown when a graph comes out of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.fx as fx
from torch import nn
from torch._inductor import config as inductor_config
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from tw_compile import Config, TWCompilePass, kept_reports
from tw_compile.compat import FakeTensorMode
from tw_compile.models.config import load_config, tensor_parallel_plan
from tw_compile.passes.reasons import Refusal
from tw_compile.planning import layer_shape, load_profile, plan_layer
from tw_compile.report import GraphReport, Overlap, OverlapWindow, PassReport, Site, Split

SITE = Site(0, 3, "all_reduce + residual + rms_norm", "fused", "", 65536, "p2p", producer="mm")
WINDOW = OverlapWindow("mlp", 1, ((3, 2), (None, "joined")), 5, gemms_leaving_sms=(("down", 16),), us=12.5)


@pytest.fixture(autouse=True)
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with inductor_config.patch(fx_graph_cache=True):
        yield


def full_report() -> GraphReport:
    """With something in every field."""
    model = load_config("llama-3.3-70b")
    plan = plan_layer(load_profile("H100"), layer_shape(model, tensor_parallel_plan(model), 4), 4096)
    assert plan.windows and plan.windows[0].gemms and plan.waves
    overlap = Overlap(4, (WINDOW,), {"nothing_left": 1}, ("add_3",), in_slot=2)
    split = Split("auto", "join", unit="token", sizes=(2048, "s0 - 2048"), joins={"unknown_operator": 1}, plan=plan)
    split = replace(split, join_details=("a", "b"), overlap=overlap)
    passes = [PassReport("fuse", "changed", 0.25, {"sites": 1})]
    return GraphReport([SITE], split, 0.5, "it failed", (2, None), 1, passes)


def test_what_is_read_is_what_was_kept_and_says_where_it_comes_from(tmp_path: Path) -> None:
    file, reports = tmp_path / "new" / "report.json", [full_report(), GraphReport()]
    kept_reports.keep(file, reports)
    read = kept_reports.read(file)
    assert all(report.from_cache for report in read)
    assert [replace(report, from_cache=False) for report in read] == reports
    assert [path.name for path in file.parent.iterdir()] == ["report.json"]
    assert read[0].as_dict() == full_report().as_dict() | {"from_cache": True}
    assert read[0].summary == "from cache: 1 of 1 all_reduces fused"


def test_a_summary_has_reasons_as_words() -> None:
    refused = replace(SITE, decision="refused", reason=Refusal.TRAINING_GRAPH)
    assert GraphReport([refused, refused]).summary == "0 of 2 all_reduces fused, {'training_graph': 2}"


@pytest.mark.parametrize(
    "change",
    [
        lambda text: "",
        lambda text: text[:-20],
        lambda text: text.replace('"fused"', '"melted"'),
        lambda text: text.replace('"index": 0', '"index": "0"'),
        lambda text: text.replace('"index"', '"number"'),
        lambda text: text.replace('"tokens": [2, null]', '"tokens": [2]'),
        lambda text: json.dumps(json.loads(text)[0]),
    ],
)
def test_a_file_that_is_not_as_it_was_kept_is_refused(tmp_path: Path, change: Callable[[str], str]) -> None:
    file = tmp_path / "report.json"
    kept_reports.keep(file, [full_report()])
    changed = change(file.read_text())
    assert changed != file.read_text()
    file.write_text(changed)
    with pytest.raises(ValueError, match=rf"report: expected a file as it was kept, got '{file}'"):
        kept_reports.read(file)


def test_no_file_is_refused_too(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No such file"):
        kept_reports.read(tmp_path / "report.json")


def test_counts_without_a_form_are_not_kept_and_leave_nothing(tmp_path: Path) -> None:
    counts: Any = {"nodes": object()}
    with pytest.raises(ValueError, match="expected to be kept in"):
        kept_reports.keep(
            tmp_path / "new" / "report.json", [GraphReport(passes=[PassReport("own", "changed", 0, counts)])]
        )
    assert not list(tmp_path.iterdir())


class Layer(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(4, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.table


def file_of(
    module: nn.Module | None = None, given: object = None, config: Config | None = None, **options: object
) -> Path | None:
    given = torch.ones(2, 4) if given is None else given
    graph = fx.symbolic_trace(Layer() if module is None else module)
    return kept_reports.file_of(graph, [given], TWCompilePass(config), options)


class Twice(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


def test_a_file_is_found_again_whatever_the_values(tmp_path: Path) -> None:
    file = file_of()
    assert file is not None and file.parent == tmp_path / "tw_compile" / "reports"
    assert file == file_of(given=torch.zeros(2, 4)) == file_of(config=Config())


@pytest.mark.parametrize(
    "change",
    [
        {"module": Twice()},
        {"module": Layer(torch.bfloat16)},
        {"given": torch.ones(3, 4)},
        {"given": torch.ones(4, 2).t()},
        {"given": torch.ones(2, 4, dtype=torch.bfloat16)},
        {"given": torch.ones(2, 4, requires_grad=True)},
        {"given": 2},
        {"config": Config(fuse=False)},
        {"config": Config(split="512")},
        {"max_autotune": True},
        {"emulate_precision_casts": True},
    ],
)
def test_another_graph_or_option_has_another_file(change: dict[str, Any]) -> None:
    assert file_of(**change) != file_of()


def test_what_holds_beyond_the_graph_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {file_of()}
    with torch.no_grad():
        files.add(file_of())
    with torch.autocast("cpu"):
        files.add(file_of())
    with inductor_config.patch(shape_padding=False):
        files.add(file_of())
    monkeypatch.setattr(torch, "__version__", "2.99")
    files.add(file_of())
    assert len(files) == 5


def symbolic(least: int, most: int) -> torch.Tensor:
    """``[s0, 4]``, with bounds that a graph does not show."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    fake = mode.from_tensor(torch.ones(8, 4), symbolic_context=context)
    torch._check(fake.shape[0] >= least)
    torch._check(fake.shape[0] <= most)
    return fake


def test_bounds_of_a_size_count_and_not_what_it_is_at_first() -> None:
    assert file_of(given=symbolic(2, 64).shape[0]) == file_of(given=symbolic(2, 64).shape[0])
    assert file_of(given=symbolic(2, 64).shape[0]) != file_of(given=symbolic(2, 128).shape[0])


def test_where_inductor_keeps_no_graph_there_is_no_report_to_keep() -> None:
    assert file_of(force_disable_caches=True) is None
    with inductor_config.patch(fx_graph_cache=False):
        assert file_of() is None
        assert file_of(fx_graph_cache=True) is not None
    graph = fx.symbolic_trace(Layer())
    assert kept_reports.file_of(graph, [], TWCompilePass(before=lambda graph: None), {}) is None


PROGRAM = """
import json, logging, sys
from dataclasses import asdict
from pathlib import Path
import torch
import torch.distributed as dist
from torch import nn
from tw_compile import collect_reports
from tw_compile.testing import fake_process_group

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(16)

    def forward(self, x, residual):
        partial = x * 2
        dist.all_reduce(partial)
        return self.norm(partial + residual)

def reports(**options):
    torch._dynamo.reset()
    x = torch.ones(4, 16)
    options = {"tw_compile.split": "2"} | {f"tw_compile.{name}": value for name, value in options.items()}
    with fake_process_group(2), torch.no_grad(), collect_reports() as reports:
        result = torch.compile(Block(), backend="tw_compile", options=options)(x, x)
    torch.testing.assert_close(result, torch.ones(4, 16))
    return [asdict(report) for report in reports]

folder = Path(sys.argv[1], "tw_compile", "reports")
if sys.argv[2] == "first":
    print(json.dumps([reports()]))
else:
    results = [reports(), reports(fuse=False)]
    for file in folder.iterdir():
        file.write_text("[{")
    print(json.dumps([*results, reports()]))
"""


def run(folder: Path, which: str) -> tuple[list[Any], str]:
    """What one process reports, and what it logs."""
    variables = os.environ | {
        "TORCHINDUCTOR_CACHE_DIR": str(folder),
        "TORCH_LOGS": "+tw_compile",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-c", PROGRAM, str(folder), which]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=variables, timeout=280)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.mark.full
def test_a_second_process_shows_the_report_of_the_first(tmp_path: Path) -> None:
    ((first,),), log = run(tmp_path, "first")
    assert not first["from_cache"] and first["split"]["mode"] == "split" and "from cache" not in log
    ((again,), (other,), broken), log = run(tmp_path, "second")
    assert again == first | {"from_cache": True}
    assert "tw_compile: from cache: 1 of 1 all_reduces fused" in log and "tokens split 2 + 2" in log
    assert not other["from_cache"] and other["sites"][0]["decision"] == "gated"  # an option that the first had not
    assert not broken and log.count("no report of it was kept") == 1
