"""The table of vLLM's models is what its compiler and the passes make of them today."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models_table import PAGE, SECTIONS, models_here, page, row_of, rows_of_page
from most_used_models import MODELS, Model
from vllm_schemas import EXPERTS, SCHEMAS

ALL = [model for models in SECTIONS.values() for model in models]


@pytest.mark.full
@pytest.mark.usefixtures("groups")
@pytest.mark.parametrize("model", ALL, ids=lambda model: model.name)
def test_a_model_is_what_its_row_says(folder: Path, model: Model) -> None:
    from traced_models import NotTracedError, trace

    row = rows_of_page()[model.name]
    with models_here():
        if "not traced" in row:
            with pytest.raises(NotTracedError) as error:
                trace(folder, model)
            assert str(error.value) in row
        else:
            assert row_of(model, trace(folder, model)) == row


def test_every_model_has_a_row_and_totals_are_theirs() -> None:
    assert len(MODELS) == 40 and len({model.name for model in ALL}) == len(ALL)
    rows = rows_of_page()
    assert list(rows) == [model.name for model in ALL]
    assert PAGE.read_text() == page(rows)


def _arguments(schema: Any) -> list[tuple[str, bool]]:
    """Names, and whether each is written to."""
    return [(one.name, one.alias_info is not None and one.alias_info.is_write) for one in schema.arguments]


@pytest.mark.usefixtures("groups")
def test_signatures_that_stand_in_elsewhere_are_vllms() -> None:
    import vllm._custom_ops
    import vllm.model_executor.kernels.linear  # noqa: F401  these register them

    for text in (*SCHEMAS, *EXPERTS):
        namespace, _, rest = text.partition("::")
        name = rest.partition("(")[0]
        theirs = getattr(getattr(torch.ops, namespace), name).default._schema
        assert _arguments(theirs) == _arguments(torch._C.parse_schema(text.replace("::", "::"))), name
