//! Whether a request says which host it is for, as HTTP/1.1 wants it.

use std::str::FromStr;

use axum::extract::Request;
use axum::http::uri::Authority;
use axum::http::{HeaderValue, Version, header};

use crate::error::{ErrorKind, GatewayError};

/// Lets a request pass that names one host, or none where it need not.
///
/// Source: RFC 9112, section 3.2.
///
/// # Errors
/// `InvalidRequest` for an HTTP/1.1 request without the field, for several of them, and for a value
/// that cannot be a host.
pub(super) fn check(request: &Request) -> Result<(), GatewayError> {
    let mut hosts = request.headers().get_all(header::HOST).iter();
    let message = match (hosts.next(), hosts.next()) {
        (None, _) if request.version() < Version::HTTP_11 => return Ok(()),
        (None, _) => "the request has no Host header, which HTTP/1.1 asks for".to_owned(),
        (Some(_), Some(_)) => "the request has more than one Host header".to_owned(),
        (Some(host), None) if is_host(host) => return Ok(()),
        (Some(host), None) => format!("the Host header is {host:?}, which is no host"),
    };
    Err(GatewayError::new(ErrorKind::InvalidRequest, message))
}

/// A name or an address and perhaps a port; nothing at all where there is no name to give.
fn is_host(value: &HeaderValue) -> bool {
    let Ok(text) = value.to_str() else { return false };
    text.is_empty() || (!text.contains('@') && Authority::from_str(text).is_ok())
}

#[cfg(test)]
mod tests {
    use axum::body::Body;

    use super::*;

    fn passes(version: Version, hosts: &[&str]) -> bool {
        let mut request = Request::new(Body::empty());
        *request.version_mut() = version;
        for host in hosts {
            request.headers_mut().append(header::HOST, HeaderValue::from_str(host).unwrap());
        }
        check(&request).is_ok()
    }

    #[test]
    fn one_host_is_wanted_from_1_1_on() {
        assert!(passes(Version::HTTP_11, &["example.org"]));
        assert!(!passes(Version::HTTP_11, &[]));
        assert!(passes(Version::HTTP_10, &[]));
        for version in [Version::HTTP_10, Version::HTTP_11] {
            assert!(!passes(version, &["example.org", "example.org"]));
        }
    }

    #[test]
    fn names_and_addresses_are_hosts() {
        for host in ["", "a", "a:80", "127.0.0.1:8000", "[::1]:8000", "a_b.local", "xn--9a.x."] {
            assert!(passes(Version::HTTP_11, &[host]), "{host}");
        }
        for host in ["a b", "a/b", "user@a", "a:b:c", "[::1", "a\""] {
            assert!(!passes(Version::HTTP_11, &[host]), "{host}");
        }
    }
}
