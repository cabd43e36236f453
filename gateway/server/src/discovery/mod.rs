//! Finds workers: keeps the pool's list equal to what all sources say together.

mod dns;
mod file;
pub mod kubernetes;

use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::Notify;
use tokio::task::JoinHandle;

use crate::config::WorkerSource;
use crate::workers::{WorkerAddress, WorkerPool};

/// The tasks that follow sources which change; dropping it ends them.
#[derive(Debug, Default)]
pub struct Discovery {
    tasks: Vec<JoinHandle<()>>,
    wake: Arc<Notify>,
}

impl Drop for Discovery {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Discovery {
    /// Gives the pool its first workers and begins to follow all sources.
    ///
    /// # Errors
    /// The source that cannot be used, with the reason.
    pub fn start(sources: &[WorkerSource], pool: &Arc<WorkerPool>) -> Result<Self, String> {
        let lists = Arc::new(Lists {
            by_source: Mutex::new(vec![Vec::new(); sources.len()]),
            pool: Arc::clone(pool),
        });
        let wake = Arc::new(Notify::new());
        let mut first = vec![Vec::new(); sources.len()];
        let mut discovery = Self { tasks: Vec::new(), wake: Arc::clone(&wake) };
        for (place, source) in sources.iter().enumerate() {
            let wake = Arc::clone(&wake);
            let publish = Publisher { place, lists: Arc::clone(&lists) };
            let task = match source {
                WorkerSource::Fixed(uri) => {
                    first[place] = vec![WorkerAddress { uri: uri.clone(), tls_name: None }];
                    continue;
                }
                WorkerSource::File(path) => {
                    first[place] = file::read(path)?;
                    tokio::spawn(file::follow(path.clone(), publish, wake))
                }
                WorkerSource::Dns { host, port, scheme } => {
                    tokio::spawn(dns::follow((host.clone(), *port), scheme, publish, wake))
                }
                WorkerSource::Kubernetes { namespace, service, port, scheme } => {
                    let server = kubernetes::ApiServer::in_cluster()?;
                    let service = kubernetes::Service {
                        namespace: namespace.clone(),
                        name: service.clone(),
                        port: port.clone(),
                        scheme,
                    };
                    tokio::spawn(kubernetes::follow(server, service, move |list| publish.set(list)))
                }
            };
            discovery.tasks.push(task);
        }
        lists.begin(first)?;
        Ok(discovery)
    }

    /// Has every source look again now.
    pub fn refresh(&self) {
        self.wake.notify_waiters();
    }

    /// Follows the sources no longer.
    pub fn stop(&self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

#[derive(Debug)]
struct Lists {
    by_source: Mutex<Vec<Vec<WorkerAddress>>>,
    pool: Arc<WorkerPool>,
}

impl Lists {
    fn begin(&self, lists: Vec<Vec<WorkerAddress>>) -> Result<(), String> {
        let mut by_source = self.by_source.lock().unwrap_or_else(PoisonError::into_inner);
        // a source that has spoken already knows better
        for (now, first) in by_source.iter_mut().zip(lists) {
            if now.is_empty() {
                *now = first;
            }
        }
        self.pool.set_workers(&together(&by_source))
    }
}

/// Where one source says what it has found.
#[derive(Debug)]
struct Publisher {
    place: usize,
    lists: Arc<Lists>,
}

impl Publisher {
    /// The source's workers are these from now on.
    fn set(&self, mut list: Vec<WorkerAddress>) {
        list.sort();
        list.dedup();
        let lists = &self.lists;
        // held over the change of the pool, so that two sources cannot overtake each other
        let mut by_source = lists.by_source.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(old) = by_source.get_mut(self.place) else { return };
        if *old == list {
            return;
        }
        tracing::info!(before = old.len(), now = list.len(), "the list of workers has changed");
        *old = list;
        if let Err(complaint) = lists.pool.set_workers(&together(&by_source)) {
            tracing::error!(%complaint, "not all workers can be followed");
        }
    }
}

fn together(by_source: &[Vec<WorkerAddress>]) -> Vec<WorkerAddress> {
    let mut all: Vec<WorkerAddress> = Vec::new();
    for address in by_source.iter().flatten() {
        if !all.iter().any(|known| known.uri == address.uri) {
            all.push(address.clone());
        }
    }
    all
}
