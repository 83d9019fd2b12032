"""Whether the records of a one-file checkpoint are as they were written, by the checksums in its archive.

torch.save writes a zip archive, a record for each storage, with the CRC-32 of each. torch.load does not compare them.
"""

from __future__ import annotations

import mmap
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from struct import error as StructError
from struct import unpack_from
from zipfile import BadZipFile, ZipFile, ZipInfo, is_zipfile

_NUM_THREADS = 4  # zlib lets go of Python's lock
_HEADER = 30  # bytes before the name in a record's own header, the last four of which tell what lies before the data


def damaged_records(path: Path, *, rank: int = 0, num_ranks: int = 1) -> list[str]:
    """The problems of a file of torch.save, a line each; one that was written without checksums has none.

    Args:
        rank: Reads every record from this one on whose turn it is.
        num_ranks: As many read the others.
    """
    if not is_zipfile(path):  # of an old torch.save; or cut off, which torch.load tells
        return []
    try:
        with ZipFile(path) as archive:
            records = archive.infolist()
    except BadZipFile as error:
        return [f"its index can't be read ({error})"]
    if not any(record.CRC for record in records):  # torch.serialization.set_crc32_options(False)
        return []
    own = sorted(records, key=lambda record: record.file_size)[rank::num_ranks]
    return [f"its record {name} has another content than was written" for name in _damaged(path, own)]


def _damaged(path: Path, records: Sequence[ZipInfo]) -> list[str]:
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
        memoryview(mapped) as content,
        ThreadPoolExecutor(_NUM_THREADS) as threads,
    ):
        are_whole = list(threads.map(lambda record: _is_whole(content, record), records))
    return [record.filename for record, is_whole in zip(records, are_whole, strict=True) if not is_whole]


def _is_whole(content: memoryview, record: ZipInfo) -> bool:
    try:
        lengths = unpack_from("<HH", content, record.header_offset + _HEADER - 4)  # of the name, and of what fills up
    except StructError:
        return False
    start = record.header_offset + _HEADER + sum(lengths)
    with content[start : start + record.file_size] as data:
        return len(data) == record.file_size and zlib.crc32(data) == record.CRC
