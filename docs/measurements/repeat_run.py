"""Makes a long run of a short one: repeat_run.py RUN OUT MIB. The trace is repeated until it has so many MiB; time and positions
go on from one to the next."""

import shutil
import struct
import sys
from pathlib import Path

RECORD = 1024

source, out, size = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]) << 20
out.mkdir()
for name in ("manifest.json", "gguf-map.parquet"):
    shutil.copy(source / name, out / name)
trace = (source / "trace.bin").read_bytes()
first, last = (struct.unpack_from("<Q", trace, at)[0] for at in (0, len(trace) - RECORD))
with open(out / "trace.bin", "wb") as file:
    for n in range(-(-size // len(trace))):
        block = bytearray(trace)
        for at in range(0, len(block), RECORD):
            timestamp, token = struct.unpack_from("<QI", block, at)
            struct.pack_into("<QI", block, at, timestamp + n * (last - first + 1), token + n * 100)
        file.write(block)
