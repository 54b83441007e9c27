"""Reading a run directory."""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, overload

import numpy as np

from ._program import StrPath
from ._record import RECORD, Records
from ._tables import Frame, read_table

if TYPE_CHECKING:
    import pandas as pd
    import polars as pl
    import pyarrow as pa

REST = "trace-rest.bin.zst"
# A zstd file starts with this skippable frame, followed by the size in bytes of the records in trace.bin that precede its own.
REST_HEADER = b"\x50\x2a\x4d\x18\x10\0\0\0moetrace"


@dataclass(frozen=True)
class Run:
    """A run directory, or a trace.bin without one."""

    path: Path
    """The run directory, or the trace.bin."""
    records: Records = field(repr=False)
    """Records of the trace, with the dtype RECORD. Read-only."""
    manifest: dict[str, Any] = field(repr=False)
    """manifest.json; empty for a trace.bin without a run directory."""

    @property
    def op_names(self) -> dict[int, str]:
        """Names of the values of `operation_type`, from the manifest."""
        return {int(number): name for number, name in self.manifest.get("ops", {}).items()}

    @overload
    def gguf_map(self, *, frame: Literal["arrow"] = "arrow") -> pa.Table: ...
    @overload
    def gguf_map(self, *, frame: Literal["polars"]) -> pl.DataFrame: ...
    @overload
    def gguf_map(self, *, frame: Literal["pandas"]) -> pd.DataFrame: ...
    def gguf_map(self, *, frame: Frame = "arrow") -> Any:
        """Offset map of the model: one row per tensor, or per expert of a stacked expert tensor."""
        directory = self.path if self.path.is_dir() else self.path.parent
        return read_table(directory / "gguf-map.parquet", frame)


def read_run(path: StrPath) -> Run:
    """Reads a run directory, or a trace.bin.

    Records end at the first timestamp 0. If the recorder was killed, or is still recording, the last records can be in
    trace-rest.bin.zst; they are read with the package zstandard, and all records are copied to a temporary file. Warns if some of them
    cannot be used.

    Raises OSError if a file cannot be read, ImportError if zstandard is needed and missing, ValueError if a file is damaged.
    """
    path = Path(path)
    trace = path / "trace.bin" if path.is_dir() else path
    _check_regular(trace)
    manifest: dict[str, Any] = {}
    if trace.name == "trace.bin":
        try:
            manifest = _read_manifest(trace.with_name("manifest.json"))
        except FileNotFoundError:
            if path.is_dir():
                raise
    if manifest.get("replacing", False):
        if path.is_dir():
            raise ValueError(
                f"{path}: the recorder was killed while it replaced this run: trace.bin, unless empty, belongs to the earlier run; "
                "open trace.bin alone, or record the run again"
            )
        manifest = {}
    records = _map_records(trace) if (restored := _restore(trace)) is None else restored
    ends = np.flatnonzero(records["timestamp_ns"] == 0)
    return Run(path, records[: ends[0]] if ends.size else records, manifest)


def _check_regular(path: Path) -> None:
    """Raises ValueError for a FIFO, where opening would block, and for other files that are not regular."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path}: not a regular file")


def _read_manifest(path: Path) -> dict[str, Any]:
    _check_regular(path)
    try:
        manifest = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: not a readable manifest: {error}; record the run again, or pass only its trace.bin") from None
    if not isinstance(manifest, dict):
        raise ValueError(f"{path}: not a readable manifest: not a JSON object; record the run again, or pass only its trace.bin")
    return manifest


def _map_records(file: Path | IO[bytes]) -> Records:
    with open(file, "rb") if isinstance(file, Path) else file as opened:
        n = os.fstat(opened.fileno()).st_size // RECORD.itemsize
        return np.memmap(opened, RECORD, mode="r", shape=(n,)) if n else np.empty(0, RECORD)


def _restore(trace: Path) -> Records | None:
    """All records of a run whose recorder has not appended the compressed ones to trace.bin; None for any other trace."""
    path = trace.with_name(REST)
    # Opening a FIFO would block.
    if trace.name != "trace.bin" or not path.is_file():
        return None
    # Opened before the trace: if a recorder removes the file meanwhile, its records are in the trace.
    try:
        rest = path.open("rb")
    except FileNotFoundError:
        return None
    with rest:
        header = rest.read(len(REST_HEADER) + 8)
        if len(header) < len(REST_HEADER) + 8 or not header.startswith(REST_HEADER):
            return None
        try:
            import zstandard
        except ImportError:
            message = f"{path}: reading compressed records needs the package zstandard; install it, or run `moe-analyze` commands on the run"
            raise ImportError(message) from None
        offset = int.from_bytes(header[len(REST_HEADER) :], "little")
        with trace.open("rb") as first, tempfile.TemporaryFile() as copy:
            damaged = "its header is damaged"
            reason = None
            following = _record_at(first, offset)
            if offset % RECORD.itemsize:
                reason = damaged
            elif offset and _record_at(first, offset - RECORD.itemsize) is None:
                # The trace was truncated by a power loss.
                reason = "trace.bin ends before the first of its records"
            else:
                first.seek(0)
                _copy(first, copy, offset)
                n_bytes, error = _decompress(rest, copy, zstandard)
                copy.flush()
                # The recorder was killed while it appended the same records to the trace.
                if following is not None and n_bytes and following != _record_at(copy, offset):
                    reason = damaged
                elif error is not None:
                    n = n_bytes // RECORD.itemsize
                    message = f"{path} is damaged ({error}); only the records in it before the damage are used: {n}"
                    warnings.warn(message, stacklevel=3)
            if reason is not None:
                warnings.warn(f"{path}: {reason}; the records in it are not used", stacklevel=3)
                return None
            return _map_records(copy)


def _decompress(rest: IO[bytes], to: IO[bytes], zstandard: Any) -> tuple[int, Exception | None]:
    """Copies the records of all complete frames, up to the first timestamp 0.

    Ignores an incomplete frame at the end, because the recorder was killed, and zeros there, after a power loss. Returns the number of
    bytes, and the error of a damaged frame.
    """
    decompressor = zstandard.ZstdDecompressor()
    frames = decompressor.decompressobj()
    # The bytes of the current frame. They are copied at its end, where zstd has compared its checksum.
    frame = bytearray()
    n_bytes = checked = 0
    data = b""
    # A larger input could be decompressed to more than fits into memory.
    while data := data or rest.read(1024):
        try:
            frame += frames.decompress(data)
        except zstandard.ZstdError as error:
            while data and not any(data):
                data = rest.read(1 << 20)
            return n_bytes, error if data else None
        is_end = frames.eof
        data = frames.unused_data if is_end else b""
        complete = len(frame) - len(frame) % RECORD.itemsize
        timestamps = np.frombuffer(bytes(frame[checked:complete]), RECORD)["timestamp_ns"]
        ends = np.flatnonzero(timestamps == 0)
        checked = checked + RECORD.itemsize * int(ends[0]) if ends.size else complete
        if is_end or ends.size or len(frame) >= 1 << 26:
            n_bytes += to.write(frame[:checked])
            del frame[:checked]
            checked = 0
        if ends.size:
            break
        if is_end:
            frames = decompressor.decompressobj()
    return n_bytes, None


def _record_at(file: IO[bytes], offset: int) -> bytes | None:
    """The record at an offset, unless its timestamp is 0 or the file ends before the end of the record."""
    if os.fstat(file.fileno()).st_size < offset + RECORD.itemsize:
        return None
    file.seek(offset)
    record = file.read(RECORD.itemsize)
    return record if any(record[:8]) else None


def _copy(source: IO[bytes], to: IO[bytes], size: int) -> None:
    """Copies at most `size` bytes."""
    while size and (block := source.read(min(size, 1 << 20))):
        to.write(block)
        size -= len(block)
