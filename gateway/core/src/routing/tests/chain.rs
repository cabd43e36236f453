//! Page keys equal the worker's: `tests/worker/cache/test_page_chain.py` holds it to the same file.

use gateway_media::{GridThw, MediaHash, PatchLayout, PixelNorm};
use serde_json::Value;

use super::super::chain::{ChainMedia, ChainPrompt, page_keys};
use super::super::memory::{ChainMemory, KnownChain};
use crate::model::MediaKind;
use crate::prompt::Span;
use std::sync::Arc;

const CASES: &str = include_str!("../../../../../tests/data/routing/chain.json");

fn numbers(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|entry| entry.as_u64().unwrap() as u32).collect()
}

fn media_hash(item: &Value) -> MediaHash {
    let text = item["hash"].as_str().unwrap();
    let byte = |place: usize| u8::from_str_radix(&text[2 * place..2 * place + 2], 16).unwrap();
    MediaHash(std::array::from_fn(byte))
}

#[test]
fn the_gateway_makes_the_committed_keys() {
    let cases: Value = serde_json::from_str(CASES).unwrap();
    for case in cases.as_array().unwrap() {
        let items = case["media"].as_array().unwrap();
        let spans: Vec<Vec<Span>> = items
            .iter()
            .map(|item| {
                let pairs = item["spans"].as_array().unwrap().iter().map(numbers);
                pairs.map(|pair| Span { offset: pair[0], length: pair[1] }).collect()
            })
            .collect();
        let media: Vec<_> = items
            .iter()
            .zip(&spans)
            .map(|(item, spans)| {
                let grid = numbers(&item["grid"]);
                let is_image = item["kind"] == "image";
                ChainMedia {
                    hash: media_hash(item),
                    kind: if is_image { MediaKind::Image } else { MediaKind::Video },
                    grid: GridThw { t: grid[0], h: grid[1], w: grid[2] },
                    frames_per_patch: item["frames_per_patch"].as_u64().unwrap() as u32,
                    spans,
                }
            })
            .collect();
        let token_ids: Vec<u32> =
            (0..case["tokens"].as_u64().unwrap() as u32).map(|place| 7 * place % 1000).collect();
        let prompt = ChainPrompt {
            token_ids: &token_ids,
            media: &media,
            layout: PatchLayout { patch_size: 14, temporal_patch_size: 2, merge_size: 2 },
            norm: PixelNorm { mean: [0.5, 0.25, 0.125], std: [0.5, 0.75, 1.0] },
            tenant: case["tenant"].as_str().unwrap_or(""),
            cache_salt: case["salt"].as_str().unwrap_or(""),
        };

        let keys = page_keys(&prompt, 8, case["epoch"].as_u64().unwrap_or(0));

        let keys: Vec<_> = keys.iter().map(u64::to_string).collect();
        let expected: Vec<_> =
            case["keys"].as_array().unwrap().iter().map(|key| key.as_str().unwrap()).collect();
        assert_eq!(keys, expected, "{}", case["name"]);
    }
}

fn text_prompt<'a>(token_ids: &'a [u32], tenant: &'a str) -> ChainPrompt<'a> {
    ChainPrompt {
        token_ids,
        media: &[],
        layout: PatchLayout { patch_size: 14, temporal_patch_size: 2, merge_size: 2 },
        norm: PixelNorm { mean: [0.0; 3], std: [1.0; 3] },
        tenant,
        cache_salt: "",
    }
}

fn known(
    memory: &ChainMemory,
    prompt: &ChainPrompt<'_>,
    page_tokens: usize,
    epoch: u64,
) -> KnownChain {
    memory.like(prompt, page_tokens).longest(prompt, page_tokens, epoch)
}

#[test]
fn a_remembered_beginning_changes_no_key() {
    let mut memory = ChainMemory::default();
    let ids = |length: u32, other_from: u32| -> Arc<Vec<u32>> {
        let id = |place| if place < other_from { place * 31 % 977 } else { place * 17 % 911 };
        Arc::new((0..length).map(id).collect())
    };
    // each begins as one before it does: whole, in part, for another tenant, not at all
    for (length, other_from, tenant, page_tokens, epoch) in [
        (300, 999, "", 4, 0),
        (300, 150, "", 4, 0),
        (900, 999, "", 4, 0),
        (301, 150, "", 4, 0),
        (301, 999, "a", 4, 0),
        (301, 999, "", 8, 0),
        (900, 999, "", 4, 1),
        (900, 1, "", 4, 0),
        (100, 999, "", 4, 0),
        (300, 999, "", 0, 0),
    ] {
        let ids = ids(length, other_from);
        let prompt = text_prompt(&ids, tenant);
        let chain = known(&memory, &prompt, page_tokens, epoch).whole(&prompt);
        assert_eq!(chain.page_keys(), page_keys(&prompt, page_tokens, epoch));
        memory.keep(chain, &ids);
    }
}

#[test]
fn a_common_beginning_is_found_and_old_prompts_are_let_go() {
    let mut memory = ChainMemory::default();
    let long = Arc::new(vec![7; 1000]);
    let prompt = text_prompt(&long, "");
    memory.keep(known(&memory, &prompt, 8, 0).whole(&prompt), &long);

    let mut other = long.to_vec();
    other[500] = 8;
    assert_eq!(known(&memory, &text_prompt(&other, ""), 8, 0).num_pages(), 500 / 8);
    assert_eq!(known(&memory, &text_prompt(&other, "a"), 8, 0).num_pages(), 0);

    for number in 0..100 {
        let fresh = Arc::new(vec![number; 1000]);
        let prompt = text_prompt(&fresh, "");
        memory.keep(known(&memory, &prompt, 8, 0).whole(&prompt), &fresh);
    }
    assert_eq!(known(&memory, &prompt, 8, 0).num_pages(), 0);
}

#[test]
fn no_page_size_means_no_pages() {
    let prompt = text_prompt(&[1; 300], "");
    assert!(page_keys(&prompt, 0, 0).is_empty());
    assert_eq!(page_keys(&prompt, 128, 0).len(), 2);
}
