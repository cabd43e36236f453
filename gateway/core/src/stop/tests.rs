use super::*;
use proptest::prelude::*;

fn text_of(events: &[OutputEvent]) -> String {
    let texts = events.iter().filter_map(|event| match event {
        OutputEvent::Content(text) => Some(text.as_str()),
        _ => None,
    });
    texts.collect()
}

/// Feeds pieces; gives the shown pieces, the end of the reply included.
fn shown(stops: &[&str], include: bool, pieces: &[&str]) -> (Vec<String>, Option<String>) {
    let stops: Vec<String> = stops.iter().map(|&stop| stop.to_owned()).collect();
    let mut matcher = StopMatcher::new(&stops, include);
    let mut shown = Vec::new();
    for &piece in pieces {
        let mut events = vec![OutputEvent::Content(piece.to_owned())];
        matcher.filter(&mut events);
        shown.push(text_of(&events));
    }
    let mut events = Vec::new();
    matcher.finish(&mut events);
    shown.push(text_of(&events));
    (shown, matcher.matched().map(str::to_owned))
}

#[test]
fn nothing_of_a_stop_text_leaks() {
    let (shown, matched) = shown(&["DEFGHIJ"], false, &["ABC", "DEF", "G", "HI", "J", "K"]);
    assert_eq!(shown, ["ABC", "", "", "", "", "", ""]);
    assert_eq!(matched.as_deref(), Some("DEFGHIJ"));
}

#[test]
fn a_beginning_that_comes_to_nothing_is_shown() {
    let (shown, matched) = shown(&["stop"], false, &["st", "op", "x"]);
    assert_eq!((shown.concat(), matched.as_deref()), (String::new(), Some("stop")));
    let (shown, matched) = self::shown(&["stop"], false, &["a sto", "ne st", "o"]);
    assert_eq!(
        (shown, matched),
        (vec!["a ".into(), "stone ".into(), "".into(), "sto".into()], None)
    );
}

#[test]
fn the_first_to_be_complete_ends_the_reply() {
    let (shown, matched) = shown(&["long stop", "st"], false, &["a long stop"]);
    assert_eq!((shown.concat().as_str(), matched.as_deref()), ("a long ", Some("st")));
}

#[test]
fn the_stop_text_is_shown_if_asked_for() {
    let (shown, _) = shown(&["END"], true, &["a E", "ND b"]);
    assert_eq!(shown.concat(), "a END");
}

#[test]
fn only_the_answer_is_watched() {
    let mut matcher = StopMatcher::new(&["x".to_owned()], false);
    let mut events = vec![
        OutputEvent::Reasoning("x".to_owned()),
        OutputEvent::CallArguments { index: 0, fragment: "x".to_owned() },
    ];
    let before = events.clone();
    matcher.filter(&mut events);
    assert_eq!(events, before);
    assert_eq!(matcher.matched(), None);
}

#[test]
fn what_is_held_comes_before_what_follows() {
    let mut matcher = StopMatcher::new(&["ab".to_owned()], false);
    let start = OutputEvent::CallStart { index: 0, name: "f".to_owned() };
    let mut events = vec![OutputEvent::Content("1a".to_owned()), start.clone()];
    matcher.filter(&mut events);
    let content = |text: &str| OutputEvent::Content(text.to_owned());
    assert_eq!(events, [content("1"), content("a"), start]);
    // the stop text does not reach over the call
    let mut events = vec![content("b")];
    matcher.filter(&mut events);
    assert_eq!((text_of(&events).as_str(), matcher.matched()), ("b", None));
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn chunking_changes_nothing(
        stops in proptest::collection::vec("[ab]{1,4}", 1..4),
        text in "[abc]{0,24}",
        lengths in proptest::collection::vec(1..5usize, 1..4),
        include in any::<bool>(),
    ) {
        let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
        let mut pieces = Vec::new();
        let mut rest = text.as_str();
        for &length in lengths.iter().cycle() {
            if rest.is_empty() {
                break;
            }
            let (piece, tail) = rest.split_at(length.min(rest.len()));
            pieces.push(piece);
            rest = tail;
        }
        let (whole, matched) = shown(&stops, include, &[&text]);
        let (split, split_matched) = shown(&stops, include, &pieces);
        prop_assert_eq!(whole.concat(), split.concat());
        prop_assert_eq!(&matched, &split_matched);
        match matched {
            None => prop_assert_eq!(split.concat(), text),
            Some(stop) => {
                let end = (0..=text.len()).find(|&end| {
                    stops.iter().any(|stop| text[..end].ends_with(stop))
                }).unwrap();
                let expected = if include { end } else { end - stop.len() };
                prop_assert_eq!(split.concat(), &text[..expected]);
            }
        }
    }
}
