"""Finding and opening data files: formats by ending or content, compression, encodings, and lines of bounded size."""

from __future__ import annotations

import codecs
import gzip
import io
import json
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

from bertblocks.core.addresses import is_address, open_filesystem, to_path
from bertblocks.core.storage import why_unreadable
from bertblocks.text.records import DataError, Format

COMPRESSIONS = (".gz", ".zst")
#: Formats by ending. Endings are compared in lower case.
ENDINGS: dict[str, Format] = {
    ".txt": "text",
    ".jsonl": "jsonl",
    ".csv": "csv",
    ".parquet": "parquet",
    ".ndjson": "jsonl",
    ".tsv": "tsv",
    ".json": "json",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".xlsx": "xlsx",
}
#: Formats that are read in a folder. JSON files and workbooks in a folder of texts are mostly metadata.
FOLDER_FORMATS = ("text", "jsonl", "csv", "tsv", "parquet", "arrow")
#: A longer line, row or document is a bad record. Without a limit, a few megabytes of gzip could fill the memory.
MAX_RECORD_BYTES = 64 * 2**20
#: A larger file is rejected where its format, or its compression, requires reading it at once.
MAX_WHOLE_BYTES = 512 * 2**20
#: How much of a file is looked at to detect its format, encoding and delimiter.
SAMPLE_BYTES = 2**20
#: What opening or reading a damaged compressed file raises.
DAMAGE = (OSError, EOFError, zlib.error)

_MAGIC = {b"\x1f\x8b": ".gz", b"\x28\xb5\x2f\xfd": ".zst"}
_FORMAT_MAGIC: dict[bytes, Format] = {b"PAR1": "parquet", b"ARROW1": "arrow", b"PK\x03\x04": "xlsx"}
_BYTE_ORDER_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),  # before UTF-16, whose mark it begins with
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


class RecordTooLongError(ValueError):
    """A line, row or document has more than `MAX_RECORD_BYTES` bytes."""

    def __init__(self, what: str) -> None:
        super().__init__(f"the {what} is longer than {MAX_RECORD_BYTES // 2**20} MiB")


def format_by_name(path: Path) -> Format | None:
    """The format that a file's ending names; None for other endings.

    Example:
        >>> format_by_name(Path("a.JSONL.zst")), format_by_name(Path("a.md"))
        ('jsonl', None)
    """
    name = Path(path.stem) if path.suffix.lower() in COMPRESSIONS else path
    return ENDINGS.get(name.suffix.lower())


def is_compressed(path: Path) -> bool:
    return path.suffix.lower() in COMPRESSIONS


def find_files(patterns: Iterable[str | Path]) -> list[Path]:
    """The files that these paths, folders and glob patterns name, in order and each once.

    Pipes such as `/dev/fd/63`, which shells make of `<(command)`, count as files.
    """
    found: list[Path] = []
    for pattern in patterns:
        path = Path(pattern).expanduser()
        if path.is_dir():
            inside = sorted(file for file in path.rglob("*") if file.is_file() and _is_readable(file))
            if not inside:
                readable = ", ".join(ending for ending, name in ENDINGS.items() if name in FOLDER_FORMATS)
                raise DataError(f"The folder {pattern} has no {readable} file.")
            found.extend(inside)
        elif path.exists():
            found.append(path)
        else:
            anchor = Path(path.anchor)
            matches = sorted(file for file in anchor.glob(str(path.relative_to(anchor))) if file.is_file())
            if not matches and path.is_symlink():
                raise DataError(f"{pattern} {why_unreadable(path)}.")
            if not matches:
                raise DataError(f"{pattern}: no such file or folder, and no file matches it as a pattern.")
            found.extend(matches)
    return list(dict.fromkeys(found))


def find_sources(patterns: Iterable[str | Path]) -> list[str]:
    """The files that these paths, folders, glob patterns and addresses such as `s3://bucket/*.csv` name.

    They come in order and each once.
    """
    found: list[str] = []
    for pattern in patterns:
        pattern = to_path(pattern) if isinstance(pattern, str) else pattern
        found.extend(_find_remote(str(pattern)) if is_address(pattern) else map(str, find_files([pattern])))
    return list(dict.fromkeys(found))


def _find_remote(address: str) -> list[str]:
    system, path = open_filesystem(address)
    if system.isdir(path):
        inside = [name for name in sorted(system.find(path)) if _is_readable(Path(name))]
    else:
        inside = [path] if system.exists(path) else sorted(system.glob(path))
    if not inside:
        raise DataError(f"{address}: no such file, no folder with readable files, and no file matches it as a pattern.")
    return [system.unstrip_protocol(name) for name in inside]


def _is_readable(path: Path) -> bool:
    return format_by_name(path) in FOLDER_FORMATS


def unknown_ending(path: Path) -> DataError:
    return DataError(
        f"{path}: the ending {path.suffix!r} is not one of {', '.join(ENDINGS)}, or one of these with .gz or .zst."
    )


# ---------------------------------------------------------------------- opening


def open_raw(source: str | Path) -> io.BufferedReader:
    """The bytes of a file, a pipe or an address."""
    if is_address(source):
        system, path = open_filesystem(str(source))
        return io.BufferedReader(system.open(path, "rb"), SAMPLE_BYTES)
    return io.BufferedReader(io.FileIO(source), SAMPLE_BYTES)


def open_file(source: str | Path) -> io.BufferedReader:
    """A file, pipe or address as decompressed bytes; UTF-16 and UTF-32 with a byte order mark become UTF-8."""
    raw: Any = open_raw(source)
    path = Path(source)
    compression = path.suffix.lower()
    if compression not in COMPRESSIONS:
        start = raw.peek(4)
        compression = next((ending for magic, ending in _MAGIC.items() if start.startswith(magic)), "")
    if compression == ".gz":
        raw = io.BufferedReader(gzip.GzipFile(fileobj=raw), SAMPLE_BYTES)
    elif compression == ".zst":
        raw = io.BufferedReader(_open_zstd(raw, path), SAMPLE_BYTES)
    encoding = bom_encoding(peek(raw, 4))
    if encoding in ("utf-16", "utf-32"):
        return io.BufferedReader(_Transcoder(raw, encoding), SAMPLE_BYTES)
    return raw


def _open_zstd(raw: IO[bytes], path: Path) -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise DataError(f"{path}: reading .zst needs pyarrow; install it with `pip install pyarrow`.") from error
    return pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, mode="r"), "zstd")


def peek(file: io.BufferedReader, size: int = SAMPLE_BYTES) -> bytes:
    """The first bytes without reading them; nothing where a compressed file is damaged, which reading will report."""
    try:
        return file.peek(size)[:size]
    except DAMAGE:
        return b""


class _Transcoder(io.RawIOBase):
    """Another encoding as UTF-8, in chunks."""

    def __init__(self, file: io.BufferedReader, encoding: str) -> None:
        self._file = file
        self._decoder = codecs.getincrementaldecoder(encoding)("surrogatepass")
        self._rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest and (data := self._file.read(2**16)):
            self._rest = self._decoder.decode(data).encode("utf-8", "surrogatepass")
        size = min(len(buffer), len(self._rest))
        buffer[:size], self._rest = self._rest[:size], self._rest[size:]
        return size

    def close(self) -> None:
        self._file.close()
        super().close()


def read_whole(file: IO[bytes], path: Path | str) -> bytes:
    """All bytes of a file that cannot be read in parts."""
    data = file.read(MAX_WHOLE_BYTES + 1)
    if len(data) > MAX_WHOLE_BYTES:
        raise DataError(
            f"{path}: the file has more than {MAX_WHOLE_BYTES // 2**20} MiB and has to be read at once; "
            "save it as .jsonl, or as .parquet without further compression."
        )
    return data


# ---------------------------------------------------------------------- detection


def detect_format(path: Path, sample: bytes) -> Format | None:
    """The format of a file by its ending, else by its first bytes; None for what may be text or a table."""
    named = format_by_name(path)
    if named is not None:
        return named
    for magic, name in _FORMAT_MAGIC.items():
        if sample.startswith(magic):
            return name
    first_line = sample.lstrip().split(b"\n", 1)[0]
    try:
        return "jsonl" if isinstance(json.loads(first_line), dict) else None
    except (ValueError, RecursionError):
        return None


def bom_encoding(start: bytes) -> str | None:
    """The encoding that a byte order mark announces."""
    return next((encoding for mark, encoding in _BYTE_ORDER_MARKS if start.startswith(mark)), None)


def detect_encoding(sample: bytes) -> str:
    """UTF-8 where the sample is UTF-8, else Windows-1252, the usual encoding of spreadsheets that are not.

    Example:
        >>> detect_encoding("café".encode()), detect_encoding("café".encode("latin-1"))
        ('utf-8', 'cp1252')
    """
    whole_lines = sample[: sample.rfind(b"\n") + 1] or sample  # the last line may be cut within a character
    try:
        whole_lines.decode()
    except UnicodeDecodeError:
        return "cp1252"
    return "utf-8"


def bad_characters(text: str) -> str | None:
    """Why a text is not valid Unicode: bytes in another encoding, or half of a surrogate pair; None if it is."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        if 0xDC80 <= code <= 0xDCFF:
            return f"byte 0x{code - 0xDC00:02x} is not UTF-8"
        return f"the text holds half of a surrogate pair (\\u{code:04x}), which is not a character"
    return None


# ---------------------------------------------------------------------- lines


class BoundedLines:
    """The lines of a binary file from its current position to `stop`, decoded, with their ends.

    Bytes that do not fit the encoding become surrogates, for `bad_characters` to find. A line beyond
    `MAX_RECORD_BYTES` raises `RecordTooLongError`; the next call continues behind it.
    """

    def __init__(self, file: IO[bytes], encoding: str = "utf-8", start: int = 0, stop: int | None = None) -> None:
        self._file, self._encoding = file, encoding
        self._position, self._stop = start, stop
        #: The number of the last line.
        self.number = 0

    def __iter__(self) -> BoundedLines:
        return self

    def __next__(self) -> str:
        line = b"" if self._stop is not None and self._position >= self._stop else self._readline(MAX_RECORD_BYTES + 1)
        if not line:
            raise StopIteration
        self.number += 1
        if len(line) > MAX_RECORD_BYTES:
            while line and not line.endswith(b"\n"):
                line = self._readline(SAMPLE_BYTES)
            raise RecordTooLongError("line")
        text = line.decode(self._encoding, errors="surrogateescape")
        return text.removeprefix("\ufeff") if self.number == 1 else text

    def _readline(self, limit: int) -> bytes:
        line = self._file.readline(limit)
        self._position += len(line)
        return line


def read_text(path: Path) -> str:
    """The text of a UTF-8 file, which may be compressed; another encoding is an error that names the line."""
    with open_file(path) as file:
        data = read_whole(file, path)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{path} line {line}: byte 0x{data[error.start]:02x} is not UTF-8; save the file as UTF-8."
        ) from error
