"""Files in the cache directory: whole or not there, and nobody else's."""

import errno
import logging
import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from apt_jax.utils import cache_dir

DATA = bytes(range(256)) * 9
DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "one byte": lambda data: data[:1],
    "half": lambda data: data[: len(data) // 2],
    "without its digest": lambda data: data[: len(DATA)],
    "zeros": lambda data: bytes(len(data)),
    "one bit": lambda data: data[:7] + bytes([data[7] ^ 1]) + data[8:],
    "a byte more": lambda data: data + b"x",
}
damaged = pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setenv("APT_JAX_CACHE_DIR", str(tmp_path / "cache"))
    cache_dir._log_not_kept.cache_clear()


def _private() -> Path:
    directory = cache_dir.private_dir("code")
    assert directory is not None
    return directory


def test_the_variables_of_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_dir.cache_dir() == tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir.cache_dir() == tmp_path / "cache"
    monkeypatch.delenv("APT_JAX_CACHE_DIR")
    assert cache_dir.cache_dir() == tmp_path / "xdg" / "apt-jax"
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert cache_dir.cache_dir() == tmp_path / ".cache" / "apt-jax"


def test_a_file_is_found_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "f"
    assert cache_dir.read_verified(path) is None
    for data in (DATA, b"", b"other"):
        cache_dir.write_verified(path, data)
        assert cache_dir.read_verified(path) == data
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


@damaged
def test_F10_H8_a_damaged_file_is_removed_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[bytes], bytes]
) -> None:
    path = tmp_path / "f"
    cache_dir.write_verified(path, DATA)
    path.write_bytes(damage(path.read_bytes()))
    assert cache_dir.read_verified(path) is None
    assert [record.message for record in caplog.records] == [f"{path}: damaged; removed, and made again"]
    assert not path.exists()


@damaged
def test_F10_code_that_is_damaged_is_not_opened(damage: Callable[[bytes], bytes]) -> None:
    path = _private() / "f"
    cache_dir.write_verified(path, DATA)
    whole = cache_dir.open_private(path)
    assert whole is not None
    os.close(whole)
    path.write_bytes(damage(path.read_bytes()))
    assert cache_dir.open_private(path) is None
    assert not path.exists()


def test_a_file_is_on_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args, name=name, real=real: (calls.append(name), real(*args)))
    cache_dir.write_verified(tmp_path / "f", DATA)
    assert calls == ["fsync", "replace", "fsync"]


def test_H8_a_full_disk_leaves_what_was_there(tmp_path: Path) -> None:
    """A limit of the file size cuts a write short, as a full disk does."""
    path = tmp_path / "f"
    cache_dir.write_verified(path, b"before")
    program = (
        "import pathlib, resource, sys; from apt_jax.utils import cache_dir\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "try: cache_dir.write_verified(pathlib.Path(sys.argv[1]), bytes(100_000))\n"
        "except OSError as error: sys.exit(error.errno)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], check=False)
    assert done.returncode == errno.EFBIG
    assert cache_dir.read_verified(path) == b"before"
    assert list(tmp_path.iterdir()) == [path]


def _owned_by(uid: int, path: Path) -> os.stat_result:
    values = list(path.stat())
    values[stat.ST_UID] = uid
    return os.stat_result(values)


@pytest.mark.parametrize("mode", [0o770, 0o777, 0o720, 0o702])
def test_O7_a_parent_that_others_write_is_refused(mode: int, caplog: pytest.LogCaptureFixture) -> None:
    directory = _private()
    directory.parent.chmod(mode)
    assert cache_dir.private_dir("code") is None
    assert "or sticky" in caplog.text
    directory.parent.chmod(mode | 0o1000)
    assert cache_dir.private_dir("code") == directory


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_O7_a_directory_that_others_write_is_refused(mode: int, caplog: pytest.LogCaptureFixture) -> None:
    _private().chmod(mode)
    assert cache_dir.private_dir("code") is None
    assert "nobody else" in caplog.text


@pytest.mark.parametrize("whose", ["the directory", "its parent"])
def test_O7_a_directory_or_parent_of_another_user_is_refused(whose: str, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = _private()
    other = directory if whose == "the directory" else directory.parent
    real = Path.stat
    changed = _owned_by(os.getuid() + 4711, other)
    monkeypatch.setattr(Path, "stat", lambda self, **kw: changed if self == other else real(self, **kw))
    assert cache_dir.private_dir("code") is None
    root = _owned_by(0, other)
    monkeypatch.setattr(Path, "stat", lambda self, **kw: root if self == other else real(self, **kw))
    assert (cache_dir.private_dir("code") is not None) == (whose == "its parent" or os.getuid() == 0)


def test_O7_everything_is_checked_again_when_code_is_opened(caplog: pytest.LogCaptureFixture) -> None:
    path = _private() / "f"
    cache_dir.write_verified(path, DATA)

    def refused() -> bool:
        file = cache_dir.open_private(path)
        if file is not None:
            os.close(file)
        return file is None

    assert not refused()
    for changed, mode in [(path.parent.parent, 0o770), (path.parent, 0o770), (path, 0o660)]:
        before = changed.stat().st_mode
        changed.chmod(mode)
        assert refused(), changed
        changed.chmod(before)
        assert not refused()
    aside = path.with_name("aside")
    path.rename(aside)
    path.symlink_to(aside)
    assert refused()
    path.unlink()
    path.mkdir()
    assert refused()
    assert aside.exists()
    assert "nobody else" in caplog.text


def test_H8_a_directory_that_cannot_be_written_is_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def read_only(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "mkdir", read_only)
    for name in ("code", "programs", "code"):
        assert cache_dir.private_dir(name) is None
    assert len(caplog.records) == 1
    assert "Read-only file system" in caplog.text


def test_files_used_last_are_kept(tmp_path: Path) -> None:
    now = time.time()
    for i in range(6):
        path = tmp_path / f"kernels-{i}.so"
        path.touch()
        os.utime(path, (now - i, now - i))
    for name, age_s in (("dead.tmp", 7200), ("alive.tmp", 5), ("other", 10**6)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (now - age_s, now - age_s))
    cache_dir.remove_leftovers(tmp_path)
    cache_dir.remove_least_recent(tmp_path, "kernels-*.so", 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["alive.tmp", "kernels-0.so", "kernels-1.so", "other"]


def test_code_that_is_opened_counts_as_used() -> None:
    old = time.time() - 10**6
    path = _private() / "f"
    cache_dir.write_verified(path, DATA)
    os.utime(path, (old, old))
    file = cache_dir.open_private(path)
    assert file is not None
    os.close(file)
    assert path.stat().st_mtime > old + 1
