//! `serve`: a server over a model of the fixtures.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::{fs, thread};

use moe_testkit::Need;
use serde_json::{Value, json};

use crate::support::gpu::stand_in;
use crate::support::{fail, repository, run};

/// A running server; dropping it kills it.
struct Server {
    process: Child,
    address: String,
}

impl Server {
    fn start(options: &[&str]) -> Server {
        Server::start_with(options, |_| ())
    }

    /// `set_up` changes the command of the server.
    fn start_with(options: &[&str], set_up: impl FnOnce(&mut Command)) -> Server {
        let mut command = Command::new(assert_cmd::cargo::cargo_bin!("moe-analyze"));
        command
            .args(["serve", "--port", "0", "--threads", "1", "--model"])
            .arg(repository("fixtures/tiny-qwen3moe-Q4_K_M.gguf"))
            .args(options)
            .stderr(Stdio::piped());
        set_up(&mut command);
        let mut process = command.spawn().unwrap();
        let mut lines = BufReader::new(process.stderr.take().unwrap()).lines();
        let address = lines
            .by_ref()
            .map(Result::unwrap)
            .find_map(|line| {
                let rest = line.strip_prefix("listening on http://")?;
                Some(rest.split(',').next().unwrap().to_owned())
            })
            .expect("the server prints its address");
        // The pipe must not fill.
        thread::spawn(move || lines.for_each(drop));
        Server { process, address }
    }

    /// Sends a request, and returns the status and the body.
    fn send(&self, method: &str, path: &str, body: &str) -> (u16, String) {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
            self.address,
            body.len()
        )
        .unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let status = answer.split(' ').nth(1).unwrap().parse().unwrap();
        let body = answer.split_once("\r\n\r\n").unwrap().1;
        (status, body.to_owned())
    }

    fn post(&self, path: &str, body: &Value) -> Value {
        let (status, answer) = self.send("POST", path, &body.to_string());
        assert_eq!(status, 200, "{answer}");
        serde_json::from_str(&answer).unwrap()
    }

    /// Ends the server with SIGTERM, and returns its exit code.
    fn stop(mut self) -> Option<i32> {
        let pid = self.process.id().to_string();
        let kill = Command::new("kill").args(["-TERM", &pid]).status().unwrap();
        assert!(kill.success());
        self.process.wait().unwrap().code()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

const PROMPT: &str = "int main(";

fn completion(n_predict: usize) -> Value {
    json!({"prompt": PROMPT, "n_predict": n_predict, "temperature": 0, "ignore_eos": true})
}

/// The text that `record` generates.
fn recorded(n_predict: &str) -> String {
    let model = repository("fixtures/tiny-qwen3moe-Q4_K_M.gguf");
    let options = ["--prompt", PROMPT, "--n-predict", n_predict, "--ignore-eos", "--trace", "off"];
    run!["--quiet", "record", "--model", model, options, "--threads", "1"]
}

#[test]
fn requests_at_the_same_time_get_the_text_of_record() {
    let server = Server::start(&["--parallel", "3", "--batch-size", "8"]);
    let texts: Vec<String> = thread::scope(|scope| {
        let ask = || {
            let answer = server.post("/completion", &completion(24));
            assert_eq!(answer["tokens_predicted"], 24);
            answer["content"].as_str().unwrap().to_owned()
        };
        let clients: Vec<_> = (0..5).map(|_| scope.spawn(ask)).collect();
        clients
            .into_iter()
            .map(|client| client.join().unwrap())
            .collect()
    });
    let expected = recorded("24");
    for text in &texts {
        assert!(expected.trim_end().ends_with(text.trim_end()), "{text:?} in {expected:?}");
    }
    let (status, metrics) = server.send("GET", "/metrics", "");
    assert_eq!(status, 200);
    assert!(metrics.contains("moe_slots 3"), "{metrics}");
    assert_eq!(server.stop(), Some(0));
}

#[test]
fn counters_of_a_hot_cache_feed_a_plan() {
    let dir = tempfile::tempdir().unwrap();
    let model = repository("fixtures/tiny-qwen3moe-Q4_K_M.gguf");
    let (run_dir, learn) = (dir.path().join("run"), dir.path().join("learn.json"));
    let prompt = ["--prompt", PROMPT, "--n-predict", "16"];
    run!["--quiet", "record", "--model", model, prompt, "--out", run_dir];
    run!["hotness", run_dir, "--out", learn];
    let learn_text = learn.to_str().unwrap();
    let server = Server::start(&[
        "--policy", "hot-cache", "--hot-cache", learn_text, "--hot-cache-mib", "2",
        "--update-rate", "0.5",
    ]);
    server.post("/completion", &completion(16));
    let (status, before) = server.send("GET", "/moe-layer-perf", "");
    assert_eq!(status, 200);
    // The update at the end of the request does not change the counters.
    let before: Value = serde_json::from_str(&before).unwrap();
    assert_eq!(before["updates"], 16, "{before}");
    server.post("/moe-layer-perf", &json!({"mode": "update"}));
    let updated = server.post(
        "/moe-hot-cache",
        &serde_json::from_str(&fs::read_to_string(&learn).unwrap()).unwrap(),
    );
    assert_eq!(updated["success"], true, "{updated}");
    assert_eq!(updated["update_rate"], 1.0);
    assert!(updated["hot_experts"].as_u64() > Some(0), "{updated}");
    // The metrics do not restart if the counters do.
    let (_, metrics) = server.send("GET", "/metrics", "");
    for lane in ["hot0", "cold"] {
        let name = format!("moe_expert_selections_total{{lane=\"{lane}\",tier=\"");
        let mut lines = metrics.lines().filter_map(|line| line.strip_prefix(&name));
        let (_, count) = lines.next().unwrap().split_once(' ').unwrap();
        assert!(count.parse::<u64>().unwrap() > 0, "{lane}: {metrics}");
    }

    // The file is an input of the server. Saving keeps its old contents.
    let counts = json!([{"layer": 0, "experts": [[3, 20], [5, 4]]}]);
    let new = json!({"schema": "llama.cpp.moe_layer_opt_perf.v1", "layers": counts});
    let mut save = new.clone();
    save["save_to_disk"] = true.into();
    let first = fs::read_to_string(&learn).unwrap();
    let mut old = first.clone();
    for n in [1, 2] {
        let saved = server.post("/moe-hot-cache", &save);
        assert_eq!(saved["saved_to_disk"], true, "{saved}");
        assert_eq!(saved["path"], learn_text);
        let backup = dir.path().join(format!("learn.{n}.json"));
        assert_eq!(saved["backup_path"], backup.to_str().unwrap());
        assert_eq!(fs::read_to_string(&backup).unwrap(), old);
        old = fs::read_to_string(&learn).unwrap();
        assert_eq!(serde_json::from_str::<Value>(&old).unwrap(), new);
    }
    // A learn file of another model changes nothing.
    for (layer, expert) in [(99, 3), (0, 999)] {
        let layers = json!([{"layer": layer, "experts": [[expert, 20]]}]);
        let schema = "llama.cpp.moe_layer_opt_perf.v1";
        let body = json!({"schema": schema, "layers": layers, "save_to_disk": true});
        let (status, answer) = server.send("POST", "/moe-hot-cache", &body.to_string());
        assert_eq!(status, 409, "{answer}");
        assert!(answer.contains("is out of range (0..="), "{answer}");
        assert_eq!(fs::read_to_string(&learn).unwrap(), old);
    }
    assert_eq!(server.stop(), Some(0));
    fs::write(&learn, first).unwrap();

    // A learn file does not replace a plan.
    let plan = dir.path().join("plan.json");
    let planned = run!["plan", learn, "--model", model, "--budget-mib", "2", "-o", "json"];
    fs::write(&plan, &planned).unwrap();
    let server = Server::start(&["--policy", "hot-cache", "--hot-cache", plan.to_str().unwrap()]);
    let (status, answer) = server.send("POST", "/moe-hot-cache", &save.to_string());
    assert_eq!(status, 409, "{answer}");
    assert_eq!(fs::read_to_string(&plan).unwrap(), planned);
    assert_eq!(server.stop(), Some(0));

    let server = Server::start(&[
        "--policy", "hot-cache", "--hot-cache", learn_text, "--hot-cache-mib", "2",
    ]);
    server.post("/completion", &completion(16));
    let (_, counters) = server.send("GET", "/moe-layer-perf", "");
    let file = dir.path().join("counters.json");
    fs::write(&file, &counters).unwrap();
    let plan = run!["plan", file, "--model", model, "--budget-mib", "2", "-o", "json"];
    let plan: Value = serde_json::from_str(&plan).unwrap();
    assert!(!plan["selected"].as_array().unwrap().is_empty(), "{before} {counters}");
    assert_eq!(server.stop(), Some(0));
}

/// The page shows text only with `--ui-text`.
#[test]
fn ui_shows_recent_requests() {
    for (options, shows_text) in [(&["--ui"][..], false), (&["--ui", "--ui-text"][..], true)] {
        let server = Server::start(options);
        let (status, page) = server.send("GET", "/", "");
        assert_eq!(status, 200);
        assert!(page.contains("moe-analyze.live.v1") && page.contains("connect-src 'self'"));
        server.post("/completion", &completion(8));
        let (status, state) = server.send("GET", "/ui/state?request=0", "");
        assert_eq!(status, 200, "{state}");
        assert_eq!(state.contains("int main("), shows_text, "{state}");
        let state: Value = serde_json::from_str(&state).unwrap();
        assert_eq!(state["requests"][0]["outcome"], "length");
        assert_eq!(state["requests"][0]["n_generated"], 8);
        let layers = state["selected"]["layers"].as_array().unwrap();
        assert!(!layers.is_empty(), "{state}");
        assert_eq!(server.stop(), Some(0));
    }
    let server = Server::start(&[]);
    assert_eq!(server.send("GET", "/", "").0, 404);
    assert_eq!(server.send("GET", "/ui/state", "").0, 404);
}

#[test]
fn traces_of_requests_are_inputs_of_other_commands() {
    let dir = tempfile::tempdir().unwrap();
    let traces = dir.path().join("traces");
    let server = Server::start(&["--record", traces.to_str().unwrap()]);
    server.post("/completion", &completion(8));
    server.post("/completion", &completion(8));
    assert_eq!(server.stop(), Some(0));
    let requests: Vec<_> = fs::read_dir(&traces)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    assert_eq!(requests.len(), 2, "{requests:?}");
    for request in &requests {
        assert!(run!["info", request].contains("routing"));
        assert!(run!["hotness", request].contains("layer"));
    }
}

/// A chat template for a fixture, which has none.
const TEMPLATE: &str =
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}";

/// Runs a script of `tests/http` with the URL of a server, and expects success.
#[track_caller]
fn check(python: &Path, script: &str, server: &Server, options: &[&str]) {
    let output = Command::new(python)
        .arg(repository("tests/http").join(script))
        .arg(format!("http://{}", server.address))
        .args(options)
        .output()
        .unwrap();
    let [stdout, stderr] =
        [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
    assert!(output.status.success(), "{script}:\n{stdout}\n{stderr}");
}

/// A server for clients, with a chat template.
fn start_for_clients(dir: &Path) -> Server {
    let template = dir.join("template.jinja");
    fs::write(&template, TEMPLATE).unwrap();
    let template = template.to_str().unwrap();
    Server::start(&["--ctx-size", "4096", "--ui", "--chat-template", template])
}

/// The openai package and curl.
#[test]
fn serves_clients() {
    let Some(python) = moe_testkit::python("openai") else {
        return;
    };
    if let Err(error) = Command::new("curl").arg("--version").output() {
        moe_testkit::skip(Need::Python, format_args!("curl cannot be run: {error}"));
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let server = start_for_clients(dir.path());
    check(&python, "check_clients.py", &server, &[]);
    assert_eq!(server.stop(), Some(0));
}

/// Generated requests, valid and invalid ones.
#[test]
fn responses_conform_to_the_openapi_description() {
    let Some(python) = moe_testkit::python("schemathesis") else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let server = start_for_clients(dir.path());
    check(&python, "check_schema.py", &server, &["--max-examples", "10"]);
    assert_eq!(server.stop(), Some(0));
}

/// A GPU that fails for good while requests run: each request gets an answer, and the server ends as usual.
#[test]
fn answers_every_request_if_the_gpu_fails() {
    let Some(stand_in) = stand_in() else { return };
    let options = ["--device", "cuda", "--parallel", "2"];
    let server = Server::start_with(&options, |command| {
        command.env("LD_LIBRARY_PATH", stand_in.path());
        command.env("STAND_IN_FAILS", "lost");
    });
    let ask = || server.send("POST", "/completion", &completion(200).to_string());
    let answers: Vec<(u16, String)> = thread::scope(|scope| {
        let clients: Vec<_> = (0..4).map(|_| scope.spawn(ask)).collect();
        clients
            .into_iter()
            .map(|client| client.join().unwrap())
            .collect()
    });
    for (status, answer) in &answers {
        let answer: Value = serde_json::from_str(answer).unwrap();
        assert_eq!(*status, 500, "{answer}");
        let message = answer["error"]["message"].as_str().unwrap();
        assert!(message.contains("CUDA_ERROR_LAUNCH_FAILED"), "{message}");
    }
    assert_eq!(server.send("GET", "/health", "").0, 200);
    let (_, metrics) = server.send("GET", "/metrics", "");
    assert!(metrics.contains("\nmoe_running_requests 0\n"), "{metrics}");
    assert_eq!(server.stop(), Some(0));
}

#[test]
fn rejects_what_it_cannot_serve() {
    let model = repository("fixtures/tiny-qwen3moe-Q4_K_M.gguf");
    let error = fail!["serve", "--model", model, "--host", "0.0.0.0", "--port", "0"];
    assert!(error.contains("pass an API key"), "{error}");
    let error = fail!["serve", "--host", "localhost"];
    let expected = "invalid value 'localhost' for '--host <ADDRESS>': expected an IP address such as 127.0.0.1 or ::1;";
    assert!(error.contains(expected), "{error}");
    let error = fail!["serve", "--port", "65536"];
    let expected = "invalid value '65536' for '--port <PORT>': out of range (0..=65535);";
    assert!(error.contains(expected), "{error}");
    let error = fail!["serve", "--model", model, "--port", "0", "--api-key", "a b"];
    assert!(error.contains("visible ASCII"), "{error}");
    let endless = Path::new("/dev/zero");
    let error = fail!["serve", "--model", model, "--port", "0", "--api-key-file", endless];
    assert!(
        error.contains("/dev/zero: the file is larger than the limit of 65536 bytes"),
        "{error}"
    );
    let error = fail![
        "serve", "--model", model, "--port", "0", "--policy", "hot-cache", "--hot-cache",
        "learn.json", "--update-rate", "1", "--update-after", "prompt"
    ];
    assert!(error.contains("when a request ends"), "{error}");
    let missing = Path::new("missing.jinja");
    let error = fail!["serve", "--model", model, "--port", "0", "--chat-template", missing];
    assert!(error.contains("missing.jinja"), "{error}");
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("foreign.txt");
    fs::write(&file, "text").unwrap();
    let error = fail!["--quiet", "serve", "--model", model, "--port", "0", "--record", file];
    let expected = "foreign.txt: it is a file, not a directory; pass a directory";
    assert!(error.contains("cannot record to ") && error.contains(expected), "{error}");
    let server = Server::start(&[]);
    let (status, answer) = server.send(
        "POST",
        "/v1/chat/completions",
        r#"{"messages":[{"role":"user","content":"a"}]}"#,
    );
    assert_eq!(status, 400, "{answer}");
    assert!(answer.contains("no chat template"), "{answer}");
    let port = server.address.rsplit(':').next().unwrap();
    let error = fail!["serve", "--model", model, "--port", port];
    assert!(error.contains("cannot listen on"), "{error}");
    assert_eq!(server.stop(), Some(0));
}
