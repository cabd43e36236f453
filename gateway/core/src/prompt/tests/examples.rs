//! M3's prompt format by example, from a request to the exact text.

use super::*;

const IDENTITY: &str = "Your model version is MiniMax-M3, developed by MiniMax. Knowledge cutoff: January 2026. Founded in early 2022, MiniMax is a global AI foundation model company committed to advancing the frontiers of AI towards AGI.";
const THINKING: &str = "\n\n<thinking_instructions>\nYou have a thinking capability that allows you to reason step by step before responding. When thinking is enabled, wrap your reasoning in <mm:think></mm:think> tags before your response. When thinking is disabled, begin your response directly after the </mm:think> prefix. When thinking is adaptive, decide on your own whether to think for the current turn.\n";
const ADAPTIVE: &str = "Current thinking mode: adaptive. You are encouraged to think for complex decision-making, multi-step reasoning, or when analyzing function/tool results.\n";
const ENABLED: &str = "Current thinking mode: enabled. You MUST think step by step before every response, including after receiving function/tool results.\n";
const DISABLED: &str = "Current thinking mode: disabled. Do not output any thinking process.\n";
const TOOL_TEXT: &str = r#"

# Tools
You may call one or more tools to assist with the user query.
Here are the tools available in JSONSchema format:

<tools>
<tool>{"name": "get_weather", "description": "Wetter für Städte", "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]}}</tool>
</tools>

To call tools, wrap all invocations in a single ]<]minimax[>[<tool_call>]<]minimax[>[</tool_call> block. Parameter values containing nested objects or arrays are recursively expanded into XML elements. Example:

]<]minimax[>[<tool_call>
]<]minimax[>[<invoke name="tool-name-1">]<]minimax[>[<param-1>value-1]<]minimax[>[</param-1>]<]minimax[>[<param-2>]<]minimax[>[<item>]<]minimax[>[<key-a>val-a]<]minimax[>[</key-a>]<]minimax[>[<key-b>val-b]<]minimax[>[</key-b>]<]minimax[>[</item>]<]minimax[>[</param-2>]<]minimax[>[</invoke>
]<]minimax[>[<invoke name="tool-name-2">]<]minimax[>[<param-1>value-1]<]minimax[>[</param-1>]<]minimax[>[</invoke>
]<]minimax[>[</tool_call>"#;

fn system(text: &str, mode: &str) -> String {
    format!("]~!b[]~b]system\n{text}{THINKING}{mode}</thinking_instructions>[e~[\n")
}

fn text(body: &str) -> String {
    render(body).unwrap().text().to_owned()
}

#[test]
fn a_first_message_in_every_thinking_mode() {
    let body = |more: &str| format!(r#"{{"messages":[{}]{more}}}"#, message("user", "Hi"));
    let turns = "]~b]developer\nYou are a helpful assistant.[e~[\n]~b]user\nHi[e~[\n]~b]ai\n";
    for (more, mode, tail) in [
        ("", ADAPTIVE, ""),
        (r#","thinking":{"type":"adaptive"}"#, ADAPTIVE, ""),
        (r#","thinking":{"type":"enabled"}"#, ENABLED, "<mm:think>"),
        (r#","chat_template_kwargs":{"thinking_mode":"disabled"}"#, DISABLED, "</mm:think>"),
    ] {
        assert_eq!(text(&body(more)), format!("{}{turns}{tail}", system(IDENTITY, mode)));
    }
}

#[test]
fn system_is_shown_to_the_model_as_developer_and_root_as_system() {
    let tail = "[e~[\n]~b]user\nHi[e~[\n";
    let body = format!(
        r#"{{"messages":[{},{}],"add_generation_prompt":false}}"#,
        message("system", "Be terse."),
        message("user", "Hi")
    );
    let expected = format!("{}]~b]developer\nBe terse.{tail}", system(IDENTITY, ADAPTIVE));
    assert_eq!(text(&body), expected);
    let body = format!(
        r#"{{"messages":[{},{},{}],"add_generation_prompt":false}}"#,
        message("root", "ROOT"),
        message("developer", "DEV"),
        message("user", "Hi")
    );
    let expected = format!("{}]~b]developer\nDEV{tail}", system("ROOT", ADAPTIVE));
    assert_eq!(text(&body), expected);
}

#[test]
fn tools_calls_results_and_media() {
    let arguments = Json::from(
        r#"{"city":"Köln <A&B>","days":3,"opt":{"deep":true,"xs":[1,"two",null,{"k":1.5}]},"skip":null,"e":[],"f":{},"s":""}"#,
    );
    let body = format!(
        r#"{{"messages":[{user},
        {{"role":"assistant","content":"","reasoning_content":"think A","tool_calls":[
            {{"id":"a","type":"function","function":{{"name":"get_weather","arguments":{arguments}}}}},
            {{"id":"b","type":"function","function":{{"name":"now","arguments":"{{}}"}}}}]}},
        {{"role":"tool","tool_call_id":"a","content":"sunny"}},
        {{"role":"tool","tool_call_id":"b","content":[{{"type":"text","text":"12:00"}},{PICTURE}]}},
        {answer},
        {{"role":"user","content":[{PICTURE},{{"type":"text","text":"and this "}},{CLIP},{{"type":"text","text":"?"}}]}}],
        "tools":[{{"type":"function","function":{{"name":"get_weather","description":"Wetter für Städte",
        "parameters":{{"type":"object","properties":{{"city":{{"type":"string"}},"days":{{"type":"integer"}}}},"required":["city"]}}}}}}],
        "thinking":{{"type":"enabled"}}}}"#,
        user = message("user", "Hi"),
        arguments = arguments.to_compact(),
        answer = message("assistant", "It is sunny."),
    );
    let calls = r#"]<]minimax[>[<tool_call>
]<]minimax[>[<invoke name="get_weather">]<]minimax[>[<city>Köln <A&B>]<]minimax[>[</city>]<]minimax[>[<days>3]<]minimax[>[</days>]<]minimax[>[<opt>]<]minimax[>[<deep>true]<]minimax[>[</deep>]<]minimax[>[<xs>]<]minimax[>[<item>1]<]minimax[>[</item>]<]minimax[>[<item>two]<]minimax[>[</item>]<]minimax[>[<item>]<]minimax[>[</item>]<]minimax[>[<item>]<]minimax[>[<k>1.5]<]minimax[>[</k>]<]minimax[>[</item>]<]minimax[>[</xs>]<]minimax[>[</opt>]<]minimax[>[<e>]<]minimax[>[</e>]<]minimax[>[<f>]<]minimax[>[</f>]<]minimax[>[<s>]<]minimax[>[</s>]<]minimax[>[</invoke>
]<]minimax[>[<invoke name="now">]<]minimax[>[</invoke>
]<]minimax[>[</tool_call>"#;
    let expected = format!(
        "{}]~b]developer\nYou are a helpful assistant.{TOOL_TEXT}[e~[\n]~b]user\nHi[e~[\n\
         ]~b]ai\n<mm:think>think A</mm:think>{calls}[e~[\n\
         ]~b]tool\n<response>sunny</response>\n<response>12:00]<]image[>[</response>[e~[\n\
         ]~b]ai\n</mm:think>It is sunny.[e~[\n\
         ]~b]user\n]<]image[>[and this ]<]video[>[?[e~[\n]~b]ai\n<mm:think>",
        system(IDENTITY, ENABLED)
    );
    assert_eq!(text(&body), expected);
}

#[test]
fn thinking_in_the_history() {
    let turn = |reply: String| {
        let body = format!(
            r#"{{"messages":[{},{reply}],"add_generation_prompt":false}}"#,
            message("user", "Hi")
        );
        let text = text(&body);
        text[text.find("]~b]ai\n").unwrap() + "]~b]ai\n".len()..].to_owned()
    };
    let with_reasoning = |reasoning: &str, content: &str| {
        let members = [
            ("role", "assistant".into()),
            ("content", content.into()),
            ("reasoning_content", reasoning.into()),
        ];
        turn(Json::object(members).to_compact())
    };
    let plain = |content: &str| turn(message("assistant", content));
    assert_eq!(plain("<mm:think>\nabc\n</mm:think>\n\nans\n"), "<mm:think>abc</mm:think>ans[e~[\n");
    assert_eq!(plain("abc</mm:think>ans"), "<mm:think>abc</mm:think>ans[e~[\n");
    assert_eq!(
        with_reasoning("R", "abc</mm:think>ans"),
        "<mm:think>R</mm:think>abc</mm:think>ans[e~[\n"
    );
    assert_eq!(with_reasoning("", "x"), "</mm:think>x[e~[\n");
}

#[test]
fn the_developer_block_has_a_default() {
    let block = |body: &str| {
        let text = text(body);
        let from = text.find("]~b]developer\n").unwrap() + "]~b]developer\n".len();
        text[from..from + text[from..].find("[e~[").unwrap()].to_owned()
    };
    let user = message("user", "Hi");
    let identity =
        format!(r#"{{"messages":[{user}],"chat_template_kwargs":{{"model_identity":"I am X"}}}}"#);
    assert_eq!(block(&identity), "I am X");
    let empty = format!(r#"{{"messages":[{},{user}]}}"#, message("system", ""));
    assert_eq!(block(&empty), "You are a helpful assistant.");
}
