//! Workers from a name: every address it has, asked for again and again.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Notify;

use super::Publisher;
use crate::workers::WorkerAddress;

const INTERVAL: Duration = Duration::from_secs(5);

/// Publishes the addresses of a name. A name that cannot be resolved for a while changes nothing.
pub(super) async fn follow(
    (host, port): (String, u16),
    scheme: &'static str,
    publish: Publisher,
    wake: Arc<Notify>,
) {
    let mut complaint = String::new();
    loop {
        match tokio::net::lookup_host((host.as_str(), port)).await {
            Ok(found) => {
                complaint.clear();
                publish.set(addresses(found, &host, scheme));
            }
            Err(error) => {
                let error = error.to_string();
                if error != complaint {
                    tracing::warn!(%host, %error, "the workers' name cannot be resolved");
                    complaint = error;
                }
            }
        }
        let _ = tokio::time::timeout(INTERVAL, wake.notified()).await;
    }
}

fn addresses(
    found: impl Iterator<Item = SocketAddr>,
    host: &str,
    scheme: &str,
) -> Vec<WorkerAddress> {
    let is_tls = scheme == "https";
    found
        .map(|address| WorkerAddress {
            uri: format!("{scheme}://{address}"),
            tls_name: is_tls.then(|| host.to_owned()),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_certificate_is_checked_against_the_name_that_was_asked_for() {
        let found = ["10.0.0.1:50051", "[fd00::1]:50051"].map(|text| text.parse().unwrap());
        let list = addresses(found.into_iter(), "workers.example", "https");
        let uris: Vec<_> = list.iter().map(|address| &*address.uri).collect();
        assert_eq!(uris, ["https://10.0.0.1:50051", "https://[fd00::1]:50051"]);
        assert_eq!(list[0].tls_name.as_deref(), Some("workers.example"));
        assert_eq!(addresses(found.into_iter(), "workers.example", "http")[1].tls_name, None);
    }
}
