//! Our numbers under vLLM's names, for dashboards and controllers that read those.

use super::super::exposition::Page;
use super::super::routing::Fleet;
use super::{Metrics, TokenClass};

impl Metrics {
    /// The same numbers under the names that dashboards and controllers made for vLLM read.
    pub fn vllm_page(&self, model: &str, fleet: &Fleet) -> String {
        let labels = format!("model_name=\"{}\"", escaped(model));
        let mut page = Page::new();
        let kinds = [
            ("vllm:prompt_tokens_total", TokenClass::Prompt),
            ("vllm:generation_tokens_total", TokenClass::Completion),
            ("vllm:prefix_cache_hits_total", TokenClass::Cached),
            ("vllm:prefix_cache_queries_total", TokenClass::Prompt),
        ];
        for (name, class) in kinds {
            page.head(name, "counter", "As in vLLM, in tokens.");
            page.sample(name, &labels, self.tokens[class as usize].value());
        }
        for (name, histogram) in [
            ("vllm:time_to_first_token_seconds", &self.first_token_seconds),
            ("vllm:time_per_output_token_seconds", &self.token_gap_seconds),
            ("vllm:e2e_request_latency_seconds", &self.reply_seconds),
        ] {
            page.head(name, "histogram", "As in vLLM.");
            page.histogram(name, &labels, histogram);
        }
        fleet.write_vllm(&mut page, &labels);
        page.into_text()
    }
}

/// A label's value may hold anything; these three would end it.
fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}
