//! Any text cut anywhere, and any stop strings: what is shown is what a plain search leaves. Stop
//! strings come first, one after the other, each ending at a byte 0; the text follows a byte 255.
#![no_main]

use gateway_core::output::OutputEvent;
use gateway_core::stop::StopMatcher;
use libfuzzer_sys::fuzz_target;

/// What of a text is shown, and which stop string ended it, by looking at every end.
fn plain(text: &str, stops: &[String], include_stop: bool) -> (String, Option<String>) {
    for end in 1..=text.len() {
        let ends_here = |stop: &&String| text.as_bytes()[..end].ends_with(stop.as_bytes());
        let longest = stops.iter().filter(ends_here).max_by_key(|stop| stop.len());
        if let Some(stop) = longest {
            let shown = if include_stop { end } else { end - stop.len() };
            return (text[..shown].to_owned(), Some(stop.clone()));
        }
    }
    (text.to_owned(), None)
}

fuzz_target!(|bytes: &[u8]| {
    let [mode, rest @ ..] = bytes else { return };
    let Some(end) = rest.iter().position(|byte| *byte == 255) else { return };
    let stops: Vec<String> = rest[..end]
        .split(|byte| *byte == 0)
        .map(|stop| String::from_utf8_lossy(stop).into_owned())
        .filter(|stop| !stop.is_empty())
        .take(16)
        .collect();
    let text = String::from_utf8_lossy(&rest[end + 1..]);
    let include_stop = mode & 1 == 1;
    let step = usize::from(mode >> 1) % 9 + 1;

    let mut matcher = StopMatcher::new(&stops, include_stop);
    let mut shown = String::new();
    let letters: Vec<char> = text.chars().collect();
    let mut pieces: Vec<String> =
        letters.chunks(step).map(|piece| piece.iter().collect()).collect();
    // what was held back for the end comes out at the end
    pieces.push(String::new());
    let last = pieces.len() - 1;
    for (index, piece) in pieces.into_iter().enumerate() {
        let mut events = vec![OutputEvent::Content(piece)];
        if index == last {
            events.clear();
            matcher.finish(&mut events);
        } else {
            matcher.filter(&mut events);
        }
        for event in events {
            let OutputEvent::Content(piece) = event else { panic!("{event:?}") };
            assert!(!piece.is_empty());
            shown.push_str(&piece);
        }
    }
    let expected = plain(&text, &stops, include_stop);
    assert_eq!((shown, matcher.matched().map(str::to_owned)), expected);
});
