#!/usr/bin/env python3
"""Speed of the hot expert cache, next to the fork of llama.cpp (adrianhoehne/llama.cpp, commit 04c1003), interleaved.

Every measurement is one JSON line on stdout; a summary follows. Both programs run with the same model, learn file, budget, prompt and number
of threads on the same CPU cores. Speeds are those of generation, without the prompt.

  hot_cache.py --moe-analyze BIN --work DIR [--llama-bin DIR] [--rounds N] PART...

PART is one of:
  gain       no cache and 5,000 MiB, 16 threads
  sweep      25, 50, 75 and 100 % of the bytes of all experts, 16 threads
  threads    no cache and 5,000 MiB, 4 and 8 threads
  counters   --perf off, update and full
  placement  experts selected at random, uniformly, from the first layers, and by frequency
"""

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
from pathlib import Path

PROMPT = "Explain how a mixture of experts selects the experts of a token, and why some experts are selected more often."
N_PREDICT = 256
MIB = 1 << 20


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=["gain", "sweep", "threads", "counters", "placement"])
    parser.add_argument("--moe-analyze", type=Path, required=True)
    parser.add_argument("--llama-bin", type=Path, help="directory of llama-completion and its libraries")
    parser.add_argument("--work", type=Path, required=True, help="directory of the model, 13 GB")
    parser.add_argument("--shape", default="gpt-oss-20b")
    parser.add_argument("--quant", default="MXFP4_MOE")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cores", type=int, default=16, help="both programs run on the cores 0 to N-1")
    return parser.parse_args()


args = parse_args()
samples = {}


def run(command, env=None, check=True):
    pinned = ["taskset", "-c", f"0-{args.cores - 1}", *map(str, command)]
    # llama.cpp would distribute the layers over all GPUs.
    env = {"CUDA_VISIBLE_DEVICES": "0", **os.environ, **(env or {})}
    done = subprocess.run(pinned, capture_output=True, text=True, env=env, errors="replace")
    if check and done.returncode != 0:
        raise RuntimeError(f"{pinned}: exit status {done.returncode}: {done.stderr[-500:]}")
    return done


def ours(*options, check=True):
    return run([args.moe_analyze, *options], check=check)


def report(what, **values):
    print(json.dumps({"what": what, **values}), flush=True)


def measure(key, function):
    """Adds the tokens/s of one run to the samples of `key`."""
    try:
        speed = function()
    except (RuntimeError, ValueError) as error:
        report("failed", key=key, error=str(error))
        return
    samples.setdefault(key, []).append(speed)
    report("speed", key=key, tokens_per_s=speed)


def ours_speed(model, threads, *options):
    command = ["record", "--trace", "off", "--model", model, "--device", "cuda", "--cpu-moe", "--threads", str(threads)]
    command += ["--prompt", PROMPT, "--n-predict", str(N_PREDICT), "--ignore-eos", "--ctx-size", "1024", *options]
    done = ours(*command)
    found = re.search(r"generated tokens \(([\d.]+) tokens/s\)", done.stderr)
    if not found:
        raise ValueError(f"no speed in: {done.stderr[-500:]}")
    return float(found[1])


def fork_speed(model, threads, *options):
    command = [args.llama_bin / "llama-completion", "-m", model, "-ngl", "99", "--cpu-moe", "-c", "1024", "-t", str(threads)]
    command += ["-p", PROMPT, "-n", str(N_PREDICT), "--ignore-eos", "--temp", "0", "-no-cnv", "--no-warmup", *options]
    done = run(command, env={"LLAMA_MOE_HOT_CACHE_FILL_RANDOM": "0", "LD_LIBRARY_PATH": str(args.llama_bin)})
    found = re.search(r"\beval time =.*?/ *\d+ runs.*?([\d.]+) tokens per second", done.stderr + done.stdout)
    if not found:
        raise ValueError(f"no speed in: {done.stderr[-500:]}")
    return float(found[1])


def cache(learn, mib):
    """Options of both programs for a cache of `mib` MiB; none for 0."""
    if mib == 0:
        return [], []
    own = ["--policy", "hot-cache", "--hot-cache", learn, "--hot-cache-mib", str(mib), "--hot-cache-weighting", "flat"]
    fork = ["--moe-hot-cache", learn, "--moe-hot-cache-max-mib", str(mib), "--moe-hot-cache-weighting", "flat"]
    return own, fork


def budgets(model, learn, threads, sizes, rounds):
    for _ in range(rounds):
        for mib in sizes:
            own, fork = cache(learn, mib)
            measure(f"ours t{threads} {mib} MiB", lambda own=own: ours_speed(model, threads, *(own or ["--policy", "cpu"])))
            if args.llama_bin:
                measure(f"fork t{threads} {mib} MiB", lambda fork=fork: fork_speed(model, threads, *fork))


def learn_file(experts):
    """A learn file with the experts in this order: `(layer, expert)`, best first."""
    layers = {}
    for rank, (layer, expert) in enumerate(experts):
        layers.setdefault(layer, []).append([expert, len(experts) - rank])
    layers = [{"layer": layer, "calls": 1, "experts": sorted(pairs)} for layer, pairs in sorted(layers.items())]
    return {"schema": "llama.cpp.moe_layer_opt_perf.v1", "layers": layers}


def placements(n_layer, n_expert, counts):
    """Orders of all experts: the first ones are on the GPU."""
    every = [(layer, expert) for layer in range(n_layer) for expert in range(n_expert)]
    shuffled = random.Random(0).sample(every, len(every))
    yield "random", shuffled
    yield "uniform", sorted(every, key=lambda it: (it[1], it[0]))
    yield "front-loading", every
    yield "frequency", sorted(every, key=lambda it: -counts.get(it, 0))


def prepare():
    """The model, its learn file, and the MiB of all experts."""
    args.work.mkdir(parents=True, exist_ok=True)
    model = args.work / f"{args.shape}-{args.quant}.gguf"
    if not model.exists():
        ours("--quiet", "synth", "--like", args.shape, "--quant", args.quant, "--out", model)
    learn, trace = args.work / "learn.json", args.work / "trace"
    if not learn.exists():
        ours("record", "--model", model, "--device", "cuda", "--prompt", PROMPT, "--n-predict", str(N_PREDICT), "--ignore-eos",
             "--trace", "experts", "--ctx-size", "1024", "--out", trace, "--force")
        ours("hotness", trace, "--out", learn, "--force")
    plan = json.loads(ours("plan", learn, "--model", model, "--budget-mib", "1000000", "-o", "json").stdout)
    return model, learn, plan


def summary():
    print("\nmedians (tokens/s)")
    medians = {key: statistics.median(speeds) for key, speeds in samples.items()}
    for key, speeds in samples.items():
        print(f"  {key:<28} {medians[key]:8.2f}   {' '.join(f'{speed:.2f}' for speed in speeds)}")
    for key, median in medians.items():
        who, threads, mib = (key.split() + ["", ""])[:3]
        base = medians.get(f"{who} {threads} 0 MiB")
        if who in ("ours", "fork") and base and mib != "0":
            print(f"  {key}: {median / base:.2f} x the speed without a cache")
        fork = medians.get(key.replace("ours", "fork"))
        if who == "ours" and fork:
            print(f"  {key}: {median / fork:.2f} x the fork")


def main():
    model, learn, plan = prepare()
    lanes = plan["lanes"]
    total = sum(lane["used_bytes"] for lane in lanes)
    report("model", model=model.name, bytes=model.stat().st_size, expert_bytes=total)
    quarters = [round(total / MIB * share / 4) + 1 for share in (1, 2, 3, 4)]
    if "gain" in args.parts:
        budgets(model, learn, 16, [0, 5000], args.rounds)
    if "threads" in args.parts:
        for threads in (4, 8):
            budgets(model, learn, threads, [0, 5000], args.rounds)
    if "sweep" in args.parts:
        budgets(model, learn, 16, quarters, args.rounds)
    if "counters" in args.parts:
        own, _ = cache(learn, 5000)
        for _ in range(args.rounds):
            for mode in ("off", "update", "full"):
                measure(f"ours t16 perf {mode}", lambda mode=mode: ours_speed(model, 16, *own, "--perf", mode))
    if "placement" in args.parts:
        counts = {}
        for layer in json.loads(learn.read_text())["layers"]:
            counts.update({(layer["layer"], expert): count for expert, count in layer["experts"]})
        n_layer = 1 + max(layer for layer, _ in counts)
        n_expert = json.loads(learn.read_text())["n_expert"]
        for name, experts in placements(n_layer, n_expert, counts):
            for share in (1, 2, 3, 4):
                n = len(experts) * share // 4
                file = args.work / f"{name}-{share}.json"
                file.write_text(json.dumps(learn_file(experts[:n])))
                own, _ = cache(file, quarters[-1])
                measure(f"placement {name} {25 * share} %", lambda own=own: ours_speed(model, 16, *own))
    summary()


if __name__ == "__main__":
    try:
        main()
    except RuntimeError as error:
        sys.exit(str(error))
