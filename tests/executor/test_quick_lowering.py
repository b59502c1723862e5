import gc
import importlib
import sys

import pytest

from apt_jax.executor.quick_lowering import quick_lowering


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


def test_only_modules_that_do_not_exist_are_looked_for_no_more(monkeypatch):
    monkeypatch.setattr("apt_jax.executor.quick_lowering._LOOKED_FOR", ("json", "no_such_package"))
    for dialect in ("tool", "no_such_module"):
        monkeypatch.delitem(sys.modules, f"json.{dialect}", raising=False)
        monkeypatch.setattr("apt_jax.executor.quick_lowering._DIALECT", dialect)
        with quick_lowering():
            pass
    assert importlib.import_module("json.tool")
    assert sys.modules["json.no_such_module"] is None
    with pytest.raises(ImportError):
        importlib.import_module("json.no_such_module")
    for name in ("json.no_such_module", "no_such_package.tool", "no_such_package.no_such_module"):
        sys.modules.pop(name, None)
