"""Tests of the Python package moe_analyze.

    python_package.py RUN [TEST...]

RUN is a run that `moe-analyze record` has written. The package is installed, or in PYTHONPATH with the program in MOE_ANALYZE. Run in the
repository, or in a directory with its docs/ and schemas/.
"""

import contextlib
import importlib.util
import io
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import unittest
import warnings
from pathlib import Path
from unittest import mock

import moe_analyze
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import zstandard

REPOSITORY = Path(__file__).resolve().parents[1]
RUN = Path(sys.argv.pop(1)).resolve() if len(sys.argv) > 1 else None


class Package(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.dir = Path(directory.name)

    def copy_of_run(self):
        return Path(shutil.copytree(RUN, self.dir / "run"))

    def killed_run(self, n_first, block=256):
        """A run whose recorder was killed while it compressed all records after the first ones."""
        run = self.copy_of_run()
        trace = (run / "trace.bin").read_bytes()
        compressor = zstandard.ZstdCompressor(write_checksum=True)
        rest = b"\x50\x2a\x4d\x18\x10\0\0\0moetrace" + struct.pack("<Q", 1024 * n_first)
        for at in range(1024 * n_first, len(trace), 1024 * block):
            rest += compressor.compress(trace[at : at + 1024 * block])
        (run / "trace.bin").write_bytes(trace[: 1024 * n_first])
        (run / "trace-rest.bin.zst").write_bytes(rest)
        return run

    def test_record_is_that_of_the_schema(self):
        spec = importlib.util.spec_from_file_location("tensor_access_log", REPOSITORY / "schemas/tensor_access_log.py")
        schema = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(schema)
        for name in ("SOURCE", "RECORD", "LANES", "PHASES", "MEMORY_SOURCES", "NO_LAYER", "NO_TENSOR"):
            self.assertEqual(getattr(moe_analyze, name), getattr(schema, name), name)
        records = moe_analyze.read_run(RUN).records
        self.assertTrue((moe_analyze.source_sizes(records) == schema.source_sizes(records)).all())
        self.assertEqual(moe_analyze.RECORD.itemsize, 1024)

    def test_reads_a_run(self):
        run = moe_analyze.read_run(RUN)
        self.assertEqual(run.manifest, json.loads((RUN / "manifest.json").read_text()))
        self.assertEqual(len(run.records), run.manifest["records"])
        self.assertEqual(run.records.dtype, moe_analyze.RECORD)
        self.assertIsInstance(run.records, np.memmap)
        self.assertEqual({run.op_names[op] for op in set(run.records["operation_type"])} & {"MUL_MAT_ID"}, {"MUL_MAT_ID"})
        self.assertEqual(run.records.tobytes(), (RUN / "trace.bin").read_bytes())
        self.assertEqual(moe_analyze.read_run(RUN / "trace.bin").manifest, run.manifest)
        frame = run.gguf_map(frame="polars")
        self.assertEqual(frame.columns[:3], ["file", "tensor", "tensor_idx"])
        self.assertEqual(run.gguf_map().num_rows, len(frame))

    def test_stops_at_the_first_timestamp_of_zero(self):
        trace = self.dir / "other.bin"
        records = np.fromfile(RUN / "trace.bin", moe_analyze.RECORD)[:10]
        records["timestamp_ns"][[6, 8]] = 0
        trace.write_bytes(records.tobytes() + b"incomplete")
        run = moe_analyze.read_run(trace)
        self.assertEqual((len(run.records), run.manifest), (6, {}))
        trace.write_bytes(b"")
        self.assertEqual(len(moe_analyze.read_run(trace).records), 0)

    def test_reports_files_that_do_not_exist(self):
        for path in (self.dir, self.dir / "missing"):
            with self.assertRaises(FileNotFoundError):
                moe_analyze.read_run(path)

    def test_reads_the_compressed_records_of_a_killed_recorder(self):
        complete = (RUN / "trace.bin").read_bytes()
        for n_first in (0, 100):
            with self.subTest(n_first=n_first):
                run = self.killed_run(n_first)
                self.assertEqual(moe_analyze.read_run(run).records.tobytes(), complete)
                # A part of the records is in trace.bin, too, if the kill came while they were appended.
                (run / "trace.bin").write_bytes(complete[: 1024 * (n_first + 40)])
                self.assertEqual(moe_analyze.read_run(run).records.tobytes(), complete)
                # After a power loss, trace.bin may be shorter.
                (run / "trace.bin").write_bytes(complete[: 1024 * (n_first // 2)])
                expected = complete if n_first == 0 else complete[: 1024 * 50]
                warns = self.assertWarnsRegex(UserWarning, "trace.bin ends before") if n_first else contextlib.nullcontext()
                with warns:
                    self.assertEqual(moe_analyze.read_run(run).records.tobytes(), expected)
                shutil.rmtree(run)

    def test_ignores_an_incomplete_last_frame(self):
        run = self.killed_run(10, block=64)
        path = run / "trace-rest.bin.zst"
        path.write_bytes(path.read_bytes()[:-50])
        records = moe_analyze.read_run(run).records
        n = moe_analyze.read_run(RUN).manifest["records"]
        self.assertTrue(n - 64 <= len(records) < n, len(records))
        self.assertEqual(records.tobytes(), (RUN / "trace.bin").read_bytes()[: 1024 * len(records)])

    def test_refuses_a_run_that_is_being_replaced(self):
        run = self.copy_of_run()
        path = run / "manifest.json"
        manifest = json.loads(path.read_text())
        path.write_text(json.dumps({**manifest, "replacing": True}))
        with self.assertRaisesRegex(ValueError, "killed while it replaced this run"):
            moe_analyze.read_run(run)
        alone = moe_analyze.read_run(run / "trace.bin")
        self.assertEqual((len(alone.records), alone.manifest), (manifest["records"], {}))
        path.write_text(json.dumps({**manifest, "replacing": False}))
        self.assertEqual(len(moe_analyze.read_run(run).records), manifest["records"])

    def test_refuses_a_manifest_that_is_not_an_object(self):
        run = self.copy_of_run()
        for text in ("[]", "3", "null", '"text"', "{", "\xff"):
            (run / "manifest.json").write_bytes(text.encode("latin-1"))
            with self.assertRaisesRegex(ValueError, "manifest.json: not a readable manifest"):
                moe_analyze.read_run(run)

    @unittest.skipUnless(hasattr(os, "mkfifo"), "the system has no FIFOs")
    def test_does_not_wait_for_a_fifo(self):
        run = self.copy_of_run()
        rest = run / "trace-rest.bin.zst"
        n = len(moe_analyze.read_run(RUN).records)
        os.mkfifo(rest)
        self.assertEqual(len(moe_analyze.read_run(run).records), n)
        rest.unlink()
        rest.mkdir()
        self.assertEqual(len(moe_analyze.read_run(run).records), n)
        for name in ("manifest.json", "trace.bin"):
            (run / name).unlink()
            os.mkfifo(run / name)
            with self.assertRaisesRegex(ValueError, f"{name}: not a regular file"):
                moe_analyze.read_run(run)

    def test_uses_the_compressed_records_before_damage(self):
        complete = (RUN / "trace.bin").read_bytes()
        path = self.killed_run(10, block=64) / "trace-rest.bin.zst"
        data = path.read_bytes()
        # Zeros after a power loss are ignored.
        path.write_bytes(data + bytes(5000))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            self.assertEqual(moe_analyze.read_run(path.parent).records.tobytes(), complete)
        # Within the checksum of the last frame.
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        n = 10 + (len(complete) // 1024 - 11) // 64 * 64
        with self.assertWarnsRegex(UserWarning, f"zst is damaged .*: {n - 10}$"):
            self.assertEqual(moe_analyze.read_run(path.parent).records.tobytes(), complete[: 1024 * n])
        for offset in (0, 1024, 9999):
            path.write_bytes(data[:16] + struct.pack("<Q", offset) + data[24:])
            with self.assertWarnsRegex(UserWarning, "its header is damaged"):
                self.assertEqual(len(moe_analyze.read_run(path.parent).records), 10)
        with mock.patch.dict(sys.modules, zstandard=None), self.assertRaisesRegex(ImportError, "needs the package zstandard"):
            moe_analyze.read_run(path.parent)
        # Another file of this name is not one of a recorder.
        path.write_bytes(b"other")
        self.assertEqual(len(moe_analyze.read_run(path.parent).records), 10)

    def test_ends_at_the_first_compressed_record_without_a_timestamp(self):
        complete = (RUN / "trace.bin").read_bytes()
        path = self.killed_run(10) / "trace-rest.bin.zst"
        zeros = zstandard.ZstdCompressor().compress(bytes(1 << 28))
        path.write_bytes(path.read_bytes() + zeros)
        with mock.patch("tempfile.TemporaryFile", lambda: open(self.dir / "copy", "w+b")):
            records = moe_analyze.read_run(path.parent).records
        self.assertEqual(records.tobytes(), complete)
        self.assertEqual((self.dir / "copy").stat().st_size, len(complete))

    def test_counts_experts_in_every_frame(self):
        table = moe_analyze.hotness(RUN)
        self.assertIsInstance(table, pa.Table)
        self.assertEqual(table.column_names, ["layer_id", "expert_id", "count", "mass", "bytes"])
        run = moe_analyze.read_run(RUN)
        counts = np.zeros((table["layer_id"].to_numpy().max() + 1, table["expert_id"].to_numpy().max() + 1), int)
        records = run.records[np.char.startswith(run.records["dst_name"], b"ffn_moe_down-")]
        for record in records:
            counts[record["layer_id"], record["expert_ids"][: record["num_experts"]]] += 1
        self.assertTrue((counts.ravel() == table["count"].to_numpy()).all() and counts.sum() > 0)
        polars = moe_analyze.hotness(RUN, frame="polars")
        self.assertIsInstance(polars, pl.DataFrame)
        self.assertEqual(polars.rows(), [tuple(row.values()) for row in table.to_pylist()])
        pandas = moe_analyze.hotness(RUN, frame="pandas")
        self.assertIsInstance(pandas, pd.DataFrame)
        self.assertEqual(pandas["count"].tolist(), polars["count"].to_list())

    def test_passes_options_and_several_inputs(self):
        twice = moe_analyze.hotness(RUN, RUN / "trace.bin", options=["--by", "phase"], frame="polars")
        once = moe_analyze.hotness(RUN, frame="polars")
        self.assertEqual(set(twice["phase"].cast(pl.String)), {"prompt", "generate"})
        self.assertEqual(twice["count"].sum(), 2 * once["count"].sum())

    def test_returns_tables_and_routing(self):
        tables = moe_analyze.tables(RUN, frame="polars")
        self.assertEqual(sorted(tables), ["accesses", "ops", "routing"])
        once = moe_analyze.hotness(RUN, frame="polars")
        self.assertEqual(len(tables["routing"]), once["count"].sum())
        self.assertEqual(moe_analyze.routing(RUN).num_rows, len(tables["routing"]))
        self.assertEqual(moe_analyze.routing(RUN, frame="pandas")["expert_id"].tolist(), tables["routing"]["expert_id"].to_list())
        written = self.dir / "run=a"
        moe_analyze.run("parquet", "--quiet", RUN, "--out", written)
        with mock.patch.dict(os.environ, MOE_ANALYZE="missing"):
            self.assertEqual(moe_analyze.routing(written).column_names, tables["routing"].columns)

    def test_runs_the_program(self):
        done = moe_analyze.run("gguf-map", REPOSITORY / "fixtures/tiny-qwen3moe-Q4_K_M.gguf", "--check-overlaps")
        self.assertEqual(done.returncode, 0)
        self.assertIn("sound", done.stdout + done.stderr)
        with self.assertRaisesRegex(moe_analyze.Error, "^(?!moe-analyze: ).*missing"):
            moe_analyze.hotness(self.dir / "missing")
        with self.assertRaisesRegex(ValueError, "'numpy', not arrow"):
            moe_analyze.hotness(RUN, frame="numpy")
        command = [sys.executable, "-m", "moe_analyze", "--version"]
        self.assertRegex(subprocess.run(command, check=True, capture_output=True, text=True).stdout, r"^moe-analyze \d")

    def test_finds_the_program(self):
        with mock.patch.dict(os.environ, MOE_ANALYZE="given"):
            self.assertEqual(moe_analyze.program(), Path("given"))
        program = moe_analyze.program()
        with (
            mock.patch.dict(os.environ, PATH=str(self.dir)),
            mock.patch("sysconfig.get_path", return_value=str(self.dir)),
            mock.patch("sys.executable", str(self.dir / "python")),
        ):
            os.environ.pop("MOE_ANALYZE", None)
            with self.assertRaisesRegex(FileNotFoundError, "set MOE_ANALYZE"):
                moe_analyze.program()
            installed = shutil.copy(program, self.dir / ("moe-analyze.exe" if os.name == "nt" else "moe-analyze"))
            self.assertEqual(moe_analyze.program(), Path(installed))

    def test_runs_the_code_of_the_documentation(self):
        page = (REPOSITORY / "docs/python.md").read_text()
        blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
        self.assertTrue(blocks)
        shutil.copytree(RUN, self.dir / "runs/first")
        names = {}
        before = os.getcwd()
        os.chdir(self.dir)
        self.addCleanup(os.chdir, before)
        with contextlib.redirect_stdout(io.StringIO()):
            for block in blocks:
                exec(compile(block, "docs/python.md", "exec"), names)


if __name__ == "__main__":
    unittest.main()
