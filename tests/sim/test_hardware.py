"""Hardware descriptions: the numbers in them, how they are found, what a broken file says."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from apt_jax.core.kinds import HIDDEN, KV, WindowSpec
from apt_jax.costs.hardware import Hardware
from apt_jax.costs.model import StepCosts
from apt_jax.errors import ConfigError
from apt_jax.sim.hardware import known_hardware, load_hardware, save_hardware
from tools.measured_hardware import DATA, describe

KNOWN = known_hardware()


def prefill_s(costs: StepCosts, chunk: int, prefix: int = 0, kind: int = KV) -> float:
    return costs.step_s(np.array([chunk], np.int32), np.array([prefix], np.int32), np.array([kind], np.int8))


def decode_s(costs: StepCosts, batch: int, cached: int, kind: int = KV) -> float:
    one = np.ones(batch, np.int32)
    return costs.step_s(one, cached * one, np.full(batch, kind, np.int8))


@pytest.fixture
def opt() -> Hardware:
    return load_hardware("opt-13b", "a100-40gb")


def test_opt_on_a100_has_the_coefficients_of_its_table() -> None:
    # Rows of opt_a100_iteration_model.csv, milliseconds; kv_blocks16_est holds both K and V.
    rows = {
        ("opt-13b", 1): (890, 18.1, 0.10191, 7.12e-6, 24.48, 0.000822, 0.0385, 14.66 + 1.26),
        ("opt-30b", 2): (672, 23.91, 0.14184, 9.69e-6, 29.98, 0.000736, 0.0863, 18.2 + 1.59),
        ("opt-66b", 4): (478, 29.44, 0.15135, 8.32e-6, 36.57, 0.000593, 0.0633, 20.5 + 2.27),
    }
    for (model, num_devices), row in rows.items():
        hardware = load_hardware(model, "a100-40gb", num_devices)
        blocks, base, token, pair, decode_base, kv_token, request, hidden_us = row
        assert hardware.num_blocks == 2 * blocks
        assert (hardware.block_size, hardware.max_model_len) == (16, 2048)
        costs = hardware.step_costs("reproject")
        found = [
            costs.prefill_base_s,
            costs.prefill_per_token_s,
            costs.prefill_per_pair_s,
            costs.decode_base_s,
            costs.decode_per_token_s,
            costs.decode_per_request_s,
            costs.decode_per_hidden_token_s,
            costs.decode_per_hidden_request_s,
            costs.prefill_per_hidden_prefix_s,
        ]
        hidden = kv_token + hidden_us * 1e-3
        wanted = [base, token, pair, decode_base, kv_token, request, hidden, request, hidden]
        np.testing.assert_allclose(found, np.array(wanted) * 1e-3, rtol=1e-5)


def test_opt_13b_meets_the_published_prefill_time(opt: Hardware) -> None:
    assert prefill_s(opt.step_costs(), 1024) == pytest.approx(0.1299, rel=1e-3)
    # Apt-Serve's text: about 120 ms for 50 decoding requests; without the lengths only the order can be held.
    assert 0.03 < decode_s(opt.step_costs(), 50, 500) < 0.12


@pytest.mark.parametrize(("context", "ratio"), [(256, 1.31), (469, 1.17), (1024, 1.08), (2048, 1.04)])
@pytest.mark.parametrize("card", ["a100-40gb", "h200"])
def test_absorption_costs_little_more_than_keys_and_values(card: str, context: int, ratio: float) -> None:
    # Two kernels over X against KV attention, OPT-13B on one GPU.
    costs = load_hardware("opt-13b", card, 1).step_costs("absorb")
    extra_request_s = costs.decode_per_hidden_request_s - costs.decode_per_request_s
    hidden_s = extra_request_s + context * costs.decode_per_hidden_token_s
    assert hidden_s / (context * costs.decode_per_token_s) == pytest.approx(ratio, rel=0.02)


@pytest.mark.parametrize(("model", "name", "num_devices"), KNOWN)
def test_every_description_loads_and_predicts_more_time_for_more_work(model: str, name: str, num_devices: int) -> None:
    hardware = load_hardware(model, name, num_devices)
    assert (hardware.model, hardware.name, hardware.num_devices) == (model, name, num_devices)
    assert hardware.source
    assert "num_blocks" in hardware.basis
    for mode in ("auto", "reproject") if hardware.programs is None else ("auto",):  # one way to attend is calibrated
        costs = hardware.step_costs(mode)
        hidden = hardware.hidden_blocks_per_group is not None
        for kind in (KV, HIDDEN) if hidden else (KV,):
            chunks = [prefill_s(costs, n, 256, kind) for n in (16, 128, 512, 1024, 1500)]
            assert chunks == sorted(set(chunks))
            prefixes = [prefill_s(costs, 128, n, kind) for n in (0, 16, 512, 1500)]
            assert prefixes == sorted(set(prefixes))
            batches = [decode_s(costs, n, 300, kind) for n in (1, 4, 64, 200)]
            assert batches == sorted(set(batches))
            lengths = [decode_s(costs, 8, n, kind) for n in (16, 300, 1500)]
            assert lengths == sorted(set(lengths))
        assert decode_s(costs, 1, 16) < prefill_s(costs, 1024)
        assert 1e-3 < decode_s(costs, 1, 16) < 0.05


def test_more_devices_are_faster_and_hold_more() -> None:
    for model, name, counts in (
        ("llama-3-8b", "a100-40gb", (1, 2, 4)),
        ("yi-6b", "a100-40gb", (1, 2, 4)),
        ("opt-13b", "a100-40gb", (1, 2)),
        ("opt-30b", "a100-40gb", (2, 4)),
    ):
        found = [load_hardware(model, name, count) for count in counts]
        pools = [hardware.num_kv_tokens for hardware in found]
        assert pools == sorted(pools)
        for time_s in (
            [prefill_s(hardware.step_costs(), 1024) for hardware in found],
            [decode_s(hardware.step_costs(), 32, 512) for hardware in found],
        ):
            assert time_s == sorted(time_s, reverse=True)


def test_fits_are_stated_and_good() -> None:
    fitted = [load_hardware(*key) for key in KNOWN if not key[0].startswith("opt") or key[1][0] == "h"]
    fitted = [hardware for hardware in fitted if hardware.programs is None]
    assert len(fitted) >= 15
    for hardware in fitted:
        assert set(hardware.fit) == {"prefill", "decode"}
        for quality in hardware.fit.values():
            assert quality["r2"] > 0.95 or quality["worst_relative_error"] < 0.06
            assert quality["mean_relative_error"] < 0.125
            assert quality["worst_relative_error"] < 0.3


def test_a_step_reads_the_experts_that_its_rows_go_to() -> None:
    """As many as are drawn: k of E experts for each row, without replacement."""
    rng = np.random.default_rng(0)
    costs = StepCosts(decode_base_s=1.0, experts_s=2.0, experts_per_token=4 / 32)
    for rows in (1, 2, 8, 32, 128):
        drawn = [len({e for _ in range(rows) for e in rng.choice(32, 4, replace=False)}) for _ in range(400)]
        assert decode_s(costs, rows, 10) == pytest.approx(1.0 + 2.0 * np.mean(drawn) / 32, rel=0.02)
    assert prefill_s(costs, 100) == 0.0  # all experts are in the base of prompts
    one, many = (decode_s(load_hardware("qwen3-30b-a3b", "h100-80gb").step_costs(), n, 16) for n in (1, 128))
    assert many > 4 * one  # of 128 experts a token goes to 8


def test_a_step_reads_windows_and_no_more() -> None:
    costs = StepCosts(decode_per_token_s=1.0, decode_per_window_token_s=10.0, window_tokens=100.0)
    for context in (50, 100, 300):
        read_s = 3 * (context + 10 * min(context, 100))
        assert decode_s(costs, 3, context - 1) == pytest.approx(read_s)
        assert costs.decode_row_s(context - 1, KV) == pytest.approx(read_s / 3)


def test_pools_of_windowed_models_count_windows_once() -> None:
    """Gemma 4 31B: 12.4 GiB hold what 15,800 positions of keys and values in all layers would take."""
    hardware = load_hardware("gemma-4-31b", "h100-80gb")
    assert hardware.kv_blocks_per_group == 1
    assert hardware.windows is not None
    assert hardware.windows.window == 1024
    assert hardware.num_kv_tokens > 200_000


def test_the_card_that_was_measured_is_described_as_its_files_say() -> None:
    hardware = load_hardware("opt-13b", "h100-80gb-hbm3")
    assert describe(DATA).programs == hardware.programs
    assert {"decode", "prefill", "mixed", "hidden prompts"} <= set(hardware.basis)
    assert hardware.fit["decode"]["r2"] > 0.99
    assert hardware.fit["linear decode"]["mean_relative_error"] < 0.1
    assert hardware.programs is not None

    def step_s(lens: list[int], starts: list[int], kind: int) -> float:
        assert hardware.programs is not None
        rows = np.array(lens, np.int32), np.array(starts, np.int32), np.full(len(lens), kind, np.int8)
        return hardware.programs.step_s(*rows)

    # Measured: 50 ms with 1,024 tokens, 28 ms (of 16 layers carried on) with 512, 33.9 ms with 84 decode rows.
    assert step_s([1024], [0], KV) == pytest.approx(50.5e-3, rel=0.01)
    assert step_s([512], [0], KV) == pytest.approx(28.3e-3, rel=0.01)
    assert step_s([1] * 84, [263] * 84, HIDDEN) == pytest.approx(33.9e-3, rel=0.02)
    # Reckoned: hidden rows cost what their prefixes do.
    assert step_s([512], [0], HIDDEN) == step_s([512], [0], KV)
    assert 8e-3 < step_s([512], [1024], HIDDEN) - step_s([512], [1024], KV) < 40e-3


def test_published_capacities_are_kept() -> None:
    assert load_hardware("llama-2-7b", "a100-80gb").num_kv_tokens == 100_000
    assert load_hardware("llama-3-70b", "a100-80gb", 4).num_kv_tokens == 100_000
    assert load_hardware("llama-3-70b", "a100-80gb", 4).max_model_len == 16384
    assert load_hardware("llama-3-8b", "a100-40gb").max_model_len == 262_144


def test_kinds_carry_the_extra_time_of_the_attention_in_use(opt: Hardware) -> None:
    kv, hidden = opt.kinds("hybrid", "reproject")
    assert (kv.blocks_per_group, hidden.blocks_per_group) == (2, 1)
    assert kv.offered
    assert hidden.offered
    assert hidden.extra_base_s == 0.0
    assert hidden.extra_per_token_s == pytest.approx(15.92e-6, rel=1e-4)
    absorbed = opt.kinds("hybrid")[HIDDEN]
    assert absorbed.extra_per_token_s < 1e-8 < 1e-5 < absorbed.extra_base_s
    kv, hidden = opt.kinds("hidden")
    assert (kv.offered, hidden.offered) == (False, True)
    assert (hidden.extra_base_s, hidden.extra_per_token_s) == (0.0, 0.0)
    kv, hidden = opt.kinds("kv")
    assert (kv.offered, hidden.offered) == (True, False)


def test_a_model_with_few_kv_heads_has_keys_and_values_only() -> None:
    llama = load_hardware("llama-3-8b", "h200")
    assert [kind.offered for kind in llama.kinds("hybrid")] == [True, False]
    assert llama.step_costs("reproject") == llama.step_costs()
    with pytest.raises(ConfigError, match=r"cache='hidden' .* few KV heads .*; use --cache kv"):
        llama.kinds("hidden")
    with pytest.raises(ConfigError, match="few KV heads"):
        llama.step_costs("absorb")


def test_rotary_embedding_rules_absorption_out() -> None:
    llama = load_hardware("llama-2-7b", "h100-80gb")
    assert llama.kinds("hybrid")[HIDDEN].offered
    assert llama.step_costs() == llama.step_costs("reproject")
    with pytest.raises(ConfigError, match=r"'absorb' is not described .* not exact with rotary"):
        llama.step_costs("absorb")


def test_unknown_options_are_refused(opt: Hardware) -> None:
    with pytest.raises(ConfigError, match="--hidden-attention"):
        opt.step_costs("fast")  # pyright: ignore[reportArgumentType]  what a flag may hold
    with pytest.raises(ConfigError, match="--cache"):
        opt.kinds("both")  # pyright: ignore[reportArgumentType]


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(ConfigError) as unknown_model:
        load_hardware("gpt-7", "a100-40gb")
    assert "'gpt-7'; known: gemma-4-12b, gemma-4-31b, gpt-oss-20b, llama-2-7b, llama-3-70b" in str(unknown_model.value)
    with pytest.raises(ConfigError) as unknown_card:
        load_hardware("opt-13b", "b200")
    assert "known: a100-40gb x1, a100-40gb x2, h100-80gb x1, h100-80gb-hbm3 x1, h200 x1" in str(unknown_card.value)
    with pytest.raises(ConfigError, match="opt-66b on 'a100-40gb x2'; known: a100-40gb x4"):
        load_hardware("opt-66b", "a100-40gb", 2)
    for error in (unknown_model, unknown_card):
        assert "\n" not in str(error.value)


def test_the_fewest_devices_are_the_default() -> None:
    assert load_hardware("opt-13b", "a100-40gb").num_devices == 1
    assert load_hardware("opt-30b", "a100-40gb").num_devices == 2


def test_a_description_survives_a_file(opt: Hardware, tmp_path: Path) -> None:
    path = tmp_path / "here.json"
    save_hardware(opt, path)
    assert load_hardware("opt-13b", str(path)) == opt
    assert "hidden_block_size" not in path.read_text()
    narrow = dataclasses.replace(opt, hidden_block_size=21)
    save_hardware(narrow, path)
    assert load_hardware("opt-13b", str(path)) == narrow
    kv_costs = {"kv": opt.step_costs()}
    windows = WindowSpec(window=1024, block_size=8, blocks_per_group=12)
    windowed = dataclasses.replace(
        opt, hidden_blocks_per_group=None, costs=kv_costs, kv_blocks_per_group=1, windows=windows
    )
    save_hardware(windowed, path)
    assert load_hardware("opt-13b", str(path)) == windowed
    save_hardware(opt, path)
    assert [file.name for file in tmp_path.iterdir()] == ["here.json"]
    with pytest.raises(ConfigError, match=r"here.json describes 'opt-13b', not 'opt-30b'"):
        load_hardware("opt-30b", str(path))
    with pytest.raises(ConfigError, match=r"1 devices, not 2 \(--tensor-parallel-size\)"):
        load_hardware("opt-13b", str(path), 2)
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(OSError, match="folder"):
        save_hardware(opt, tmp_path / "folder.json")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["folder.json", "here.json"]


@pytest.mark.parametrize(
    ("at", "value", "says"),
    [
        (("format",), 2, "format: 2 must be 1"),
        (("num_blocks",), 1, "num_blocks: 1 must be at least 2"),
        (("num_blocks",), "many", "num_blocks: 'many' must be an integer"),
        pytest.param(("num_blocks",), 10**400, "num_blocks: the number is too large", id="huge_blocks"),
        pytest.param(
            ("costs", "absorb", "prefill_base_s"),
            10**400,
            "costs.absorb.prefill_base_s: the number is too large",
            id="huge_cost",
        ),
        (("block_size",), True, "block_size: True must be an integer"),
        (("max_model_len",), 0, "max_model_len: 0 must be at least 1"),
        (("hidden_blocks_per_group",), 3, "hidden_blocks_per_group: 3 must be 1 or null"),
        (("hidden_blocks_per_group",), None, "costs: 'reproject' must be kv"),
        (("hidden_block_size",), 8, "hidden_block_size: 8 must be more than half of block_size 16"),
        (("hidden_block_size",), "21", "hidden_block_size: '21' must be an integer"),
        (("kv_blocks_per_group",), 3, "kv_blocks_per_group: 3 must be 1 or 2"),
        (("windows",), 7, "windows: 7 must be an object"),
        (("windows",), {"window": 7}, "windows.block_size: missing"),
        (("windows",), {"width": 7}, "windows.width: unknown field"),
        (
            ("windows",),
            {"window": "7", "block_size": 1, "blocks_per_group": 2},
            "windows.window: '7' must be an integer",
        ),
        (("windows",), {"window": 7, "block_size": 0, "blocks_per_group": 2}, "windows: .* must be positive numbers"),
        (("windows",), {"window": 7, "block_size": 1, "blocks_per_group": 2}, "windows: layer inputs and windows"),
        (("name",), 7, "name: 7 must be a string"),
        (("name",), "", "name: must not be empty"),
        (("colour",), "red", "colour: unknown field"),
        (("costs",), [], r"costs: \[\] must be an object"),
        (("costs",), {}, "costs: reproject or absorb is missing"),
        (("costs", "sideways"), {}, "costs.sideways.prefill_base_s: missing"),
        (("costs", "absorb", "decode_base_s"), -1.0, "costs.absorb.decode_base_s: -1.0 must be"),
        (("costs", "absorb", "decode_base_s"), "x", "costs.absorb.decode_base_s: 'x' must be a n"),
        (("costs", "absorb", "decode_base_s"), 1.0, "absorb.decode_base_s: 1.0 must equal that of"),
        (("costs", "absorb", "decode_base_s"), float("nan"), "costs.absorb.decode_base_s: nan"),
        (("costs", "absorb", "speed"), 1.0, "costs.absorb.speed: unknown coefficient"),
        (("costs", "absorb", "experts_per_token"), 1.5, "costs.absorb.experts_per_token: 1.5 must"),
        (("basis", "decode"), 3, "basis.decode: 3 must be a string"),
        (("fit", "decode"), {"r2": "good"}, "fit.decode.r2: 'good' must be a number"),
    ],
)
def test_a_malformed_file_names_the_field(
    opt: Hardware, tmp_path: Path, at: tuple[str, ...], value: object, says: str
) -> None:
    path = tmp_path / "broken.json"
    save_hardware(opt, path)
    inner = data = json.loads(path.read_text())
    for name in at[:-1]:
        inner = inner[name]
    inner[at[-1]] = value
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=says) as error:
        load_hardware("opt-13b", str(path))
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)


def test_a_missing_field_and_a_missing_coefficient_are_named(opt: Hardware, tmp_path: Path) -> None:
    path = tmp_path / "broken.json"
    save_hardware(opt, path)
    data = json.loads(path.read_text())
    del data["costs"]["absorb"]["decode_base_s"]
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=r"costs.absorb.decode_base_s: missing"):
        load_hardware("opt-13b", str(path))
    del data["num_blocks"]
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match="num_blocks: missing"):
        load_hardware("opt-13b", str(path))


@pytest.mark.parametrize("text", ["", "{", "[]", "7", "[" * 100_000])
def test_what_is_no_description_is_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_hardware("opt-13b", str(path))
    assert "\n" not in str(error.value)


def test_a_file_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_hardware("opt-13b", str(tmp_path / "nowhere.json"))
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_hardware("opt-13b", str(tmp_path / "binary.json"))
