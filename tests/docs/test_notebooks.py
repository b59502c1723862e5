"""Every notebook runs from top to bottom."""

import ast
import asyncio
import inspect
from pathlib import Path
from typing import Any

import pytest

from tests.support.small_models import write_shallow_model

PRINTS = {
    "quickstart": "apt, hybrid cache",
    "policies": "apt-plus, hybrid by absorption",
    "training": "of the engine and of the module are the same: True",
    "two_classes": "longest wait for a token",
    "agents": "turn 3: ",
}
"""Something that each notebook prints near its end."""

SMALLER = {
    "quickstart": {
        "from apt_jax import LLM": (
            "import dataclasses\n\n"
            "from apt_jax.config import SchedulerConfig\n"
            "from tests.support.paged_driver import few_programs\n"
            "from apt_jax import LLM"
        ),
        'parts = recalibrate(build_engine(demo_config("tiny-opt", num_blocks=96), calibrate=False), 8.0)': (
            "config = dataclasses.replace(demo_config({model!r}, num_blocks=96),"
            " scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64))\n"
            "parts = build_engine(config, warm_up=False, calibrate=False)\n"
            "few_programs(parts.executor)\n"
            "parts = recalibrate(parts, 0.5)"
        ),
        "workload = make_workload(parts, duration_s=10, seed=0)": (
            "workload = make_workload(parts, duration_s=1, seed=0)\n"
            "workload = dataclasses.replace(workload, arrivals=workload.arrivals[:8])"
        ),
        "max_tokens=arrival.max_tokens": "max_tokens=4",
    },
    "policies": {
        'trace="sharegpt"': 'trace="humaneval"',
        "num_requests=300": "num_requests=6",
        "rates = [2.0, 4.0, 6.0, 10.0]": "rates = [2.0, 10.0]",
    },
    "two_classes": {
        "NUM_BATCH, NUM_CHATS, RATE = 120, 120, 3.0": "NUM_BATCH, NUM_CHATS, RATE = 12, 6, 3.0",
        "mixed(1, 360, 14.0, batch_s=10.0)": "mixed(1, 4, 14.0, batch_s=2.5)",
    },
    "agents": {
        "num_sessions=10": "num_sessions=3",
        "concurrent_sessions=8": "concurrent_sessions=3",
        'LLM("tiny-opt", retention': "LLM({model!r}, warm_up=False, max_num_seqs=2, retention",
    },
    "training": {
        'MODEL = "tiny-opt"': "MODEL = {model!r}",
        "STEPS = 25": "STEPS = 15",
        "max_tokens=24": "max_tokens=6",
    },
}
"""A smaller model, and less to calibrate, replay and simulate; every cell runs all the same, and as it is with
`make test-slow`."""

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


@pytest.mark.in_turn(4, group="whole commands")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_cells_run_in_this_process(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With less to do, and as in Jupyter within a running event loop."""
    import jax
    import matplotlib.pyplot as plt
    import nbformat

    if path.stem == "training":
        pytest.importorskip("flax", reason="needs the extra `train`")
    monkeypatch.chdir(path.parent)
    plt.switch_backend("agg")
    model = str(write_shallow_model(tmp_path / "tiny-opt"))
    cells = [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    for written, smaller in SMALLER[path.stem].items():
        assert sum(written in cell for cell in cells) == 1, written
        cells = [cell.replace(written, smaller.format(model=model)) for cell in cells]
    names: dict[str, Any] = {"__name__": "__main__"}

    async def run() -> None:
        for cell in cells:
            result = eval(compile(cell, path.name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
            if inspect.isawaitable(result):
                await result

    try:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # as it is for users
            asyncio.run(run())
    finally:
        plt.close("all")
    assert PRINTS[path.stem] in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("default")  # the kernel's own libraries warn
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_runs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Optax promotes dtypes and ranks.
    monkeypatch.setenv("JAX_NUMPY_DTYPE_PROMOTION", "standard")
    monkeypatch.setenv("JAX_NUMPY_RANK_PROMOTION", "allow")
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook,
        timeout=500,
        kernel_name="python3",
        resources={"metadata": {"path": str(path.parent)}},
    ).execute()
    printed = "".join(o.get("text", "") for cell in notebook.cells if cell.cell_type == "code" for o in cell.outputs)
    assert PRINTS[path.stem] in printed


def test_notebooks_are_kept_without_outputs() -> None:
    import nbformat

    assert NOTEBOOKS
    for path in NOTEBOOKS:
        cells = nbformat.read(path, as_version=4).cells
        assert not any(cell.outputs for cell in cells if cell.cell_type == "code"), path.name
