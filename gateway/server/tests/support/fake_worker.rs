//! A real gRPC worker that says what a test tells it to say, and remembers what it was asked.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex};

use futures::Stream;
use futures::stream::StreamExt;
use sha2::{Digest, Sha256};
use tokio::sync::{Notify, mpsc, watch};
use tonic::metadata::MetadataMap;
use tonic::{Code, Request, Response, Status, Streaming};

/// The protocol as the tests compile it for themselves.
#[allow(dead_code, missing_docs, clippy::all)]
pub mod proto {
    include!(concat!(env!("OUT_DIR"), "/server/m3stack.worker.v1.rs"));
}

use proto::worker_service_server::{WorkerService, WorkerServiceServer};

use super::script::{self, Act};

/// What a test tells a worker to do with a request, given its header.
pub type Script = Arc<dyn Fn(&proto::GenerateHeader) -> Vec<Act> + Send + Sync>;

/// Which media a worker claims to lack.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Holds {
    Nothing,
    Everything,
}

/// A request as it arrived.
#[derive(Clone, Default)]
pub struct Seen {
    pub header: proto::GenerateHeader,
    /// Patch bytes of each item that was sent, whole and with a hash that was right.
    pub patches: HashMap<u32, Vec<u8>>,
    pub trace_id: Option<String>,
    pub traceparent: Option<String>,
    pub has_deadline: bool,
}

#[derive(Default)]
pub struct Record {
    pub seen: Vec<Seen>,
    /// Calls that the gateway dropped before their end.
    pub cancelled: usize,
    /// Calls that ran to their end.
    pub ended: usize,
    /// Calls of `Watch`.
    pub watched: usize,
}

struct Inner {
    identity: Mutex<proto::Identity>,
    script: Mutex<Script>,
    holds: Mutex<Holds>,
    record: Arc<Mutex<Record>>,
    changed: Arc<Notify>,
    told: watch::Receiver<Told>,
}

/// What a worker says of itself.
#[derive(Clone, Default)]
struct Told {
    state: proto::WorkerState,
    load: proto::Load,
    /// News of its pages, numbered.
    cache: (u64, Option<proto::CacheEvents>),
    /// Nothing comes between changes.
    is_taciturn: bool,
}

/// A worker on its own runtime; dropping it is `kill -9`.
pub struct FakeWorker {
    pub address: SocketAddr,
    inner: Arc<Inner>,
    told: watch::Sender<Told>,
    runtime: Option<tokio::runtime::Runtime>,
}

impl FakeWorker {
    /// Starts on a free port, or on `address` to take the place of one that was killed.
    pub fn start(
        facts: proto::ModelFacts,
        fingerprint: [u8; 32],
        address: Option<SocketAddr>,
    ) -> Self {
        Self::start_with(facts, fingerprint, address, None)
    }

    /// The same, speaking TLS.
    pub fn start_with(
        facts: proto::ModelFacts,
        fingerprint: [u8; 32],
        address: Option<SocketAddr>,
        tls: Option<tonic::transport::ServerTlsConfig>,
    ) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let wanted = address.unwrap_or_else(|| "127.0.0.1:0".parse().unwrap());
        let listener = std::net::TcpListener::bind(wanted).unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        let load = proto::Load { total_pages: 100, ..proto::Load::default() };
        let state = proto::WorkerState::Ready;
        let (told, follow) =
            watch::channel(Told { state, load, cache: (0, None), is_taciturn: false });
        let inner = Arc::new(Inner {
            identity: Mutex::new(identity(facts, fingerprint)),
            script: Mutex::new(Arc::new(|_| vec![Act::Start, Act::Stop])),
            holds: Mutex::new(Holds::Nothing),
            record: Arc::default(),
            changed: Arc::default(),
            told: follow,
        });
        let service = WorkerServiceServer::from_arc(Arc::new(Service(Arc::clone(&inner))))
            .max_decoding_message_size(64 << 20);
        runtime.spawn(async move {
            let listener = tokio::net::TcpListener::from_std(listener).unwrap();
            let incoming = tokio_stream::wrappers::TcpListenerStream::new(listener);
            let mut server = tonic::transport::Server::builder();
            if let Some(tls) = tls {
                server = server.tls_config(tls).unwrap();
            }
            server.add_service(service).serve_with_incoming(incoming).await
        });
        Self { address, inner, told, runtime: Some(runtime) }
    }

    /// Says how busy it is.
    pub fn set_load(&self, load: proto::Load) {
        self.told.send_modify(|told| told.load = load);
    }

    /// Says which pages it holds.
    pub fn tell_pages(&self, events: proto::CacheEvents) {
        self.told.send_modify(|told| told.cache = (told.cache.0 + 1, Some(events)));
    }

    pub fn set_script(
        &self,
        script: impl Fn(&proto::GenerateHeader) -> Vec<Act> + Send + Sync + 'static,
    ) {
        *self.inner.script.lock().unwrap() = Arc::new(script);
    }

    pub fn set_acts(&self, acts: Vec<Act>) {
        self.set_script(move |_| acts.clone());
    }

    /// Says nothing any more but what is new.
    pub fn fall_silent(&self) {
        self.told.send_modify(|told| told.is_taciturn = true);
    }

    /// Says from the next `Watch` on what it does.
    pub fn set_role(&self, role: proto::WorkerRole) {
        self.inner.identity.lock().unwrap().role = role.into();
    }

    pub fn set_holds(&self, holds: Holds) {
        *self.inner.holds.lock().unwrap() = holds;
    }

    pub fn set_state(&self, state: proto::WorkerState) {
        self.told.send_modify(|told| told.state = state);
    }

    pub fn seen(&self) -> Vec<Seen> {
        self.inner.record.lock().unwrap().seen.clone()
    }

    /// Calls that the gateway has dropped so far.
    pub fn num_cancelled(&self) -> usize {
        self.inner.record.lock().unwrap().cancelled
    }

    /// Waits until what this worker has seen satisfies the test.
    pub async fn wait_until(&self, is_so: impl Fn(&Record) -> bool) {
        let waiting = async {
            loop {
                let notified = self.inner.changed.notified();
                if is_so(&self.inner.record.lock().unwrap()) {
                    return;
                }
                notified.await;
            }
        };
        tokio::time::timeout(super::PATIENCE, waiting).await.expect("the worker never saw it");
    }

    /// Ends it as a crash would: every connection breaks at once.
    pub fn kill(mut self) -> SocketAddr {
        let address = self.address;
        if let Some(runtime) = self.runtime.take() {
            // blocking is not allowed on the test's own thread
            let shutdown = move || runtime.shutdown_timeout(std::time::Duration::from_secs(5));
            std::thread::spawn(shutdown).join().unwrap();
        }
        address
    }
}

impl Drop for FakeWorker {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

fn identity(facts: proto::ModelFacts, fingerprint: [u8; 32]) -> proto::Identity {
    static STARTS: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
    let start = STARTS.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    proto::Identity {
        worker_id: format!("fake-{start}"),
        version: "test".into(),
        model_name: "fake".into(),
        max_context_tokens: facts.max_position_embeddings,
        facts: Some(facts),
        fingerprint: fingerprint.to_vec().into(),
        page_tokens: 128,
        ..proto::Identity::default()
    }
}

struct Service(Arc<Inner>);

type Replies<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl WorkerService for Service {
    type GenerateStream = Replies<proto::GenerateResponse>;
    type WatchStream = Replies<proto::WatchResponse>;

    async fn watch(
        &self,
        _request: Request<proto::WatchRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let inner = Arc::clone(&self.0);
        inner.record.lock().unwrap().watched += 1;
        inner.changed.notify_waiters();
        let (sender, receiver) = mpsc::channel(4);
        tokio::spawn(async move {
            let mut follow = inner.told.clone();
            let mut identity = Some(inner.identity.lock().unwrap().clone());
            let mut num_news = 0;
            loop {
                let Told { state, load, cache, is_taciturn } = follow.borrow_and_update().clone();
                let is_news = std::mem::replace(&mut num_news, cache.0) != cache.0;
                let message = proto::WatchResponse {
                    identity: identity.take(),
                    state: state.into(),
                    load: Some(load),
                    cache: cache.1.filter(|_| is_news),
                };
                if sender.send(Ok(message)).await.is_err() {
                    return;
                }
                let pulse = tokio::time::sleep(std::time::Duration::from_millis(500));
                tokio::select! { _ = follow.changed() => {}, () = pulse, if !is_taciturn => {} }
            }
        });
        Ok(Response::new(tokio_stream::wrappers::ReceiverStream::new(receiver).boxed()))
    }

    async fn generate(
        &self,
        request: Request<Streaming<proto::GenerateRequest>>,
    ) -> Result<Response<Self::GenerateStream>, Status> {
        let inner = Arc::clone(&self.0);
        let metadata = request.metadata().clone();
        let (sender, receiver) = mpsc::channel(1);
        let guard = CallGuard { inner: Arc::clone(&inner), is_ended: false };
        tokio::spawn(async move {
            let closed = sender.clone();
            let mut guard = guard;
            tokio::select! {
                () = closed.closed() => {}
                outcome = run(&inner, metadata, request.into_inner(), &sender) => {
                    match outcome {
                        Ok(()) => guard.is_ended = true,
                        // the upload broke because the gateway dropped the call
                        Err(status) if status.code() == Code::Cancelled => {}
                        Err(status) => {
                            guard.is_ended = sender.send(Err(status)).await.is_ok();
                        }
                    }
                }
            }
        });
        Ok(Response::new(tokio_stream::wrappers::ReceiverStream::new(receiver).boxed()))
    }
}

struct CallGuard {
    inner: Arc<Inner>,
    is_ended: bool,
}

impl Drop for CallGuard {
    fn drop(&mut self) {
        let mut record = self.inner.record.lock().unwrap();
        if self.is_ended {
            record.ended += 1;
        } else {
            record.cancelled += 1;
        }
        drop(record);
        self.inner.changed.notify_waiters();
    }
}

async fn run(
    inner: &Arc<Inner>,
    metadata: MetadataMap,
    mut requests: Streaming<proto::GenerateRequest>,
    sender: &script::Sender,
) -> Result<(), Status> {
    let first = requests.message().await?.and_then(|request| request.body);
    let Some(proto::generate_request::Body::Header(header)) = first else {
        return Err(Status::invalid_argument("no header"));
    };
    let seen = Seen {
        header: header.clone(),
        patches: HashMap::new(),
        trace_id: metadata.get("x-request-id").map(|id| id.to_str().unwrap().to_owned()),
        traceparent: metadata.get("traceparent").map(|id| id.to_str().unwrap().to_owned()),
        has_deadline: metadata.contains_key("grpc-timeout"),
    };
    let place = {
        let mut record = inner.record.lock().unwrap();
        record.seen.push(seen);
        record.seen.len() - 1
    };
    inner.changed.notify_waiters();
    if !header.media.is_empty() {
        receive_media(inner, &header, place, &mut requests, sender).await?;
    }
    let script = Arc::clone(&*inner.script.lock().unwrap());
    script::play(&inner.holds, &header, script(&header), sender).await
}

async fn receive_media(
    inner: &Arc<Inner>,
    header: &proto::GenerateHeader,
    place: usize,
    requests: &mut Streaming<proto::GenerateRequest>,
    sender: &script::Sender,
) -> Result<(), Status> {
    let holds = *inner.holds.lock().unwrap();
    let needed: Vec<u32> = match holds {
        Holds::Everything => Vec::new(),
        Holds::Nothing => (0..header.media.len() as u32).collect(),
    };
    let needs = proto::MediaNeeds { item_indices: needed.clone() };
    script::say(sender, proto::generate_response::Body::Needs(needs)).await?;
    for index in needed {
        let promised = header.media[index as usize].patch_bytes;
        let mut bytes = Vec::new();
        let mut hash = None;
        while (bytes.len() as u64) < promised {
            let Some(request) = requests.message().await? else {
                // the upload's half of a dropped call may end cleanly before its reset arrives
                return Err(Status::cancelled("the upload ended early"));
            };
            let Some(proto::generate_request::Body::Chunk(chunk)) = request.body else {
                return Err(Status::invalid_argument("not a chunk"));
            };
            assert_eq!((chunk.item_index, chunk.offset), (index, bytes.len() as u64));
            assert!(chunk.data.len() <= 2 << 20);
            bytes.extend_from_slice(&chunk.data);
            hash = Some(chunk.patches_sha256);
        }
        assert_eq!(bytes.len() as u64, promised);
        assert_eq!(hash.as_deref(), Some(Sha256::digest(&bytes).as_slice()));
        inner.record.lock().unwrap().seen[place].patches.insert(index, bytes);
        inner.changed.notify_waiters();
    }
    Ok(())
}
