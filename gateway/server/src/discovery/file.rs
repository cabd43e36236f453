//! Workers from a file: one address a line, `#` begins a comment; read anew when it changes.
//!
//! Files are read while they are written: what one says is believed once it has said so twice, a
//! second apart, or when somebody asks for a look.

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

/// Publishes the file's addresses whenever they change. A file that is gone, broken or empty for a
/// while changes nothing: better old workers than none.
pub(super) async fn follow(path: PathBuf, publish: Publisher, wake: Arc<Notify>) {
    let mut complaint = String::new();
    let mut reading = Reading::default();
    loop {
        let is_asked = tokio::time::timeout(INTERVAL, wake.notified()).await.is_ok();
        let text = tokio::fs::read_to_string(&path).await.map_err(|error| error.to_string());
        match text.and_then(|text| reading.take(text, is_asked)) {
            Ok(list) => {
                complaint.clear();
                if let Some(list) = list {
                    publish.set(list);
                }
            }
            Err(error) => complain(&path, error, &mut complaint),
        }
    }
}

/// What the file said when it was last looked at.
#[derive(Debug, Default)]
struct Reading {
    last: String,
}

impl Reading {
    /// The list to follow from now on; `None` for one that may still be written. Whoever has asked
    /// for a look means the file as it is.
    ///
    /// # Errors
    /// A file that says nothing at all, or the line that is no address.
    fn take(&mut self, text: String, is_asked: bool) -> Result<Option<Vec<WorkerAddress>>, String> {
        let is_settled = is_asked || self.last == text;
        self.last = text;
        if self.last.trim().is_empty() {
            return Err("it is empty; the workers stay as they were (a comment alone means that \
                        there are none)"
                .to_owned());
        }
        let list = parse(&self.last)?;
        Ok(is_settled.then_some(list))
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

    #[test]
    fn a_file_in_the_middle_of_being_written_takes_no_worker_away() {
        let mut reading = Reading::default();
        let mut look = |text: &str, is_asked| {
            let list = reading.take(text.to_owned(), is_asked);
            list.map(|list| list.map(|list| list.len()))
        };
        assert_eq!(look("a:1\nb:2\n", true), Ok(Some(2)));
        assert_eq!(look("a:1\nb:2\n", false), Ok(Some(2)));
        // cut short, then its first line alone, then an address that lacks its last digit
        assert!(look("", false).unwrap_err().starts_with("it is empty"));
        assert!(look("", false).is_err());
        assert_eq!(look("c:10\n", false), Ok(None));
        assert_eq!(look("c:10\nd:1", false), Ok(None));
        assert_eq!(look("c:10\nd:10\n", false), Ok(None));
        assert_eq!(look("c:10\nd:10\n", false), Ok(Some(2)));
        // who asks is believed, and a comment says that nobody is meant
        assert_eq!(look("e:1\n", true), Ok(Some(1)));
        assert!(look("\n \n", true).is_err());
        assert_eq!(look("# none\n", true), Ok(Some(0)));
    }
}
