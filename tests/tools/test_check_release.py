"""The checks of a release, on archives made for them, and the forge's workflows."""

import io
import re
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

from apt_jax.version import __version__
from tools import check_release

ROOT = Path(__file__).parents[2]
RECORD = f"apt_jax-{__version__}.dist-info"


def _file(path: str) -> str:
    return f"{path}x.py" if path.endswith("/") else path


def _wheel(folder: Path, *, without: str = "", more: str = "", version: str = __version__) -> Path:
    path = folder / f"apt_jax-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name in (*map(_file, check_release.IN_WHEEL), f"{RECORD}/licenses/LICENSE", more):
            if name and not (without and name.startswith(without)):
                wheel.writestr(name, "")
        wheel.writestr(f"{RECORD}/METADATA", f"Metadata-Version: 2.4\nName: apt-jax\nVersion: {version}\n")
    return path


def test_a_whole_wheel_has_nothing_wrong(tmp_path: Path) -> None:
    assert check_release.check_wheel(_wheel(tmp_path)) == []


@pytest.mark.parametrize("needed", check_release.IN_WHEEL)
def test_a_wheel_without_a_file_that_it_needs_is_named(tmp_path: Path, needed: str) -> None:
    (line,) = check_release.check_wheel(_wheel(tmp_path, without=needed))
    assert line.endswith(f"lacks {needed}")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("tests/test_engine.py", "holds tests, which would be installed beside the package"),
        ("apt_jax/cpu/kernels.so", "holds compiled files, apt_jax/cpu/kernels.so among them"),
        ("serve/__pycache__/app.pyc", "holds compiled files"),
    ],
)
def test_a_wheel_with_what_does_not_belong_there_is_named(tmp_path: Path, more: str, said: str) -> None:
    (line,) = check_release.check_wheel(_wheel(tmp_path, more=more))
    assert said in line


def test_a_wheel_of_another_version_is_named(tmp_path: Path) -> None:
    (line,) = check_release.check_wheel(_wheel(tmp_path, version="0.0.1"))
    assert "version 0.0.1" in line


@pytest.mark.parametrize("needed", ["", *check_release.IN_SOURCE])
def test_the_source_archive_is_whole(tmp_path: Path, needed: str) -> None:
    path = tmp_path / f"apt_jax-{__version__}.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name in map(_file, check_release.IN_SOURCE):
            if not needed or not name.startswith(needed):
                archive.addfile(tarfile.TarInfo(f"apt_jax-{__version__}/{name}"), io.BytesIO())
    assert check_release.check_source(path) == ([f"{path.name}: lacks {needed}"] if needed else [])


@pytest.mark.parametrize(
    ("text", "is_right"),
    [
        (f"# Changelog\n\n## {__version__} - 2026-11-27\n", True),
        (f"# Changelog\n\n## Unreleased\n\n## {__version__} - 2026-11-27\n", True),
        (f"# Changelog\n\n## {__version__}\n", False),
        ("# Changelog\n\n## 0.0.1 - 2026-11-27\n", False),
        ("# Changelog\n\n## Unreleased\n", False),
    ],
)
def test_the_changelog_begins_with_the_version(text: str, is_right: bool) -> None:
    assert bool(check_release.check_changelog(text)) != is_right


def test_a_folder_without_one_archive_of_each_kind_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check_release.main([str(tmp_path), "--no-install"]) == 1
    assert "holds 0 wheels and 0 source archives" in capsys.readouterr().out


def test_workflows_run_what_is_there() -> None:
    """Scripts and make targets that workflows name exist."""
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    steps = []
    for path in sorted((ROOT / ".github/workflows").glob("*.yml")):
        for job in yaml.safe_load(path.read_text())["jobs"].values():
            steps += [step["run"] for step in job["steps"] if "run" in step]
    assert steps
    for step in steps:
        command, *rest = step.split()
        if command == "make":
            assert rest[0] in targets
        elif "/" in command:
            assert (ROOT / command).exists()
    assert ".ci/run" in steps
    assert any(step.startswith("make release") for step in steps)
