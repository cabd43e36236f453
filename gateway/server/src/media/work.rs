//! Threads and memory for pixels: bounded, and shared fairly among requests by cost.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use tokio::runtime::Runtime;

use super::allowance::Taken;
use super::fair::{FairQueue, Flow, Place};
use super::limits;
use crate::config::MediaLimits;
use crate::error::GatewayError;
use crate::priority;

/// What pixel work may use at one time.
#[derive(Debug)]
pub struct WorkRooms {
    threads: Arc<FairQueue>,
    memory: Arc<FairQueue>,
    /// Only its blocking threads are used, all of low priority; taken when it is dropped.
    pool: Option<Runtime>,
}

/// What one request has used so far, at each queue.
#[derive(Debug, Default)]
pub struct Share {
    threads: Flow,
    memory: Flow,
    /// Of the FFmpeg processes.
    pub processes: Flow,
    /// What its media count to its tenant, as long as there are any.
    taken: OnceLock<Taken>,
    /// Pixels of all animations that are decoded only to be written in another form.
    rewritten: AtomicU64,
}

impl Share {
    /// Counts an animation of so many pixels before it is rewritten.
    ///
    /// # Errors
    /// `MediaRejected` if those of the request come to more than its limit.
    pub fn rewrite(&self, pixels: u64, limits: &MediaLimits) -> Result<(), GatewayError> {
        let before = self.rewritten.fetch_add(pixels, Ordering::Relaxed);
        limits::check_rewritten(before.saturating_add(pixels), limits)
    }

    /// Keeps what the request has taken, to be given back with the last of its media.
    pub fn hold(&self, taken: Option<Taken>) {
        if let Some(taken) = taken {
            // a request takes once
            let _ = self.taken.set(taken);
        }
    }
}

/// Told to work that has begun: whether anyone still waits for it.
#[derive(Clone, Debug)]
pub struct Watch(Weak<()>);

/// The one who waited has left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Left;

impl Watch {
    /// # Errors
    /// [`Left`] if nobody waits for the result any more.
    pub fn check(&self) -> Result<(), Left> {
        if self.0.strong_count() == 0 { Err(Left) } else { Ok(()) }
    }
}

impl WorkRooms {
    /// At most so many threads and bytes of working memory.
    ///
    /// # Errors
    /// What the system said about the threads.
    pub fn new(threads: u32, bytes: u64) -> std::io::Result<Self> {
        let pool = tokio::runtime::Builder::new_current_thread()
            .thread_name("pixels")
            .max_blocking_threads(threads.max(1) as usize)
            .on_thread_start(priority::step_back)
            .build()?;
        Ok(Self {
            threads: FairQueue::new(u64::from(threads)),
            memory: FairQueue::new(bytes),
            pool: Some(pool),
        })
    }

    /// Memory for one item's decoding; a larger item than there is memory has it all.
    pub async fn memory(&self, share: &Share, bytes: u64) -> Place {
        self.memory.enter(&share.memory, bytes, bytes).await
    }

    /// Items that wait for memory.
    #[cfg(test)]
    pub fn waiting_for_memory(&self) -> usize {
        self.memory.waiting()
    }

    /// Runs one piece of work that costs about `cost` pixels. Dropping the future before its turn
    /// cancels it; once begun it ends when it next looks at its [`Watch`].
    ///
    /// # Errors
    /// `Internal` if the work panicked.
    pub async fn run<T, F>(&self, share: &Share, cost: u64, work: F) -> Result<T, GatewayError>
    where
        T: Send + 'static,
        F: FnOnce(&Watch) -> T + Send + 'static,
    {
        let place = self.threads.enter(&share.threads, 1, cost).await;
        let pool = self.pool.as_ref().ok_or_else(|| GatewayError::internal("no pixel threads"))?;
        let waiting = Arc::new(());
        let watch = Watch(Arc::downgrade(&waiting));
        let running = pool.spawn_blocking(move || {
            let outcome = work(&watch);
            drop(place);
            outcome
        });
        let outcome = running.await;
        drop(waiting);
        outcome.map_err(|error| GatewayError::internal(format!("a thread died: {error}")))
    }
}

impl Drop for WorkRooms {
    fn drop(&mut self) {
        // not waited for: it may be dropped where nothing may wait
        if let Some(pool) = self.pool.take() {
            pool.shutdown_background();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    #[tokio::test]
    async fn a_panic_is_an_internal_error_and_frees_its_place() {
        let rooms = WorkRooms::new(1, 1).unwrap();
        let share = Share::default();
        let refused = rooms.run(&share, 1, |_| panic!("on purpose")).await.map(|(): ()| ());
        assert_eq!(refused.unwrap_err().kind, ErrorKind::Internal);
        assert_eq!(rooms.run(&share, 1, |_| 7).await.unwrap(), 7);
    }

    #[tokio::test]
    async fn pixel_threads_step_back_and_all_others_stay() {
        let nice = || {
            let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
            let after_name = stat.rsplit_once(") ").unwrap().1;
            // the 19th field of the line, 17th after the name
            after_name.split(' ').nth(16).unwrap().parse::<i32>().unwrap()
        };
        let before = nice();
        let rooms = WorkRooms::new(1, 1).unwrap();
        let inside = rooms.run(&Share::default(), 1, move |_| nice()).await.unwrap();
        assert_eq!(inside, (before + 10).min(19));
        assert_eq!(nice(), before);
        assert_eq!(tokio::task::spawn_blocking(nice).await.unwrap(), before);
    }

    #[tokio::test]
    async fn work_learns_that_nobody_waits_for_it() {
        let rooms = WorkRooms::new(1, 1).unwrap();
        let share = Share::default();
        let (tell, told) = std::sync::mpsc::channel::<()>();
        let (report, reported) = tokio::sync::oneshot::channel();
        let (begin, begun) = tokio::sync::oneshot::channel();
        let mut running = Box::pin(rooms.run(&share, 1, move |watch| {
            begin.send(watch.check()).unwrap();
            told.recv().unwrap();
            report.send(watch.check()).unwrap();
        }));
        let early = tokio::select! {
            _ = running.as_mut() => panic!("it waits to be told"),
            early = begun => early,
        };
        assert_eq!(early.unwrap(), Ok(()));
        drop(running);
        tell.send(()).unwrap();
        assert_eq!(reported.await.unwrap(), Err(Left));
        // its thread is free again
        assert_eq!(rooms.run(&share, 1, |_| 7).await.unwrap(), 7);
    }
}
