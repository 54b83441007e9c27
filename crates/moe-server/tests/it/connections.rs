//! Connections: disconnects, slow clients, a full queue, shutdown.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use moe_server::http::{ApiKey, Options, ServeError, serve};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::client::options;
use crate::fake::Fake;

/// A server on a loopback address.
struct Server {
    backend: Arc<Fake>,
    address: SocketAddr,
    shutdown: oneshot::Sender<()>,
    task: JoinHandle<Result<(), ServeError>>,
}

impl Server {
    async fn start(backend: Fake, options: Options) -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let backend = Arc::new(backend);
        let (shutdown, receiver) = oneshot::channel();
        let task = tokio::spawn(serve(listener, backend.clone(), options, async {
            let _ = receiver.await;
        }));
        Server {
            backend,
            address,
            shutdown,
            task,
        }
    }

    async fn connect(&self) -> TcpStream {
        TcpStream::connect(self.address).await.unwrap()
    }

    /// Sends a request for text on a connection of its own.
    async fn request(&self, body: &str) -> TcpStream {
        let mut stream = self.connect().await;
        stream.write_all(request(body).as_bytes()).await.unwrap();
        stream
    }

    /// Waits in a thread of its own, since the tests have one thread for all tasks.
    async fn wait_until(&self, condition: impl Fn(&crate::fake::State) -> bool + Send + 'static) {
        let backend = self.backend.clone();
        let wait = tokio::task::spawn_blocking(move || backend.wait_until(condition));
        wait.await.unwrap();
    }
}

fn request(body: &str) -> String {
    let n = body.len();
    format!("POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {n}\r\n\r\n{body}")
}

/// Everything that the server sends until it closes the connection. Fails after 30 seconds.
async fn rest(stream: &mut TcpStream) -> String {
    let mut bytes = Vec::new();
    let read = stream.read_to_end(&mut bytes);
    let result = tokio::time::timeout(Duration::from_secs(30), read).await;
    let _ = result.expect("the server does not close the connection");
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Reads until the text contains `end`.
async fn read_until(stream: &mut TcpStream, end: &str) -> String {
    let mut text = String::new();
    let mut bytes = [0; 4096];
    while !text.contains(end) {
        let read = tokio::time::timeout(Duration::from_secs(30), stream.read(&mut bytes)).await;
        let n = read.expect("the server does not send").unwrap();
        assert!(n > 0, "the connection was closed: {text}");
        text += &String::from_utf8_lossy(&bytes[..n]);
    }
    text
}

fn hello(n_slots: usize) -> Fake {
    Fake::new(&[b"Hello", b" world"], n_slots)
}

#[tokio::test]
async fn serves_several_requests_on_a_connection() {
    let server = Server::start(hello(1), options()).await;
    let mut stream = server.connect().await;
    for _ in 0..2 {
        stream
            .write_all(request("{\"prompt\": \"a\"}").as_bytes())
            .await
            .unwrap();
        let text = read_until(&mut stream, "total_tokens").await;
        assert!(text.contains("Hello world"), "{text}");
    }
}

#[tokio::test]
async fn cancels_requests_of_clients_that_disconnect() {
    let server = Server::start(hello(2), options()).await;
    server.backend.allow(Some(0));
    let plain = server.request("{\"prompt\": \"a\"}").await;
    let stream = server
        .request("{\"prompt\": \"a\", \"stream\": true}")
        .await;
    server.wait_until(|state| state.n_running == 2).await;
    drop((plain, stream));
    server
        .wait_until(|state| state.n_cancelled == 2 && state.n_running == 0)
        .await;
}

#[tokio::test]
async fn rejects_requests_beyond_the_queue() {
    let server = Server::start(hello(1), options()).await;
    server.backend.allow(Some(0));
    let mut accepted = Vec::new();
    for n in 1..=2 {
        accepted.push(server.request("{\"prompt\": \"a\"}").await);
        server
            .wait_until(move |state| state.requests.len() == n)
            .await;
    }
    let mut third = server.request("{\"prompt\": \"a\"}").await;
    let text = read_until(&mut third, "queue_full").await;
    assert!(text.starts_with("HTTP/1.1 429 "), "{text}");
    server.backend.allow(None);
    for stream in &mut accepted {
        assert!(
            read_until(stream, "total_tokens")
                .await
                .contains("Hello world")
        );
    }
}

#[tokio::test]
async fn closes_connections_of_clients_that_do_not_send() {
    let options = Options {
        read_timeout: Duration::from_millis(1),
        ..options()
    };
    let server = Server::start(hello(1), options).await;
    // No request, an incomplete header.
    for sent in ["", "POST /completion HT"] {
        let mut stream = server.connect().await;
        // The server may have closed the connection already.
        let _ = stream.write_all(sent.as_bytes()).await;
        assert_eq!(rest(&mut stream).await, "");
    }
    assert!(server.backend.state().requests.is_empty());
}

/// A backend whose texts are endless and large, so that the buffers of a connection that is not read become full.
fn endless(n_slots: usize) -> Fake {
    let mut backend = Fake::new(&[&[b'x'; 1 << 20]], n_slots);
    backend.model.n_ctx = usize::MAX;
    backend.pause = Duration::from_millis(1);
    backend
}

const ENDLESS: &str =
    "{\"prompt\": \"a\", \"stream\": true, \"ignore_eos\": true, \"max_tokens\": 1e18}";

#[tokio::test]
async fn cancels_requests_of_clients_that_do_not_read() {
    let options = Options {
        write_timeout: Duration::from_millis(1),
        ..options()
    };
    let server = Server::start(endless(1), options).await;
    let slow = server.request(ENDLESS).await;
    server
        .wait_until(|state| state.n_cancelled == 1 && state.n_running == 0)
        .await;
    drop(slow);
}

#[tokio::test]
async fn a_client_that_does_not_read_does_not_delay_other_clients() {
    let server = Server::start(endless(2), options()).await;
    let slow = server.request(ENDLESS).await;
    server.wait_until(|state| state.n_running == 1).await;
    let mut other = server
        .request("{\"prompt\": \"a\", \"max_tokens\": 1}")
        .await;
    read_until(&mut other, "total_tokens").await;
    drop(slow);
    server.wait_until(|state| state.n_cancelled == 1).await;
}

/// The connection has no room for the error at the end, so that it is closed.
#[tokio::test]
async fn shutdown_cancels_requests_of_clients_that_do_not_read() {
    let options = Options {
        shutdown_timeout: Duration::from_millis(1),
        ..options()
    };
    let server = Server::start(endless(1), options).await;
    let slow = server.request(ENDLESS).await;
    server.wait_until(|state| state.n_running == 1).await;
    server.shutdown.send(()).unwrap();
    server.task.await.unwrap().unwrap();
    let backend = server.backend.clone();
    let wait = move || backend.wait_until(|state| state.n_cancelled == 1 && state.n_running == 0);
    tokio::task::spawn_blocking(wait).await.unwrap();
    drop(slow);
}

/// The client sends the complete body before it reads, as Python's `http.client` does.
#[tokio::test]
async fn a_client_with_a_large_body_gets_the_error() {
    let options = Options {
        max_body_bytes: 100,
        ..options()
    };
    let server = Server::start(hello(1), options).await;
    let mut stream = server.connect().await;
    let text = request(&"a".repeat(64 << 20));
    stream.write_all(text.as_bytes()).await.unwrap();
    let text = read_until(&mut stream, "100 bytes").await;
    assert!(text.starts_with("HTTP/1.1 413 "), "{text}");
    // The connection can be used again.
    let next = request("{\"prompt\": \"a\"}");
    stream.write_all(next.as_bytes()).await.unwrap();
    read_until(&mut stream, "total_tokens").await;
}

#[tokio::test]
async fn limits_the_number_of_connections() {
    let options = Options {
        max_connections: 1,
        ..options()
    };
    let server = Server::start(hello(1), options).await;
    let mut first = server.request("{\"prompt\": \"a\"}").await;
    read_until(&mut first, "total_tokens").await;
    // The second connection waits until the first one is closed.
    let mut second = server.request("{\"prompt\": \"a\"}").await;
    let waits = tokio::time::timeout(Duration::from_millis(50), second.read_u8()).await;
    assert!(waits.is_err());
    drop(first);
    read_until(&mut second, "total_tokens").await;
}

#[tokio::test]
async fn shutdown_finishes_running_requests() {
    let server = Server::start(hello(1), options()).await;
    let (address, backend) = (server.address, server.backend.clone());
    backend.allow(Some(0));
    let mut running = server.request("{\"prompt\": \"a\"}").await;
    let mut queued = server
        .request("{\"prompt\": \"a\", \"stream\": true}")
        .await;
    server.wait_until(|state| state.requests.len() == 2).await;
    let mut idle = server.connect().await;
    server.shutdown.send(()).unwrap();
    assert_eq!(rest(&mut idle).await, "");
    assert!(TcpStream::connect(address).await.is_err());
    backend.allow(None);
    assert!(rest(&mut running).await.contains("Hello world"));
    assert!(rest(&mut queued).await.contains("[DONE]"));
    server.task.await.unwrap().unwrap();
}

#[tokio::test]
async fn shutdown_ends_long_requests_with_an_error() {
    let options = Options {
        shutdown_timeout: Duration::from_millis(1),
        ..options()
    };
    let server = Server::start(hello(1), options).await;
    server.backend.allow(Some(1));
    let mut plain = server.request("{\"prompt\": \"a\"}").await;
    let mut stream = server
        .request("{\"prompt\": \"a\", \"stream\": true}")
        .await;
    server.wait_until(|state| state.requests.len() == 2).await;
    server.shutdown.send(()).unwrap();
    let text = rest(&mut plain).await;
    assert!(text.starts_with("HTTP/1.1 503 "), "{text}");
    let text = rest(&mut stream).await;
    assert!(
        text.starts_with("HTTP/1.1 200 ") && text.contains("unavailable_error"),
        "{text}"
    );
    server.task.await.unwrap().unwrap();
}

#[tokio::test]
async fn refuses_other_addresses_without_a_key() {
    let bind = || TcpListener::bind("0.0.0.0:0");
    let backend = Arc::new(hello(1));
    let served = serve(bind().await.unwrap(), backend.clone(), options(), async {}).await;
    assert!(matches!(served, Err(ServeError::KeyRequired(_))));
    let options = Options {
        api_key: ApiKey::new("secret"),
        ..options()
    };
    serve(bind().await.unwrap(), backend, options, async {})
        .await
        .unwrap();
}
