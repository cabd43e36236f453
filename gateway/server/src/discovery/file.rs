//! Workers from a file: one address a line, `#` begins a comment; read anew when it changes.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Notify;

use super::Publisher;
use crate::config::worker_uri;
use crate::workers::WorkerAddress;

const INTERVAL: Duration = Duration::from_secs(1);

/// The addresses in a file.
///
/// # Errors
/// The file that cannot be read, or the line that is no address.
pub(super) fn read(path: &Path) -> Result<Vec<WorkerAddress>, String> {
    let shown = path.display();
    let text = std::fs::read_to_string(path).map_err(|error| format!("{shown}: {error}"))?;
    parse(&text).map_err(|error| format!("{shown}: {error}"))
}

fn parse(text: &str) -> Result<Vec<WorkerAddress>, String> {
    let mut addresses = Vec::new();
    for (place, line) in text.lines().enumerate() {
        let line = line.split('#').next().unwrap_or_default().trim();
        if line.is_empty() {
            continue;
        }
        let uri = worker_uri(line, true).map_err(|error| format!("line {}: {error}", place + 1))?;
        addresses.push(WorkerAddress { uri, tls_name: None });
    }
    Ok(addresses)
}

/// Publishes the file's addresses whenever they change. A file that is gone or broken for a while
/// changes nothing: better old workers than none.
pub(super) async fn follow(path: PathBuf, publish: Publisher, wake: Arc<Notify>) {
    let mut complaint = String::new();
    loop {
        let _ = tokio::time::timeout(INTERVAL, wake.notified()).await;
        match tokio::fs::read_to_string(&path).await.map_err(|error| error.to_string()) {
            Ok(text) => match parse(&text) {
                Ok(list) => {
                    complaint.clear();
                    publish.set(list);
                    continue;
                }
                Err(error) => complain(&path, error, &mut complaint),
            },
            Err(error) => complain(&path, error, &mut complaint),
        }
    }
}

/// Once for each thing that is wrong, not once a second.
fn complain(path: &Path, error: String, last: &mut String) {
    if *last != error {
        tracing::warn!(path = %path.display(), %error, "the list of workers cannot be used");
        *last = error;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_addresses_and_comments() {
        let list = parse("# all\na:1\n\n http://b:2 # second\nhttps://c:3\n").unwrap();
        let uris: Vec<_> = list.iter().map(|address| &*address.uri).collect();
        assert_eq!(uris, ["http://a:1", "http://b:2", "https://c:3"]);
        assert!(parse("a:1\nb\n").unwrap_err().starts_with("line 2: expected host:port"));
        assert_eq!(parse("").unwrap(), []);
    }
}
