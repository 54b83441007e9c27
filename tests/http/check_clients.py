#!/usr/bin/env python3
"""Uses a running server through the openai package and curl.

    check_clients.py URL [KEY]

The server may serve any model with a chat template. Prints one line for each check, and exits with 1 at the first failure.
Packages: tests/requirements.txt.
"""

import json
import subprocess
import sys
import threading

import openai

PROMPT = "The kernel driver is responsible for"
MESSAGES = [{"role": "user", "content": "Say hello."}]


def check(condition, text):
    if not condition:
        sys.exit(f"failed: {text}")
    print(f"ok: {text}")


def check_models(client):
    models = client.models.list().data
    check(len(models) == 1, "models.list has one model")
    model = models[0].id
    check(client.models.retrieve(model).id == model, "models.retrieve finds the model")
    return model


def token_bytes(name):
    """Bytes of a token from its name in the log probabilities: text, or bytes that are not valid UTF-8."""
    if not name.startswith("bytes:"):
        return name.encode()
    return bytes.fromhex(name.removeprefix("bytes:").replace("\\x", ""))


def check_completions(client, model):
    def create(**arguments):
        return client.completions.create(model=model, prompt=PROMPT, **arguments)

    first = create(max_tokens=8, seed=7, logprobs=2)
    choice, usage = first.choices[0], first.usage
    check(usage.total_tokens == usage.prompt_tokens + usage.completion_tokens, "usage is the sum of its parts")
    check(0 < usage.completion_tokens <= 8, "max_tokens limits the text")
    pieces = b"".join(token_bytes(token) for token in choice.logprobs.tokens)
    check(pieces.decode(errors="replace") == choice.text, "the tokens are the text")
    check(all(len(top) <= 2 for top in choice.logprobs.top_logprobs), "logprobs limits the most probable tokens")
    check(create(max_tokens=8, seed=7).choices[0].text == choice.text, "a seed yields the same text again")

    parts = list(create(max_tokens=8, seed=7, stream=True, stream_options={"include_usage": True}))
    text = "".join(part.choices[0].text for part in parts if part.choices)
    check(text == choice.text, "a stream has the same text")
    check(parts[-1].usage == usage, "a stream ends with usage")

    stop = choice.text[len(choice.text) // 2 :]
    stopped = create(max_tokens=8, seed=7, stop=[stop]).choices[0]
    check(stopped.text == choice.text[: choice.text.index(stop)], "stop ends the text before the sequence")
    check(stopped.finish_reason == "stop", "finish_reason is stop")

    several = client.completions.create(model=model, prompt=["a", "b"], max_tokens=2).choices
    check([choice.index for choice in several] == [0, 1], "two prompts yield two choices")


def check_chat(client, model):
    def create(**arguments):
        return client.chat.completions.create(model=model, messages=MESSAGES, seed=7, max_completion_tokens=8, **arguments)

    choice = create(logprobs=True, top_logprobs=3).choices[0]
    check(choice.message.role == "assistant", "a message of the assistant")
    pieces = b"".join(bytes(token.bytes) for token in choice.logprobs.content)
    check(pieces.decode(errors="replace") == choice.message.content, "the bytes of the tokens are the message")
    parts = list(create(stream=True))
    check(parts[0].choices[0].delta.role == "assistant", "the first event has the role")
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    check(text == choice.message.content, "a stream has the same message")
    check(parts[-1].choices[0].finish_reason in ("stop", "length"), "the last event has finish_reason")


def check_errors(client, url, model):
    try:
        client.completions.create(model=model, prompt=PROMPT, temperature=-1)
        check(False, "a wrong temperature is rejected")
    except openai.BadRequestError as error:
        check(error.param == "temperature", "a wrong temperature is rejected")
    try:
        client.completions.create(model=model, prompt=PROMPT, n=2)
        check(False, "n = 2 is rejected")
    except openai.BadRequestError as error:
        check(error.param == "n", "n = 2 is rejected")
    if client.api_key != "none":
        try:
            openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0).models.list()
            check(False, "a wrong key is rejected")
        except openai.AuthenticationError as error:
            check(error.code == "invalid_api_key", "a wrong key is rejected")


def check_parallel(client, model):
    """Several clients at the same time: all succeed or get 429, which the openai package retries."""
    results = []

    def run(seed):
        answer = client.completions.create(model=model, prompt=PROMPT, seed=seed, max_tokens=8)
        results.append(answer.choices[0].finish_reason)

    threads = [threading.Thread(target=run, args=[seed]) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    check(len(results) == 8, "8 requests at the same time succeed")


def check_curl(url, key):
    def curl(*arguments):
        command = ["curl", "--silent", "--show-error", "--max-time", "60"]
        command += ["--write-out", "\n%{http_code}"] + (["--header", f"Authorization: Bearer {key}"] if key else [])
        output = subprocess.run([*command, *arguments], capture_output=True, check=True, text=True).stdout
        body, _, status = output.rpartition("\n")
        return int(status), body

    def post(path, body):
        status, text = curl(f"{url}{path}", "--data", json.dumps(body))
        check(status == 200, f"curl {path}")
        return json.loads(text)

    check(curl(f"{url}/health") == (200, '{"status":"ok"}'), "curl /health")
    completion = post("/completion", {"prompt": PROMPT, "n_predict": 4, "n_probs": 1, "return_tokens": True})
    check(len(completion["tokens"]) == completion["tokens_predicted"], "tokens_predicted is the number of tokens")
    text = post("/detokenize", {"tokens": completion["tokens"]})["content"]
    check(text == completion["content"], "/detokenize yields the text of /completion")
    tokens = post("/tokenize", {"content": PROMPT})["tokens"]
    check(post("/detokenize", {"tokens": tokens})["content"] == PROMPT, "/detokenize reverses /tokenize")
    status, body = curl("--no-buffer", f"{url}/completion", "--data", json.dumps({"prompt": PROMPT, "n_predict": 4, "stream": True}))
    events = [json.loads(line[len("data: ") :]) for line in body.splitlines() if line.startswith("data: ")]
    check(status == 200 and [event["stop"] for event in events[-2:]] == [False, True], "curl streams /completion")

    status, report = curl(f"{url}/moe-layer-perf")
    check(status == 200 and json.loads(report)["layers"], "/moe-layer-perf has layers")
    check(post("/moe-layer-perf", {"mode": "full"})["mode"] == "full", "/moe-layer-perf sets the mode")
    post("/moe-layer-perf", {"mode": "update"})
    status, metrics = curl(f"{url}/metrics")
    check(status == 200 and "moe_generated_tokens_total " in metrics, "curl /metrics")
    for body, expected in [("{", 400), ("[]", 400), ("{}", 400), ("\xff", 400)]:
        status, text = curl(f"{url}/completion", "--data-binary", body)
        check(status == expected and json.loads(text)["error"]["message"], f"the body {body!r} is rejected")
    check(curl(f"{url}/nothing")[0] == 404, "an unknown path is rejected")
    check(curl(f"{url}/completion")[0] == 405, "a wrong method is rejected")


def main():
    url = sys.argv[1].rstrip("/")
    key = sys.argv[2] if len(sys.argv) > 2 else None
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=key or "none")
    model = check_models(client)
    check_completions(client, model)
    check_chat(client, model)
    check_errors(client, url, model)
    check_parallel(client, model)
    check_curl(url, key)


if __name__ == "__main__":
    main()
