//! Serves the endpoints without a model, for tests of clients: `fake_server [ADDRESS]`. The default address is
//! `127.0.0.1:8080`. The environment variable `MOE_API_KEY` contains the key, if requests need one. SIGTERM and SIGINT stop the server.
#![allow(clippy::unwrap_used, reason = "a program for tests")]

#[path = "../tests/it/fake.rs"]
#[allow(dead_code, reason = "the tests use more of it")]
mod fake;

use std::sync::Arc;
use std::time::Duration;

use moe_server::http::{ApiKey, Options, serve};
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};

const SCRIPT: [&[u8]; 8] = [
    b"Hello",
    b",",
    b" w",
    "ö".as_bytes(),
    b"rld",
    b" \xf0\x9f",
    b"\x8c\x8d",
    b"!",
];

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let address = std::env::args().nth(1);
    let address = address.unwrap_or_else(|| "127.0.0.1:8080".into());
    let listener = TcpListener::bind(address).await?;
    println!("listening on {}", listener.local_addr()?);
    let mut backend = fake::Fake::new(&SCRIPT, 4);
    backend.pause = Duration::from_millis(1);
    let options = Options {
        api_key: std::env::var("MOE_API_KEY").ok().and_then(ApiKey::new),
        ..Options::default()
    };
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let shutdown = async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    };
    serve(listener, Arc::new(backend), options, shutdown).await?;
    Ok(())
}
