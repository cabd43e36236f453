//! Accepts connections, and lets them end in order when the gateway stops.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio_io_timeout::TimeoutWriter;
use tokio_util::sync::CancellationToken;

use super::auth::Door;
use super::body::Leftovers;
use super::{admin, observe, router};
use crate::app::App;

/// Time for a client to send the head of a request.
const HEAD_TIMEOUT: Duration = Duration::from_secs(30);
/// Pause after an accept that failed, so that a full descriptor table does not spin a core.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// Time for aborted replies to tell their clients.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// Time in which a client that has stopped reading has to take another byte. Its reply is read from the worker only as
/// it is taken, and holds its place among the running ones that long.
const READING_TIMEOUT: Duration = Duration::from_secs(60);

/// Time for a client to greet by TLS.
const GREETING_TIMEOUT: Duration = Duration::from_secs(10);

/// Serves operators until `gone`; plain HTTP, on a listener of its own.
pub async fn serve_admin(app: Arc<App>, listener: TcpListener, gone: CancellationToken) {
    let router = admin::router(&app);
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            () = gone.cancelled() => break,
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => {
                    let (app, router, gone) = (Arc::clone(&app), router.clone(), gone.clone());
                    connections.spawn(speak(app, Door::Operators, router, stream, gone));
                }
                Err(_) => tokio::time::sleep(ACCEPT_PAUSE).await,
            },
            Some(_) = connections.join_next() => {}
        }
    }
    connections.shutdown().await;
}

/// Serves until `stop`, then lets running requests finish within the configured time; what is
/// left after it is ended with an error.
pub async fn serve(app: Arc<App>, listener: TcpListener, stop: CancellationToken) {
    let router = router(&app);
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            () = stop.cancelled() => break,
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => {
                    let serving = connection(Arc::clone(&app), router.clone(), stream, stop.clone());
                    connections.spawn(serving);
                }
                Err(error) => {
                    tracing::warn!(%error, "a connection could not be accepted");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            },
            Some(_) = connections.join_next() => {}
        }
    }
    drop(listener);
    app.admission.close();
    drain(&app, &mut connections).await;
}

async fn drain(app: &App, connections: &mut JoinSet<()>) {
    let limit = app.config.drain_timeout;
    tracing::info!(connections = connections.len(), limit_s = limit.as_secs(), "draining");
    if tokio::time::timeout(limit, all_gone(connections)).await.is_err() {
        tracing::warn!(connections = connections.len(), "drain time is over; ending what runs");
        app.abort.cancel();
        let _ = tokio::time::timeout(LAST_WORDS, all_gone(connections)).await;
    }
    connections.shutdown().await;
    if let Some(tracer) = &app.tracer {
        tracer.finish().await;
    }
    app.discovery.stop();
    app.workers.stop();
}

async fn all_gone(connections: &mut JoinSet<()>) {
    while connections.join_next().await.is_some() {}
}

async fn connection(app: Arc<App>, router: Router, stream: TcpStream, stop: CancellationToken) {
    // tokens are small and must not wait for company
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "a connection died at once");
        return;
    }
    let Some(tls) = &app.tls else {
        return speak(app, Door::Clients, router, stream, stop).await;
    };
    let greeting = tls.acceptor().accept(stream);
    match tokio::time::timeout(GREETING_TIMEOUT, greeting).await {
        Ok(Ok(stream)) => speak(app, Door::Clients, router, stream, stop).await,
        Ok(Err(error)) => tracing::debug!(%error, "a connection was not greeted by TLS"),
        Err(_) => tracing::debug!("a connection was too slow to greet by TLS"),
    }
}

async fn speak<S>(app: Arc<App>, door: Door, router: Router, stream: S, stop: CancellationToken)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (leftovers, reading) = Leftovers::new();
    let service = service_fn(move |request: hyper::Request<hyper::body::Incoming>| {
        let (app, router) = (Arc::clone(&app), router.clone());
        let leftovers = leftovers.clone();
        async move {
            let mut request = request.map(Body::new);
            request.extensions_mut().insert(leftovers);
            Ok::<_, std::convert::Infallible>(observe::answer(app, door, router, request).await)
        }
    });
    let serving = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        // events are small: putting them together costs less than telling the system where each is
        .writev(false)
        .serve_connection(TokioIo::new(expecting(stream, READING_TIMEOUT)), service);
    let mut serving = std::pin::pin!(serving);
    let mut reading = std::pin::pin!(reading);
    // replies first, then the rest of what they refused, which is never all
    let outcome = tokio::select! {
        biased;
        outcome = serving.as_mut() => outcome,
        () = reading.as_mut() => return,
        () = stop.cancelled() => {
            serving.as_mut().graceful_shutdown();
            tokio::select! {
                biased;
                outcome = serving.as_mut() => outcome,
                () = reading => return,
            }
        }
    };
    if let Err(error) = outcome {
        tracing::debug!(%error, "a connection ended early");
    }
}

/// The stream, whose writes fail once the other end has taken nothing for `limit`.
fn expecting<S: AsyncWrite>(stream: S, limit: Duration) -> Pin<Box<TimeoutWriter<S>>> {
    let mut writer = TimeoutWriter::new(stream);
    writer.set_timeout(Some(limit));
    Box::pin(writer)
}

#[cfg(test)]
mod tests {
    use std::io::ErrorKind;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    #[tokio::test]
    async fn a_client_that_reads_is_served_and_one_that_has_stopped_is_not() {
        let (ours, mut theirs) = tokio::io::duplex(8);
        let mut ours = expecting(ours, Duration::from_secs(3600));
        let reader = tokio::spawn(async move {
            let mut taken = [0; 40];
            theirs.read_exact(&mut taken).await.expect("bytes of ours");
        });
        ours.write_all(&[7; 40]).await.expect("it is read");
        reader.await.expect("a reader that ended");

        let (ours, _silent) = tokio::io::duplex(8);
        let mut ours = expecting(ours, Duration::from_millis(50));
        let outcome = ours.write_all(&[7; 40]).await;
        assert_eq!(outcome.expect_err("nobody reads").kind(), ErrorKind::TimedOut);
    }
}
