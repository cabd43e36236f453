//! Page keys of prompts seen of late: one that begins as an earlier one hashes only what is new.

use std::collections::VecDeque;
use std::sync::Arc;

use super::chain::{ChainPrompt, Key, PageKeys, extend_chain, root_key, short};

/// Tokens of all prompts that are kept: 4 bytes each, which the requests that brought them share.
const MAX_TOKENS: usize = 2 << 20;
/// Prompts of fewer pages are hashed before they could be found.
const MIN_PAGES: usize = 32;
/// Prompts that are kept, each of which is compared with a new one.
const MAX_PROMPTS: usize = 32;

/// Prompts without media and the keys of their pages, the last one seen first.
#[derive(Debug, Default)]
pub struct ChainMemory {
    seen: VecDeque<Seen>,
    num_tokens: usize,
}

/// The chain of a prompt, as far as it is known.
#[derive(Clone, Debug)]
pub struct KnownChain {
    root: Key,
    page_tokens: usize,
    keys: Arc<[Key]>,
    num_pages: usize,
}

/// Prompts that one may begin as.
#[derive(Debug, Default)]
pub struct Candidates {
    seen: Vec<Seen>,
}

#[derive(Clone, Debug)]
struct Seen {
    chain: KnownChain,
    token_ids: Arc<Vec<u32>>,
}

impl ChainMemory {
    /// The prompts that may begin as this one does; quick, however long they are, so that whoever
    /// shares the memory holds it for no comparison.
    pub fn like(&self, prompt: &ChainPrompt<'_>, page_tokens: usize) -> Candidates {
        if page_tokens == 0 || !is_remembered(prompt, page_tokens) {
            return Candidates::default();
        }
        let same = |seen: &&Seen| seen.chain.page_tokens == page_tokens;
        Candidates { seen: self.seen.iter().filter(same).cloned().collect() }
    }

    /// Keeps a whole chain that [`KnownChain::whole`] gave; `token_ids` are those of its prompt.
    pub fn keep(&mut self, chain: KnownChain, token_ids: &Arc<Vec<u32>>) {
        if chain.num_pages < MIN_PAGES {
            return;
        }
        // one that this one continues is found by it as well
        let is_covered = |seen: &Seen| {
            seen.chain.root == chain.root
                && seen.chain.page_tokens == chain.page_tokens
                && chain.keys.get(seen.chain.num_pages - 1) == seen.chain.keys.last()
        };
        self.seen.retain(|seen| !is_covered(seen));
        self.seen.push_front(Seen { chain, token_ids: Arc::clone(token_ids) });
        self.num_tokens = self.seen.iter().map(|seen| seen.token_ids.len()).sum();
        while self.seen.len() > MAX_PROMPTS || self.num_tokens > MAX_TOKENS {
            let Some(oldest) = self.seen.pop_back() else { break };
            self.num_tokens -= oldest.token_ids.len();
        }
    }
}

impl Candidates {
    /// What is known of the prompt's pages of `page_tokens` tokens under this epoch, by the one that
    /// shares most of them. Both as they were given to [`ChainMemory::like`].
    pub fn longest(&self, prompt: &ChainPrompt<'_>, page_tokens: usize, epoch: u64) -> KnownChain {
        let root = root_key(prompt, epoch);
        let mut best = KnownChain { root, page_tokens, keys: Arc::from([]), num_pages: 0 };
        for Seen { chain, token_ids } in self.seen.iter().filter(|seen| seen.chain.root == root) {
            // a key stands for all tokens before it: who has another one there shares fewer pages,
            // and of the others only what follows is compared
            let shared = best.num_pages;
            if shared > 0 && chain.keys.get(shared - 1) != best.keys.get(shared - 1) {
                continue;
            }
            let from = shared * page_tokens;
            let more = match (token_ids.get(from..), prompt.token_ids.get(from..)) {
                (Some(theirs), Some(ours)) => common(theirs, ours, page_tokens),
                _ => 0,
            };
            let num_pages = (shared + more).min(chain.num_pages);
            if num_pages > shared {
                best = KnownChain { num_pages, ..chain.clone() };
            }
        }
        best
    }
}

impl KnownChain {
    /// The chain of the same prompt to its end.
    pub fn whole(&self, prompt: &ChainPrompt<'_>) -> Self {
        let known = &self.keys[..self.num_pages];
        let keys: Arc<[Key]> = extend_chain(prompt, self.page_tokens, &self.root, known).into();
        let num_pages = if is_remembered(prompt, self.page_tokens) { keys.len() } else { 0 };
        Self { num_pages, keys, ..*self }
    }

    /// How many pages are known.
    pub fn num_pages(&self) -> usize {
        self.num_pages
    }

    /// The first eight bytes of all its keys.
    pub fn page_keys(&self) -> PageKeys {
        self.keys.iter().map(short).collect()
    }
}

fn is_remembered(prompt: &ChainPrompt<'_>, page_tokens: usize) -> bool {
    prompt.media.is_empty() && prompt.token_ids.len() > MIN_PAGES * page_tokens
}

/// Whole pages that both begin with.
fn common(one: &[u32], other: &[u32], page_tokens: usize) -> usize {
    let pages = one.chunks_exact(page_tokens).zip(other.chunks_exact(page_tokens));
    pages.take_while(|(one, other)| one == other).count()
}
