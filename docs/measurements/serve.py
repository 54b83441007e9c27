#!/usr/bin/env python3
"""Throughput and latency of `serve`, and its memory under load. Needs Python's standard library only.

Starts `moe-analyze serve` on a loopback port with the options after `--`, sends requests, and prints one JSON line per result.

  serve.py --moe-analyze BIN --model FILE [--clients 1,4,16] [--rounds N] [--requests N] [--n-prompt N] [--n-predict N] speed [-- OPTION...]
  serve.py --moe-analyze BIN --model FILE [--seconds N] load [-- OPTION...]

  speed   every client sends requests one after another; tokens/s over all clients, and percentiles of the time to the first token and of
          the time between parts of a stream. Alternates with `bench --parallel` with the same options and as many sequences, in rounds.
          `ratio_to_bench` compares the generation of all clients with it, without prompts and without the queue. `pass_ms` is the mean
          time of a forward pass with its sampling, from /metrics.
  load    mixed requests for --seconds (default 3600): streams, complete answers, clients that disconnect, malformed bodies. Prints the
          resident memory of the server once a minute, and at the end its medians in both halves of the time.
"""

import argparse
import http.client
import json
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["speed", "load"])
    parser.add_argument("--moe-analyze", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--port", type=int, default=18080)
    parser.add_argument("--clients", default="1,4,16", help="numbers of clients; the largest is the number of slots")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of `bench` and of all clients")
    parser.add_argument("--requests", type=int, default=4, help="requests of each client in a round")
    parser.add_argument("--n-prompt", type=int, default=32, help="tokens of each prompt")
    parser.add_argument("--n-predict", type=int, default=128, help="tokens of each answer")
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("options", nargs="*", help="options of `serve`, after --")
    return parser.parse_args()


args = parse_args()
clients = [int(number) for number in args.clients.split(",")]


def report(what, **values):
    print(json.dumps({"what": what, **values}), flush=True)


class Server:
    """A running server. Leaving the block ends it with SIGTERM."""

    def __enter__(self):
        command = [args.moe_analyze, "serve", "--model", args.model, "--port", args.port, "--parallel", max(clients), *args.options]
        self.process = subprocess.Popen([str(part) for part in command], stdout=subprocess.DEVNULL)
        while True:
            if self.process.poll() is not None:
                sys.exit(f"the server ended with {self.process.returncode}")
            try:
                if request("GET", "/health")[0] == 200:
                    return self
            except OSError:
                pass
            time.sleep(0.1)

    def __exit__(self, *_):
        self.process.send_signal(signal.SIGTERM)
        report("stopped", exit_status=self.process.wait(timeout=120))

    def resident_bytes(self):
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return 1024 * int(status.split("VmRSS:")[1].split()[0])


def connect():
    return http.client.HTTPConnection("127.0.0.1", args.port, timeout=600)


def request(method, path, body=None):
    connection = connect()
    try:
        connection.request(method, path, body, {"Content-Type": "application/json"} if body else {})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def prompt(number):
    """Token ids that differ between requests and exist in every vocabulary of the fixtures."""
    generator = random.Random(number)
    return [generator.randrange(3, 250) for _ in range(args.n_prompt)]


def stream(number, n_predict, stop_after=None):
    """Streams an answer. Returns the times of its parts, relative to the start, and the number of its tokens. A part has several tokens if a
    character has. Disconnects after `stop_after` parts, without the number of tokens."""
    body = {"prompt": prompt(number), "n_predict": n_predict, "temperature": 0, "ignore_eos": True, "stream": True}
    start, times, n_tokens = time.monotonic(), [], None
    connection = connect()
    try:
        connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise RuntimeError(f"{answer.status}: {answer.read()[:200]}")
        for line in answer:
            part = json.loads(line[6:]) if line.startswith(b"data: {") else None
            if part and part.get("stop"):
                n_tokens = part["tokens_predicted"]
            elif part:
                times.append(time.monotonic() - start)
                if len(times) == stop_after:
                    break
    finally:
        connection.close()
    return times, n_tokens


def percentiles(values):
    values = sorted(values)
    return {f"p{p}": round(1e3 * values[min(len(values) - 1, len(values) * p // 100)], 2) for p in (50, 90, 99)}


def bench(n):
    """Tokens/s of `bench` with `n` sequences, all together."""
    command = [args.moe_analyze, "--quiet", "bench", "--model", args.model, "--parallel", n, "-p", 0, "-n", args.n_predict, "-r", 2]
    command += ["-o", "json", *args.options]
    rows = json.loads(subprocess.run([str(part) for part in command], capture_output=True, text=True, check=True).stdout)
    return rows[0]["avg_ts"]


def passes():
    """Number of passes so far and their seconds."""
    lines = request("GET", "/metrics")[1].decode().splitlines()
    metrics = dict(line.split() for line in lines if len(line.split()) == 2)
    seconds = sum(float(metrics[f"moe_{phase}_seconds_total"]) for phase in ("prompt", "generation"))
    return int(metrics["moe_passes_total"]), seconds


def speed(server):
    stream(0, 8)
    for _ in range(args.rounds):
        for n in clients:
            speed_of(n, bench(n))


def speed_of(n, bench_tokens_per_s):
    answers, lock, before = [], threading.Lock(), passes()

    def client(index):
        for i in range(args.requests):
            answer = stream(1 + index + n * i, args.n_predict)
            with lock:
                answers.append(answer)

    start = time.monotonic()
    threads = [threading.Thread(target=client, args=(index,)) for index in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.monotonic() - start
    (n_passes, pass_seconds), (n_before, seconds_before) = passes(), before
    n_tokens = sum(n_tokens for _, n_tokens in answers)
    gaps = [b - a for times, _ in answers for a, b in zip(times, times[1:])]
    # While all clients decode: without prompts and without the queue.
    per_client = [(n_tokens - 1) / (times[-1] - times[0]) for times, n_tokens in answers]
    of_client = statistics.median(per_client)
    report("speed", clients=n, requests=len(answers), tokens=n_tokens, seconds=round(seconds, 3),
           tokens_per_s=round(n_tokens / seconds, 2), decode_tokens_per_s_of_a_client=round(of_client, 2),
           bench_tokens_per_s=bench_tokens_per_s, ratio_to_bench=round(n * of_client / bench_tokens_per_s, 3),
           pass_ms=round(1e3 * (pass_seconds - seconds_before) / (n_passes - n_before), 3),
           first_token_ms=percentiles([times[0] for times, _ in answers]), between_parts_ms=percentiles(gaps))


def load(server):
    """Mixed load. Each request checks its own answer; a wrong status is counted as a failure."""
    counts, lock, end = {}, threading.Lock(), time.monotonic() + args.seconds

    def count(kind):
        with lock:
            counts[kind] = counts.get(kind, 0) + 1

    def client(index):
        generator = random.Random(index)
        while time.monotonic() < end:
            kind = generator.choice(["stream", "answer", "disconnect", "malformed", "metrics"])
            number = generator.randrange(1000)
            try:
                if kind == "stream":
                    right = stream(number, 16)[1] == 16
                elif kind == "disconnect":
                    right = len(stream(number, 200, stop_after=3)[0]) == 3
                elif kind == "answer":
                    body = {"prompt": prompt(number), "n_predict": 8, "temperature": 0, "ignore_eos": True}
                    status, answer = request("POST", "/completion", json.dumps(body))
                    right = status == 200 and json.loads(answer)["tokens_predicted"] == 8
                elif kind == "malformed":
                    right = request("POST", "/v1/completions", '{"prompt": ')[0] == 400
                else:
                    right = request("GET", "/metrics")[0] == 200
            except (OSError, RuntimeError, http.client.HTTPException, ValueError) as error:
                right = "429" in str(error)
                kind = "refused" if right else kind
            count(kind if right else f"failed {kind}")
            time.sleep(0.02)

    threads = [threading.Thread(target=client, args=(index,), daemon=True) for index in range(max(clients) + 2)]
    for thread in threads:
        thread.start()
    samples, start = [], time.monotonic()
    while time.monotonic() < end:
        time.sleep(min(60, max(0, end - time.monotonic())))
        samples.append(server.resident_bytes())
        report("memory", minutes=round((time.monotonic() - start) / 60, 1), resident_bytes=samples[-1], requests=dict(counts))
    for thread in threads:
        thread.join(timeout=60)
    half = len(samples) // 2
    early, late = (statistics.median(part) if part else 0 for part in (samples[1:half], samples[half:]))
    report("load", requests=counts, median_bytes_first_half=early, median_bytes_second_half=late)
    if any(kind.startswith("failed") for kind in counts):
        sys.exit("some requests failed")


with Server() as server:
    (speed if args.part == "speed" else load)(server)
