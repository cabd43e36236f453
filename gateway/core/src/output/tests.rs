use super::*;
use proptest::prelude::*;

fn events() -> Vec<OutputEvent> {
    let call = |index| OutputEvent::CallStart { index, name: format!("f{index}") };
    let arguments =
        |index, fragment: &str| OutputEvent::CallArguments { index, fragment: fragment.to_owned() };
    vec![
        OutputEvent::Reasoning("hm".to_owned()),
        OutputEvent::Reasoning(" hm".to_owned()),
        OutputEvent::Content("So".to_owned()),
        call(0),
        arguments(0, "{"),
        arguments(0, "}"),
        OutputEvent::CallEnd { index: 0 },
        call(1),
        arguments(1, "{\"a\":"),
    ]
}

#[test]
fn no_delta_holds_two_kinds() {
    let mut folder = ReplyFolder::new("id", 0, ReasoningField::Both);
    let deltas = folder.deltas(events());
    assert_eq!(deltas.len(), 3);
    for delta in &deltas {
        let kinds = [
            delta.content.is_some(),
            delta.reasoning_content.is_some(),
            !delta.tool_calls.is_empty(),
        ];
        assert_eq!(kinds.iter().filter(|&&is_there| is_there).count(), 1, "{delta:?}");
    }
    assert_eq!(deltas[0].reasoning_content.as_deref(), Some("hm hm"));
    assert_eq!(deltas[0].reasoning, deltas[0].reasoning_content);
}

#[test]
fn id_and_name_come_once() {
    let mut folder = ReplyFolder::new("id", 0, ReasoningField::default());
    let deltas: Vec<Delta> =
        events().into_iter().flat_map(|event| folder.deltas(vec![event])).collect();
    let calls: Vec<&ToolCallDelta> = deltas.iter().flat_map(|delta| &delta.tool_calls).collect();
    for index in [0, 1] {
        let parts: Vec<_> = calls.iter().filter(|call| call.index == index).collect();
        assert!(
            parts[0].id.is_some() && parts[0].kind.is_some() && parts[0].function.name.is_some()
        );
        for later in &parts[1..] {
            assert!(later.id.is_none() && later.kind.is_none() && later.function.name.is_none());
        }
    }
    let ids: std::collections::HashSet<_> =
        calls.iter().filter_map(|call| call.id.clone()).collect();
    assert_eq!(ids.len(), 2);
}

#[test]
fn ids_differ_between_replies_and_samples() {
    let id = |reply, sample| {
        let mut folder = ReplyFolder::new(reply, sample, ReasoningField::default());
        folder.deltas(events())[2].tool_calls[0].id.clone()
    };
    assert_ne!(id("a", 0), id("b", 0));
    assert_ne!(id("a", 0), id("a", 1));
    assert_eq!(id("a", 1), id("a", 1));
}

#[test]
fn the_whole_message_is_the_stream_folded_and_leaves_out_cut_calls() {
    let fold = |chunks: Vec<Vec<OutputEvent>>| {
        let mut folder = ReplyFolder::new("id", 0, ReasoningField::default());
        let mut message = MessageFolder::default();
        for chunk in chunks {
            folder.deltas(chunk).into_iter().for_each(|delta| message.add(delta));
        }
        message.finish(&folder)
    };
    let at_once = fold(vec![events()]);
    assert_eq!(at_once, fold(events().into_iter().map(|event| vec![event]).collect()));
    assert_eq!(at_once.content.as_deref(), Some("So"));
    assert_eq!(at_once.tool_calls.len(), 1);
    assert_eq!(at_once.tool_calls[0].function.arguments, "{}");
}

#[test]
fn length_counts_more_than_calls() {
    let mut folder = ReplyFolder::new("id", 0, ReasoningField::default());
    assert_eq!(folder.finish_reason(EngineStop::Stop), FinishReason::Stop);
    folder.deltas(events());
    assert_eq!(folder.num_complete_calls(), 1);
    assert_eq!(folder.finish_reason(EngineStop::Stop), FinishReason::ToolCalls);
    assert_eq!(folder.finish_reason(EngineStop::Length), FinishReason::Length);
}

#[test]
fn chunks_have_the_form_that_clients_know() {
    let mut folder = ReplyFolder::new("id", 0, ReasoningField::default());
    let deltas = folder.deltas(events());
    let json = |delta: &Delta| serde_json::to_string(delta).unwrap();
    assert_eq!(json(&deltas[0]), r#"{"reasoning_content":"hm hm"}"#);
    assert_eq!(json(&deltas[1]), r#"{"content":"So"}"#);
    let id = deltas[2].tool_calls[0].id.as_deref().unwrap();
    assert!(json(&deltas[2]).starts_with(&format!(
        r#"{{"tool_calls":[{{"index":0,"id":"{id}","type":"function","function":{{"name":"f0","arguments":"{{}}"}}}}"#
    )));
}

fn classes(tokens: &[usize], account: &[(TextClass, usize)]) -> Vec<TextClass> {
    let mut ledger = TokenLedger::default();
    let mut classes = Vec::new();
    tokens.iter().for_each(|&num_bytes| ledger.push_token(num_bytes));
    let account: Vec<Stretch> =
        account.iter().map(|&(class, num_bytes)| Stretch { class, num_bytes }).collect();
    ledger.settle(&account, &mut classes);
    ledger.finish(&mut classes);
    classes
}

#[test]
fn tokens_are_told_by_what_their_text_became() {
    use TextClass::*;
    // "Add", ".", "</mm:think>", "4", "!"
    let account = [(Reasoning, 4), (Markup, 11), (Content, 2)];
    assert_eq!(
        classes(&[3, 1, 11, 1, 1], &account),
        [Reasoning, Reasoning, Markup, Content, Content]
    );
    // a token that holds the end of one and the beginning of the other is content
    assert_eq!(classes(&[3, 13, 1], &account), [Reasoning, Content, Content]);
    // the first bytes of a character belong to a token without text of its own
    assert_eq!(classes(&[0, 4, 0], &[(Content, 4)]), [Content, Content, Content]);
    assert_eq!(classes(&[5], &[]), [Markup]);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_token_is_told_once_however_the_account_arrives(
        tokens in proptest::collection::vec(0..5usize, 0..20),
        cuts in proptest::collection::vec(1..6usize, 1..20),
    ) {
        let total: usize = tokens.iter().sum();
        let kinds = [TextClass::Reasoning, TextClass::Markup, TextClass::Content];
        let mut stretches = Vec::new();
        let mut left = total;
        for (number, &cut) in cuts.iter().cycle().enumerate() {
            if left == 0 {
                break;
            }
            let num_bytes = cut.min(left);
            stretches.push(Stretch { class: kinds[number / 2 % 3], num_bytes });
            left -= num_bytes;
        }
        let mut at_once = Vec::new();
        let mut ledger = TokenLedger::default();
        tokens.iter().for_each(|&num_bytes| ledger.push_token(num_bytes));
        ledger.settle(&stretches, &mut at_once);
        ledger.finish(&mut at_once);
        prop_assert_eq!(at_once.len(), tokens.len());
        let mut one_by_one = Vec::new();
        let mut ledger = TokenLedger::default();
        tokens.iter().for_each(|&num_bytes| ledger.push_token(num_bytes));
        for stretch in &stretches {
            ledger.settle(std::slice::from_ref(stretch), &mut one_by_one);
        }
        ledger.finish(&mut one_by_one);
        prop_assert_eq!(at_once.len(), one_by_one.len());
        for (number, (a, b)) in at_once.iter().zip(&one_by_one).enumerate() {
            prop_assert!(a == b || tokens[number] == 0, "token {}", number);
        }
    }
}
