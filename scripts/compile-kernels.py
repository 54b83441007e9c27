#!/usr/bin/env python3
"""Compiles the CUDA kernels to the compressed PTX files that the program embeds. Needs neither a GPU nor the CUDA toolkit:

    pip install -r .ci/requirements.txt     # NVRTC and zstandard
    scripts/compile-kernels.py [--check] [NAME ...]

NAME is a file in crates/moe-executor/src/cuda/kernels without .cu (default: all files). A PTX file contains the modules of a family, such
as those whose names start with `products_`, each with a section for each architecture. --check writes nothing; the exit code is 1 if a
module does not match its source. `zstd -dc FILE` prints a PTX file, in which the numbers of registers and labels are differences.
"""

import argparse
import ctypes
import hashlib
import importlib.util
import itertools
import re
import sys
from pathlib import Path

try:
    import zstandard
except ModuleNotFoundError:
    sys.exit("the Python package zstandard is missing: pip install -r .ci/requirements.txt")

CUDA = Path(__file__).resolve().parent.parent / "crates/moe-executor/src/cuda"
KERNELS, PTX = CUDA / "kernels", CUDA / "ptx"
# The driver compiles PTX for any device whose compute capability is at least the architecture. 8.0 adds integer matrix
# instructions and asynchronous copies to shared memory, 9.0 programmatic dependent launch.
ARCHITECTURES = [75, 80, 90]
OPTIONS = ["--std=c++17"]
# A driver rejects PTX of a newer ISA version than its own. NVRTC 12.4 writes PTX ISA 8.4.
NVRTC = (12, 4)
COMPRESSION_LEVEL = 19
MODULE = "// module "


def nvrtc():
    """Loads NVRTC from the Python package `nvidia-cuda-nvrtc-cu12`."""
    try:
        package = importlib.util.find_spec("nvidia.cuda_nvrtc")
    except ModuleNotFoundError:
        package = None
    if package is None:
        sys.exit("the Python package nvidia-cuda-nvrtc-cu12 is missing: pip install -r .ci/requirements.txt")
    library = ctypes.CDLL(str(Path(package.submodule_search_locations[0]) / "lib/libnvrtc.so.12"))
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    if (major.value, minor.value) != NVRTC:
        found, required = f"{major.value}.{minor.value}", f"{NVRTC[0]}.{NVRTC[1]}"
        sys.exit(f"NVRTC is version {found}, but {required} is required: pip install -r .ci/requirements.txt")
    return library


def sources(path, seen=None):
    """Returns the file and its includes, recursively, in the order of their first inclusion."""
    seen = [] if seen is None else seen
    if path not in seen:
        seen.append(path)
        for name in re.findall(r'^#include "(.+)"$', path.read_text("utf-8"), re.MULTILINE):
            sources(path.parent / name, seen)
    return seen


def compile_file(library, path):
    """Returns a module: a line with its name and the hash of the sources; per architecture, a line `// sm_N` and its PTX."""
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in sources(path))).hexdigest()
    sections = [f"// sm_{architecture}\n{compile_kernel(library, path, architecture)}" for architecture in ARCHITECTURES]
    return "\n".join([f"{MODULE}{path.stem}, sources: sha256 {digest}", *sections])


def compile_kernel(library, path, architecture):
    """Returns the PTX of a source file for one architecture."""
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
    return with_differences(ptx)


def with_differences(ptx):
    """Replaces the number of each register or label by the difference to the previous one of its kind, such as %r12 by %r+1 and $L__BB0_3
    by $L__BB0_+1. Unrolled loops then repeat the same text, and the compressed files have half the size. The program restores the numbers."""
    last = {}

    def difference(name):
        kind, number = name[1], int(name[2])
        change = number - last.get(kind, 0)
        last[kind] = number
        return f"{kind}{change:+}"

    without_comments = re.sub(r"(?m)^\s*// [a-z]+ inline asm\n", "", ptx)
    return re.sub(r"(%[a-z]+|\$L__BB[0-9]+_)([0-9]+)", difference, without_comments)


def read_family(path):
    """Returns the modules of a compressed PTX file by name. A file that does not exist or is damaged has none."""
    try:
        text = zstandard.ZstdDecompressor().decompress(path.read_bytes()).decode()
    except (FileNotFoundError, UnicodeDecodeError, zstandard.ZstdError):
        return {}
    modules = [MODULE + module for module in text.split(MODULE)[1:]]
    return {module[len(MODULE):].split(",")[0]: module for module in modules}


def write_family(path, modules):
    """Writes a PTX file. Modules of a family are similar, so the compressor looks back over all of them."""
    text = "".join(modules[name] for name in sorted(modules)).encode()
    parameters = zstandard.ZstdCompressionParameters.from_level(COMPRESSION_LEVEL, window_log=24, enable_ldm=True, write_checksum=True)
    path.write_bytes(zstandard.ZstdCompressor(compression_params=parameters).compress(text))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare and write nothing")
    parser.add_argument("names", nargs="*", metavar="NAME")
    arguments = parser.parse_args()
    names = arguments.names or sorted(path.stem for path in KERNELS.glob("*.cu"))

    library, stale = nvrtc(), []
    for name in names:
        if not (KERNELS / f"{name}.cu").exists():
            sys.exit(f"{KERNELS / name}.cu does not exist")
    for family, group in itertools.groupby(sorted(names), lambda name: name.split("_")[0]):
        file = PTX / f"{family}.ptx.zst"
        present = read_family(file)
        compiled = {name: compile_file(library, KERNELS / f"{name}.cu") for name in group}
        # Modules whose source was removed do not stay.
        modules = {name: module for name, module in {**present, **compiled}.items() if (KERNELS / f"{name}.cu").exists()}
        # Compares the text: another version of zstd may produce other bytes.
        if present == modules:
            continue
        if arguments.check:
            stale += sorted(name for name in {*present, *modules} if present.get(name) != modules.get(name))
        else:
            write_family(file, modules)
    if stale:
        sys.exit(f"out of date: {', '.join(stale)}; run scripts/compile-kernels.py and commit the result")


if __name__ == "__main__":
    main()
