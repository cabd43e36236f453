//! Work that would hold up other requests, moved to threads, a bounded number at a time.

use std::sync::Arc;

use tokio::sync::Semaphore;

use crate::error::GatewayError;
use crate::priority;

/// A share of the runtime's blocking threads.
#[derive(Clone, Debug)]
pub struct BlockingPool {
    places: Arc<Semaphore>,
}

impl BlockingPool {
    /// At most `threads` pieces of work at once; more wait in order of arrival.
    pub fn new(threads: u32) -> Self {
        Self { places: Arc::new(Semaphore::new(threads as usize)) }
    }

    /// Runs one piece. Dropping the future before its turn cancels it; once begun, it ends.
    ///
    /// # Errors
    /// `Internal` if the work panicked.
    pub async fn run<T, F>(&self, work: F) -> Result<T, GatewayError>
    where
        T: Send + 'static,
        F: FnOnce() -> T + Send + 'static,
    {
        let place = Arc::clone(&self.places)
            .acquire_owned()
            .await
            .map_err(|_| GatewayError::internal("the pool of threads is closed"))?;
        let running = tokio::task::spawn_blocking(move || {
            priority::take_time();
            let outcome = work();
            drop(place);
            outcome
        });
        running.await.map_err(|error| GatewayError::internal(format!("a thread died: {error}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    #[tokio::test]
    async fn a_panic_is_an_internal_error_and_frees_its_place() {
        let pool = BlockingPool::new(1);
        let refused = pool.run(|| panic!("on purpose")).await.map(|(): ()| ());
        assert_eq!(refused.unwrap_err().kind, ErrorKind::Internal);
        assert_eq!(pool.run(|| 7).await.unwrap(), 7);
    }
}
