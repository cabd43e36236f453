//! What was made is kept within a budget of bytes, and made once for all who ask at the same time.

use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use tokio::sync::OnceCell;

use crate::telemetry::{CacheClass, Metrics};

/// Values by key; the least recently used ones leave when the budget is full.
pub struct ByteCache<K, V> {
    class: CacheClass,
    max_bytes: u64,
    state: Mutex<State<K, V>>,
    metrics: Arc<Metrics>,
}

struct State<K, V> {
    entries: HashMap<K, Entry<V>>,
    /// Keys by last use.
    order: BTreeMap<u64, K>,
    bytes: u64,
    clock: u64,
    /// Being made now.
    jobs: HashMap<K, Weak<OnceCell<V>>>,
}

struct Entry<V> {
    value: V,
    bytes: u64,
    used: u64,
}

impl<K: Clone + Eq + Hash, V: Clone> ByteCache<K, V> {
    /// An empty cache; a budget of 0 keeps nothing.
    pub fn new(class: CacheClass, max_bytes: u64, metrics: Arc<Metrics>) -> Self {
        let state = State {
            entries: HashMap::new(),
            order: BTreeMap::new(),
            bytes: 0,
            clock: 0,
            jobs: HashMap::new(),
        };
        Self { class, max_bytes, state: Mutex::new(state), metrics }
    }

    /// Whether a value of that size would be kept: an eighth of the budget at most, so that one
    /// clip does not push out everything else.
    pub fn takes(&self, bytes: u64) -> bool {
        bytes <= self.max_bytes / 8
    }

    /// The value, now the most recently used one.
    pub fn get(&self, key: &K) -> Option<V> {
        let found = self.lock().touch(key);
        self.metrics.cache_lookup(self.class, found.is_some());
        found
    }

    /// Keeps a value of that size if it takes such.
    pub fn put(&self, key: K, value: V, bytes: u64) {
        if !self.takes(bytes) {
            return;
        }
        let mut state = self.lock();
        state.remove(&key);
        state.clock += 1;
        let used = state.clock;
        state.order.insert(used, key.clone());
        state.entries.insert(key, Entry { value, bytes, used });
        state.bytes += bytes;
        while state.bytes > self.max_bytes {
            let Some((_, oldest)) = state.order.pop_first() else { break };
            state.remove(&oldest);
        }
        self.metrics.cache_bytes(self.class, state.bytes);
    }

    /// Forgets a value.
    pub fn remove(&self, key: &K) {
        let mut state = self.lock();
        state.remove(key);
        self.metrics.cache_bytes(self.class, state.bytes);
    }

    /// The value, kept or made; of those who ask at the same time one makes it, and if that one
    /// leaves, the next one does.
    ///
    /// # Errors
    /// What `make` says; each who waits then tries for itself.
    pub async fn get_or_make<E, F, M>(
        &self,
        key: K,
        size: impl Fn(&V) -> u64,
        make: F,
    ) -> Result<V, E>
    where
        F: FnOnce() -> M,
        M: Future<Output = Result<V, E>>,
    {
        if let Some(value) = self.get(&key) {
            return Ok(value);
        }
        let job = self.lock().job(&key);
        let value = job.get_or_try_init(make).await.cloned();
        if let Ok(value) = &value
            && self.lock().touch(&key).is_none()
        {
            self.put(key.clone(), value.clone(), size(value));
        }
        self.lock().clear_job(&key, job);
        value
    }

    fn lock(&self) -> MutexGuard<'_, State<K, V>> {
        // nothing panics while it is held
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<K: Clone + Eq + Hash, V: Clone> State<K, V> {
    fn touch(&mut self, key: &K) -> Option<V> {
        self.clock += 1;
        let entry = self.entries.get_mut(key)?;
        let before = std::mem::replace(&mut entry.used, self.clock);
        let value = entry.value.clone();
        self.order.remove(&before);
        self.order.insert(self.clock, key.clone());
        Some(value)
    }

    fn remove(&mut self, key: &K) {
        if let Some(entry) = self.entries.remove(key) {
            self.order.remove(&entry.used);
            self.bytes -= entry.bytes;
        }
    }

    fn job(&mut self, key: &K) -> Arc<OnceCell<V>> {
        if let Some(job) = self.jobs.get(key).and_then(Weak::upgrade) {
            return job;
        }
        let job = Arc::new(OnceCell::new());
        // jobs whose makers all left while they waited
        self.jobs.retain(|_, job| job.strong_count() > 0);
        self.jobs.insert(key.clone(), Arc::downgrade(&job));
        job
    }

    fn clear_job(&mut self, key: &K, job: Arc<OnceCell<V>>) {
        if Arc::strong_count(&job) == 1 {
            self.jobs.remove(key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt;
    use std::sync::atomic::{AtomicU32, Ordering};

    fn cache(max_bytes: u64) -> ByteCache<u32, u64> {
        ByteCache::new(CacheClass::Patches, max_bytes, Arc::new(Metrics::default()))
    }

    #[test]
    fn the_least_recently_used_leaves_first_and_bytes_never_pass_the_budget() {
        let cache = cache(800);
        for key in 0..8 {
            cache.put(key, 0, 100);
        }
        assert!(cache.get(&0).is_some());
        cache.put(8, 0, 100);

        assert!(cache.get(&1).is_none(), "1 was used longest ago");
        assert!(cache.get(&0).is_some() && cache.get(&8).is_some());
        assert_eq!(cache.lock().bytes, 800);
        assert_eq!(cache.lock().order.len(), 8);
    }

    #[test]
    fn a_value_put_twice_counts_once_and_one_above_its_share_is_not_kept() {
        let cache = cache(800);
        cache.put(1, 10, 100);
        cache.put(1, 11, 50);
        cache.put(2, 0, 101);
        assert_eq!((cache.get(&1), cache.get(&2)), (Some(11), None));
        assert_eq!(cache.lock().bytes, 50);
        cache.remove(&1);
        assert_eq!((cache.get(&1), cache.lock().bytes), (None, 0));
    }

    #[tokio::test]
    async fn all_who_ask_at_once_share_one_job_even_when_nothing_is_kept() {
        for budget in [0, 800] {
            let cache = cache(budget);
            let made = AtomicU32::new(0);
            let (open, gate) = tokio::sync::watch::channel(false);
            let ask = || {
                let (made, mut gate) = (&made, gate.clone());
                cache.get_or_make(
                    7,
                    |_| 8,
                    move || async move {
                        made.fetch_add(1, Ordering::Relaxed);
                        let _ = gate.wait_for(|is_open| *is_open).await;
                        Ok::<_, ()>(42)
                    },
                )
            };
            let asking = futures::future::join_all((0..5).map(|_| ask()));
            let (values, _) = tokio::join!(asking, async { open.send_replace(true) });
            assert!(values.iter().all(|value| *value == Ok(42)));
            assert_eq!(made.load(Ordering::Relaxed), 1);
            assert!(cache.lock().jobs.is_empty());
        }
    }

    #[tokio::test]
    async fn if_the_one_who_makes_it_leaves_the_next_one_does() {
        let cache = cache(800);
        let mut first =
            Box::pin(cache.get_or_make(7, |_| 8, std::future::pending::<Result<u64, ()>>));
        assert!(first.as_mut().now_or_never().is_none());
        let mut second = Box::pin(cache.get_or_make(7, |_| 8, || async { Ok::<_, ()>(9) }));
        assert!(second.as_mut().now_or_never().is_none());
        drop(first);
        assert_eq!(second.await, Ok(9));
        let failed = cache.get_or_make(8, |_| 8, || async { Err("no") }).await;
        assert_eq!(failed, Err("no"));
        assert_eq!(cache.get(&8), None);
    }
}
