//! Who may send requests: clients with the API key or, without a key, programs on this machine.

use std::fmt;
use std::net::IpAddr;

use axum::extract::{Request, State};
use axum::http::header::{AUTHORIZATION, HOST, ORIGIN};
use axum::http::{HeaderMap, Uri};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use subtle::ConstantTimeEq;

use super::Shared;
use super::error::ApiError;

/// A secret that requests must send as `Authorization: Bearer KEY` or `X-Api-Key: KEY`.
#[derive(Clone)]
pub struct ApiKey(String);

impl ApiKey {
    /// A key; `None` if it is empty or contains a character that is not visible ASCII, such as a space.
    pub fn new(key: impl Into<String>) -> Option<ApiKey> {
        let key = key.into();
        let is_valid = !key.is_empty() && key.bytes().all(|byte| byte.is_ascii_graphic());
        is_valid.then_some(ApiKey(key))
    }

    /// Compares in a time that depends on the lengths only.
    fn matches(&self, sent: &[u8]) -> bool {
        self.0.as_bytes().ct_eq(sent).into()
    }
}

/// Does not contain the key.
impl fmt::Debug for ApiKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ApiKey")
    }
}

/// Rejects requests without the API key. `/health` needs no key. The page of the live state needs none either: browsers cannot send a key
/// when they open it, and it contains no data.
pub(super) async fn check(State(server): State<Shared>, request: Request, next: Next) -> Response {
    let headers = request.headers();
    let result = match &server.options.api_key {
        _ if request.uri().path() == "/health" => Ok(()),
        Some(_) if request.uri().path() == "/" && server.options.ui.is_some() => Ok(()),
        Some(key) if sent_key(headers).is_some_and(|sent| key.matches(sent)) => Ok(()),
        Some(_) => Err(ApiError::unauthorized()),
        None if is_from_other_site(headers) => Err(ApiError::other_site()),
        None => Ok(()),
    };
    match result {
        Ok(()) => next.run(request).await,
        Err(error) => error.into_response(),
    }
}

fn sent_key(headers: &HeaderMap) -> Option<&[u8]> {
    if let Some(key) = headers.get("x-api-key") {
        return Some(key.as_bytes());
    }
    let value = headers.get(AUTHORIZATION)?.as_bytes();
    let (scheme, key) = value.split_at_checked("Bearer ".len())?;
    scheme.eq_ignore_ascii_case(b"Bearer ").then_some(key)
}

/// Whether a browser sent the request for a web page that is not served from this machine. Without this check, any page could
/// use a server without a key: browsers send simple requests to other sites without asking them, and a host name of
/// the page may resolve to a loopback address.
fn is_from_other_site(headers: &HeaderMap) -> bool {
    let is_cross_site = headers
        .get("sec-fetch-site")
        .is_some_and(|site| site == "cross-site");
    let names = [HOST, ORIGIN].map(|name| headers.get(name));
    let mut names = names.into_iter().flatten();
    is_cross_site || !names.all(|name| name.to_str().is_ok_and(is_loopback))
}

/// Whether the value of a header `Host` or `Origin` names a loopback address.
fn is_loopback(value: &str) -> bool {
    let Ok(uri) = value.parse::<Uri>() else {
        return false;
    };
    let host = uri.host().unwrap_or_default();
    let address = host.trim_start_matches('[').trim_end_matches(']');
    host.eq_ignore_ascii_case("localhost")
        || address.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recognizes_loopback_hosts() {
        for host in [
            "localhost",
            "LocalHost:80",
            "127.0.0.1:8080",
            "127.9.9.9",
            "[::1]:80",
            "[::1]",
            "http://localhost:3000",
            "https://127.0.0.1",
        ] {
            assert!(is_loopback(host), "{host}");
        }
        for host in [
            "example.org",
            "localhost.example.org",
            "http://example.org",
            "10.0.0.1:80",
            "null",
            "",
            "127.0.0.1.example.org",
            "file://",
            "a b",
        ] {
            assert!(!is_loopback(host), "{host}");
        }
    }

    #[test]
    fn rejects_keys_that_no_header_can_contain() {
        for key in ["", "a b", "a\n", "ä"] {
            assert!(ApiKey::new(key).is_none(), "{key:?}");
        }
        let key = ApiKey::new("secret").unwrap();
        assert!(key.matches(b"secret") && !key.matches(b"secre") && !key.matches(b"Secret"));
        assert_eq!(format!("{key:?}"), "ApiKey");
    }
}
