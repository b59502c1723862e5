"""Settings of the tests against PyTorch."""

import importlib.util

import pytest


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> None:
    """Run PyTorch on one thread: its threads spin while they wait, and would slow down the programs beside them."""
    if importlib.util.find_spec("torch"):
        importlib.import_module("torch").set_num_threads(1)
