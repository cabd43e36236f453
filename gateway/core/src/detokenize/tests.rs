use super::*;
use crate::checkpoint::tests::tiny_model;
use proptest::prelude::*;

fn incomplete_tail(bytes: &[u8]) -> usize {
    // the longest end that is the beginning of a character
    (1..=3.min(bytes.len()))
        .rev()
        .find(|&length| {
            let tail = &bytes[bytes.len() - length..];
            matches!(std::str::from_utf8(tail), Err(error) if error.valid_up_to() == 0 && error.error_len().is_none())
        })
        .unwrap_or(0)
}

fn table() -> Arc<TokenBytes> {
    tiny_model().prompt_builder.tokenizer().bytes().clone()
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn pieces_equal_the_whole(
        ids in proptest::collection::vec(prop_oneof![0..300u32, 0..2500u32], 0..60),
        cuts in proptest::collection::vec(1..4usize, 1..5),
    ) {
        let table = table();
        let mut detokenizer = Detokenizer::new(table.clone(), HiddenTokens::default());
        let mut text = String::new();
        let mut rest = ids.as_slice();
        for &cut in cuts.iter().cycle() {
            if rest.is_empty() {
                break;
            }
            let (piece, tail) = rest.split_at(cut.min(rest.len()));
            text.push_str(&detokenizer.push(piece));
            rest = tail;
        }
        let dropped = detokenizer.finish();
        let bytes: Vec<u8> = ids.iter().flat_map(|&id| table.get(id)).copied().collect();
        prop_assert_eq!(dropped, incomplete_tail(&bytes));
        prop_assert_eq!(text, String::from_utf8_lossy(&bytes[..bytes.len() - dropped]));
    }
}

/// Ids of single bytes.
fn bytes_as_ids(table: &TokenBytes, bytes: &[u8]) -> Vec<u32> {
    let id_of = |byte: &u8| (0..table.len() as u32).find(|&id| table.get(id) == [*byte]).unwrap();
    bytes.iter().map(id_of).collect()
}

#[test]
fn a_character_split_over_tokens_comes_whole() {
    let table = table();
    let mut detokenizer = Detokenizer::new(table.clone(), HiddenTokens::default());
    let shown: Vec<String> =
        bytes_as_ids(&table, "a🙂é".as_bytes()).iter().map(|&id| detokenizer.push(&[id])).collect();
    assert_eq!(shown, ["a", "", "", "", "🙂", "", "é"]);
    assert_eq!(detokenizer.finish(), 0);
}

#[test]
fn the_beginning_of_a_character_at_the_end_is_no_text() {
    let table = table();
    let mut detokenizer = Detokenizer::new(table.clone(), HiddenTokens::default());
    assert_eq!(detokenizer.push(&bytes_as_ids(&table, b"ok\xf0\x9f")), "ok");
    assert_eq!(detokenizer.finish(), 2);
    assert_eq!(detokenizer.push(&bytes_as_ids(&table, b"!")), "!");
}

#[test]
fn a_byte_that_can_never_be_valid_holds_nothing_back() {
    let table = table();
    let mut detokenizer = Detokenizer::new(table.clone(), HiddenTokens::default());
    assert_eq!(detokenizer.push(&bytes_as_ids(&table, b"a\xffb")), "a\u{fffd}b");
    // an emoji cut short by a letter
    assert_eq!(detokenizer.push(&bytes_as_ids(&table, b"\xf0\x9f\x98x")), "\u{fffd}x");
}

#[test]
fn control_tokens_are_hidden_and_output_markers_shown() {
    let model = tiny_model();
    let added = model.prompt_builder.tokenizer().added();
    let id = |content| added.by_content(content).unwrap().id;
    let ids = [
        id("]~b]"),
        id("<mm:think>"),
        id("]<]image[>["),
        id("]<]minimax[>["),
        id("[e~["),
        id("</mm:think>"),
        id("<think>"),
    ];
    let text = model.prompt_builder.detokenizer(true).push(&ids);
    assert_eq!(text, "<mm:think>]<]minimax[>[</mm:think><think>");
    let text = model.prompt_builder.detokenizer(false).push(&ids);
    assert_eq!(text, "]~b]<mm:think>]<]image[>[]<]minimax[>[[e~[</mm:think><think>");
}

#[test]
fn ids_that_no_token_has_leave_no_text() {
    let table = table();
    let beyond = table.len() as u32;
    assert_eq!(Detokenizer::new(table, HiddenTokens::default()).push(&[beyond, u32::MAX]), "");
}
