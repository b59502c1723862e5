"""Files of cached groups: what is found again, what is refused, the bound, two servers on one directory, a disk that fails."""

import contextlib
import os
import stat
import time
import zlib
from pathlib import Path

import numpy as np
import pytest

from apt_jax.core.kinds import HIDDEN, KV
from apt_jax.errors import ConfigError
from apt_jax.executor.transfers.prefix_files import PrefixFiles, StoredGroup

BLOCK_BYTES = 256
IDENTITY = bytes(range(32))


def opened(directory: Path, identity: bytes = IDENTITY, *, groups: int = 100, block_bytes: int = BLOCK_BYTES):
    """With room for so many groups of keys and values."""
    return PrefixFiles(directory, identity, block_bytes, (2, 1), groups * (2 * block_bytes + 100))


def group(seed: int, num_blocks: int = 2, *, is_downward: bool = False, block_bytes: int = BLOCK_BYTES) -> StoredGroup:
    blocks = np.random.default_rng(seed).integers(0, 256, (num_blocks, block_bytes)).astype(np.uint8)
    return StoredGroup(blocks, tuple(zlib.crc32(block) for block in blocks), is_downward)


def digest(number: int) -> bytes:
    return number.to_bytes(16, "little")


def only_file(directory: Path) -> Path:
    (found,) = [path for path in directory.glob("*/*") if path.is_file()]
    return found


def same(a: StoredGroup | None, b: StoredGroup) -> bool:
    return a is not None and np.array_equal(a.blocks, b.blocks) and a[1:] == b[1:]


@pytest.fixture
def home(tmp_path) -> Path:
    return tmp_path / "prefixes"


@pytest.mark.parametrize(("kind", "num_blocks"), [(KV, 2), (HIDDEN, 1)], ids=["kv", "hidden"])
@pytest.mark.parametrize("is_downward", [False, True])
def test_what_is_written_is_found_by_the_next_process(home, kind, num_blocks, is_downward):
    files, one = opened(home), group(0, num_blocks, is_downward=is_downward)
    assert not files.has(kind, digest(1))
    size = files.write(kind, digest(1), 1, one)
    assert (files.num_bytes, only_file(home).stat().st_size) == (size, size)
    again = opened(home)
    assert again.salt == files.salt
    assert again.has(kind, digest(1))
    assert not again.has(1 - kind, digest(1))
    assert same(again.read(kind, digest(1), 1), one)
    assert (again.num_bytes, again.num_groups) == (size, 1)


def test_nobody_else_may_read_or_write(home):
    files = opened(home)
    files.write(KV, digest(1), 1, group(0))
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    assert stat.S_IMODE(only_file(home).parent.stat().st_mode) == 0o700
    for path in (only_file(home), home / "salt"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("mode", [0o750, 0o701, 0o777])
def test_a_directory_that_others_may_look_into_is_refused(home, mode):
    home.mkdir()
    home.chmod(mode)
    with pytest.raises(ConfigError, match=r"without access for others; chmod 700 it \(--prefix-cache-dir\)"):
        opened(home)


def test_what_is_no_directory_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file: cannot be used for cached prefixes \(.*\) \(--prefix-cache-dir\)"):
        opened(tmp_path / "file")
    (tmp_path / "cut").mkdir(mode=0o700)
    (tmp_path / "cut" / "salt").write_bytes(b"short")
    with pytest.raises(ConfigError, match="cut/salt: damaged; empty the directory"):
        opened(tmp_path / "cut")


def test_each_directory_has_a_salt_of_its_own(tmp_path):
    assert opened(tmp_path / "a").salt != opened(tmp_path / "b").salt


def test_another_model_finds_nothing_and_removes_nothing(home):
    files = opened(home)
    files.write(KV, digest(1), 1, group(0))
    other = opened(home, bytes(32))
    assert not other.has(KV, digest(1))
    assert other.read(KV, digest(1), 1) is None
    assert same(files.read(KV, digest(1), 1), group(0))
    assert other.num_dropped_files == files.num_dropped_files == 0
    assert other.num_bytes == files.num_bytes  # the bound is that of all
    assert other.num_groups == 0


class TestWhatDoesNotMatch:
    """Each is removed, logged once, and not found again."""

    def refused(self, home, caplog, files=None) -> str:
        files = opened(home) if files is None else files
        assert files.has(KV, digest(1))
        assert files.read(KV, digest(1), 1) is None
        assert not files.has(KV, digest(1))
        assert files.num_dropped_files == 1
        assert not [path for path in home.glob("*/*") if path.is_file()]
        assert files.read(KV, digest(1), 1) is None
        (record,) = [r for r in caplog.records if r.name.startswith("apt_jax")]
        return record.getMessage()

    @pytest.fixture
    def path(self, home) -> Path:
        opened(home).write(KV, digest(1), 1, group(0))
        return only_file(home)

    @pytest.mark.parametrize("length", [0, 1, 60, 90, 300, -1])
    def test_cut_off(self, home, path, caplog, length):
        path.write_bytes(path.read_bytes()[:length])
        assert "removed because it has" in self.refused(home, caplog)

    def test_longer(self, home, path, caplog):
        path.write_bytes(path.read_bytes() + b"x")
        assert "removed because it has" in self.refused(home, caplog)

    def test_any_bit_that_has_changed(self, home, path, caplog):
        whole = path.read_bytes()
        for at in (0, 9, 13, 40, 70, 85, len(whole) - 2 * BLOCK_BYTES, len(whole) - BLOCK_BYTES, len(whole) - 1):
            caplog.clear()
            damaged = bytearray(whole)
            damaged[at] ^= 0x10
            path.write_bytes(damaged)
            assert self.refused(home, caplog).endswith(
                ("its header is damaged; it will be computed again", "its checksum differs; it will be computed again")
            )

    def test_of_another_version(self, home, path, caplog, monkeypatch):
        monkeypatch.setattr("apt_jax.executor.transfers.prefix_files.FORMAT", 2)
        assert "because it has another format version" in self.refused(home, caplog)

    def test_of_another_model_or_geometry(self, home, path, caplog):
        other = PrefixFiles(home, bytes(32), BLOCK_BYTES, (2, 1), 10**6)
        other.write(KV, digest(1), 1, group(0))
        of_other = next(p for p in home.glob("*/*") if p != path)
        of_other.replace(path)
        assert "because it belongs to another model" in self.refused(home, caplog)

    def test_renamed(self, home, path, caplog):
        opened(home).write(KV, digest(2), 1, group(2))
        next(p for p in path.parent.iterdir() if p != path).replace(path)
        assert "because its name does not match its header" in self.refused(home, caplog)

    def test_a_link_or_a_pipe_is_not_opened(self, home, path):
        target = home.parent / "elsewhere"
        path.rename(target)
        path.symlink_to(target)
        files = opened(home)
        with pytest.raises(OSError, match="symbolic links"):
            files.read(KV, digest(1), 1)
        path.unlink()
        os.mkfifo(path)
        assert files.read(KV, digest(1), 1) is None


class TestBound:
    def test_is_kept(self, home):
        files = opened(home, groups=10)
        for number in range(50):
            files.write(KV, digest(number), 1, group(number))
            total = sum(path.stat().st_size for path in home.glob("*/*"))
            assert total == files.num_bytes <= 10 * (2 * BLOCK_BYTES + 100)
        found = [number for number in range(50) if files.has(KV, digest(number))]
        assert found == list(range(found[0], 50))
        assert 8 <= len(found) <= 10
        assert all(same(files.read(KV, digest(number), 1), group(number)) for number in found)

    def test_what_is_read_stays(self, home):
        files = opened(home, groups=10)
        for number in range(30):
            files.write(KV, digest(number), 1, group(number))
            assert same(files.read(KV, digest(0), 1), group(0))

    def test_the_end_of_a_prefix_leaves_first(self, home):
        files = opened(home, groups=10)
        for depth in range(1, 11):
            files.write(KV, digest(depth), depth, group(depth))
        files.write(KV, digest(99), 1, group(99))
        found = [depth for depth in range(1, 11) if files.has(KV, digest(depth))]
        assert found == list(range(1, len(found) + 1))
        assert len(found) < 10

    def test_more_than_all_of_it_is_not_written(self, home):
        assert opened(home, groups=0).write(KV, digest(1), 1, group(0)) == 0

    def test_a_smaller_bound_is_kept_from_the_start(self, home):
        files = opened(home)
        for number in range(20):
            files.write(KV, digest(number), 1, group(number))
        smaller = opened(home, groups=5)
        assert sum(path.stat().st_size for path in home.glob("*/*")) == smaller.num_bytes <= 5 * 612
        assert smaller.has(KV, digest(19))
        assert files.read(KV, digest(0), 1) is None  # the other server finds out
        assert not files.has(KV, digest(0))
        assert files.num_dropped_files == 0

    def test_what_writers_have_left_is_removed_when_it_is_old(self, home):
        files = opened(home)
        files.write(KV, digest(1), 1, group(0))
        old, new = (only_file(home).with_name(f"{name}.tmp") for name in ("old", "new"))
        for path in (old, new):
            path.write_bytes(b"part")
        os.utime(old, (0, time.time() - 4000))
        opened(home)
        assert (old.exists(), new.exists()) == (False, True)


def test_two_servers_on_one_directory(home):
    """Random writes, reads and removals of both: nothing wrong is ever read, and the bound is kept within what one
    writes between two looks."""
    rng = np.random.default_rng(0)
    both = [opened(home, groups=20), opened(home, groups=20)]
    assert both[0].salt == both[1].salt
    num_read = 0
    for _ in range(400):
        files, number = both[int(rng.integers(2))], int(rng.integers(40))
        match rng.integers(8):
            case 0:
                files.remove(KV, digest(number))
            case 1 | 2 | 3:
                files.write(KV, digest(number), 1, group(number))
            case _:
                found = files.read(KV, digest(number), 1)
                assert found is None or same(found, group(number))
                num_read += found is not None
        assert sum(path.stat().st_size for path in home.glob("*/*")) <= 22 * 612
    assert num_read > 50
    assert sum(files.num_dropped_files for files in both) == 0


CALLS = ("open", "replace", "utime", "listdir", "write")


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("nth", [0, 1, 2])
def test_a_write_that_fails_leaves_nothing_behind(home, monkeypatch, name, nth):
    """No space, at every call in turn: what was there before is still good."""
    files = opened(home, groups=4)
    for number in range(4):
        files.write(KV, digest(number), number + 1, group(number))
    count = iter(range(1000))

    def failing(call):
        def maybe(*args, **kwargs):
            if next(count) == nth:
                raise OSError(28, "No space left on device")
            return call(*args, **kwargs)

        return maybe

    with monkeypatch.context() as patch:
        if name == "write":
            writes = failing(lambda file, part: file.write(part))
            patch.setattr("apt_jax.executor.transfers.prefix_files._write_part", writes)
        else:
            patch.setattr(os, name, failing(getattr(os, name)))
        is_written = False
        with contextlib.suppress(OSError):
            is_written = files.write(KV, digest(9), 1, group(9)) > 0
    assert not list(home.glob("*/*.tmp"))
    again = opened(home)
    for number in (0, 1, 2, 3, 9):
        found = again.read(KV, digest(number), 1)
        assert found is None or same(found, group(number))
    assert not is_written or again.has(KV, digest(9))
    assert again.num_dropped_files == 0


def test_a_directory_that_has_gone_fails_and_does_no_more(home):
    files = opened(home)
    files.write(KV, digest(1), 1, group(0))
    for path in sorted(home.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    home.rmdir()
    assert files.read(KV, digest(1), 1) is None
    with pytest.raises(OSError, match="No such file"):
        files.write(KV, digest(2), 1, group(2))
    assert not home.exists()
