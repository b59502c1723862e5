"""The load of a benchmark: lengths and arrivals sampled as in the simulator, or prompts from a file."""

import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apt_jax.errors import ConfigError
from apt_jax.sim.config import SimulationConfig
from apt_jax.sim.sessions import Calls, scramble
from apt_jax.sim.trace import Trace, load_trace
from apt_jax.sim.workload import Arrivals as SessionArrivals
from apt_jax.sim.workload import sample_workload
from apt_jax.utils.text_files import read_text
from apt_jax.validation import REQUEST_FIELDS

Prompt = str | list[int] | list[dict[str, Any]]
"""A prompt: text, token ids, or the messages of a chat."""

CLASSES = REQUEST_FIELDS["slo_class"].choices
_MOST_REQUESTS = 10_000_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchRequest:
    """One request to send."""

    index: int
    at_s: float
    """Time to send the request, in seconds after the start; 0 without a schedule."""
    max_tokens: int
    prompt_tokens: int = 0
    """Length of a random prompt; 0 if `prompt` is given."""
    prompt: Prompt | None = None
    """The prompt; None: a random prompt of `prompt_tokens` tokens."""
    slo_class: str | None = None
    """SLO class, rt or be; None: the server's default."""
    seed: int = 0
    """Seed of the run; together with the index it determines the random prompt."""
    session: str | None = None
    """Name of the session that the request belongs to; None: it belongs to none."""
    numbers: NDArray[np.int32] | None = dataclasses.field(default=None, compare=False)
    """(prompt_tokens,) numbers that a prompt is made from, equal where prompts share a prefix; None: random ones."""

    def picks(self, num: int, below: int, every: float = 1.0) -> NDArray[np.integer]:
        """Return the (num,) places in a vocabulary of the prompt's tokens, or of its words.

        Args:
            num: number of tokens or words.
            below: size of the vocabulary.
            every: number of tokens per place.
        """
        if self.numbers is None:
            return np.random.default_rng([self.seed, self.index, 0x1D5]).integers(0, below, num)
        at = np.minimum((np.arange(num) * every).astype(np.intp), self.numbers.size - 1)
        own = scramble(
            self.numbers[at].astype(np.uint64) | np.uint64(self.seed % 2**32 << 32)
        )  # other seeds share nothing
        return (own % np.uint64(below)).astype(np.intp)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """Lengths or prompts to sample requests from; `prompts` has one entry per request of `trace`, or is None."""

    trace: Trace
    prompts: tuple[Prompt, ...] | None = None
    slo_class: str | None = None
    """Class of requests without a class in the trace; None: the server's default."""

    @property
    def alone(self) -> "Source":
        """The same lengths, as requests that do not wait for each other."""
        return dataclasses.replace(self, trace=dataclasses.replace(self.trace, calls=None))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arrivals:
    """Schedule of a run."""

    rate: float | None = None
    """Requests per second; infinite: all at once, or as many as `max_concurrency` of the run allows. None: as
    recorded."""
    burstiness: float | None = None
    """Shape of the Gamma distribution of gaps between arrivals, as in vLLM: their coefficient of variation is 1 /
    sqrt(burstiness). None: the trace's recorded arrivals, stretched to `rate`, or 1 (Poisson) if it has none."""
    num_requests: int | None = None
    duration_s: float | None = None
    """Seconds after which no request is sent; without `num_requests`, all arrivals within this time are sent."""

    def __post_init__(self) -> None:
        if self.burstiness is not None and not 1e-4 <= self.burstiness <= 400:
            raise ConfigError(
                f"burstiness {self.burstiness:g} must lie in [0.0001, 400], a coefficient of variation in [0.05, 100] "
                "(--burstiness, --cv)"
            )

    @property
    def cv(self) -> float | None:
        return None if self.burstiness is None else self.burstiness**-0.5


def trace_source(
    name: str,
    *,
    output_scale: float = 1.0,
    scale_tokens: float = 1.0,
    hash_block_tokens: int | None = None,
    max_len: int | None = None,
) -> Source:
    """Load a trace by name or file (`apt_jax.sim.trace`), without requests of more than `max_len` tokens in total, and
    without the calls of a session that follow such a one.

    Raises:
        ConfigError: the trace is unknown or malformed, or no request is left.
    """
    trace = load_trace(name)
    trace.check_shared(hash_block_tokens)
    trace = trace.scale_outputs(output_scale).scale_tokens(scale_tokens)
    if max_len is not None:
        total = trace.prompt_tokens.astype(np.int64) + trace.output_tokens
        trace = trace.without(total > max_len)
        if not trace.num_requests:
            raise ConfigError(f"{name}: no request has at most {max_len} tokens (--max-len)")
    return Source(trace=trace)


def fixed_source(input_len: int, output_len: int) -> Source:
    """Return a source of requests that all have these prompt and output lengths, in tokens."""
    return Source(trace=_lengths("random", [input_len], [output_len]))


def prompts_source(path: str, *, output_len: int) -> Source:
    """Read prompts from JSON lines: objects with `prompt` (text or token ids) or `messages`, and optionally
    `output_tokens` and `class`.

    Args:
        path: the file.
        output_len: number of output tokens for lines without `output_tokens`.

    Raises:
        ConfigError: the file is missing, or a line is malformed; the message names the line.
    """
    lines = read_text(path, "--prompts").split("\n")  # JSON strings may contain other line separators
    prompts: list[Prompt] = []
    outputs: list[int] = []
    classes: list[str | None] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path} line {number}"
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            raise ConfigError(f"{where}: not JSON (--prompts)") from None
        prompt = entry.get("prompt", entry.get("messages")) if isinstance(entry, dict) else None
        if not prompt or not isinstance(prompt, str | list):
            raise ConfigError(f"{where}: needs prompt (text or token ids) or messages (--prompts)")
        tokens = entry.get("output_tokens", output_len)
        if type(tokens) is not int or not 1 <= tokens <= _MOST_REQUESTS:
            raise ConfigError(f"{where}: output_tokens={tokens!r:.40} must be a whole number of at least 1 (--prompts)")
        of_class = entry.get("class")
        if of_class not in (None, *CLASSES):
            raise ConfigError(f"{where}: class={of_class!r:.40} must be rt or be (--prompts)")
        prompts.append(prompt)
        outputs.append(tokens)
        classes.append(of_class)
    if not prompts:
        raise ConfigError(f"{path}: has no prompts (--prompts)")
    trace = _lengths(path, [1] * len(prompts), outputs)
    if any(of_class is not None for of_class in classes):
        trace = dataclasses.replace(trace, best_effort=np.array([of_class == "be" for of_class in classes]))
    return Source(trace=trace, prompts=tuple(prompts))


def _lengths(name: str, prompt: Sequence[int], output: Sequence[int]) -> Trace:
    return Trace(
        name=name,
        prompt_tokens=np.array(prompt, np.int32),
        output_tokens=np.array(output, np.int32),
    )


def requests(source: Source, arrivals: Arrivals, seed: int) -> list[BenchRequest]:
    """Return the requests of a run with a schedule, in order of arrival; a seed always gives the same requests.

    Raises:
        ConfigError: a source without recorded arrivals has no rate, or no request falls within the duration.
    """
    trace, rate = source.trace, arrivals.rate
    if source.prompts is not None:  # sample positions of prompts instead of lengths
        trace = dataclasses.replace(trace, prompt_tokens=np.arange(trace.num_requests, dtype=np.int32))
    recorded = trace.arrival_s is not None and arrivals.cv is None
    at_once = rate is not None and math.isinf(rate)
    count = arrivals.num_requests
    if count is None:
        if recorded and not at_once:
            count = trace.num_requests
        else:
            # Enough that the last arrival is almost surely beyond the duration; otherwise doubled below.
            count = 32 + int(2 * (rate or 0.0) * (arrivals.duration_s or 0.0)) if not at_once else 1
    while True:
        config = SimulationConfig(
            trace=trace.name,
            rate=1.0 if at_once else rate,
            cv=1.0 if at_once else arrivals.cv,
            num_requests=count,
            seed=seed,
        )
        drawn = sample_workload(trace, config)
        at_s = np.zeros(count) if at_once else drawn.arrival_s
        if arrivals.duration_s is None:
            kept = at_s.size
            break
        kept = int(np.searchsorted(at_s, arrivals.duration_s, side="right"))
        if kept < at_s.size or recorded or at_once or arrivals.num_requests is not None:
            break
        count *= 2
        if count > _MOST_REQUESTS:
            raise ConfigError(f"more than {_MOST_REQUESTS} requests in {arrivals.duration_s:g} s (--duration)")
    if not kept:
        raise ConfigError(f"no request arrives within {arrivals.duration_s:g} s (--duration, --request-rate)")
    return [
        _request(source, drawn.prompt_tokens, drawn.output_tokens, drawn.best_effort, i, float(at_s[i]), seed)
        for i in range(kept)
    ]  # fmt: skip


class SessionLoad:
    """Calls of sessions, each released when the previous answer is complete; the same as a simulation's.

    Args:
        source: a trace of sessions.
        config: which sessions begin when, and the seed.
        name: beginning of the names of all sessions.

    Raises:
        ConfigError: the configuration says neither how many sessions begin per second nor how many there are at once.
    """

    def __init__(self, source: Source, config: SimulationConfig, name: str) -> None:
        drawn = sample_workload(source.trace, config)
        assert drawn.calls is not None
        self.calls: Calls = drawn.calls
        self._arrivals = SessionArrivals(drawn, config)
        self._source, self._drawn, self._seed, self._name = source, drawn, config.seed, name

    def known(self) -> Iterator[BenchRequest]:
        """Yield the calls whose times are known and that have not been yielded before, by time."""
        while math.isfinite(self._arrivals.next_s):
            call, drawn = self._arrivals.take(), self._drawn
            i = int(call.request_id)
            request = _request(
                self._source, drawn.prompt_tokens, drawn.output_tokens, drawn.best_effort, i, call.arrival_s, self._seed
            )
            session = f"{self._name}-{call.session_id}"
            yield dataclasses.replace(request, session=session, numbers=call.prompt_token_ids)

    def ended(self, index: int, at_s: float) -> None:
        """Record that a call has ended, `at_s` seconds after the start."""
        self._arrivals.ended(index, at_s)


def endless(source: Source, seed: int) -> Iterator[BenchRequest]:
    """Yield requests without a schedule, endlessly: the source is repeated, in a new random order each time."""
    done, rng = 0, np.random.default_rng([seed, 0xA97])
    trace = source.trace
    while True:
        for position in rng.permutation(trace.num_requests):
            picked = trace.take(np.array([position]))
            prompt = picked.prompt_tokens if source.prompts is None else np.array([position], np.int32)
            best_effort = np.zeros(1, np.bool_) if picked.best_effort is None else picked.best_effort
            request = _request(source, prompt, picked.output_tokens, best_effort, 0, 0.0, seed)
            yield dataclasses.replace(request, index=done)
            done += 1


def _request(
    source: Source,
    prompt_tokens: NDArray[np.int32],
    output_tokens: NDArray[np.int32],
    best_effort: NDArray[np.bool_],
    i: int,
    at_s: float,
    seed: int,
) -> BenchRequest:
    given = None if source.prompts is None else source.prompts[int(prompt_tokens[i])]
    of_trace = source.trace.best_effort is not None
    return BenchRequest(
        index=i,
        at_s=at_s,
        prompt_tokens=int(prompt_tokens[i]) if given is None else 0,
        prompt=given,
        max_tokens=int(output_tokens[i]),
        slo_class=CLASSES[int(best_effort[i])] if of_trace else source.slo_class,
        seed=seed,
    )
