//! One kept HTTP/1.1 connection that reads no more of an answer than its timing needs.

use std::net::SocketAddr;
use std::time::Instant;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::{Outcome, Taken};

/// A chat request with its head.
pub fn chat_request(gateway: SocketAddr, body: &[u8]) -> Vec<u8> {
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: {gateway}\r\n\
         content-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    [head.as_bytes(), body].concat()
}

/// One kept connection to a gateway.
pub struct Connection {
    stream: TcpStream,
    buffer: Vec<u8>,
}

impl Connection {
    pub async fn open(address: SocketAddr) -> Outcome<Self> {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        Ok(Self { stream, buffer: Vec::with_capacity(64 * 1024) })
    }

    /// Sends a request and reads its answer, which must be a 200; `needle` stands before the text
    /// whose first appearance is told.
    pub async fn ask(&mut self, request: &[u8], needle: Option<&str>) -> Outcome<Taken> {
        let begin = Instant::now();
        self.stream.write_all(request).await?;
        self.buffer.clear();
        let head = loop {
            if let Some(end) = find(&self.buffer, b"\r\n\r\n") {
                break end + 4;
            }
            self.read().await?;
        };
        let text = std::str::from_utf8(&self.buffer[..head])?.to_ascii_lowercase();
        let length = match text.lines().find_map(|line| line.strip_prefix("content-length: ")) {
            Some(length) => Some(length.parse::<usize>()?),
            None => None,
        };
        let mut first = None;
        let mut searched = head;
        loop {
            if let (None, Some(needle)) = (first, needle) {
                if shows_text(&self.buffer[searched..], needle.as_bytes()) {
                    first = Some(begin.elapsed());
                }
                // what may be the beginning of one stays
                searched = head.max(self.buffer.len().saturating_sub(needle.len() + 1));
            }
            let is_complete = match length {
                Some(length) => self.buffer.len() >= head + length,
                None => self.buffer.ends_with(b"\r\n0\r\n\r\n"),
            };
            if is_complete {
                break;
            }
            self.read().await?;
        }
        let whole = begin.elapsed();
        if !text.starts_with("http/1.1 200") || find(&self.buffer, b"\"error\":").is_some() {
            return Err(String::from_utf8_lossy(&self.buffer).into_owned().into());
        }
        match (first, needle) {
            (None, Some(needle)) => {
                Err(format!("no {needle} in {}", String::from_utf8_lossy(&self.buffer)).into())
            }
            _ => Ok(Taken { first: first.unwrap_or(whole), whole }),
        }
    }

    async fn read(&mut self) -> Outcome<()> {
        match self.stream.read_buf(&mut self.buffer).await? {
            0 => Err("the gateway closed the connection".into()),
            _ => Ok(()),
        }
    }
}

fn find(bytes: &[u8], needle: &[u8]) -> Option<usize> {
    bytes.windows(needle.len()).position(|window| window == needle)
}

/// Whether the needle stands there; one that opens a text, before a text that is not empty.
fn shows_text(bytes: &[u8], needle: &[u8]) -> bool {
    if !needle.ends_with(b"\"") {
        return find(bytes, needle).is_some();
    }
    bytes
        .windows(needle.len() + 1)
        .any(|window| window.starts_with(needle) && !window.ends_with(b"\""))
}
