//! A server that holds media, and misbehaves by path.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// Serves the files of the handed set under `/file/NAME`, and trouble under other paths.
pub struct Origin {
    pub address: SocketAddr,
    connections: Arc<AtomicUsize>,
    serving: tokio::task::JoinHandle<()>,
}

impl Origin {
    pub async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let connections = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&connections);
        let serving = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                counted.fetch_add(1, Ordering::Relaxed);
                tokio::spawn(answer(stream, address));
            }
        });
        Self { address, connections, serving }
    }

    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    /// Connections that were accepted.
    pub fn connections(&self) -> usize {
        self.connections.load(Ordering::Relaxed)
    }
}

impl Drop for Origin {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

async fn answer(mut stream: TcpStream, address: SocketAddr) {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        match stream.read_u8().await {
            Ok(byte) => head.push(byte),
            Err(_) => return,
        }
    }
    let head = String::from_utf8_lossy(&head).into_owned();
    let target = head.split(' ').nth(1).unwrap_or("/");
    // asked as a proxy it is told whose file is wanted
    let path = target
        .strip_prefix("http://")
        .map_or(target, |rest| rest.find('/').map_or("/", |place| &rest[place..]));
    let path = path.to_owned();
    if let Some(rest) = path.strip_prefix("/kept/") {
        let _ = kept(&mut stream, rest, &head).await;
        return;
    }
    let _ = write(&mut stream, &path, address).await;
}

/// `/kept/TERMS/NAME`: a file with `Cache-Control: TERMS` and an entity tag; 304 if it is asked
/// whether that tag still holds.
async fn kept(stream: &mut TcpStream, rest: &str, head: &str) -> std::io::Result<()> {
    let (terms, name) = rest.split_once('/').unwrap_or(("", rest));
    let fields = format!("Cache-Control: {terms}\r\nETag: \"{name}\"\r\nConnection: close");
    if head.to_ascii_lowercase().contains("if-none-match:") {
        let reply = format!("HTTP/1.1 304 Not Modified\r\n{fields}\r\n\r\n");
        return stream.write_all(reply.as_bytes()).await;
    }
    let bytes = std::fs::read(super::media_directory().join(name))?;
    let length = bytes.len();
    let reply = format!("HTTP/1.1 200 OK\r\n{fields}\r\nContent-Length: {length}\r\n\r\n");
    stream.write_all(reply.as_bytes()).await?;
    stream.write_all(&bytes).await
}

async fn write(stream: &mut TcpStream, path: &str, address: SocketAddr) -> std::io::Result<()> {
    let redirect = |to: &str| {
        format!(
            "HTTP/1.1 302 Found\r\nLocation: {to}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        )
    };
    if let Some(name) = path.strip_prefix("/file/") {
        let bytes = std::fs::read(super::media_directory().join(name))?;
        return whole(stream, &bytes).await;
    }
    if let Some(count) = path.strip_prefix("/hops/") {
        let left: u32 = count.parse().unwrap_or(0);
        let to = match left {
            0 => "/file/pair_red_112.png".to_owned(),
            _ => format!("/hops/{}", left - 1),
        };
        return stream.write_all(redirect(&to).as_bytes()).await;
    }
    match path {
        "/away" => stream.write_all(redirect("http://elsewhere.invalid/a.png").as_bytes()).await,
        "/other-port" => {
            let to = format!("http://127.0.0.1:{}/a.png", address.port() ^ 1);
            stream.write_all(redirect(&to).as_bytes()).await
        }
        "/to-file" => stream.write_all(redirect("file:///etc/hostname").as_bytes()).await,
        "/nowhere" => stream.write_all(redirect("http://").as_bytes()).await,
        "/large" => {
            let head = "HTTP/1.1 200 OK\r\nContent-Length: 100000000\r\n\r\n";
            stream.write_all(head.as_bytes()).await
        }
        "/endless" => {
            let head = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
            stream.write_all(head.as_bytes()).await?;
            loop {
                stream.write_all(b"1000\r\n").await?;
                stream.write_all(&[7; 4096]).await?;
                stream.write_all(b"\r\n").await?;
            }
        }
        "/broken" => {
            let head = "HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nabc";
            stream.write_all(head.as_bytes()).await
        }
        "/silent" => std::future::pending().await,
        "/teapot" => {
            let reply = "HTTP/1.1 500 Oh\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
            stream.write_all(reply.as_bytes()).await
        }
        _ => {
            let reply = "HTTP/1.1 404 No\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
            stream.write_all(reply.as_bytes()).await
        }
    }
}

async fn whole(stream: &mut TcpStream, bytes: &[u8]) -> std::io::Result<()> {
    let head = format!(
        "HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        bytes.len()
    );
    stream.write_all(head.as_bytes()).await?;
    stream.write_all(bytes).await
}
