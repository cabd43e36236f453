//! Content hashes: of source bytes, and of source bytes together with what was done to them.

use crate::types::MediaHash;
use sha2::{Digest, Sha256};

/// Separates these hashes from every other use of SHA-256 in the system.
const MEDIA_DOMAIN: &[u8] = b"m3stack.media.v1";

/// SHA-256 of some bytes.
pub fn sha256(bytes: &[u8]) -> [u8; 32] {
    Sha256::digest(bytes).into()
}

/// SHA-256 of bytes that come in pieces.
#[derive(Clone, Debug, Default)]
pub struct RunningSha256(Sha256);

impl RunningSha256 {
    /// The next piece.
    pub fn add(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The hash of all pieces so far.
    pub fn value(&self) -> [u8; 32] {
        self.0.clone().finalize().into()
    }
}

/// Names one preprocessed item: its source and `params`, a text that holds every parameter that
/// changes pixels or their arrangement (target size, chosen frames, kind, decoder revision).
pub fn media_hash(source_sha256: &[u8; 32], params: &str) -> MediaHash {
    let mut hasher = Sha256::new();
    for field in [MEDIA_DOMAIN, source_sha256.as_slice(), params.as_bytes()] {
        // the length in front keeps ("ab", "c") apart from ("a", "bc")
        hasher.update((field.len() as u64).to_le_bytes());
        hasher.update(field);
    }
    MediaHash(hasher.finalize().into())
}

#[cfg(test)]
mod tests {
    use super::{RunningSha256, media_hash, sha256};

    #[test]
    fn sha256_is_the_standard_one() {
        let expected = [
            0xba, 0x78, 0x16, 0xbf, 0x8f, 0x01, 0xcf, 0xea, 0x41, 0x41, 0x40, 0xde, 0x5d, 0xae,
            0x22, 0x23, 0xb0, 0x03, 0x61, 0xa3, 0x96, 0x17, 0x7a, 0x9c, 0xb4, 0x10, 0xff, 0x61,
            0xf2, 0x00, 0x15, 0xad,
        ];
        assert_eq!(sha256(b"abc"), expected);
        let mut running = RunningSha256::default();
        running.add(b"a");
        assert_eq!(running.value(), sha256(b"a"));
        running.add(b"bc");
        assert_eq!(running.value(), expected);
    }

    #[test]
    fn media_hash_covers_source_and_parameters_and_is_not_a_bare_digest() {
        let source = sha256(b"picture");
        let hash = media_hash(&source, "image 56x84");
        assert_ne!(hash, media_hash(&source, "image 84x56"));
        assert_ne!(hash, media_hash(&sha256(b"other"), "image 56x84"));
        let bare: Vec<u8> = [source.as_slice(), b"image 56x84"].concat();
        assert_ne!(hash.0, sha256(&bare));
    }

    #[test]
    fn media_hash_never_changes_between_releases() {
        // workers and gateways of different builds must agree; computed with hashlib
        let hash = media_hash(&sha256(b"picture"), "image 56x84");
        let hex: String = hash.0.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hex, "91c3ddcc312e297de2a5b6453d0a78ef289f67927e55a2a947abfdd211b3446f");
    }
}
