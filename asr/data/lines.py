"""Reading text files line by line, with errors that name file and line."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path


def read_lines(path: str | Path) -> Iterator[tuple[int, str]]:
    """(line number, line) of every line that is not blank, from a UTF-8 text file, packed if its name ends in .gz.

    Lines end with a line feed, with or without carriage return, and with nothing else: other separators belong to the
    text. A byte order mark is dropped. Raises ValueError for a file that is missing, damaged, empty or not UTF-8.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path}: no such file.")
    number = 0
    found = False
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as lines:
            for number, raw in enumerate(lines, start=1):
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
                if line.strip():
                    found = True
                    yield number, line
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}, line {number}: not UTF-8 ({error}). Convert the file to UTF-8.") from error
    except (EOFError, OSError) as error:
        raise ValueError(f"{path}, after line {number}: the file is truncated or damaged ({error}).") from error
    if not found:
        raise ValueError(f"{path}: the file is empty.")
