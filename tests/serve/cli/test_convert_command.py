"""`apt-jax convert`, and other commands on its results."""

import contextlib
import io
import json
import signal
import subprocess
import sys

import pytest

from serve import cli
from tests.support.small_models import write_shallow_model

pytest.importorskip("orbax.checkpoint")


def run(*argv: str, stdin: str = "") -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    before, sys.stdin = sys.stdin, io.StringIO(stdin)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = cli.main(argv)
            except SystemExit as exit_:
                code = int(exit_.code or 0)
    finally:
        sys.stdin = before
    return code, out.getvalue(), err.getvalue()


# One kind and few sizes, so that few programs are compiled.
FEW_PROGRAMS = ("--no-warm-up", "--cache", "kv", "--max-num-seqs", "1", "--num-blocks-override", "64")


@pytest.fixture(scope="module", params=["shallow", pytest.param("bundled", marks=pytest.mark.slow)])
def source(request, tmp_path_factory):
    """A model's name, and what is said of it."""
    if request.param == "bundled":
        return "tiny-opt", 132, "30.1 MiB"
    return str(write_shallow_model(tmp_path_factory.mktemp("source") / "tiny-opt")), 20, "9.0 MiB"


@pytest.fixture(scope="module")
def converted(tmp_path_factory, source):
    model, num_tensors, size = source
    target = tmp_path_factory.mktemp("convert") / "tiny"
    code, out, err = run("convert", model, str(target), "--dtype", "float32", "--json", str(target) + ".json")
    assert code == 0, err
    assert out.startswith(f"{target}: {num_tensors} tensors, {size}")
    return target


def test_the_result_is_measured(converted, source):
    measured = json.loads((converted.parent / "tiny.json").read_text())
    assert (measured["format"], measured["tensors"]) == ("orbax", source[1])


def test_a_second_conversion_overwrites_nothing(converted):
    code, out, err = run("convert", "tiny-opt", str(converted))
    assert (code, out) == (1, "")
    assert err == f"apt-jax convert: {converted}: exists already; nothing is overwritten\n"


def test_the_converted_model_completes_as_its_source_does(converted, source):
    flags = ("--quiet", "--max-tokens", "6", *FEW_PROGRAMS)
    code, out, _ = run("generate", str(converted), "Once upon a time", *flags)
    assert code == 0
    assert out == run("generate", source[0], "Once upon a time", *flags)[1]


def test_info_tells_format_quantisation_and_template(converted):
    code, out, _ = run("info", str(converted), "--num-blocks-override", "64")
    assert code == 0
    for name, value in (
        ("files", "orbax"),
        ("weights in the files", "F32"),
        ("chat template", "none"),
        ("end-of-sequence ids", "2"),
    ):
        assert any(line.strip().startswith(name) and line.strip().endswith(value) for line in out.splitlines())


def test_chat_answers_lines_of_stdin_by_the_template(tmp_path, converted):
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}King:")
    flags = (*FEW_PROGRAMS, "--max-tokens", "5", "--chat-template", str(template))
    code, out, err = run("chat", "--model", str(converted), *flags, "--timings", stdin="Who art thou?\n\nAnd why?\n")
    assert code == 0, err
    assert "King:" not in out
    assert err.count("5 output tokens") == 2
    assert "User:" not in out


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("convert", "tiny-opt"), "DST"),
        (
            ("convert", "tiny-opt", "x", "--format", "gguf"),
            "--format: 'gguf' must be one of orbax, safetensors",
        ),
        (("convert", "tiny-opt", "x", "--dtype", "int8"), "--dtype"),
    ],
)
def test_wrong_usage_is_one_line(argv, says):
    code, out, err = run(*argv)
    assert (code, out) == (2, "")
    assert says in err
    assert err.count("\n") == 1


@pytest.mark.in_turn(4, group="whole commands")
def test_a_conversion_that_is_told_to_end_leaves_nothing(tmp_path):
    code = (
        "import sys, time; from apt_jax.models.loading import convert; from serve import cli\n"
        "def slow(*a): print('writing', flush=True); time.sleep(60)\n"
        "convert._WRITERS['orbax'].write = slow\n"
        f"sys.exit(cli.main(['convert', 'tiny-opt', {str(tmp_path / 'x')!r}]))"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"writing\n"
        assert len(list(tmp_path.iterdir())) == 1
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 130
    assert list(tmp_path.iterdir()) == []


def test_everything_is_imported_without_the_optional_libraries():
    code = (
        "import sys\n"
        "for name in ('gguf', 'jinja2', 'orbax', 'orbax.checkpoint', 'huggingface_hub'): sys.modules[name] = None\n"
        "import apt_jax.frontend.llm, apt_jax.models.loading.convert, serve.cli, serve.cli.commands.chat, serve.cli.commands.convert, serve.cli.commands.info\n"
        "sys.exit(serve.cli.main(['info', '/absent.gguf']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr


def test_a_source_that_is_not_there_leaves_nothing(tmp_path):
    code, _, err = run("convert", "no-such-model", str(tmp_path / "x"))
    assert code == 1
    assert "no-such-model" in err
    assert list(tmp_path.iterdir()) == []
