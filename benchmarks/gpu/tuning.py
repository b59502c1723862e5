"""Stage `tune`: tiles of each kernel that differ from the one in use in one field, then in two; the best of each as
JSON.

A tile is put into its table while the program is traced and taken out again. What is found is fast, not known to be
right: paste it, then run stage `correctness` and `make gate`.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from benchmarks.gpu import problems, shapes
from benchmarks.gpu.harness import Stage, time_call, write_json
from benchmarks.gpu.kernels import (
    Pools,
    Timed,
    abstract_arguments,
    kernel_ops,
    lower_or_error,
    make_arguments,
    num_workers,
    one_call,
    tile_class,
    unless_failed,
)
from benchmarks.gpu.shapes import AttentionShape

_WARPS = (4, 8)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Tunable:
    """A kernel that has a table of tiles, and what to try."""

    kernel: str
    """Its name in the table."""
    op: str
    timed: str
    """The name that `kernels.one_call` knows it by."""
    choices: Mapping[str, Sequence[int]] = dataclasses.field(default_factory=dict)
    stages: Sequence[int] = (2, 3, 4, 5)
    models: tuple[str, ...] = ("opt-13b", "opt-66b", "opt-6.7b")
    """The first before the first of other kernels' second."""
    tiles: Sequence[tuple[int, int, int, int]] = ()
    """Prefill only, in place of choices: queries, keys, warps, stages. One changed field would not lead there: fewer warps
    need fewer queries, or registers spill."""

    @property
    def prefill(self) -> bool:
        return bool(self.tiles)


_CHUNK_TILES = (
    (128, 128, 8, 3), (128, 64, 8, 3), (64, 64, 4, 3), (128, 128, 8, 2), (128, 64, 8, 4), (128, 64, 8, 2), (64, 64, 4, 2),
    (64, 128, 4, 2), (128, 32, 8, 4), (128, 32, 4, 3), (128, 64, 4, 2),
)  # fmt: skip
"""With 64 queries and 4 warps two programs share a processor, one multiplies while the other takes exponentials, but keys
are read twice as often from the L2 cache."""

_TUNABLES = (
    _Tunable(kernel="chunk", op="prefill", timed="prefill", tiles=_CHUNK_TILES),
    _Tunable(kernel="kv", op="decode_kv", timed="decode_kv", choices={"tokens": (32, 64, 128)}),
    _Tunable(kernel="scores", op="decode_absorbed", timed="absorbed scores", choices={"tokens": (128, 64), "lanes": (32, 64, 128)}, stages=(3, 4, 6)),
    _Tunable(kernel="output", op="decode_absorbed", timed="absorbed output", choices={"tokens": (32, 64), "lanes": (64, 128, 256)}, stages=(4, 6, 7)),
    _Tunable(kernel="reprojected", op="decode_reprojected", timed="decode_reprojected", choices={"tokens": (64, 128), "lanes": (32, 64), "passes": (1, 2)}),
    _Tunable(kernel="project", op="prefill", timed="prefill, hidden prefix", choices={"tokens": (128, 256), "lanes": (32, 64)}),
    _Tunable(kernel="rotary_scores", op="decode_v_absorbed", timed="decode_v_absorbed", choices={"lanes": (32, 64), "columns": (64, 128), "tokens": (64, 128)}, models=("llama-2-7b",)),
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Trial:
    tunable: _Tunable
    case: Timed
    key: tuple[Any, ...]
    """Key of the tile table."""
    tile: Any
    default: bool

    @property
    def name(self) -> str:
        values = ", ".join(f"{k}={v}" for k, v in dataclasses.asdict(self.tile).items() if v)
        shape = "" if self.tunable.prefill else f" {self.case.shape.name}"
        return f"{self.tunable.kernel}{shape}: {values}"


def _variations(tile: Any, choices: Mapping[str, Sequence[int]], changed: int) -> list[Any]:
    """Return tiles that differ from `tile` in exactly `changed` fields; with `changed=1` the first is `tile` itself."""
    found = [tile] if changed == 1 else []
    for fields in itertools.combinations(choices, changed):
        for values in itertools.product(*(choices[f] for f in fields)):
            pairs = dict(zip(fields, values, strict=True))
            if all(getattr(tile, f) != v for f, v in pairs.items()):
                found.append(dataclasses.replace(tile, **pairs))
    return found


def _table_of(tunable: _Tunable) -> dict[Any, Any]:
    from apt_jax.pallas import triton_tiles as tiles

    return tiles._PREFILL if tunable.prefill else tiles._TUNED


@contextlib.contextmanager
def _installed(trial: _Trial) -> Iterator[None]:
    table = _table_of(trial.tunable)
    before = table.get(trial.key)
    table[trial.key] = trial.tile
    jax.clear_caches()  # ops are traced once for all calls that are alike
    try:
        yield
    finally:
        del table[trial.key]
        if before is not None:
            table[trial.key] = before


def _trials(chip: str, tiny: bool) -> Iterator[_Trial]:
    """One changed field for every kernel before two for any, OPT-13B before other models."""
    from apt_jax.pallas import triton_tiles as tiles

    tokens, batch = (64, 2) if tiny else (shapes.CACHED_TOKENS[1], 64)

    def of_decode(tunable: _Tunable, shape: AttentionShape) -> tuple[Timed, tuple[Any, ...], Any]:
        width = shape.head_dim if tunable.kernel == "kv" else shape.hidden_size
        default = tiles.tile_for(tunable.kernel, chip, shape.num_heads, width, 2)
        if tunable.op == "prefill":
            case = Timed(kernel=tunable.timed, op="prefill", shape=shape, tokens=4096, batch=4, chunk=512)
        else:
            case = Timed(kernel=tunable.timed, op=tunable.op, shape=shape, tokens=tokens, batch=batch)
        return case, (tunable.kernel, chip, shape.num_heads, width), default

    def of_prefill(tunable: _Tunable, shape: AttentionShape) -> tuple[Timed, tuple[Any, ...], Any]:
        case = Timed(kernel=tunable.timed, op="prefill", shape=shape, tokens=1024, batch=1, chunk=2048)
        key = (chip, 128)  # lanes of a head
        return case, key, _table_of(tunable)[key]

    for rank, changed in itertools.product(range(1 if tiny else 3), (1,) if tiny else (1, 2)):
        for tunable in _TUNABLES[1:2] if tiny else _TUNABLES:
            if rank >= len(tunable.models) or (tunable.prefill and (rank or changed > 1)):
                continue  # prefill: one tile for all shapes
            shape = shapes.SMALL["three-heads"] if tiny else shapes.PUBLISHED[tunable.models[rank]]
            case, key, default = (of_prefill if tunable.prefill else of_decode)(tunable, shape)
            choices = {"warps": (8,)} if tiny else {**tunable.choices, "warps": _WARPS, "stages": tunable.stages}
            if tunable.prefill:
                listed = [tiles.PrefillTile(queries=q, keys=k, warps=w, stages=s) for q, k, w, s in tunable.tiles]
                tried = [default, *(tile for tile in listed if tile != default)]
            else:
                tried = _variations(default, choices, changed)
            for tile in tried:
                yield _Trial(tunable=tunable, case=case, key=key, tile=tile, default=tile == default)


def tune(stage: Stage) -> None:
    """Prefill with a prompt of 2,048 tokens over 1,024 cached ones, hidden prefixes of four chunks of 512, decode kernels at
    30k tokens, batch 64; bfloat16."""
    table = stage.table()
    ops, pools = kernel_ops(stage.tiny), Pools()
    if not ops.name.startswith("triton"):
        table.add("tiles", status=f"skipped: nothing to tune in {ops.name}")
        return
    chip = tile_class()

    def lowered() -> Iterator[tuple[Any, Any]]:
        for trial in _trials(chip, stage.tiny):
            if stage.wanted(table, trial.name):
                length = "chunk_lens" if trial.case.op == "prefill" else "lens"
                shared, own = abstract_arguments(trial.case)
                with _installed(trial):
                    program = problems.chained(one_call(trial.case, ops), length)
                    yield trial, lower_or_error(program, shared, own)

    def measure(trial: _Trial, program: Any) -> dict[str, Any]:
        program = unless_failed(program)
        shared, own = make_arguments(trial.case, pools)
        seconds, _ = time_call(lambda: program(shared, own), tiny=stage.tiny, seconds=0.08)
        return {
            "kernel": trial.tunable.kernel, "key": json.dumps(trial.key), "tile": json.dumps(dataclasses.asdict(trial.tile)),
            "us": 1e6 * seconds / len(own), "default": trial.default,
        }  # fmt: skip

    programs = stage.compiled(lowered(), lambda t: t.name, workers=num_workers(), together=32)
    for trial, program in programs:
        if stage.wanted(table, trial.name):
            stage.run(table, trial.name, functools.partial(measure, trial, program))
    _write_tiles(stage, [row for row in table.rows() if row["status"] == "ok"])
    print(f"  {stage.num_skipped} not reached", flush=True)


def _write_tiles(stage: Stage, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the best tile of each key, beside the one in use and as a line to paste."""
    found = []
    for key in dict.fromkeys(row["key"] for row in rows):
        of_key = [row for row in rows if row["key"] == key]
        best = min(of_key, key=lambda row: row["us"])
        default = [row["us"] for row in of_key if row["default"]]
        tile = json.loads(best["tile"])
        name = "PrefillTile" if "queries" in tile else "Tile"
        text = ", ".join(json.dumps(part) for part in json.loads(key))
        fields = ", ".join(f"{k}={v}" for k, v in tile.items())
        found.append({
            "kernel": best["kernel"], "key": json.loads(key), "tile": tile, "us": best["us"],
            "default_us": default[0] if default else None, "line": f"({text}): {name}({fields}),",
        })  # fmt: skip
        print(
            f"  {found[-1]['us']:9.1f} us, default {found[-1]['default_us'] or 0:9.1f}: {found[-1]['line']}", flush=True
        )
    write_json(stage.out / "tiles.json", found)
