"""Tables that the program computes, as Arrow tables or frames."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from ._program import StrPath, run

if TYPE_CHECKING:
    import pandas as pd
    import polars as pl
    import pyarrow as pa

Frame = Literal["arrow", "polars", "pandas"]


def read_table(path: Path, frame: Frame) -> Any:
    """Reads a Parquet file into memory."""
    if frame == "polars":
        import polars as pl

        return pl.read_parquet(path, memory_map=False)
    if frame not in ("arrow", "pandas"):
        raise ValueError(f"frame is {frame!r}, not arrow, polars or pandas")
    import pyarrow.parquet as pq

    # Not read_table, which adds a column for a directory such as run=ID.
    table = pq.ParquetFile(path).read()
    return table.to_pandas() if frame == "pandas" else table


@overload
def hotness(*inputs: StrPath, options: Sequence[StrPath] = (), frame: Literal["arrow"] = "arrow") -> pa.Table: ...
@overload
def hotness(*inputs: StrPath, options: Sequence[StrPath] = (), frame: Literal["polars"]) -> pl.DataFrame: ...
@overload
def hotness(*inputs: StrPath, options: Sequence[StrPath] = (), frame: Literal["pandas"]) -> pd.DataFrame: ...
def hotness(*inputs: StrPath, options: Sequence[StrPath] = (), frame: Frame = "arrow") -> Any:
    """Counts of the selected experts of one or more inputs: one row per layer and expert (columns: schemas/parquet.md).

    `inputs` are run directories, trace.bin files, directories of tables, or traces of other tools, all of one model.
    `options` are further options of `moe-analyze hotness`, for example ["--by", "phase"] or ["--phase", "generate"].
    Raises Error if the command fails, ImportError if the package of the frame is missing.
    """
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "hotness.parquet"
        run("hotness", "--quiet", "--matrix", path, *options, "--", *inputs)
        return read_table(path, frame)


@overload
def tables(path: StrPath, *, options: Sequence[StrPath] = (), frame: Literal["arrow"] = "arrow") -> dict[str, pa.Table]: ...
@overload
def tables(path: StrPath, *, options: Sequence[StrPath] = (), frame: Literal["polars"]) -> dict[str, pl.DataFrame]: ...
@overload
def tables(path: StrPath, *, options: Sequence[StrPath] = (), frame: Literal["pandas"]) -> dict[str, pd.DataFrame]: ...
def tables(path: StrPath, *, options: Sequence[StrPath] = (), frame: Frame = "arrow") -> Any:
    """Tables by name: "ops", "accesses" and "routing" (columns: schemas/parquet.md).

    `path` is a run directory, a trace.bin, or a trace of another tool, which can have only the table "routing".
    `options` are further options of `moe-analyze parquet`, for example ["--top-k", "8"].
    Raises Error if the command fails, ImportError if the package of the frame is missing.
    """
    with tempfile.TemporaryDirectory() as directory:
        run("parquet", "--quiet", "--out", Path(directory) / "tables", *options, "--", path)
        return {file.stem: read_table(file, frame) for file in sorted(Path(directory).glob("tables/*.parquet"))}


@overload
def routing(path: StrPath, *, options: Sequence[StrPath] = (), frame: Literal["arrow"] = "arrow") -> pa.Table: ...
@overload
def routing(path: StrPath, *, options: Sequence[StrPath] = (), frame: Literal["polars"]) -> pl.DataFrame: ...
@overload
def routing(path: StrPath, *, options: Sequence[StrPath] = (), frame: Literal["pandas"]) -> pd.DataFrame: ...
def routing(path: StrPath, *, options: Sequence[StrPath] = (), frame: Frame = "arrow") -> Any:
    """Selected experts of each token and layer, the best first (columns: schemas/parquet.md).

    `path` and `options` are those of `tables`. A directory with a routing.parquet is read directly.
    """
    file = Path(path) / "routing.parquet"
    if file.is_file():
        return read_table(file, frame)
    with tempfile.TemporaryDirectory() as directory:
        run("parquet", "--quiet", "--out", Path(directory) / "tables", *options, "--", path)
        return read_table(Path(directory) / "tables" / "routing.parquet", frame)
