//! What goes to a worker on one call: the header, then chunks as they are made.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::BufMut;
use futures::stream::Stream;
use prost::Message as _;
use prost::encoding::{WireType, encode_key, encode_varint, encoded_len_varint, key_len};
use tokio::sync::mpsc;
use tonic::Status;
use tonic::codec::{EncodeBuf, Encoder};

use super::wire::proto;

/// Field numbers of `GenerateRequest.header` and `GenerateHeader.prompt_token_ids`.
const HEADER_FIELD: u32 = 1;
const IDS_FIELD: u32 = 3;
/// Longest varint of an id.
const MAX_ID_BYTES: usize = 5;

/// One message to a worker.
pub(super) enum Message {
    /// The header, with the ids that it lacks: there may be a million of them, which are neither
    /// copied into it nor written byte by byte.
    Header(Box<proto::GenerateHeader>, Arc<Vec<u32>>),
    /// A piece of an item.
    Chunk(Box<proto::GenerateRequest>),
}

/// All messages of a call. (A named type: boxed streams defeat the compiler's proof that the call
/// can move between threads.)
pub(super) struct Outgoing {
    /// Until it was sent.
    pub(super) header: Option<Message>,
    /// Present if the header names media.
    pub(super) chunks: Option<mpsc::Receiver<proto::GenerateRequest>>,
}

impl Stream for Outgoing {
    type Item = Message;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if let Some(header) = self.header.take() {
            return Poll::Ready(Some(header));
        }
        match &mut self.chunks {
            Some(chunks) => chunks
                .poll_recv(context)
                .map(|chunk| chunk.map(|chunk| Message::Chunk(Box::new(chunk)))),
            None => Poll::Ready(None),
        }
    }
}

/// Writes messages.
pub(super) struct MessageEncoder;

impl Encoder for MessageEncoder {
    type Item = Message;
    type Error = Status;

    fn encode(&mut self, message: Message, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        let written = match message {
            Message::Chunk(chunk) => {
                buffer.reserve(chunk.encoded_len());
                chunk.encode(buffer)
            }
            Message::Header(header, ids) => {
                let ids_len = packed_len(&ids);
                let field = key_len(IDS_FIELD) + encoded_len_varint(ids_len) + ids_len as usize;
                let length = (header.encoded_len() + field) as u64;
                let outer = key_len(HEADER_FIELD) + encoded_len_varint(length);
                buffer.reserve(outer + length as usize);
                encode_key(HEADER_FIELD, WireType::LengthDelimited, buffer);
                encode_varint(length, buffer);
                // fields may stand in any order
                encode_key(IDS_FIELD, WireType::LengthDelimited, buffer);
                encode_varint(ids_len, buffer);
                put_packed(&ids, buffer);
                header.encode(buffer)
            }
        };
        written.map_err(|error| Status::internal(error.to_string()))
    }
}

fn packed_len(ids: &[u32]) -> u64 {
    let length =
        |id: &u32| 1 + [7, 14, 21, 28].map(|bits| u64::from(*id >> bits > 0)).iter().sum::<u64>();
    ids.iter().map(length).sum()
}

/// Writes varints through a small buffer: handing each byte on costs more than making it.
fn put_packed(ids: &[u32], buffer: &mut impl BufMut) {
    let mut bytes = [0; 1024];
    let mut end = 0;
    for id in ids {
        if end + MAX_ID_BYTES > bytes.len() {
            buffer.put_slice(&bytes[..end]);
            end = 0;
        }
        let mut rest = *id;
        while rest >= 0x80 {
            bytes[end] = rest as u8 | 0x80;
            rest >>= 7;
            end += 1;
        }
        bytes[end] = rest as u8;
        end += 1;
    }
    buffer.put_slice(&bytes[..end]);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_packed_as_the_protocol_compiler_would() {
        let edges = [7, 14, 21, 28].map(|bits| 1_u32 << bits);
        let some = edges.into_iter().flat_map(|edge| [edge - 1, edge]).chain([0, 1, u32::MAX]);
        for ids in [vec![], some.clone().collect(), some.cycle().take(5000).collect::<Vec<_>>()] {
            let mut packed = Vec::new();
            put_packed(&ids, &mut packed);
            let mut theirs = Vec::new();
            prost::encoding::uint32::encode_packed(IDS_FIELD, &ids, &mut theirs);

            assert!(theirs.ends_with(&packed));
            assert_eq!(packed_len(&ids), packed.len() as u64);
        }
    }
}
