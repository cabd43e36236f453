//! What a request needs of a worker, from its header.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Mutex, PoisonError};

use gateway_core::prompt::Span;
use gateway_core::routing::{ChainMedia, ChainMemory, ChainPrompt, Demand};

use super::RequestHeader;

/// Prompt, longest output, and the pages it shares with others under each of these cache epochs
/// and page sizes. Hashes what of the prompt is not in `memory`: half a millisecond for some
/// 100,000 tokens.
pub(super) fn demand(
    header: &RequestHeader,
    affinity: Option<&str>,
    epochs: &[(u64, u32)],
    memory: &Mutex<ChainMemory>,
) -> Demand {
    let media: Vec<_> = header
        .items
        .iter()
        .map(|item| ChainMedia {
            hash: item.hash,
            kind: item.plan.kind,
            grid: item.plan.grid,
            frames_per_patch: item.frames_per_patch,
            spans: &item.spans,
        })
        .collect();
    let prompt = ChainPrompt {
        token_ids: &header.prompt_token_ids,
        media: &media,
        layout: header.layout,
        norm: header.norm,
        tenant: &header.tenant,
        cache_salt: &header.standing.cache_salt,
    };
    // a panic while it was held left it whole: at worst one prompt is not remembered
    let memory = || memory.lock().unwrap_or_else(PoisonError::into_inner);
    let keys = |(epoch, page_tokens): &(u64, u32)| {
        let page_tokens = *page_tokens as usize;
        // compared and hashed with nothing held: other requests need the memory as well
        let like = memory().like(&prompt, page_tokens);
        let chain = like.longest(&prompt, page_tokens, *epoch).whole(&prompt);
        let keys = chain.page_keys();
        memory().keep(chain, &header.prompt_token_ids);
        (*epoch, keys)
    };
    let chains = epochs.iter().map(keys).collect();
    let prompt_tokens = u32::try_from(header.prompt_token_ids.len()).unwrap_or(u32::MAX);
    Demand {
        prompt_tokens,
        context_tokens: u64::from(prompt_tokens) + u64::from(header.max_tokens),
        chains,
        affinity: affinity.map(number),
        media: header.items.first().map(|item| first_bytes(&item.hash.0)),
        media_end: header.items.iter().flat_map(|item| &item.spans).map(end_of).max().unwrap_or(0),
        ..Demand::default()
    }
}

fn end_of(span: &Span) -> u32 {
    span.offset + span.length
}

fn first_bytes(hash: &[u8; 32]) -> u64 {
    hash.iter().take(8).fold(0, |number, byte| (number << 8) | u64::from(*byte))
}

/// The same text is the same number in every gateway of one build.
pub(super) fn number(text: &str) -> u64 {
    // keys are fixed, so that gateways beside each other agree
    let mut hasher = DefaultHasher::new();
    text.hash(&mut hasher);
    hasher.finish()
}
