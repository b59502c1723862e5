"""The training loop: AdamW, warm-up and cosine decay, Orbax checkpoints, a progress bar.

The run is a sequence of numbered steps over three phases of growing length (256, 512, then the
full context), with the same number of tokens per step in each. Progress in [0, 1] decides phase
and learning rate. It is ``step / steps``, or, with a time budget, the share of the budget that is
spent: such a run always reaches the end of its schedule, however busy the machine is.
Everything a step needs follows from the checkpoint and the step number, so a run with a fixed
number of steps gives the same parameters whether it was interrupted or not.
"""

import csv
import dataclasses
import functools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from tqdm import tqdm

from tools.train_tiny_opt import data
from tools.train_tiny_opt.model import OptConfig, compute_logits, init_params, is_decayed, token_losses

Params = Any
_CSV_FIELDS: tuple[str, ...] = (
    "step",
    "tokens_seen",
    "elapsed_s",
    "learning_rate",
    "train_loss",
    "val_loss",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Settings of a training run besides model and data."""

    steps: int = 4000
    """Optimizer steps; ignored when ``max_minutes`` is given."""
    max_minutes: float | None = None
    """Training time after which the schedule ends, checkpoints and pauses not counted."""
    tokens_per_step: int = 4096
    """Tokens in one batch."""
    phases: tuple[tuple[float, int], ...] = ((0.70, 256), (0.90, 512), (1.0, 2048))
    """(progress at which the phase ends, sequence length)."""
    peak_lr: float = 1.5e-3
    """Learning rate after warm-up."""
    warmup: float = 0.03
    """Share of the run spent warming up."""
    weight_decay: float = 0.1
    """Decay of matrices; vectors are not decayed."""
    seed: int = 0
    """Seed of initialisation and sampling."""
    log_every: int = 20
    """Steps between rows of the loss file."""
    eval_every: int = 400
    """Steps between validations on a part of the held-out text."""
    checkpoint_every_s: float = 180.0
    """Seconds between checkpoints."""

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"{self.steps=} must be at least 1 (--steps)")
        for _, length in self.phases:
            if self.tokens_per_step % length:
                raise ValueError(f"{self.tokens_per_step=} must be divisible by {length}")

    def seq_len(self, progress: float) -> int:
        """Sequence length of the phase that ``progress`` lies in."""
        return next((n for end, n in self.phases if progress < end), self.phases[-1][1])

    def learning_rate(self, progress: float) -> float:
        """Linear warm-up, then half a cosine down to 1 % of the peak."""
        if progress < self.warmup:
            return self.peak_lr * (progress + 1e-3) / (self.warmup + 1e-3)
        angle = np.pi * (progress - self.warmup) / (1 - self.warmup)
        return self.peak_lr * (0.01 + 0.99 * 0.5 * (1 + float(np.cos(angle))))


def _optimizer(cfg: TrainConfig) -> optax.GradientTransformation:
    """AdamW without the learning rate, which each step gets as an argument."""

    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(b1=0.9, b2=0.95, eps=1e-8),
        optax.add_decayed_weights(cfg.weight_decay, mask=is_decayed),
    )


@functools.cache
def _make_step(model_cfg: OptConfig, cfg: TrainConfig) -> Callable[..., Any]:
    optimizer = _optimizer(cfg)

    def loss_fn(params: Params, windows: jax.Array, offsets: jax.Array) -> jax.Array:
        logits = compute_logits(params, model_cfg, windows[:, :-1], offsets)
        return token_losses(logits, windows[:, 1:]).mean()

    def step(
        params: Params, opt_state: Any, windows: jax.Array, offsets: jax.Array, lr: jax.Array
    ) -> tuple[Params, Any, jax.Array]:
        loss, grads = jax.value_and_grad(loss_fn)(params, windows, offsets)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = jax.tree.map(lambda p, u: p - lr * u, params, updates)
        return params, opt_state, loss

    return jax.jit(step, donate_argnums=(0, 1))


def evaluate(
    params: Params,
    cfg: OptConfig,
    tokens: np.ndarray,
    *,
    window: int,
    max_tokens: int | None = None,
) -> float:
    """Mean loss in nats per token over windows of ``window`` tokens, each from position 0.

    The first token of a window is only context, so a shorter window sees a harder task.
    """
    num = (len(tokens) if max_tokens is None else min(len(tokens), max_tokens)) // window
    if num == 0:
        raise ValueError(f"{len(tokens)} validation tokens are fewer than one window of {window}")
    rows = np.asarray(tokens[: num * window], dtype=np.int32).reshape(num, window)
    batch = max(1, 4096 // window)
    losses = _jit_losses(cfg)
    total = 0.0
    for i in range(0, num, batch):
        part = rows[i : i + batch]
        padded = np.concatenate([part, np.repeat(part[:1], batch - len(part), axis=0)])
        total += float(losses(params, padded)[: len(part)].sum())
    return total / (num * (window - 1))


_losses_cache: dict[OptConfig, Callable[[Params, np.ndarray], jax.Array]] = {}


def _jit_losses(cfg: OptConfig) -> Callable[[Params, np.ndarray], jax.Array]:
    if cfg not in _losses_cache:

        @jax.jit
        def losses(params: Params, rows: jax.Array) -> jax.Array:
            # The whole row goes in (its length is a multiple of the query block), the last
            # logits are dropped.
            logits = compute_logits(params, cfg, rows, jnp.zeros(len(rows), jnp.int32))
            return token_losses(logits[:, :-1], rows[:, 1:])

        _losses_cache[cfg] = losses
    return _losses_cache[cfg]


class _LossFile:
    """``loss.csv``; rows after the step of the checkpoint are dropped on resuming."""

    def __init__(self, path: Path, resume_step: int) -> None:
        rows = []
        if path.exists() and resume_step:
            with path.open(newline="") as stream:
                rows = [r for r in csv.DictReader(stream) if int(r["step"]) <= resume_step]
        self._stream = path.open("w", newline="")
        self._writer = csv.DictWriter(self._stream, _CSV_FIELDS, lineterminator="\n")
        self._writer.writeheader()
        self._writer.writerows(rows)

    def add(self, **row: float | int | str) -> None:
        self._writer.writerow(row)
        self._stream.flush()

    def close(self) -> None:
        self._stream.close()


def _manager(work_dir: Path) -> ocp.CheckpointManager:
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    return ocp.CheckpointManager((work_dir / "checkpoints").resolve(), options=options)


def _abstract_state(model_cfg: OptConfig, cfg: TrainConfig) -> Any:
    def build() -> Any:
        params = init_params(model_cfg, cfg.seed)
        return {
            "params": params,
            "opt_state": _optimizer(cfg).init(params),
            "elapsed_s": jnp.zeros((), jnp.float32),
            "tokens_seen": jnp.zeros((), jnp.int32),
        }

    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), jax.eval_shape(build))


def restore(work_dir: Path, model_cfg: OptConfig, cfg: TrainConfig) -> tuple[int, Any] | None:
    """Step number and state of the newest checkpoint; None without one."""
    with _manager(work_dir) as manager:
        step = manager.latest_step()
        if step is None:
            return None
        args = ocp.args.StandardRestore(_abstract_state(model_cfg, cfg))
        return step, manager.restore(step, args=args)


def train(
    work_dir: Path,
    model_cfg: OptConfig,
    cfg: TrainConfig,
    *,
    stop_after: int | None = None,
    progress_bar: bool = True,
) -> Params:
    """Trains from the newest checkpoint of ``work_dir``, or from scratch; returns parameters.

    Reads ``train.bin`` and ``val.bin``; writes ``checkpoints/``, ``loss.csv`` and, at the end of
    the schedule, ``result.json``.

    Args:
        stop_after: leave after this step as if interrupted (a checkpoint is written).
        progress_bar: show one on standard error.
    """
    train_tokens, val_tokens = data.load(work_dir, "train"), data.load(work_dir, "val")
    longest = max(length for _, length in cfg.phases)
    if len(train_tokens) <= longest:
        raise ValueError(f"{len(train_tokens)=} must exceed the longest sequence, {longest}")
    restored = restore(work_dir, model_cfg, cfg)
    if restored is None:
        step, tokens_seen, elapsed_s = 0, 0, 0.0
        params = init_params(model_cfg, cfg.seed)
        # Placed as what `restore` returns, so that both compile the same programs.
        params, opt_state = jax.device_put((params, _optimizer(cfg).init(params)), jax.devices()[0])
    else:
        step, state = restored
        params, opt_state = state["params"], state["opt_state"]
        elapsed_s, tokens_seen = float(state["elapsed_s"]), int(state["tokens_seen"])
    losses = _LossFile(work_dir / "loss.csv", step)
    step_fn = _make_step(model_cfg, cfg)
    budget_s = 60.0 * cfg.max_minutes if cfg.max_minutes is not None else None
    recent: list[jax.Array] = []
    compiled: set[int] = set()
    saved_at = time.monotonic()

    def progress() -> float:
        return step / cfg.steps if budget_s is None else elapsed_s / budget_s

    def save(manager: ocp.CheckpointManager) -> None:
        state = {
            "params": params,
            "opt_state": opt_state,
            "elapsed_s": jnp.float32(elapsed_s),
            "tokens_seen": jnp.int32(tokens_seen),
        }
        manager.save(step, args=ocp.args.StandardSave(state))
        # The step function donates these arrays, so they must be written before it runs again.
        manager.wait_until_finished()

    timed = budget_s is not None
    bar = tqdm(
        total=cfg.max_minutes if timed else cfg.steps,
        initial=elapsed_s / 60 if timed else step,
        bar_format="{l_bar}{bar}| {n:.1f}/{total:g} {unit} {postfix}" if timed else None,
        unit="min" if timed else "step",
        disable=not progress_bar,
        mininterval=5.0,
    )
    with _manager(work_dir) as manager, bar:
        while progress() < 1.0 and (stop_after is None or step < stop_after):
            share = progress()
            seq_len, lr = cfg.seq_len(share), cfg.learning_rate(share)
            windows, offsets = data.sample(
                train_tokens,
                seed=cfg.seed,
                step=step,
                batch=cfg.tokens_per_step // seq_len,
                seq_len=seq_len,
                max_len=model_cfg.max_len,
            )
            begin = time.monotonic()
            params, opt_state, loss = step_fn(params, opt_state, windows, offsets, jnp.float32(lr))
            loss.block_until_ready()
            if seq_len in compiled:
                elapsed_s += time.monotonic() - begin
            compiled.add(seq_len)  # the first call compiles; that is not training time
            recent.append(loss)
            step += 1
            tokens_seen += cfg.tokens_per_step
            if step % cfg.log_every == 0 or progress() >= 1.0:
                val_loss: float | str = ""
                if step % cfg.eval_every == 0:
                    val_loss = evaluate(params, model_cfg, val_tokens, window=min(256, longest), max_tokens=32768)
                train_loss = float(np.mean(recent))
                recent.clear()
                losses.add(
                    step=step,
                    tokens_seen=tokens_seen,
                    elapsed_s=round(elapsed_s, 1),
                    learning_rate=round(lr, 8),
                    train_loss=round(train_loss, 5),
                    val_loss=val_loss if val_loss == "" else round(float(val_loss), 5),
                )
                rate = tokens_seen / elapsed_s if elapsed_s else 0.0
                bar.set_postfix_str(f"step {step} loss {train_loss:.3f} {rate:.0f} tok/s")
            bar.update(elapsed_s / 60 - bar.n if timed else 1)
            if time.monotonic() - saved_at > cfg.checkpoint_every_s:
                save(manager)
                saved_at = time.monotonic()
        if manager.latest_step() != step:
            save(manager)
    losses.close()
    if progress() >= 1.0:
        result = {
            "steps": step,
            "tokens_seen": tokens_seen,
            "train_s": round(elapsed_s, 1),
            "tokens_per_s": round(tokens_seen / max(elapsed_s, 1e-9), 1),
            "unigram_perplexity": data.unigram_perplexity(train_tokens, val_tokens, model_cfg.vocab_size),
            "val_perplexity": {
                str(w): float(np.exp(evaluate(params, model_cfg, val_tokens, window=w)))
                for w in sorted({n for _, n in cfg.phases})
            },
            "device": f"{jax.device_count()} {jax.default_backend()} device(s), {os.cpu_count()} CPU cores",
            "model": dataclasses.asdict(model_cfg),
            "train": dataclasses.asdict(cfg),
        }
        (work_dir / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    return params
