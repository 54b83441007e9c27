#!/usr/bin/env python3
"""Draws docs/plots/hot-cache.png and docs/plots/placement.png from the raw output of hot_cache.py.

  hot_cache_plots.py [hot-cache.txt] [DIRECTORY]

Needs matplotlib (notebooks/requirements.txt).
"""

import io
import json
import re
import statistics
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from PIL import Image

HERE = Path(__file__).parent
BLUE, ORANGE, GREY = "#0072b2", "#e69f00", "#999999"


def read(path):
    """The samples of each key: speeds and hit rates."""
    speeds, hits, expert_bytes = {}, {}, None
    for line in path.read_text().splitlines():
        if not line.startswith("{"):
            continue
        row = json.loads(line)
        if row.get("what") == "model" and "gpt-oss-20b" in row["model"]:
            expert_bytes = row["expert_bytes"]
        if row.get("what") == "speed":
            # hot_cache.py prints a line per sample; hot-cache.txt has one per key.
            samples = row["tokens_per_s"]
            speeds.setdefault(row["key"], []).extend(samples if isinstance(samples, list) else [samples])
            if "hit_pct" in row:
                hits.setdefault(row["key"], []).append(row["hit_pct"])
    return speeds, hits, expert_bytes


def draw_sizes(speeds, hits, expert_bytes, file):
    """Hit rate and tokens/s by cache size, next to the fork."""
    sizes = sorted({int(key.split()[2]) for key in speeds if re.fullmatch(r"ours t16 \d+ MiB", key)})
    labels = [f"{100 * (size << 20) / expert_bytes:.0f} %\n{size / 1024:.1f} GiB" for size in sizes]
    fig, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), gridspec_kw={"width_ratios": [2, 3]}, constrained_layout=True)
    rates = [statistics.median(hits.get(f"ours t16 {size} MiB", [0])) for size in sizes]
    left.bar(labels, rates, color=BLUE)
    left.bar_label(left.containers[0], fmt="%.0f", fontsize=8)
    left.set(ylabel="activations computed by the GPU (%)", ylim=(0, 110))
    for offset, who, name, color in ((-0.2, "ours", "moe-analyze", BLUE), (0.2, "fork", "fork of llama.cpp", ORANGE)):
        samples = [speeds.get(f"{who} t16 {size} MiB", [0]) for size in sizes]
        medians = [statistics.median(them) for them in samples]
        spread = [[m - min(them) for m, them in zip(medians, samples)], [max(them) - m for m, them in zip(medians, samples)]]
        bars = right.bar([i + offset for i in range(len(sizes))], medians, 0.4, yerr=spread, color=color, label=name, capsize=2,
                         error_kw={"linewidth": 0.8})
        right.bar_label(bars, fmt="%.0f", fontsize=8, padding=2)
    right.set_xticks(range(len(sizes)), labels)
    right.set(ylabel="generated tokens/s")
    right.legend(frameon=False, loc="upper left")
    for axis in (left, right):
        axis.tick_params(labelsize=8)
        axis.set_xlabel("cache size")
        axis.spines[["top", "right"]].set_visible(False)
    save(fig, file)


def draw_placement(speeds, file):
    """Tokens/s by the fraction of experts on the GPU, for several orders of the experts."""
    fig, axis = plt.subplots(figsize=(6, 3.6), constrained_layout=True)
    styles = {"frequency": (BLUE, "o-"), "front-loading": (ORANGE, "s--"), "uniform": ("#009e73", "^-."), "random": (GREY, "d:")}
    without = speeds.get("ours t16 0 MiB")
    for name, (color, style) in styles.items():
        points = [(0, without)] if without else []
        points += [(share, speeds.get(f"placement {name} {share} %")) for share in (25, 50, 75, 100)]
        points = [(share, samples) for share, samples in points if samples]
        medians = [statistics.median(samples) for _, samples in points]
        spread = [[m - min(s) for m, (_, s) in zip(medians, points)], [max(s) - m for m, (_, s) in zip(medians, points)]]
        axis.errorbar([share for share, _ in points], medians, yerr=spread, fmt=style, color=color, label=name, capsize=2, markersize=4)
    axis.set(xlabel="experts on the GPU (%)", ylabel="generated tokens/s", ylim=(0, None))
    axis.legend(title="order of the experts", frameon=False, fontsize=8, title_fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    save(fig, file)


def save(fig, file):
    """Writes the figure with a palette: a few colors are enough, and the file is a third as large."""
    buffer = io.BytesIO()
    fig.savefig(buffer, dpi=110)
    Image.open(buffer).convert("RGB").quantize(256).save(file, optimize=True)


def main():
    source = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "hot-cache.txt"
    plots = Path(sys.argv[2]) if len(sys.argv) > 2 else HERE.parent / "plots"
    speeds, hits, expert_bytes = read(source)
    draw_sizes(speeds, hits, expert_bytes, plots / "hot-cache.png")
    draw_placement(speeds, plots / "placement.png")


if __name__ == "__main__":
    main()
