//! Connections: limits, and a shutdown that finishes running and queued requests.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

use super::connection::Connection;
use super::{Backend, Options, routes};

/// Pause after a connection that cannot be accepted, for example because the process has too many open files.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Time in which requests that a shutdown ends can send their error.
const ERROR_TIME: Duration = Duration::from_secs(2);

/// State of the server.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Phase {
    /// Requests are accepted.
    Running,
    /// Running requests are finished; new ones are refused.
    Draining,
    /// Running requests end with an error.
    Stopping,
    /// All connections are closed.
    Stopped,
}

/// The server cannot start.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// Other machines can reach the address, but requests need no key.
    #[error(
        "{0} is not a loopback address, so that other machines can use the server; set an API key"
    )]
    KeyRequired(SocketAddr),
    /// The address of the listener is unknown.
    #[error("the address of the listener is unknown: {0}")]
    Listener(#[from] std::io::Error),
}

/// Serves the endpoints until `shutdown` is complete. Then no connection is accepted, new requests on open connections are
/// refused, and running and queued requests are finished. Requests that have not ended after [`Options::shutdown_timeout`] end
/// with an error. The connections of clients that do not read it are closed. When the function returns, no request runs any more,
/// or it is cancelled.
///
/// # Errors
/// The listener is not on a loopback address and [`Options::api_key`] is not set.
pub async fn serve(
    listener: TcpListener,
    backend: Arc<dyn Backend>,
    options: Options,
    shutdown: impl Future<Output = ()>,
) -> Result<(), ServeError> {
    let address = listener.local_addr()?;
    if !address.ip().is_loopback() && options.api_key.is_none() {
        return Err(ServeError::KeyRequired(address));
    }
    let (phase, receiver) = watch::channel(Phase::Running);
    let connections = Connections {
        router: routes(backend, options.clone(), receiver.clone()),
        phase: receiver,
        graceful: GracefulShutdown::new(),
        limit: Arc::new(Semaphore::new(options.max_connections)),
        options,
    };
    tokio::select! {
        () = connections.accept(&listener) => {}
        () = shutdown => {}
    }
    drop(listener);
    phase.send_replace(Phase::Draining);
    connections.finish(&phase).await;
    phase.send_replace(Phase::Stopped);
    Ok(())
}

/// Waits until all connections have to be closed.
async fn stopped(phase: &mut watch::Receiver<Phase>) {
    // An error means that the server has ended.
    let _ = phase.wait_for(|phase| *phase == Phase::Stopped).await;
}

struct Connections {
    router: Router,
    phase: watch::Receiver<Phase>,
    graceful: GracefulShutdown,
    limit: Arc<Semaphore>,
    options: Options,
}

impl Connections {
    /// Accepts connections forever.
    async fn accept(&self, listener: &TcpListener) {
        while let Ok(permit) = Arc::clone(&self.limit).acquire_owned().await {
            match listener.accept().await {
                Ok((stream, _)) => self.start(stream, permit),
                Err(error) => {
                    let log = &self.options.log;
                    log.line(format_args!("cannot accept a connection: {error}"));
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }

    fn start(&self, stream: TcpStream, permit: OwnedSemaphorePermit) {
        // Events of a stream are small; a failure only delays them.
        let _ = stream.set_nodelay(true);
        let io = TokioIo::new(Connection::new(stream, self.options.write_timeout));
        let service = TowerToHyperService::new(self.router.clone());
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(self.options.read_timeout)
            .serve_connection(io, service);
        let connection = self.graceful.watch(connection);
        let mut phase = self.phase.clone();
        tokio::spawn(async move {
            tokio::select! {
                // An error concerns this client only, for example that it has disconnected.
                _ = connection => {}
                () = stopped(&mut phase) => {}
            }
            drop(permit);
        });
    }

    /// Waits for running and queued requests, first to finish, then to send their error.
    async fn finish(self, phase: &watch::Sender<Phase>) {
        let shutdown = self.graceful.shutdown();
        tokio::pin!(shutdown);
        let finished = tokio::time::timeout(self.options.shutdown_timeout, &mut shutdown).await;
        if finished.is_err() {
            phase.send_replace(Phase::Stopping);
            let _ = tokio::time::timeout(ERROR_TIME, shutdown).await;
        }
    }
}
