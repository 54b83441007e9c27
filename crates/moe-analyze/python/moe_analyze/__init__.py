"""Reads the runs and tables of moe-analyze.

    import moe_analyze

    run = moe_analyze.read_run("runs/first")
    run.records["token_id"]                             # NumPy, memory-mapped
    moe_analyze.hotness("runs/first", frame="polars")   # one row per layer and expert
    moe_analyze.routing("runs/first", frame="pandas")   # one row per selected expert of a token

Tables are computed by the program `moe-analyze`, which the wheel contains.
"""

from ._program import Error, program, run
from ._record import (
    LANES,
    MEMORY_SOURCES,
    NO_LAYER,
    NO_TENSOR,
    PHASES,
    RECORD,
    SOURCE,
    source_sizes,
)
from ._run import Run, read_run
from ._tables import hotness, routing, tables

__all__ = [
    "LANES",
    "MEMORY_SOURCES",
    "NO_LAYER",
    "NO_TENSOR",
    "PHASES",
    "RECORD",
    "SOURCE",
    "Error",
    "Run",
    "hotness",
    "program",
    "read_run",
    "routing",
    "run",
    "source_sizes",
    "tables",
]
