//! A connection to a worker on which small writes go out together: HTTP/2 writes a request's head,
//! its message and its end one after the other, and those of other requests beside them.

use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use bytes::{Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::task::JoinHandle;

/// Bytes that may wait for the system to take those before them.
const MAX_WAITING_BYTES: usize = 256 << 10;

/// The connection. Writing always succeeds until too much waits; a task of its own hands the bytes
/// on once whoever else is ready has written, and at the latest before the thread would sleep.
pub(super) struct Gathered {
    read: OwnedReadHalf,
    waiting: Arc<Waiting>,
    writing: JoinHandle<()>,
}

impl Gathered {
    /// Takes a socket over; needs a running tokio runtime.
    pub(super) fn new(stream: TcpStream) -> Self {
        let (read, write) = stream.into_split();
        let waiting = Arc::new(Waiting::default());
        let writing = tokio::spawn(hand_on(Arc::clone(&waiting), write));
        Self { read, waiting, writing }
    }
}

impl Drop for Gathered {
    fn drop(&mut self) {
        self.writing.abort();
    }
}

impl AsyncRead for Gathered {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.read).poll_read(context, buffer)
    }
}

impl AsyncWrite for Gathered {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.waiting.poll_add(context, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, _context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(self.waiting.lock().check())
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.waiting.poll_close(context)
    }
}

/// What both sides of the writing share, behind a lock that is held for a copy at most.
#[derive(Default)]
struct Waiting(Mutex<State>);

#[derive(Default)]
struct State {
    bytes: BytesMut,
    is_closing: bool,
    /// Everything was handed on and the connection's end told.
    is_closed: bool,
    /// Why writing has ended.
    failure: Option<io::ErrorKind>,
    /// Waits for room, or for the end.
    writer: Option<Waker>,
    /// Waits for bytes.
    task: Option<Waker>,
}

impl State {
    fn check(&self) -> io::Result<()> {
        self.failure.map_or(Ok(()), |kind| Err(kind.into()))
    }

    fn wake_writer(&mut self) {
        if let Some(writer) = self.writer.take() {
            writer.wake();
        }
    }
}

impl Waiting {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn poll_add(&self, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let mut state = self.lock();
        state.check()?;
        if state.bytes.len() >= MAX_WAITING_BYTES {
            state.writer = Some(context.waker().clone());
            return Poll::Pending;
        }
        state.bytes.extend_from_slice(bytes);
        if let Some(task) = state.task.take() {
            task.wake();
        }
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_close(&self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut state = self.lock();
        state.check()?;
        if state.is_closed {
            return Poll::Ready(Ok(()));
        }
        state.is_closing = true;
        state.writer = Some(context.waker().clone());
        if let Some(task) = state.task.take() {
            task.wake();
        }
        Poll::Pending
    }

    /// Waits until there is something to do.
    fn poll_work(&self, context: &mut Context<'_>) -> Poll<()> {
        let mut state = self.lock();
        if !state.bytes.is_empty() || state.is_closing {
            return Poll::Ready(());
        }
        state.task = Some(context.waker().clone());
        Poll::Pending
    }

    /// All that waits; the writer may go on.
    fn take(&self) -> (Bytes, bool) {
        let mut state = self.lock();
        let bytes = state.bytes.split().freeze();
        if !state.is_closing {
            state.wake_writer();
        }
        (bytes, state.is_closing)
    }

    fn end(&self, outcome: io::Result<()>) {
        let mut state = self.lock();
        state.is_closed = outcome.is_ok();
        state.failure = outcome.err().map(|error| error.kind());
        state.wake_writer();
    }
}

async fn hand_on(waiting: Arc<Waiting>, mut write: OwnedWriteHalf) {
    let outcome = loop {
        std::future::poll_fn(|context| waiting.poll_work(context)).await;
        // behind all that is ready now
        tokio::task::yield_now().await;
        let (mut bytes, is_last) = waiting.take();
        let written = write.write_all_buf(&mut bytes).await;
        if written.is_err() {
            break written;
        }
        if is_last {
            break write.shutdown().await;
        }
    };
    waiting.end(outcome);
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncReadExt;
    use tokio::net::TcpListener;

    use super::*;

    async fn pair() -> (Gathered, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        (Gathered::new(near), listener.accept().await.unwrap().0)
    }

    #[tokio::test]
    async fn all_bytes_arrive_in_order_and_then_the_end() {
        let (mut near, mut far) = pair().await;
        let sent: Vec<u8> = (0..3_000_000_u32).map(|place| (place % 251) as u8).collect();
        let expected = sent.clone();
        let writing = tokio::spawn(async move {
            let mut rest = &sent[..];
            for length in [1, 9, 200, 70_000].into_iter().cycle() {
                let piece = &rest[..rest.len().min(length)];
                near.write_all(piece).await.unwrap();
                near.flush().await.unwrap();
                rest = &rest[piece.len()..];
                if rest.is_empty() {
                    break;
                }
            }
            near.shutdown().await.unwrap();
            near
        });
        let mut got = Vec::new();
        far.read_to_end(&mut got).await.unwrap();
        assert!(got == expected);
        drop(writing.await.unwrap());
    }

    #[tokio::test]
    async fn small_writes_of_one_turn_arrive_together_without_a_further_word() {
        let (mut near, mut far) = pair().await;
        for piece in ["one ", "two ", "three"] {
            near.write_all(piece.as_bytes()).await.unwrap();
            near.flush().await.unwrap();
        }
        let mut got = [0; 64];
        let length = far.read(&mut got).await.unwrap();
        assert_eq!(&got[..length], b"one two three");
    }

    #[tokio::test]
    async fn a_writer_learns_that_the_other_end_is_gone() {
        let (mut near, far) = pair().await;
        drop(far);
        // the first bytes after it may still be taken
        while near.write_all(&[0; 4096]).await.is_ok() {
            tokio::task::yield_now().await;
        }
        assert!(near.flush().await.is_err());
    }

    #[tokio::test]
    async fn what_waits_is_bounded() {
        let (mut near, far) = pair().await;
        let flood = async {
            loop {
                near.write_all(&[0; 64 << 10]).await.unwrap();
                let waiting = near.waiting.lock().bytes.len();
                assert!(waiting <= MAX_WAITING_BYTES + (64 << 10), "{waiting}");
            }
        };
        // the system takes some, then nothing more is taken
        assert!(tokio::time::timeout(std::time::Duration::from_millis(300), flood).await.is_err());
        drop(far);
    }
}
