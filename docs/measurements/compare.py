#!/usr/bin/env python3
"""Speed on a GPU next to llama.cpp, interleaved, in parts of a few minutes that can run on different machines.

  compare.py run PART --moe-analyze BIN --llama-bench BIN --work DIR [--rounds N] >> compare.jsonl
  compare.py table compare.jsonl

`run` writes a JSON line for each measurement: both programs run the same file with the same numbers of tokens, one after the other, in each
round. `table` prints the medians and the median of the paired ratios as a Markdown table. PART is one of:

  decode    128 tokens after an empty context and after 8,192 tokens
  prompt    prompts of 128, 512, 2,048 and 8,192 tokens
  float     prompts of 512 and 2,048 tokens with dense weights in F16
  host      experts in CPU memory: a prompt of 512 tokens, and 32 tokens
  architectures      a prompt of 512 tokens and 32 tokens, with models of a few layers (0.9 to 4.5 GB)
  architectures-cpu  the same on the CPU, with prompts of 128 tokens

The models are synthetic: `moe-analyze synth` writes them to the directory --work (32 GB; the short ones are removed afterwards). A null stands for a model that the program
cannot load.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path

MODELS = {
    "gpt-oss-20b MXFP4": ["--like", "gpt-oss-20b", "--quant", "MXFP4_MOE"],
    "qwen3-30b-a3b Q4_K_M": ["--like", "qwen3-30b-a3b", "--quant", "Q4_K_M"],
    "gpt-oss-20b MXFP4, dense weights in F16": ["--like", "gpt-oss-20b"],
}
BOTH = list(MODELS)[:2]
# Numbers of layers.
SHORT = {
    "afmoe": 8, "deepseek-v2-lite": 8, "gemma4-26b-a4b": 4, "glm-4.5-air": 2, "granite-4-h-tiny": 10, "lfm2-8b-a1b": 10,
    "nemotron-3-nano-30b-a3b": 8, "qwen35moe-35b-a3b": 4, "qwen3-next-80b-a3b": 4, "qwen3-30b-a3b": 6,
}
MODELS |= {f"{name}, {layers} layers": ["--like", name, "--quant", "Q4_K_M", "--layers", str(layers)] for name, layers in SHORT.items()}
# Models; tests as prompt, generated and depth in tokens; where the model is: on the GPU, on the GPU with experts in CPU memory ("host"), or
# on the CPU; repetitions in a round.
PARTS = {
    "decode": (BOTH, [(0, 128, 0), (0, 128, 8192)], "gpu", 2),
    "prompt": (BOTH, [(128, 0, 0), (512, 0, 0), (2048, 0, 0), (8192, 0, 0)], "gpu", 2),
    "float": (list(MODELS)[2:3], [(512, 0, 0), (2048, 0, 0)], "gpu", 2),
    "host": (BOTH, [(512, 0, 0), (0, 32, 0)], "host", 1),
    "architectures": (list(MODELS)[3:], [(512, 0, 0), (0, 32, 0)], "gpu", 2),
    "architectures-cpu": (list(MODELS)[3:], [(128, 0, 0), (0, 32, 0)], "cpu", 1),
}


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run")
    run.add_argument("part", choices=PARTS)
    run.add_argument("--moe-analyze", type=Path, required=True)
    run.add_argument("--llama-bench", type=Path, required=True)
    run.add_argument("--work", type=Path, required=True, help="directory for the models")
    run.add_argument("--rounds", type=int, default=5)
    run.add_argument("--threads", type=int, default=16)
    table = commands.add_parser("table")
    table.add_argument("files", type=Path, nargs="+")
    return parser.parse_args()


def output_of(command, **environment):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, env=os.environ | environment)
    if done.returncode != 0:
        raise RuntimeError(f"{command[0]} failed with exit code {done.returncode}: {done.stderr[-800:]}")
    return done.stdout


def model(args, name):
    path = args.work / f"{name.replace(' ', '-').replace(',', '')}.gguf"
    if not path.exists():
        args.work.mkdir(parents=True, exist_ok=True)
        output_of([args.moe_analyze, "--quiet", "synth", *MODELS[name], "--out", path])
    return path


def of_llama_cpp(args, path, test, place, repetitions):
    prompt, generated, depth = test
    command = [args.llama_bench, "-m", path, "-ngl", 0 if place == "cpu" else 99, "-fa", 1, "-p", prompt, "-n", generated, "-d", depth, "-r", repetitions, "-t", args.threads, "-o", "json"]
    if place == "host":
        command += ["-ncmoe", 99]
    environment = {"LD_LIBRARY_PATH": str(args.llama_bench.parent)}
    if place == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    return json.loads(output_of(command, **environment))[0]["avg_ts"]


def of_moe_analyze(args, path, test, place, repetitions):
    prompt, generated, depth = test
    command = [args.moe_analyze, "--quiet", "bench", "-m", path, "--device", "cpu" if place == "cpu" else "cuda", "-p", prompt, "-n", generated, "-d", depth, "-r", repetitions]
    command += ["-t", args.threads, "-o", "json"]
    if place == "host":
        command += ["--cpu-moe", "--policy", "cpu"]
    return json.loads(output_of(command))[0]["avg_ts"]


def run(args):
    models, tests, place, repetitions = PARTS[args.part]
    gpu = output_of(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]).splitlines()[0]
    version = output_of([args.moe_analyze, "--version"]).strip()
    print(json.dumps({"machine": platform.processor() or platform.machine(), "cpus": os.cpu_count(), "gpu": gpu, "program": version}), flush=True)
    for name in models:
        path = model(args, name)
        for test in tests:
            for number in range(args.rounds):
                programs = [of_llama_cpp, of_moe_analyze]
                speeds = {}
                # Alternately first, so that a change of the clock affects both.
                for program in programs if number % 2 == 0 else programs[::-1]:
                    try:
                        speed = round(program(args, path, test, place, repetitions), 2)
                    except RuntimeError as error:
                        speed = None
                        print(error, file=sys.stderr)
                    speeds[program.__name__[3:]] = speed
                row = {"part": args.part, "model": name, "n_prompt": test[0], "n_gen": test[1], "n_depth": test[2], "place": place, "round": number}
                print(json.dumps(row | speeds), flush=True)
        if "layers" in name:
            path.unlink()


def name_of(row):
    what = f"prompt of {row['n_prompt']:,} tokens" if row["n_prompt"] else f"{row['n_gen']} tokens"
    if row["n_depth"]:
        what += f" at depth {row['n_depth']:,}"
    return what + {"gpu": "", "host": ", experts in CPU memory", "cpu": ", on the CPU"}[row["place"]]


def table(args):
    rows = {}
    for file in args.files:
        for line in file.read_text("utf-8").splitlines():
            row = json.loads(line)
            if "model" in row and row["moe_analyze"] and row["llama_cpp"]:
                rows.setdefault((row["model"], name_of(row)), []).append((row["moe_analyze"], row["llama_cpp"]))
    print("| model | test | tokens/s | llama.cpp (tokens/s) | ratio | rounds |")
    print("|---|---|---|---|---|---|")
    for (name, test), speeds in rows.items():
        ours, theirs = (statistics.median(column) for column in zip(*speeds))
        ratio = statistics.median(a / b for a, b in speeds)
        print(f"| {name} | {test} | {ours:,.0f} | {theirs:,.0f} | {ratio:.2f} × | {len(speeds)} |")


if __name__ == "__main__":
    arguments = parse_args()
    run(arguments) if arguments.command == "run" else table(arguments)
