//! Patch bytes on their way to a worker: pieces of at most 2 MiB, hashed as they pass.

use std::collections::BTreeMap;

use bytes::{Bytes, BytesMut};
use sha2::{Digest, Sha256};
use tokio::sync::mpsc;

use super::shared_pieces::Ways;
use super::wire::proto;
use crate::error::{ErrorKind, GatewayError};

/// Largest piece the wire contract allows.
pub const CHUNK_BYTES: usize = 2 * 1024 * 1024;
/// Pieces from this size on go out as they are; smaller ones are put together first.
const WHOLE_BYTES: usize = 256 * 1024;

/// The open upload of one request. Sending waits while the worker is behind.
#[derive(Clone, Debug)]
pub struct ChunkSender {
    requests: mpsc::Sender<proto::GenerateRequest>,
    /// Absent where nothing leaves the process.
    ways: Option<Ways>,
}

impl ChunkSender {
    pub(super) fn new(requests: mpsc::Sender<proto::GenerateRequest>, ways: Option<Ways>) -> Self {
        Self { requests, ways }
    }

    /// Begins the upload of one item of exactly `total_bytes`.
    pub fn item(&self, item_index: u32, total_bytes: u64) -> ItemUpload {
        ItemUpload {
            sender: self.clone(),
            item_index,
            total_bytes,
            sent_bytes: 0,
            waiting: BytesMut::new(),
            digest: Digesting::Running(Box::default()),
        }
    }
}

/// An upload that stays in this process: its sender, and what gathers the bytes of each item.
/// The gathering ends when every sender is dropped.
pub fn gather() -> (ChunkSender, impl Future<Output = BTreeMap<u32, Vec<Bytes>>> + Send) {
    let (requests, mut received) = mpsc::channel::<proto::GenerateRequest>(1);
    let gathering = async move {
        let mut items = BTreeMap::<u32, Vec<Bytes>>::new();
        while let Some(request) = received.recv().await {
            if let Some(proto::generate_request::Body::Chunk(chunk)) = request.body {
                items.entry(chunk.item_index).or_default().push(chunk.data);
            }
        }
        items
    };
    (ChunkSender::new(requests, None), gathering)
}

/// The upload of one item. Its last piece carries the hash of all.
pub struct ItemUpload {
    sender: ChunkSender,
    item_index: u32,
    total_bytes: u64,
    sent_bytes: u64,
    waiting: BytesMut,
    digest: Digesting,
}

/// The hash of all patch bytes.
enum Digesting {
    /// Of those sent so far.
    Running(Box<Sha256>),
    /// Made by whoever makes the patches, and told before the last of them is pushed.
    Awaited,
    /// Known before they are sent, or since the last was.
    Done([u8; 32]),
}

impl ItemUpload {
    /// Spares the hashing: the patches that will be pushed are known to have this hash.
    pub fn with_sha256(self, sha256: [u8; 32]) -> Self {
        Self { digest: Digesting::Done(sha256), ..self }
    }

    /// Leaves the hashing to the caller, who must name the hash before the last patches are pushed.
    pub fn hashed_by_caller(self) -> Self {
        Self { digest: Digesting::Awaited, ..self }
    }

    /// The hash of all patches that were and will be pushed.
    pub fn set_sha256(&mut self, sha256: [u8; 32]) {
        self.digest = Digesting::Done(sha256);
    }

    /// The hash of all patches, once it is known.
    pub fn sha256(&self) -> Option<[u8; 32]> {
        match &self.digest {
            Digesting::Running(_) | Digesting::Awaited => None,
            Digesting::Done(sha256) => Some(*sha256),
        }
    }

    /// Sends the next patch bytes, of any length.
    ///
    /// # Errors
    /// `WorkerUnavailable` when the call is gone; `Internal` for more bytes than announced.
    pub async fn push(&mut self, mut patches: Bytes) -> Result<(), GatewayError> {
        let announced = self.total_bytes - self.sent_bytes - self.waiting.len() as u64;
        if patches.len() as u64 > announced {
            let message = format!(
                "item {}: {} patch bytes more than announced",
                self.item_index,
                patches.len() as u64 - announced
            );
            return Err(GatewayError::internal(message));
        }
        while !patches.is_empty() {
            let is_rest = self.sent_bytes + patches.len() as u64 == self.total_bytes;
            if self.waiting.is_empty() && (patches.len() >= WHOLE_BYTES || is_rest) {
                let piece = patches.split_to(patches.len().min(CHUNK_BYTES));
                self.send(piece).await?;
                continue;
            }
            let room = CHUNK_BYTES - self.waiting.len();
            self.waiting.extend_from_slice(&patches.split_to(room.min(patches.len())));
            let is_last = self.sent_bytes + self.waiting.len() as u64 == self.total_bytes;
            if self.waiting.len() == CHUNK_BYTES || is_last {
                let piece = self.waiting.split().freeze();
                self.send(piece).await?;
            }
        }
        Ok(())
    }

    /// Bytes sent so far.
    pub fn sent_bytes(&self) -> u64 {
        self.sent_bytes
    }

    /// Confirms that everything announced was sent.
    ///
    /// # Errors
    /// `Internal` when bytes are missing.
    pub fn finish(self) -> Result<(), GatewayError> {
        if self.sent_bytes == self.total_bytes {
            return Ok(());
        }
        Err(GatewayError::internal(format!(
            "item {}: {} of {} patch bytes were made",
            self.item_index, self.sent_bytes, self.total_bytes
        )))
    }

    async fn send(&mut self, mut data: Bytes) -> Result<(), GatewayError> {
        let offset = self.sent_bytes;
        self.sent_bytes += data.len() as u64;
        let is_last = self.sent_bytes == self.total_bytes;
        if let Digesting::Running(hasher) = &mut self.digest {
            hasher.update(&data);
            if is_last {
                self.digest = Digesting::Done(hasher.finalize_reset().into());
            }
        }
        let patches_sha256 = match &self.digest {
            Digesting::Done(sha256) if is_last => Bytes::copy_from_slice(sha256),
            _ if is_last => return Err(GatewayError::internal("the patches have no hash")),
            _ => Bytes::new(),
        };
        let shared = self.sender.ways.as_ref().and_then(|ways| ways.share(&data));
        if shared.is_some() {
            data = Bytes::new();
        }
        let item_index = self.item_index;
        let chunk = proto::MediaChunk { item_index, offset, data, patches_sha256, shared };
        let body = proto::generate_request::Body::Chunk(chunk);
        let request = proto::GenerateRequest { body: Some(body) };
        self.sender.requests.send(request).await.map_err(|_| {
            GatewayError::new(
                ErrorKind::WorkerUnavailable,
                "the worker ended the call while media was on its way",
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn pieces(total: usize, pushes: &[usize]) -> Vec<proto::MediaChunk> {
        let (requests, mut received) = mpsc::channel(64);
        let mut upload = ChunkSender::new(requests, None).item(3, total as u64);
        let all: Vec<u8> = (0..total).map(|place| (place % 251) as u8).collect();
        let mut rest = Bytes::from(all);
        for length in pushes {
            upload.push(rest.split_to(*length)).await.unwrap();
        }
        upload.finish().unwrap();
        let mut chunks = Vec::new();
        while let Some(request) = received.recv().await {
            match request.body {
                Some(proto::generate_request::Body::Chunk(chunk)) => chunks.push(chunk),
                other => panic!("not a chunk: {other:?}"),
            }
        }
        chunks
    }

    #[tokio::test]
    async fn any_cutting_arrives_whole_in_order_and_hashed_on_the_last_piece() {
        let total = 2 * CHUNK_BYTES + 1234;
        let all: Vec<u8> = (0..total).map(|place| (place % 251) as u8).collect();
        let small = [vec![1000; 4000], vec![total - 4_000_000]].concat();
        for pushes in
            [vec![total], vec![1, CHUNK_BYTES, CHUNK_BYTES + 1233], vec![total / 2; 2], small]
        {
            let chunks = pieces(total, &pushes).await;

            let joined: Vec<u8> = chunks.iter().flat_map(|chunk| chunk.data.to_vec()).collect();
            assert!(joined == all);
            assert!(chunks.iter().all(|chunk| chunk.data.len() <= CHUNK_BYTES));
            let mut offset = 0;
            for chunk in &chunks {
                assert_eq!((chunk.item_index, chunk.offset), (3, offset));
                offset += chunk.data.len() as u64;
            }
            let (last, earlier) = chunks.split_last().unwrap();
            assert_eq!(last.patches_sha256.as_ref(), Sha256::digest(&all).as_slice());
            assert!(earlier.iter().all(|chunk| chunk.patches_sha256.is_empty()));
        }
    }

    #[tokio::test]
    async fn a_known_hash_goes_out_as_it_is_and_pieces_are_not_copied() {
        let (requests, mut received) = mpsc::channel(64);
        let upload = ChunkSender::new(requests, None).item(0, 2 * WHOLE_BYTES as u64);
        assert_eq!(upload.sha256(), None);
        let mut upload = upload.with_sha256([7; 32]);
        let pieces = [Bytes::from(vec![1; WHOLE_BYTES]), Bytes::from(vec![2; WHOLE_BYTES])];
        for piece in &pieces {
            upload.push(piece.clone()).await.unwrap();
        }
        upload.finish().unwrap();
        for piece in &pieces {
            let Some(proto::generate_request::Body::Chunk(chunk)) =
                received.recv().await.and_then(|request| request.body)
            else {
                panic!("not a chunk");
            };
            assert_eq!(chunk.data.as_ptr(), piece.as_ptr());
            let is_last = chunk.offset > 0;
            assert_eq!(chunk.patches_sha256.as_ref(), if is_last { &[7; 32][..] } else { &[] });
        }
    }

    #[tokio::test]
    async fn the_callers_hash_goes_out_with_the_last_piece() {
        let (requests, mut received) = mpsc::channel(4);
        let mut upload = ChunkSender::new(requests, None).item(0, 2 * WHOLE_BYTES as u64);
        upload = upload.hashed_by_caller();
        upload.push(Bytes::from(vec![1; WHOLE_BYTES])).await.unwrap();
        upload.set_sha256([7; 32]);
        upload.push(Bytes::from(vec![2; WHOLE_BYTES])).await.unwrap();
        upload.finish().unwrap();
        for expected in [&[][..], &[7; 32][..]] {
            let body = received.recv().await.and_then(|request| request.body);
            let Some(proto::generate_request::Body::Chunk(chunk)) = body else {
                panic!("not a chunk: {body:?}");
            };
            assert_eq!(chunk.patches_sha256.as_ref(), expected);
        }
    }

    #[tokio::test]
    async fn too_few_and_too_many_bytes_are_our_own_mistake() {
        let (requests, _received) = mpsc::channel(64);
        let sender = ChunkSender::new(requests, None);

        let mut short = sender.item(0, 10);
        short.push(Bytes::from_static(b"123")).await.unwrap();
        assert_eq!(short.finish().unwrap_err().kind, ErrorKind::Internal);

        let mut unnamed = sender.item(0, 2).hashed_by_caller();
        let refused = unnamed.push(Bytes::from_static(b"12")).await.unwrap_err();
        assert_eq!(refused.kind, ErrorKind::Internal);

        let mut long = sender.item(0, 2);
        let refused = long.push(Bytes::from_static(b"123")).await.unwrap_err();
        assert_eq!(refused.kind, ErrorKind::Internal);
    }
}
