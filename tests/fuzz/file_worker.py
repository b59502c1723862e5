"""Loads changed files, in a process of its own: a crash ends it, and the test that reads its output knows where.

    python -m tests.fuzz.file_worker SEED KIND:FIRST:COUNT ...      cases FIRST, FIRST + 1, ... of each kind
    python -m tests.fuzz.file_worker FILE ...                       inputs in files of tests/fuzz_inputs

It writes a line before each case, and one after it: `loaded`, `refused` or `FAILED` with the reason.
"""

import contextlib
import dataclasses
import functools
import json
import logging
import os
import random
import resource
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import jax
import numpy as np
from markupsafe import _speedups
from tokenizers import pre_tokenizers

from apt_jax.config import EngineConfig
from apt_jax.cpu import build
from apt_jax.errors import AptJaxError, ModelLoadError
from apt_jax.executor.calibrate import load_calibration, store_calibration
from apt_jax.models import load_model
from apt_jax.models.loading.gguf.model import open_gguf
from apt_jax.ops.blocks import BLOCK_KINDS
from apt_jax.ops.weights import GroupedMatrix
from apt_jax.text.chat import load_chat_template
from apt_jax.text.detokenizer import IncrementalDetokenizer
from apt_jax.text.tokenizer import Tokenizer, load_tokenizer
from apt_jax.utils.cache_dir import write_verified
from apt_jax.utils.compile_cache import CompiledPrograms
from tests.support.fuzzing import read_input
from tests.support.gguf_models import hf_tensors, write_gguf
from tests.support.mutations import mutate
from tests.support.opt_checkpoint import TINY, random_tensors, write_model

MEMORY_BYTES = 48 << 20
"""Beside twice the size of the files."""
_ADDRESS_SPACE = 3 << 30
_PROGRAM = bytes(range(256)) * 8
_LIBRARY = _speedups.__file__
_TEXT = "The 3 naïve façades, 東京 👩\u200d👧 \n\n </s> <s>x"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """Files of one kind.

    Attributes:
        make: writes good files into an empty directory.
        load: reads them; raises `AptJaxError` where they are damaged.
        changed: names of files that are changed.
    """

    make: Callable[[Path, random.Random], object]
    load: Callable[[Path], object]
    changed: Callable[[str], bool] = lambda _: True


def _use(tokenizer: Tokenizer) -> None:
    """Use what was loaded, which must work."""
    for text in (_TEXT, "", "a" * 300):
        ids = tokenizer.encode(text)
        detokenizer = IncrementalDetokenizer(tokenizer, ids)
        assert len("".join(map(detokenizer.push, ids)) + detokenizer.flush()) >= len(tokenizer.decode(ids))
    tokenizer.min_tokens(_TEXT)
    for end in (0, len(_TEXT)):
        tokenizer.encode_template(_TEXT, [(0, end)])


def _load_model(path: Path) -> None:
    model = load_model(EngineConfig(model=str(path)))
    for leaf in jax.tree.leaves(model.params):
        assert np.isfinite(np.asarray(leaf, np.float32)).all()


def _make_tokenizer(path: Path, rng: random.Random) -> None:
    from tests.fuzz import test_text

    name = rng.choice(["byte-level", "byte-fallback", "unigram", "word-piece"])
    (path / "tokenizer.json").write_text(test_text.tokenizer_named(name).backend.to_str())
    config = {
        "bos_token": "<s>",
        "eos_token": {"content": "</s>", "special": True},
        "add_bos_token": True,
        "chat_template": "{{ messages[0].content }}",
        "model_max_length": 64,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "special_tokens_map.json").write_text(json.dumps({"unk_token": "<unk>"}))


def _load_tokenizer(path: Path) -> None:
    _use(load_tokenizer(path))
    template = load_chat_template(path)
    if template is not None:
        template.close()


def _make_gpt2(path: Path, _rng: random.Random) -> None:
    from tests.fuzz import test_text

    fields = json.loads(test_text.tokenizer_named("byte-level").backend.to_str())["model"]
    (path / "vocab.json").write_text(json.dumps(fields["vocab"]))
    (path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in fields["merges"]))
    (path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "add_bos_token": True}))


def _make_gguf(path: Path, rng: random.Random) -> None:
    """Half of the matrices have wide rows, in blocks of any kind."""

    def kind_of(_: str, values: np.ndarray) -> gguf.GGMLQuantizationType | None:
        return gguf.GGMLQuantizationType[rng.choice([*BLOCK_KINDS])] if values.shape == (8, 256) else None

    tensors = {
        name: np.resize(values, (8, 256)) if values.ndim == 2 and rng.random() < 0.5 else values
        for name, values in hf_tensors("llama").items()
    }
    write_gguf(path / "m.gguf", "llama", tensors, quant=kind_of)


def _load_gguf(path: Path) -> None:
    checkpoint, _ = open_gguf(path / "m.gguf")
    with contextlib.closing(checkpoint):
        for name, info in checkpoint.tensors.items():
            checkpoint.read(name)
            if checkpoint.is_grouped(name):
                w = GroupedMatrix(blocks=checkpoint.blocks(name), kind=info.dtype, shape=info.shape)
                assert np.isfinite(w.dequantized(np.float32)).all()


def _make_gguf_tokenizer(path: Path, rng: random.Random) -> None:
    def add(writer: Any) -> None:
        if rng.random() < 0.5:
            tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "a", "b", "▁a", "ab"]
            writer.add_tokenizer_model("llama")
            writer.add_token_scores([-float(i) for i in range(len(tokens))])
            writer.add_token_types([2, 3, 3, *([6] * 256), *([1] * 5)])
        else:
            tokens = ["<unk>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "Ġa"]
            writer.add_tokenizer_model("gpt2")
            writer.add_tokenizer_pre(rng.choice(["gpt-2", "smollm", "llama-bpe", "qwen2", "tekken"]))
            writer.add_token_types([2, 3, 3, *([1] * 258)])
            writer.add_token_merges(["a b", "Ġ a"])
        writer.add_token_list(tokens)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_add_bos_token(True)
        writer.add_chat_template("{{ messages[0].content }}")

    write_gguf(path / "m.gguf", "llama", {}, extra=add)


def _load_gguf_tokenizer(path: Path) -> None:
    _use(load_tokenizer(path / "m.gguf"))
    template = load_chat_template(path / "m.gguf")
    assert template is None or not template.close()


def _make_cache(path: Path, _rng: random.Random) -> None:
    from apt_jax.costs.fit import CostModel, FitQuality
    from apt_jax.costs.model import StepCosts
    from apt_jax.costs.programs import ProgramCosts, ProgramShapes

    shapes = ProgramShapes(
        decode_buckets=(1, 4), prefill_buckets=(16, 64), max_num_seqs=4, mixed=True, rows_per_tile=1, tokens_per_tile=16, query_tile=16, key_tile=16,
    )  # fmt: skip
    quality = FitQuality(**{field.name: 1 for field in dataclasses.fields(FitQuality)})
    model = CostModel(
        costs=StepCosts(prefill_base_s=1e-3, decode_base_s=1e-3),
        programs=ProgramCosts(shapes=shapes, coefficients=(1e-3,) * len(shapes.feature_names())),
        **{f.name: quality for f in dataclasses.fields(CostModel) if f.name.endswith("_quality")},
    )
    store_calibration(model, path / "calibration")
    assert load_calibration(path / "calibration") == model
    CompiledPrograms(path).put("key", _PROGRAM)
    # Any shared library will do.
    write_verified(path / "kernels.so", Path(_LIBRARY).read_bytes())


def _load_cache(path: Path) -> None:
    """Damaged entries are made again: each is as it was written, or absent."""
    whole = _good_cache()
    library = build._kept(path / "kernels.so") if (path / "kernels.so").is_file() else None
    found = {
        "calibration": load_calibration(path / "calibration"),
        "key.program": CompiledPrograms(path).get("key"),
        "kernels.so": library and "library",
    }
    assert all(value is None or value == whole[name] for name, value in found.items())
    if None in found.values():
        raise ModelLoadError("made again")


@functools.cache
def _good_cache() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as made:
        path = Path(made)
        _make_cache(path, random.Random(0))
        return {
            "calibration": load_calibration(path / "calibration"),
            "key.program": _PROGRAM,
            "kernels.so": "library",
        }


def _make_template(path: Path, rng: random.Random) -> None:
    from tests.support import chat_templates

    _make_gpt2(path, rng)
    texts = [value for name, value in vars(chat_templates).items() if name.isupper() and isinstance(value, str)]
    (path / "chat_template.jinja").write_text(rng.choice(texts))


def _load_template(path: Path) -> None:
    template = load_chat_template(path)
    if template is None:  # its file was left out
        return
    with contextlib.closing(template):
        template.validate()


def _is_one_of(*names: str) -> Callable[[str], bool]:
    return lambda name: name in names


KINDS = {
    "model": Kind(
        make=lambda path, _: (
            write_model(path, TINY, random_tensors(TINY)),
            (path / "generation_config.json").write_text('{"eos_token_id": [2], "temperature": 0.5}'),
        ),
        load=_load_model,
    ),
    "shards": Kind(make=lambda path, _: write_model(path, TINY, random_tensors(TINY), shards=3), load=_load_model),
    "tokenizer": Kind(make=_make_tokenizer, load=_load_tokenizer),
    "gpt2-tokenizer": Kind(make=_make_gpt2, load=_load_tokenizer),
    "gguf": Kind(make=_make_gguf, load=_load_gguf),
    "gguf-tokenizer": Kind(make=_make_gguf_tokenizer, load=_load_gguf_tokenizer),
    "cache": Kind(make=_make_cache, load=_load_cache),
    "template": Kind(make=_make_template, load=_load_template, changed=_is_one_of("chat_template.jinja")),
}


def make_case(kind: str, seed: int, number: int) -> dict[str, bytes]:
    """Contents of the files of a case, by their names."""
    rng = random.Random(f"{kind} {seed} {number}")
    with tempfile.TemporaryDirectory() as made:
        KINDS[kind].make(Path(made), rng)
        files = {path.name: path.read_bytes() for path in sorted(Path(made).iterdir())}
    names = [name for name in files if KINDS[kind].changed(name)]
    for name in rng.sample(names, 1 if rng.random() < 0.8 else min(2, len(names))):
        files[name] = mutate(rng, name, files[name])
        if rng.random() < 0.01:
            del files[name]
    return files


class _Opened:
    """Paths that Python opens while `at` is set."""

    def __init__(self) -> None:
        self.at: Path | None = None
        self.outside: list[str] = []
        sys.addaudithook(self._hear)

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if event != "open" or self.at is None or not isinstance(args[0], str | bytes):
            return
        # A bare name is relative to a descriptor of the directory, which is not told.
        name = os.fsdecode(args[0])
        path = os.path.realpath(name if "/" in name else self.at / name)
        # Compiled programs, modules that are imported late, and what the machine says about itself.
        programs = jax.config.jax_compilation_cache_dir or "/dev/null"
        allowed = (
            str(self.at.resolve()),
            programs,
            sys.prefix,
            sys.base_prefix,
            "/proc/",
            "/sys/",
            "/dev/null",
            "/usr/lib",
        )
        if not path.startswith(allowed) and not path.endswith((".py", ".pyc")):
            self.outside.append(path)


def _peak_bytes(*, reset: bool = False) -> int | None:
    """The most memory that this process has had since it was reset; None: the system does not say."""
    try:
        if reset:
            Path("/proc/self/clear_refs").write_text("5")
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        return None


def check(kind: str, files: dict[str, bytes], opened: _Opened) -> str:
    """Load the files; the outcome as a word.

    Raises:
        AssertionError: something other than the two ends that are allowed.
    """
    with tempfile.TemporaryDirectory(prefix="fuzz-") as directory:
        path = Path(directory)
        for name, data in files.items():
            (path / name).write_bytes(data)
        before = _peak_bytes(reset=True)
        opened.at, outcome = path, "loaded"
        try:
            KINDS[kind].load(path)
        except AptJaxError as error:
            outcome, message = "refused", str(error)
            assert message.isprintable(), ascii(message)
            assert len(message) < 1000, message
        finally:
            opened.at = None
        after = _peak_bytes()
        outside, opened.outside = opened.outside, []
        assert not outside, f"opened {outside}"
        if before is not None and after is not None:
            grown, size = after - before, sum(map(len, files.values()))
            assert grown <= 2 * size + MEMORY_BYTES, f"{grown >> 20} MiB for {size} bytes"
    return outcome


def _cases(args: list[str]) -> Iterator[tuple[str, str, dict[str, bytes]]]:
    """Name, kind and files of each case."""
    if not args[0].isdecimal():
        for name in args:
            given = read_input(Path(name))
            yield name, given["kind"], given["files"]
        return
    for part in args[1:]:
        kind, first, count = part.split(":")
        for number in range(int(first), int(first) + int(count)):
            yield f"{kind}:{number}", kind, make_case(kind, int(args[0]), number)


def main(args: list[str]) -> None:
    logging.disable()
    warnings.simplefilter("ignore")
    opened = _Opened()
    size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (size + _ADDRESS_SPACE, resource.RLIM_INFINITY))
    ready: set[str] = set()
    for name, kind, files in _cases(args):
        if kind not in ready:  # imports, threads and pools of memory
            ready.add(kind)
            with tempfile.TemporaryDirectory() as good:
                KINDS[kind].make(Path(good), random.Random(0))
                KINDS[kind].load(Path(good))
        print("case", name, flush=True)
        try:
            outcome = check(kind, files, opened)
        except BaseException as error:  # a panic of a Rust library is no Exception
            where = traceback.extract_tb(error.__traceback__)[-1]
            outcome = f"FAILED {type(error).__name__}: {str(error)[:400]!r} at {where.filename}:{where.lineno}"
        print(outcome, flush=True)
    print("done", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
