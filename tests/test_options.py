"""Configuration dataclasses check the types of their values."""

import collections.abc
import dataclasses
import functools
import typing
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from apt_jax.config import SLO, CacheConfig, EngineConfig, ParallelConfig, SchedulerConfig
from apt_jax.errors import ConfigError
from apt_jax.frontend.llm import _OPTIONS, configure
from apt_jax.options import option_type, options_of
from apt_jax.sim.config import SimulationConfig

SECTIONS = {"cache": CacheConfig, "scheduler": SchedulerConfig, "parallel": ParallelConfig}
CLASSES = (EngineConfig, *SECTIONS.values(), SimulationConfig)
VALUES: tuple[Any, ...] = (
    "8",
    "no",
    8,
    0.5,
    np.float32(8.0),
    True,
    None,
    [],
    ["x"],
    {},
    {"ttft_s": 1},
    (5,),
    np.arange(99),
    object(),
)
RIGHT = {
    int: lambda value: isinstance(value, int) and value is not True,
    float: lambda value: isinstance(value, int | float | np.floating) and value is not True,
    bool: lambda value: value is True,
    str: lambda value: isinstance(value, str),
    collections.abc.Mapping: lambda value: isinstance(value, dict),
}
"""Keyed by type: whether a value of `VALUES` has the type. No value has another type, or is a valid choice."""


def fields_and_wrong_values(cls: type) -> Iterator[tuple[str, str, object]]:
    """Yield the name of each field, its name in messages, and values of another type."""
    for field in dataclasses.fields(cls):
        kind = option_type(cls, field.name)
        is_right = RIGHT.get(typing.get_origin(kind) or kind, lambda value: False)
        in_messages = options_of(cls)[field.name][1].keyword if field.name in options_of(cls) else field.name
        for value in VALUES:
            if not is_right(value) and not (value is None and field.default is None):
                yield field.name, in_messages, value


@pytest.mark.parametrize("cls", CLASSES)
def test_a_value_of_the_wrong_type_is_one_line_that_names_it(cls):
    make = functools.partial(cls, **({"model": "m"} if cls is EngineConfig else {}))
    for name, keyword, value in fields_and_wrong_values(cls):
        with pytest.raises(ConfigError, match=rf"^{keyword}=[^\n]* (must|is) [^\n]*$"):
            make(**{name: value})


def test_every_option_of_llm_is_checked_before_it_is_used():
    for section, cls in {None: EngineConfig, **SECTIONS}.items():
        for _, keyword, value in fields_and_wrong_values(cls):
            if keyword in _OPTIONS and _OPTIONS[keyword][0] == section and value is not None:
                with pytest.raises(ConfigError, match=rf"^{keyword}=[^\n]*$"):
                    configure("m", None, {keyword: value})


@pytest.mark.parametrize("value", ["1", None, True, [], {}, (1.0,), SLO()])
def test_an_objective_is_a_number_of_seconds(value):
    for name in ("ttft_s", "tbt_s"):
        with pytest.raises(ConfigError, match=rf"^slo {name}=.* must be a positive number of seconds$"):
            SLO(**{name: value})


@pytest.mark.parametrize("cls", CLASSES)
def test_numbers_of_numpy_are_numbers(cls):
    make = functools.partial(cls, **({"model": "m"} if cls is EngineConfig else {}))
    for field in dataclasses.fields(cls):
        kind = option_type(cls, field.name)
        if kind in (int, float) and field.default is not None:
            default: Any = field.default
            for of_numpy in (np.int64, np.uint32) if kind is int else (np.float64, np.float32):
                make(**{field.name: of_numpy(default)})
    objectives: dict[str, Any] = {"ttft_s": np.float32(1.0), "tbt_s": np.int64(1)}
    SLO(**objectives)
