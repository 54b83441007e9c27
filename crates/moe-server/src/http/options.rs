//! Settings of the server.

use std::time::Duration;

use super::{ApiKey, Log, Ui};

/// Settings of the server. The default has no API key and can therefore only be used on a loopback address.
#[derive(Clone, Debug)]
pub struct Options {
    /// Key that requests must send; `None`: requests need no key.
    pub api_key: Option<ApiKey>,
    /// Maximum size of the body of a request, in bytes.
    pub max_body_bytes: usize,
    /// Maximum number of open connections. Further connections wait until one is closed.
    pub max_connections: usize,
    /// Time limit of a request that generates text, from the end of its body.
    pub request_timeout: Duration,
    /// Time limit for the headers of a request, for its body, and for an idle connection.
    pub read_timeout: Duration,
    /// Time after which a connection is closed whose client does not read.
    pub write_timeout: Duration,
    /// Time limit for running requests after the start of a shutdown. Then they end with an error.
    pub shutdown_timeout: Duration,
    /// Where log lines are written.
    pub log: Log,
    /// Page with the live state; `None`: the server has no such page.
    pub ui: Option<Ui>,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            api_key: None,
            max_body_bytes: 4 << 20,
            max_connections: 128,
            request_timeout: Duration::from_secs(600),
            read_timeout: Duration::from_secs(30),
            write_timeout: Duration::from_secs(30),
            shutdown_timeout: Duration::from_secs(60),
            log: Log::default(),
            ui: None,
        }
    }
}
