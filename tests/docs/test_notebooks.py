"""Every notebook runs from top to bottom."""

from pathlib import Path

import pytest

from tests.support.small_models import write_shallow_model

PRINTS = {"quickstart": "apt, hybrid cache", "policies": "apt-plus, hybrid by absorption"}
"""Something that each notebook prints near its end."""

SMALLER = {
    "quickstart": {
        "from apt_jax import LLM": "import dataclasses\n\nfrom apt_jax.config import SchedulerConfig\nfrom apt_jax import LLM",
        'demo_config("tiny-opt", num_blocks=96)': (
            "dataclasses.replace(demo_config({model!r}, num_blocks=96),"
            " scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64))"
        ),
        "calibrate=False), 8.0)": "calibrate=False), 0.5)",
        "duration_s=10": "duration_s=1",
        "max_tokens=arrival.max_tokens": "max_tokens=8",
    },
    "policies": {"num_requests=300": "num_requests=25"},
}
"""A smaller model, and less to calibrate, replay and simulate; every cell runs all the same, and as it is with
`make test-slow`."""

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("default")  # the kernel's own libraries warn
@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_runs(path: Path, whole: bool, tmp_path: Path) -> None:
    import nbformat
    from nbclient import NotebookClient

    model = str(write_shallow_model(tmp_path / "tiny-opt"))
    notebook = nbformat.read(path, as_version=4)
    for written, smaller in ({} if whole else SMALLER[path.stem]).items():
        cells = [cell for cell in notebook.cells if written in cell.source]
        assert len(cells) == 1, written
        cells[0].source = cells[0].source.replace(written, smaller.format(model=model))
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
