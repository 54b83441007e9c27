#!/usr/bin/env python3
"""Speed of the hot expert cache, next to the fork of llama.cpp (adrianhoehne/llama.cpp, commit 04c1003), interleaved.

Every measurement is one JSON line on stdout; a summary follows. Both programs run with the same model, learn file, budget, prompt and number
of threads on the same CPU cores. Speeds are those of generation, without the prompt.

  hot_cache.py --moe-analyze BIN --work DIR [--llama-bin DIR] [--rounds N] [--cores FIRST-LAST] PART... > hot-cache.txt

PART is one of:
  gain       no cache and 5,000 MiB, 16 threads
  sweep      0, 25, 50, 75 and 100 % of the bytes of all experts, 16 threads
  threads    no cache and 5,000 MiB, 4 and 8 threads
  counters   --perf off, update and full, alternating in one process
  budgets    the same percentages in one process, without the fork
  placement  experts selected at random, uniformly, from the first layers, and by frequency
  predicted  the bounds that `simulate` predicts, next to the results of `sweep` in the file --sweep; needs no GPU

CUDA_VISIBLE_DEVICES selects the GPU (default 0). hot_cache_plots.py draws the results.
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
    parser.add_argument("parts", nargs="+", choices=["gain", "sweep", "threads", "counters", "budgets", "placement", "predicted"])
    parser.add_argument("--moe-analyze", type=Path, required=True)
    parser.add_argument("--llama-bin", type=Path, help="directory of llama-completion and its libraries")
    parser.add_argument("--work", type=Path, required=True, help="directory of the model, 13 GB")
    parser.add_argument("--shape", default="gpt-oss-20b")
    parser.add_argument("--quant", default="MXFP4_MOE")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cuda", help="device that records the trace of the learn file")
    parser.add_argument("--sweep", type=Path, help="output with the results of the part sweep")
    parser.add_argument("--gpu-gb-s", type=float, default=4200.0, help="memory bandwidth of the GPU in 10^9 bytes/s")
    parser.add_argument("--cores", default="0-15", help="cores of both programs")
    return parser.parse_args()


args = parse_args()
samples = {}


def run(command, env=None, check=True):
    pinned = ["taskset", "-c", args.cores, *map(str, command)]
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
    """Adds the tokens/s of one run to the samples of `key`. Without counters, the hit rate is unknown."""
    try:
        speed, hit_rate = function()
    except (RuntimeError, ValueError) as error:
        report("failed", key=key, error=str(error))
        return
    samples.setdefault(key, []).append(speed)
    report("speed", key=key, tokens_per_s=speed, **({} if hit_rate is None else {"hit_pct": hit_rate}))


def ours_speed(model, threads, *options):
    command = ["record", "--trace", "off", "--model", model, "--device", "cuda", "--cpu-moe", "--threads", str(threads)]
    command += ["--prompt", PROMPT, "--n-predict", str(N_PREDICT), "--ignore-eos", "--ctx-size", "1024", *options]
    done = ours(*command)
    found = re.search(r"generated tokens \(([\d.]+) tokens/s\)", done.stderr)
    if not found:
        raise ValueError(f"no speed in: {done.stderr[-500:]}")
    hits = re.search(r"hot cache: ([\d.]+) % of", done.stderr)
    return float(found[1]), hits and float(hits[1])


def fork_speed(model, threads, *options):
    command = [args.llama_bin / "llama-completion", "-m", model, "-ngl", "99", "--cpu-moe", "-c", "1024", "-t", str(threads)]
    command += ["-p", PROMPT, "-n", str(N_PREDICT), "--ignore-eos", "--temp", "0", "-no-cnv", "--no-warmup", *options]
    done = run(command, env={"LLAMA_MOE_HOT_CACHE_FILL_RANDOM": "0", "LD_LIBRARY_PATH": str(args.llama_bin)})
    found = re.search(r"\beval time =.*?/ *\d+ runs.*?([\d.]+) tokens per second", done.stderr + done.stdout)
    if not found:
        raise ValueError(f"no speed in: {done.stderr[-500:]}")
    return float(found[1]), None


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
    """The model, its learn file, the trace that it counts, orders of all experts, and a lane with all of them."""
    args.work.mkdir(parents=True, exist_ok=True)
    model = args.work / f"{args.shape}-{args.quant}.gguf"
    if not model.exists():
        ours("--quiet", "synth", "--like", args.shape, "--quant", args.quant, "--out", model)
    learn, trace = args.work / "learn.json", args.work / "trace"
    if not learn.exists():
        ours("record", "--model", model, "--device", args.device, "--prompt", PROMPT, "--n-predict", str(N_PREDICT), "--ignore-eos",
             "--trace", "experts", "--ctx-size", "1024", "--out", trace, "--force")
        ours("hotness", trace, "--out", learn, "--force")
    counts = {}
    learned = json.loads(learn.read_text())
    for layer in learned["layers"]:
        counts.update({(layer["layer"], expert): count for expert, count in layer["experts"]})
    orders = dict(placements(1 + max(layer for layer, _ in counts), learned["n_expert"], counts))
    everything = args.work / "everything.json"
    everything.write_text(json.dumps(learn_file(orders["frequency"])))
    plan = json.loads(ours("plan", everything, "--model", model, "--budget-mib", "1000000", "-o", "json").stdout)
    return model, learn, trace, orders, plan["lanes"][0]


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


def paired(options):
    """`bench` with several values of --perf: one row per value, with the ratio of its times to those of the first."""
    done = ours("bench", *options, "-p", "0", "-n", "128", "-r", "20", "-o", "json")
    for row in json.loads(done.stdout):
        report("paired", **{key: row[key] for key in ("perf", "avg_ts", "stddev_ts", "time_ratio", "time_ratio_low", "time_ratio_high")})


def predicted(model, learn, trace, sizes, expert_bytes):
    """Bounds of tokens/s that `simulate` predicts from the speeds without a cache and with all experts in it."""
    n_layer, top_k = (json.loads((trace / "manifest.json").read_text())["model"][key] for key in ("n_layer", "n_expert_used"))
    lookups = n_layer * top_k
    without, everything = (statistics.median(samples[f"ours t16 {mib} MiB"]) for mib in (sizes[0], sizes[-1]))
    # Reads of an expert at the bandwidth of the GPU; other time and the time on the CPU follow from the two speeds.
    gpu_us = expert_bytes / args.gpu_gb_s / 1e3
    other_ms = 1e3 / everything - lookups * gpu_us / 1e3
    cpu_us = (1e6 / without - 1e3 * other_ms) / lookups
    report("machine", gpu_expert_us=round(gpu_us, 3), cpu_expert_us=round(cpu_us, 3), other_ms=round(other_ms, 3))
    rows = json.loads(ours(
        "simulate", trace, "--model", model, "--policy", "hotcache", "--learn", learn, "--update-rate", "0",
        "--budget-mib", ",".join(map(str, sizes[1:])), "--pcie-gb-s", "50", "--gpu-expert-us", f"{gpu_us}",
        "--cpu-expert-us", f"{cpu_us}", "--other-ms", f"{other_ms}", "-o", "json").stdout)
    for row in rows:
        measured = statistics.median(samples[f"ours t16 {row['budget_mib']} MiB"])
        low, high = row["tokens_s_min"], row["tokens_s_max"]
        error = min(0, measured / low - 1) + max(0, measured / high - 1)
        report("predicted", mib=row["budget_mib"], hit_pct=row["hit_pct_decode"], tokens_s_min=low, tokens_s_max=high,
               measured=measured, outside_pct=round(100 * error, 1))


def main():
    model, learn, trace, orders, everything = prepare()
    total = everything["used_bytes"]
    report("model", model=model.name, bytes=model.stat().st_size, expert_bytes=total)
    sizes = [0] + [round(total / MIB * share / 4) + 1 for share in (1, 2, 3, 4)]
    if "gain" in args.parts:
        budgets(model, learn, 16, [0, 5000], args.rounds)
    if "threads" in args.parts:
        for threads in (4, 8):
            budgets(model, learn, threads, [0, 5000], args.rounds)
    if "sweep" in args.parts:
        budgets(model, learn, 16, sizes, args.rounds)
    if "predicted" in args.parts:
        for line in args.sweep.read_text().splitlines():
            if line.startswith('{"what": "speed"'):
                row = json.loads(line)
                speeds = row["tokens_per_s"]  # hot-cache.txt has a line per key
                samples.setdefault(row["key"], []).extend(speeds if isinstance(speeds, list) else [speeds])
        predicted(model, learn, trace, sizes, total / everything["experts"])
        return
    common = ["--model", model, "--device", "cuda", "--cpu-moe", "--threads", "16", "--policy", "hot-cache", "--hot-cache", learn,
              "--hot-cache-weighting", "flat"]
    if "counters" in args.parts:
        paired([*common, "--hot-cache-mib", "5000", "--perf", "off,off,update,full"])
    if "budgets" in args.parts:
        rows = ours("bench", *common, "--hot-cache-percent", "0,25,50,75,100", "-p", "512", "-n", "128", "-o", "json")
        for row in json.loads(rows.stdout):
            report("budget", **{key: row[key] for key in ("hot_cache_percent", "n_prompt", "n_gen", "avg_ts", "stddev_ts", "hit_rate")})
    if "placement" in args.parts:
        for _ in range(args.rounds):
            for share in (1, 2, 3, 4):
                for name, experts in orders.items():
                    file = args.work / f"{name}-{share}.json"
                    file.write_text(json.dumps(learn_file(experts[:len(experts) * share // 4])))
                    own, _ = cache(file, sizes[-1])
                    measure(f"placement {name} {25 * share} %", lambda own=own: ours_speed(model, 16, *own))
    summary()


if __name__ == "__main__":
    try:
        main()
    except RuntimeError as error:
        sys.exit(str(error))
