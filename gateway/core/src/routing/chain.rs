//! The keys under which workers keep the pages of a prompt, computed here exactly as there.
//!
//! Source: `worker/m3stack/cache/{prefix,media}.py`; `tests/routing/chain.json` holds both to the
//! same values.

use std::sync::Arc;

use blake2::Blake2b;
use blake2::digest::{Digest, consts::U32};
use gateway_media::{GridThw, MediaHash, PatchLayout, PixelNorm};

use crate::model::MediaKind;
use crate::prompt::Span;

const ROOT: &[u8] = b"m3stack page chain v1";
const CHANNELS: u32 = 3;

/// The key of one page.
pub(super) type Key = [u8; 32];
type Hasher = Blake2b<U32>;

/// The first eight bytes, little endian, of the key of every page a prompt can share, in order.
pub type PageKeys = Arc<[u64]>;

/// A media item as far as it names pages.
#[derive(Clone, Debug)]
pub struct ChainMedia<'a> {
    /// Names its patches.
    pub hash: MediaHash,
    /// Picture or clip.
    pub kind: MediaKind,
    /// Patch grid.
    pub grid: GridThw,
    /// Frames in one patch row.
    pub frames_per_patch: u32,
    /// Its runs of placeholder ids, in order.
    pub spans: &'a [Span],
}

/// Everything that names the pages of a prompt, save the worker's epoch.
#[derive(Clone, Debug)]
pub struct ChainPrompt<'a> {
    /// Placeholders expanded.
    pub token_ids: &'a [u32],
    /// Pictures and clips in prompt order.
    pub media: &'a [ChainMedia<'a>],
    /// How patches are cut.
    pub layout: PatchLayout,
    /// How they are normalised.
    pub norm: PixelNorm,
    /// On whose behalf.
    pub tenant: &'a str,
    /// What else must be equal for pages to be shared.
    pub cache_salt: &'a str,
}

/// Placeholder tokens that one item fills.
struct Run {
    key: Key,
    first_feature: u64,
    offset: usize,
    length: usize,
}

/// Keys of all pages of `page_tokens` tokens before the prompt's last token, which is always
/// computed anew. `epoch` counts how often the worker has forgotten everything.
pub fn page_keys(prompt: &ChainPrompt<'_>, page_tokens: usize, epoch: u64) -> PageKeys {
    let root = root_key(prompt, epoch);
    extend_chain(prompt, page_tokens, &root, &[]).iter().map(short).collect()
}

/// The whole keys of all pages; those of the first pages may be `known`.
pub(super) fn extend_chain(
    prompt: &ChainPrompt<'_>,
    page_tokens: usize,
    root: &Key,
    known: &[Key],
) -> Vec<Key> {
    let pages = match page_tokens {
        0 => 0,
        size => prompt.token_ids.len().saturating_sub(1) / size,
    };
    let known = &known[..known.len().min(pages)];
    let runs = runs(prompt);
    let mut first_run = 0;
    let mut parent = *known.last().unwrap_or(root);
    let mut bytes = Vec::with_capacity(page_tokens * 4);
    let mut keys = Vec::with_capacity(pages);
    keys.extend_from_slice(known);
    let chunks = prompt.token_ids.chunks_exact(page_tokens.max(1)).take(pages).enumerate();
    for (page, ids) in chunks.skip(known.len()) {
        let (start, end) = (page * page_tokens, (page + 1) * page_tokens);
        bytes.clear();
        ids.iter().for_each(|id| bytes.extend_from_slice(&id.to_le_bytes()));
        let mut hasher = Hasher::new();
        field(&mut hasher, &parent);
        hasher.update((ids.len() as u32).to_le_bytes());
        hasher.update(&bytes);
        while runs.get(first_run).is_some_and(|run| run.offset + run.length <= start) {
            first_run += 1;
        }
        for run in runs[first_run..].iter().take_while(|run| run.offset < end) {
            let (low, high) = (run.offset.max(start), (run.offset + run.length).min(end));
            field(&mut hasher, &run.key);
            let feature = run.first_feature + (low - run.offset) as u64;
            for number in [feature, (low - start) as u64, (high - low) as u64] {
                hasher.update(number.to_le_bytes());
            }
        }
        parent = hasher.finalize().into();
        keys.push(parent);
    }
    keys
}

/// What stands before the first page.
pub(super) fn root_key(prompt: &ChainPrompt<'_>, epoch: u64) -> Key {
    let mut hasher = Hasher::new();
    field(&mut hasher, ROOT);
    hasher.update(epoch.to_le_bytes());
    field(&mut hasher, prompt.tenant.as_bytes());
    field(&mut hasher, prompt.cache_salt.as_bytes());
    hasher.finalize().into()
}

/// Runs of all items by place in the prompt.
fn runs(prompt: &ChainPrompt<'_>) -> Vec<Run> {
    let mut runs = Vec::new();
    for item in prompt.media {
        let key = media_key(item, prompt.layout, prompt.norm);
        let mut first_feature = 0;
        for span in item.spans.iter().filter(|span| span.length > 0) {
            let (offset, length) = (span.offset as usize, span.length as usize);
            runs.push(Run { key, first_feature, offset, length });
            first_feature += u64::from(span.length);
        }
    }
    runs.sort_by_key(|run| run.offset);
    runs
}

fn media_key(item: &ChainMedia<'_>, layout: PatchLayout, norm: PixelNorm) -> Key {
    let mut hasher = Hasher::new();
    hasher.update(item.hash.0);
    let kind = match item.kind {
        MediaKind::Image => 1_u32,
        MediaKind::Video => 2,
    };
    let GridThw { t, h, w } = item.grid;
    let PatchLayout { patch_size, temporal_patch_size, merge_size } = layout;
    for number in [
        kind,
        t,
        h,
        w,
        item.frames_per_patch,
        CHANNELS,
        patch_size,
        temporal_patch_size,
        merge_size,
    ] {
        hasher.update(number.to_le_bytes());
    }
    for (place, numbers) in [(0_u32, norm.mean), (1, norm.std)] {
        hasher.update(place.to_le_bytes());
        numbers.iter().for_each(|number| hasher.update(number.to_le_bytes()));
    }
    hasher.finalize().into()
}

fn field(hasher: &mut Hasher, bytes: &[u8]) {
    hasher.update((bytes.len() as u32).to_le_bytes());
    hasher.update(bytes);
}

pub(super) fn short(key: &Key) -> u64 {
    let mut first = [0; 8];
    first.copy_from_slice(&key[..8]);
    u64::from_le_bytes(first)
}
