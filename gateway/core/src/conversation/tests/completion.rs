//! Text completions and the tokenizer endpoints.

use super::*;

#[test]
fn text_completions_take_text_ids_and_lists_of_both() {
    let check = |members: &str| {
        let body = format!(r#"{{{members}}}"#);
        check_completion(RequestBody::parse(body.as_bytes()).unwrap(), &limits())
    };
    let text = |text: &str| CompletionPrompt::Text(text.to_owned());
    for (members, expected) in [
        (r#""prompt":"a""#, vec![text("a")]),
        (r#""prompt":["a","b"]"#, vec![text("a"), text("b")]),
        (r#""prompt":[1,2]"#, vec![CompletionPrompt::Ids(vec![1, 2])]),
        (
            r#""prompt":[[1],[2,3]]"#,
            vec![CompletionPrompt::Ids(vec![1]), CompletionPrompt::Ids(vec![2, 3])],
        ),
    ] {
        assert_eq!(check(members).unwrap().prompts, expected);
    }
    let task = check(r#""prompt":"a","echo":true,"stream":true"#).unwrap();
    assert!(task.echo && task.stream.stream && task.add_special_tokens);
    assert_eq!(task.generation.max_tokens, Some(16));
    let task = check(r#""prompt":"a","logprobs":0"#).unwrap();
    assert_eq!(task.generation.logprobs, LogprobsWish { wanted: true, top: 0 });
    for (members, param) in [
        ("", "prompt"),
        (r#""prompt":[]"#, "prompt"),
        (r#""prompt":[[]]"#, "prompt[0]"),
        (r#""prompt":[1,"a"]"#, "prompt[1]"),
        (r#""prompt":[1,320]"#, "prompt[1]"),
        (r#""prompt":[["a"]]"#, "prompt[0][0]"),
        (r#""prompt":{}"#, "prompt"),
        (r#""prompt":"a","suffix":"b""#, "suffix"),
        (r#""prompt":"a","echo":true,"logprobs":0"#, "echo"),
        (r#""prompt":"a","logprobs":true"#, "logprobs"),
    ] {
        assert_eq!(check(members).unwrap_err().param.as_deref(), Some(param), "{members}");
    }
}

#[test]
fn tokenizer_endpoints_are_checked() {
    let body = |text: &str| RequestBody::parse(text.as_bytes()).unwrap();
    let task = check_tokenize(body(r#"{"prompt":"a","add_special_tokens":false}"#), &limits());
    let expected =
        TokenizeTask::Text { model: None, text: "a".to_owned(), add_special_tokens: false };
    assert_eq!(task.unwrap(), expected);
    let task = check_tokenize(body(r#"{"messages":[{"role":"user","content":"a"}]}"#), &limits());
    assert!(matches!(task, Ok(TokenizeTask::Chat(_))));
    assert!(check_tokenize(body("{}"), &limits()).is_err());
    assert_eq!(check_detokenize(body(r#"{"tokens":[1,2]}"#), &limits()), Ok(vec![1, 2]));
    assert!(check_detokenize(body(r#"{"tokens":[-1]}"#), &limits()).is_err());
    assert!(check_detokenize(body("{}"), &limits()).is_err());
}
