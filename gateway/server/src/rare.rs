//! A future that is rarely ready, beside something that is asked with every token.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use futures::task::AtomicWaker;

/// Asks its future only when that has called: a timer or a cancellation that is asked takes a lock,
/// which several of them with every token would.
pub struct Rare<T> {
    future: Pin<Box<dyn Future<Output = T> + Send>>,
    bell: Arc<Bell>,
    waker: Waker,
}

struct Bell {
    has_rung: AtomicBool,
    task: AtomicWaker,
}

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.has_rung.store(true, Ordering::Release);
        self.task.wake();
    }
}

impl<T> Rare<T> {
    /// The same future, asked less.
    pub fn new(future: impl Future<Output = T> + Send + 'static) -> Self {
        // it must be asked once, to know whom to call
        let bell = Bell { has_rung: AtomicBool::new(true), task: AtomicWaker::new() };
        let bell = Arc::new(bell);
        Self { future: Box::pin(future), waker: Arc::clone(&bell).into(), bell }
    }

    /// As the future's own poll; not to be asked again once it was ready.
    pub fn poll(&mut self, context: &mut Context<'_>) -> Poll<T> {
        self.bell.task.register(context.waker());
        if !self.bell.has_rung.swap(false, Ordering::AcqRel) {
            return Poll::Pending;
        }
        self.future.as_mut().poll(&mut Context::from_waker(&self.waker))
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::sync::atomic::AtomicUsize;

    use tokio_util::sync::CancellationToken;

    use super::*;

    #[tokio::test]
    async fn the_future_is_asked_when_it_calls_and_whoever_asks_last_is_woken() {
        let (token, asked) = (CancellationToken::new(), Arc::new(AtomicUsize::new(0)));
        let mut inner = Box::pin(token.clone().cancelled_owned());
        let counter = Arc::clone(&asked);
        let mut rare = Rare::new(poll_fn(move |context| {
            counter.fetch_add(1, Ordering::Relaxed);
            inner.as_mut().poll(context)
        }));

        for _ in 0..10 {
            assert!(rare.poll(&mut Context::from_waker(Waker::noop())).is_pending());
        }
        assert_eq!(asked.load(Ordering::Relaxed), 1);

        // another task waits for it from here on
        let waiting = tokio::spawn(async move { poll_fn(|context| rare.poll(context)).await });
        tokio::task::yield_now().await;
        token.cancel();
        waiting.await.unwrap();
        assert_eq!(asked.load(Ordering::Relaxed), 2);
    }
}
