//! Page keys equal the worker's: `tests/worker/cache/test_page_chain.py` holds it to the same file.

use gateway_media::{GridThw, MediaHash, PatchLayout, PixelNorm};
use serde_json::Value;

use super::super::chain::{ChainMedia, ChainPrompt, page_keys};
use crate::model::MediaKind;
use crate::prompt::Span;

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

#[test]
fn no_page_size_means_no_pages() {
    let prompt = ChainPrompt {
        token_ids: &[1; 300],
        media: &[],
        layout: PatchLayout { patch_size: 14, temporal_patch_size: 2, merge_size: 2 },
        norm: PixelNorm { mean: [0.0; 3], std: [1.0; 3] },
        tenant: "",
        cache_salt: "",
    };
    assert!(page_keys(&prompt, 0, 0).is_empty());
    assert_eq!(page_keys(&prompt, 128, 0).len(), 2);
}
