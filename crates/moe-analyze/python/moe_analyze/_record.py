"""The 1024-byte trace record as NumPy dtypes. A test compares this module with schemas/tensor_access_log.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Records = np.ndarray[Any, np.dtype[np.void]]

NO_LAYER = 0xFFFF
NO_TENSOR = 0xFFFFFFFF
PHASES = ("PROMPT", "GENERATE")
MEMORY_SOURCES = ("DISK", "BUFFER")
LANES = (
    "unknown",
    "cpu",
    "gpu_resident",
    "hot_cache",
    "post_fetched",
    "post_fetch_miss",
    "cache_hit",
    "cache_miss",
)

SOURCE: np.dtype[np.void] = np.dtype(
    [
        ("name", "S128"),
        ("tensor_ptr", "<u8"),
        ("size_bytes", "<u4"),
        ("layer_id", "<u2"),
        ("memory_source", "u1"),
        ("pad", "u1"),
        ("offset_or_buffer_id", "<u8"),
        ("tensor_idx", "<u4"),
        ("pad2", "u1", 4),
    ]
)

RECORD: np.dtype[np.void] = np.dtype(
    [
        ("timestamp_ns", "<u8"),
        ("token_id", "<u4"),
        ("layer_id", "<u2"),
        ("thread_id", "<u2"),
        ("operation_type", "u1"),
        ("phase", "u1"),
        ("num_sources", "u1"),
        ("pad", "u1", 5),
        ("dst_name", "S128"),
        ("sources", SOURCE, 4),
        ("expert_ids", "<i4", 16),
        ("num_experts", "u1"),
        ("ext_version", "u1"),
        ("flags", "u1"),
        ("expert_slot_base", "u1"),
        ("duration_ns", "<u8"),
        ("n_tokens", "<u4"),
        ("sequence_id", "<u4"),
        ("size_bytes_high", "<u4", 4),
        ("expert_weights", "<f4", 16),
        ("expert_lane", "u1", 16),
        ("source_file", "<u2", 4),
        ("reserved", "u1", 44),
    ]
)


def source_sizes(records: Records) -> npt.NDArray[np.uint64]:
    """Sizes of the sources in bytes, shape (n, 4). The v4 field has the low 32 bits, the extension the high 32 bits."""
    high = np.where(records["ext_version"][:, None] >= 1, records["size_bytes_high"], 0).astype(np.uint64)
    low: npt.NDArray[np.uint32] = records["sources"]["size_bytes"]
    return (high << np.uint64(32)) | low.astype(np.uint64)
