"""Reading a run directory."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
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
    trace-rest.bin.zst; they are read with the package zstandard, and all records are copied to a temporary file.

    Raises OSError if a file cannot be read, ImportError if zstandard is needed and missing, ValueError if a file is damaged.
    """
    path = Path(path)
    trace = path / "trace.bin" if path.is_dir() else path
    manifest: dict[str, Any] = {}
    if trace.name == "trace.bin":
        try:
            manifest = json.loads((trace.parent / "manifest.json").read_bytes())
        except FileNotFoundError:
            if path.is_dir():
                raise
    records = _map_records(trace) if (restored := _restore(trace)) is None else restored
    ends = np.flatnonzero(records["timestamp_ns"] == 0)
    return Run(path, records[: ends[0]] if ends.size else records, manifest)


def _map_records(file: Path | IO[bytes]) -> Records:
    with open(file, "rb") if isinstance(file, Path) else file as opened:
        n = os.fstat(opened.fileno()).st_size // RECORD.itemsize
        return np.memmap(opened, RECORD, mode="r", shape=(n,)) if n else np.empty(0, RECORD)


def _restore(trace: Path) -> Records | None:
    """All records of a run whose recorder has not appended the compressed ones to trace.bin; None for any other trace."""
    if trace.name != "trace.bin":
        return None
    path = trace.with_name(REST)
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
            # A trace that was truncated by a power loss ends where the first record is missing.
            if _copy(first, copy, offset) == offset:
                try:
                    # A frame that is incomplete, because the recorder was killed, is the last one.
                    with zstandard.ZstdDecompressor().stream_reader(rest, read_across_frames=True, closefd=False) as reader:
                        shutil.copyfileobj(reader, copy, 1 << 20)
                except zstandard.ZstdError as error:
                    raise ValueError(f"{path}: {error}; remove it to use the records of trace.bin") from None
            copy.flush()
            return _map_records(copy)


def _copy(source: IO[bytes], to: IO[bytes], size: int) -> int:
    """Copies at most `size` bytes. Returns the number of bytes."""
    left = size
    while left and (block := source.read(min(left, 1 << 20))):
        to.write(block)
        left -= len(block)
    return size - left
