use super::*;
use proptest::prelude::*;

/// The first end of a pattern, and how much of the end may become one, looked up the slow way.
fn naive(patterns: &[String], text: &str) -> (Option<(usize, usize)>, usize) {
    for end in 1..=text.len() {
        let longest = patterns
            .iter()
            .enumerate()
            .filter(|(_, pattern)| {
                !pattern.is_empty() && text.as_bytes()[..end].ends_with(pattern.as_bytes())
            })
            .max_by_key(|(number, pattern)| (pattern.len(), std::cmp::Reverse(*number)));
        if let Some((number, _)) = longest {
            return (Some((number, end)), 0);
        }
    }
    let held = (0..=text.len()).find(|&at| {
        patterns.iter().any(|pattern| pattern.as_bytes().starts_with(&text.as_bytes()[at..]))
    });
    (None, text.len() - held.unwrap_or(text.len()))
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn ends_and_possible_beginnings_are_found_in_any_chunking(
        patterns in proptest::collection::vec("[ab\\]é]{0,4}", 0..5),
        text in "[ab\\]é]{0,20}",
        lengths in proptest::collection::vec(1..5usize, 1..4),
    ) {
        let set = MarkerSet::new(&patterns);
        let (expected, expected_held) = naive(&patterns, &text);
        let mut position = Position::default();
        let mut done = 0;
        let mut rest = text.as_str();
        let mut lengths = lengths.iter().cycle();
        while !rest.is_empty() {
            let cut = *lengths.next().unwrap();
            let end = rest.char_indices().nth(cut).map_or(rest.len(), |(at, _)| at);
            let (piece, tail) = rest.split_at(end);
            if let Some(found) = set.scan(&mut position, piece) {
                prop_assert_eq!(expected, Some((found.pattern, done + found.end)));
                prop_assert_eq!(found.length, patterns[found.pattern].len());
                prop_assert_eq!(set.held(position), 0);
                return Ok(());
            }
            done += piece.len();
            rest = tail;
        }
        prop_assert_eq!(expected, None);
        // a pattern that is nothing but what is held would have been found
        prop_assert_eq!(set.held(position), if patterns.iter().all(String::is_empty) { 0 } else { expected_held });
    }
}
