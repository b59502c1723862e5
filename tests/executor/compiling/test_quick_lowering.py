import gc
import importlib
import logging
import sys

import pytest

from apt_jax.executor.compiling import quick_lowering as module
from apt_jax.executor.compiling.quick_lowering import quick_lowering


def test_what_there_was_is_collected_again_afterwards():
    if gc.get_freeze_count():
        gc.unfreeze()
    with quick_lowering():
        assert gc.get_freeze_count() > 0
        with quick_lowering():
            pass
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0


def test_a_heap_that_was_frozen_before_stays_so():
    gc.freeze()
    try:
        with quick_lowering():
            pass
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


def test_collections_are_rare_until_the_last_of_those_that_overlap_ends():
    before = gc.get_threshold()
    try:
        gc.set_threshold(700, *before[1:])
        given = gc.get_threshold()
        first, second = quick_lowering(), quick_lowering()
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert gc.get_threshold()[0] > 700
        second.__exit__(None, None, None)
        assert gc.get_threshold() == given
    finally:
        gc.set_threshold(*before)


@pytest.mark.parametrize("first", [0, 10**7])
def test_thresholds_of_fewer_collections_are_left_alone(first):
    before = gc.get_threshold()
    try:
        gc.set_threshold(first, *before[1:])
        given = gc.get_threshold()
        with quick_lowering():
            assert gc.get_threshold() == given
        assert gc.get_threshold() == given
    finally:
        gc.set_threshold(*before)


def test_triton_operations_are_found_at_the_first_place(monkeypatch):
    monkeypatch.setattr(module, "_LOOKED_FOR", "json.no_such_module")
    monkeypatch.setattr(module, "_TRITON", "json.tool")
    try:
        with quick_lowering():
            pass
        assert importlib.import_module("json.no_such_module") is importlib.import_module("json.tool")
    finally:
        sys.modules.pop("json.no_such_module", None)


def test_a_module_that_is_there_is_left_alone(monkeypatch):
    monkeypatch.setattr(module, "_LOOKED_FOR", "json.tool")
    monkeypatch.setattr(module, "_TRITON", "json.decoder")
    monkeypatch.delitem(sys.modules, "json.tool", raising=False)
    with quick_lowering():
        pass
    assert importlib.import_module("json.tool").__name__ == "json.tool"


@pytest.mark.parametrize("names", [("no_such_package.tt", "json.tool"), ("json.no_such_module", "no_such_package")])
def test_without_triton_there_is_one_line_in_the_log(names, monkeypatch, caplog):
    monkeypatch.setattr(module, "_LOOKED_FOR", names[0])
    monkeypatch.setattr(module, "_TRITON", names[1])
    with caplog.at_level(logging.INFO), quick_lowering():
        pass
    assert len(caplog.records) == 1
    assert names[0] not in sys.modules


def test_jaxlib_has_the_module_of_triton_operations():
    module._name_triton()
    assert module._LOOKED_FOR in sys.modules
