#!/usr/bin/env python3
"""Sends generated requests to a running server, and compares its responses with schemas/openapi.json.

    check_schema.py URL [--key KEY] [--max-examples N]

The description cannot contain the size of the vocabulary. Therefore the copy for this check limits token ids to those of the server's
model. Texts of valid requests have at most 4 tokens, which takes less time than a full context. Exits with the status of schemathesis. Packages: tests/requirements.txt.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

import schemathesis

SCHEMA = Path(__file__).resolve().parents[2] / "schemas" / "openapi.json"


# Maximum number of generated tokens of each path, by the name in its body.
LIMITS = {"/v1/completions": "max_tokens", "/v1/chat/completions": "max_completion_tokens", "/completion": "n_predict"}
MAX_TOKENS = 4


@schemathesis.hook
def before_call(context, case, kwargs):
    """Lowers the number of generated tokens. Values of a wrong type are not changed. schemathesis imports this file for this function."""
    key = LIMITS.get(case.operation.path)
    if key is None or not isinstance(case.body, dict):
        return
    limit = case.body.get(key)
    is_number = isinstance(limit, (int, float)) and not isinstance(limit, bool)
    if limit is None or (is_number and limit == int(limit) and (limit > MAX_TOKENS or key == "n_predict")):
        case.body[key] = MAX_TOKENS


def n_vocab(url, headers):
    request = urllib.request.Request(f"{url}/v1/models", headers=headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)["data"][0]["meta"]["n_vocab"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--key")
    parser.add_argument("--max-examples", type=int, default=50, help="requests of each operation and phase")
    args = parser.parse_args()
    url = args.url.rstrip("/")
    headers = {"Authorization": f"Bearer {args.key}"} if args.key else {}
    schema = json.loads(SCHEMA.read_text())
    schema["components"]["schemas"]["TokenId"]["maximum"] = n_vocab(url, headers) - 1
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "openapi.json"
        path.write_text(json.dumps(schema))
        command = [sys.executable, "-m", "schemathesis.cli", "run", path, "--url", url, "--checks", "all", "--seed", "1"]
        command += ["--max-examples", args.max_examples, "--workers", "1", "--no-color", "--request-timeout", "120"]
        command += ["--suppress-health-check", "filter_too_much"]
        for name, value in headers.items():
            command += ["--header", f"{name}: {value}"]
        environment = os.environ | {"SCHEMATHESIS_HOOKS": Path(__file__).stem, "PYTHONPATH": str(Path(__file__).resolve().parent)}
        # The working directory gets the files of schemathesis.
        sys.exit(subprocess.run([str(part) for part in command], cwd=directory, env=environment).returncode)


if __name__ == "__main__":
    main()
