#!/usr/bin/env python3
"""Compiles the CUDA kernels to the compressed PTX files that the program embeds. Needs no GPU and no toolkit:

    pip install -r .ci/requirements.txt     # NVRTC and zstandard
    scripts/compile-kernels.py [--check] [NAME ...]

NAME is a file of crates/moe-executor/src/cuda/kernels without its .cu; default: all. A PTX file has a section for each
architecture. With --check nothing is written; the exit code is 1 if a PTX file does not match its source. zstd -dc prints
the text of a PTX file.
"""

import argparse
import ctypes
import hashlib
import importlib.util
import re
import sys
from pathlib import Path

try:
    import zstandard
except ModuleNotFoundError:
    sys.exit("no zstandard: install the Python package zstandard (.ci/requirements.txt)")

CUDA = Path(__file__).resolve().parent.parent / "crates/moe-executor/src/cuda"
KERNELS, PTX = CUDA / "kernels", CUDA / "ptx"
# A driver translates PTX for its own device when the architecture is not above it. From 8.0 on there are integer matrix products
# and copies into shared memory beside computing, from 9.0 on kernels that start before the one before them has ended.
ARCHITECTURES = [75, 80, 90]
OPTIONS = ["--std=c++17"]
# A driver refuses PTX of a newer instruction set than its own: 12.4 writes 8.4.
NVRTC = (12, 4)
COMPRESSION_LEVEL = 19


def nvrtc():
    """The library of the Python package `nvidia-cuda-nvrtc-cu12`."""
    try:
        package = importlib.util.find_spec("nvidia.cuda_nvrtc")
    except ModuleNotFoundError:
        package = None
    if package is None:
        sys.exit("no NVRTC: install the Python package nvidia-cuda-nvrtc-cu12 (.ci/requirements.txt)")
    library = ctypes.CDLL(str(Path(package.submodule_search_locations[0]) / "lib/libnvrtc.so.12"))
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    if (major.value, minor.value) != NVRTC:
        sys.exit(f"NVRTC {major.value}.{minor.value} found, {NVRTC[0]}.{NVRTC[1]} wanted: see .ci/requirements.txt")
    return library


def sources(path, seen=None):
    """The file and those that it includes, in the order in which they are first included."""
    seen = [] if seen is None else seen
    if path not in seen:
        seen.append(path)
        for name in re.findall(r'^#include "(.+)"$', path.read_text("utf-8"), re.MULTILINE):
            sources(path.parent / name, seen)
    return seen


def compile_file(library, path):
    """The PTX for all architectures: a line with the hash of the sources, then for each architecture a line `// sm_N` and its PTX."""
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in sources(path))).hexdigest()
    sections = [f"// sm_{architecture}\n{compile_kernel(library, path, architecture)}" for architecture in ARCHITECTURES]
    return "\n".join([f"// sources: sha256 {digest}", *sections])


def compile_kernel(library, path, architecture):
    """PTX of a source file for one architecture."""
    program = ctypes.c_void_p()

    def check(code):
        if code:
            library.nvrtcGetErrorString.restype = ctypes.c_char_p
            sys.exit(f"{path.name}, sm_{architecture}: {library.nvrtcGetErrorString(code).decode()}\n{log()}")

    def text(size_of, get):
        size = ctypes.c_size_t()
        size_of(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        get(program, buffer)
        return buffer.value.decode()

    def log():
        return text(library.nvrtcGetProgramLogSize, library.nvrtcGetProgramLog)

    source, name = path.read_bytes(), path.name.encode()
    check(library.nvrtcCreateProgram(ctypes.byref(program), source, name, 0, None, None))
    options = [*OPTIONS, f"--gpu-architecture=compute_{architecture}", f"--include-path={KERNELS}"]
    options = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    check(library.nvrtcCompileProgram(program, len(options), options))
    if log().strip():
        print(log(), file=sys.stderr)
    ptx = text(library.nvrtcGetPTXSize, library.nvrtcGetPTX)
    library.nvrtcDestroyProgram(ctypes.byref(program))
    return ptx


def read_ptx(path):
    """The text of a PTX file; None if it does not exist or is damaged."""
    try:
        return zstandard.ZstdDecompressor().decompress(path.read_bytes()).decode()
    except (FileNotFoundError, UnicodeDecodeError, zstandard.ZstdError):
        return None


def write_ptx(path, ptx):
    compressor = zstandard.ZstdCompressor(level=COMPRESSION_LEVEL, write_checksum=True)
    path.write_bytes(compressor.compress(ptx.encode()))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    parser.add_argument("names", nargs="*", metavar="NAME")
    arguments = parser.parse_args()
    names = arguments.names or sorted(path.stem for path in KERNELS.glob("*.cu"))

    library, stale = nvrtc(), []
    for name in names:
        source, out = KERNELS / f"{name}.cu", PTX / f"{name}.ptx.zst"
        if not source.exists():
            sys.exit(f"{source} does not exist")
        ptx = compile_file(library, source)
        # Another version of zstd may compress the same text to other bytes.
        if read_ptx(out) == ptx:
            continue
        if arguments.check:
            stale.append(out.name)
        else:
            write_ptx(out, ptx)
    if stale:
        sys.exit(f"out of date: {', '.join(stale)}; run scripts/compile-kernels.py and commit the result")


if __name__ == "__main__":
    main()
