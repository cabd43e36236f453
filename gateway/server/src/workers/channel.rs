//! How a worker is connected to.

use std::time::Duration;

use hyper::Uri;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tonic::transport::{Channel, ClientTlsConfig, Endpoint, Error};
use tower::ServiceExt;

use super::WorkerAddress;
use super::gathered::Gathered;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// A connection whose other end is gone without a word is found dead after these two.
const KEEP_ALIVE: (Duration, Duration) = (Duration::from_secs(10), Duration::from_secs(5));
/// What a reply may have sent that nobody has read: a thousand tokens and more.
const STREAM_BYTES: u32 = 256 << 10;
/// The same for all replies together, as much as thousands of clients that stopped reading can leave: they must
/// not hold up those of others, nor what the worker says of itself.
const CONNECTION_BYTES: u32 = 1 << 30;

/// A channel to a worker, connected when it is first needed and again when it breaks.
///
/// # Errors
/// An address that is none, or a name that no certificate can be for.
pub(super) fn open(
    address: &WorkerAddress,
    tls: Option<&ClientTlsConfig>,
) -> Result<Channel, Error> {
    let endpoint = Endpoint::from_shared(address.uri.clone())?
        .connect_timeout(CONNECT_TIMEOUT)
        .http2_keep_alive_interval(KEEP_ALIVE.0)
        .keep_alive_timeout(KEEP_ALIVE.1)
        .initial_stream_window_size(STREAM_BYTES)
        .initial_connection_window_size(CONNECTION_BYTES);
    let endpoint = match tls {
        Some(tls) if address.uri.starts_with("https://") => {
            let tls = match &address.tls_name {
                Some(name) => tls.clone().domain_name(name),
                None => tls.clone(),
            };
            endpoint.tls_config(tls)?
        }
        _ => endpoint,
    };
    let mut http = HttpConnector::new();
    // with TLS the endpoint speaks it over what is connected here
    http.enforce_http(false);
    http.set_nodelay(true);
    http.set_connect_timeout(Some(CONNECT_TIMEOUT));
    let gathered = |io: TokioIo<TcpStream>| TokioIo::new(Gathered::new(io.into_inner()));
    Ok(endpoint.connect_with_connector_lazy(ServiceExt::<Uri>::map_response(http, gathered)))
}
