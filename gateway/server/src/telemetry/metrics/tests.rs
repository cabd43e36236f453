//! The page of metrics against its documentation and the customs of Prometheus.

use std::collections::BTreeSet;
use std::path::Path;

use super::{Fleet, Metrics, RouteLabel};
use crate::error::ErrorKind;

/// Name, kind and help of every metric of a page, counters without their `_total`.
fn told(page: &str) -> BTreeSet<(String, String, String)> {
    let heads = page.lines().filter_map(|line| line.strip_prefix("# HELP "));
    let kinds = page.lines().filter_map(|line| line.strip_prefix("# TYPE "));
    let of_both = heads.zip(kinds).filter_map(|(head, kind)| {
        let (name, help) = head.split_once(' ')?;
        let (same_name, kind) = kind.split_once(' ')?;
        assert_eq!(name, same_name);
        let bare = match kind {
            "counter" => name.strip_suffix("_total").expect("a counter ends in _total"),
            _ => name,
        };
        Some((bare.to_owned(), kind.to_owned(), help.to_owned()))
    });
    of_both.collect()
}

/// The rows of the documentation whose names begin so: name, kind and meaning.
fn documented(beginnings: &[&str]) -> BTreeSet<(String, String, String)> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/metrics.md");
    let text = std::fs::read_to_string(path).expect("the documentation is part of the tree");
    let rows = text.lines().filter_map(|line| line.strip_prefix("| `"));
    let cells = rows.filter_map(|row| {
        let (name, rest) = row.split_once("` | ")?;
        let (kind, meaning) = rest.trim_end_matches(" |").split_once(" | ")?;
        Some((name.to_owned(), kind.to_owned(), meaning.to_owned()))
    });
    let is_asked = |name: &str| beginnings.iter().any(|beginning| name.starts_with(beginning));
    cells.filter(|(name, ..)| is_asked(name)).collect()
}

#[test]
fn what_the_gateway_tells_is_what_the_documentation_says() {
    let page = Metrics::default().page(&Fleet::default(), 0);
    assert_eq!(told(&page), documented(&["m3stack_gateway_", "process_"]));
}

#[test]
fn names_of_vllm_are_those_of_the_documentation() {
    let page = Metrics::default().vllm_page("m3", &Fleet::default());
    let names = told(&page).into_iter().map(|(name, kind, _)| (name, kind));
    let rows = documented(&["vllm:"]).into_iter();
    let ours = rows.filter(|(_, _, by_whom)| by_whom.starts_with("yes"));
    let ours = ours.map(|(name, kind, _)| (name, kind));
    assert_eq!(names.collect::<BTreeSet<_>>(), ours.collect::<BTreeSet<_>>());
}

#[test]
fn names_keep_to_the_customs_of_prometheus() {
    let page = Metrics::default().page(&Fleet::default(), 0);
    for (name, kind, help) in told(&page) {
        let is_of_the_system = name.starts_with("process_");
        assert!(name.starts_with("m3stack_gateway_") || is_of_the_system, "{name}");
        assert!(!name.ends_with("_total"), "{name}: only counters end so");
        let units = ["_ms", "_us", "_milliseconds", "_kb", "_percent"];
        assert!(!units.iter().any(|unit| name.ends_with(unit)), "{name}: base units");
        assert!(kind != "histogram" || name.ends_with("_seconds"), "{name}: without its unit");
        assert!(help.ends_with('.'), "{name}: {help}");
    }
}

#[test]
fn each_status_of_an_error_is_counted_as_itself() {
    for kind in ErrorKind::ALL {
        let metrics = Metrics::default();
        let status = kind.row().status;
        metrics.http_request(RouteLabel::Chat, status, std::time::Duration::ZERO);
        let page = metrics.page(&Fleet::default(), 0);
        let line = format!("route=\"/v1/chat/completions\",code=\"{status}\"}} 1\n");
        assert!(page.contains(&line), "{kind:?}");
    }
}
