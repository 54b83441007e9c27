"""Prints what the `gguf` package reads in each file: a line `name offset bytes` for each tensor."""

import sys

from gguf import GGUFReader

for path in sys.argv[1:]:
    reader = GGUFReader(path)
    print("data", reader.data_offset)
    for tensor in reader.tensors:
        print(tensor.name, tensor.data_offset, tensor.n_bytes)
