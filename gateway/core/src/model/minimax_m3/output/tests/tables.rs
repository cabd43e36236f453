//! Cases as tables, each fed whole, by characters, at every cut and in odd pieces. `§` stands for
//! the mark of tags.

use super::*;

/// What a text between the tags of a member is, by the member's schema.
const LEAVES: [(&str, &str, &str); 132] = [
    // strings are taken as they are
    (r#"{"type":"string"}"#, "", r#""""#),
    (r#"{"type":"string"}"#, " ", r#"" ""#),
    (r#"{"type":"string"}"#, "\n", r#""\n""#),
    (r#"{"type":"string"}"#, "null", r#""null""#),
    (r#"{"type":"string"}"#, "true", r#""true""#),
    (r#"{"type":"string"}"#, "0012", r#""0012""#),
    (r#"{"type":"string"}"#, "1e5", r#""1e5""#),
    (r#"{"type":"string"}"#, "{\"a\":1}", r#""{\"a\":1}""#),
    (r#"{"type":"string"}"#, "[1,2]", r#""[1,2]""#),
    (r#"{"type":"string"}"#, "\"quoted\"", r#""\"quoted\"""#),
    (r#"{"type":"string"}"#, "a\\b", r#""a\\b""#),
    (r#"{"type":"string"}"#, "\t\u{1}", r#""\t\u0001""#),
    (r#"{"type":"string"}"#, "<b>&amp;</b>", r#""<b>&amp;</b>""#),
    (r#"{"type":"string"}"#, "]<]", r#""]<]""#),
    (r#"{"type":"string"}"#, "]<]minimax[>", r#""]<]minimax[>""#),
    (r#"{"type":"string"}"#, "<mm:think>x</mm:think>", r#""<mm:think>x</mm:think>""#),
    (r#"{"type":"string"}"#, "Köln 🙂 終", r#""Köln 🙂 終""#),
    (r#"{"type":"string"}"#, "é", r#""é""#),
    (r#"{"type":"string"}"#, "e\u{301}\u{200d}", "\"e\u{301}\u{200d}\""),
    (r#"{"type":"string"}"#, "line one\r\nline two\n", r#""line one\r\nline two\n""#),
    (r#"{"type":"string"}"#, "</invoke>", r#""</invoke>""#),
    (r#"{"type":"string"}"#, "<tool_call>", r#""<tool_call>""#),
    (r#"{"type":"string","format":"date"}"#, "2026-01-01", r#""2026-01-01""#),
    (r#"{"type":"string","maxLength":1}"#, "long", r#""long""#),
    // integers
    (r#"{"type":"integer"}"#, "0", "0"),
    (r#"{"type":"integer"}"#, "-7", "-7"),
    (r#"{"type":"integer"}"#, " 42\n", "42"),
    (r#"{"type":"integer"}"#, "123456789012345678901234567890", "123456789012345678901234567890"),
    (r#"{"type":"integer"}"#, "5.0", "5.0"),
    (r#"{"type":"integer"}"#, "2.5", r#""2.5""#),
    (r#"{"type":"integer"}"#, "1e3", "1e3"),
    (r#"{"type":"integer"}"#, "007", r#""007""#),
    (r#"{"type":"integer"}"#, "+1", r#""+1""#),
    (r#"{"type":"integer"}"#, "many", r#""many""#),
    (r#"{"type":"integer"}"#, "", r#""""#),
    (r#"{"type":"integer"}"#, "null", r#""null""#),
    (r#"{"type":"integer","minimum":5}"#, "3", "3"),
    // numbers
    (r#"{"type":"number"}"#, "3", "3"),
    (r#"{"type":"number"}"#, "3.10", "3.10"),
    (r#"{"type":"number"}"#, "-0.0", "-0.0"),
    (r#"{"type":"number"}"#, "6.02e23", "6.02e23"),
    (r#"{"type":"number"}"#, "\t1.5 ", "1.5"),
    (r#"{"type":"number"}"#, ".5", r#"".5""#),
    (r#"{"type":"number"}"#, "5.", r#""5.""#),
    (r#"{"type":"number"}"#, "NaN", r#""NaN""#),
    (r#"{"type":"number"}"#, "1,5", r#""1,5""#),
    (r#"{"type":"number"}"#, "0x10", r#""0x10""#),
    // booleans
    (r#"{"type":"boolean"}"#, "true", "true"),
    (r#"{"type":"boolean"}"#, "false", "false"),
    (r#"{"type":"boolean"}"#, " true\n", "true"),
    (r#"{"type":"boolean"}"#, "True", "true"),
    (r#"{"type":"boolean"}"#, "False", "false"),
    (r#"{"type":"boolean"}"#, "TRUE", r#""TRUE""#),
    (r#"{"type":"boolean"}"#, "1", r#""1""#),
    (r#"{"type":"boolean"}"#, "yes", r#""yes""#),
    // null
    (r#"{"type":"null"}"#, "null", "null"),
    (r#"{"type":"null"}"#, "", "null"),
    (r#"{"type":"null"}"#, "None", r#""None""#),
    // several types
    (r#"{"type":["string","null"]}"#, "null", "null"),
    (r#"{"type":["string","null"]}"#, "nullable", r#""nullable""#),
    (r#"{"type":["string","null"]}"#, "", r#""""#),
    (r#"{"type":["string","null"]}"#, " null", r#"" null""#),
    (r#"{"type":["string","integer"]}"#, "12", "12"),
    (r#"{"type":["string","integer"]}"#, "12a", r#""12a""#),
    (r#"{"type":["string","integer"]}"#, "-", r#""-""#),
    (r#"{"type":["string","integer"]}"#, "1.5", r#""1.5""#),
    (r#"{"type":["string","number"]}"#, "1.5", "1.5"),
    (r#"{"type":["string","boolean"]}"#, "true", "true"),
    (r#"{"type":["string","boolean"]}"#, "True", r#""True""#),
    (r#"{"type":["integer","null"]}"#, "null", "null"),
    (r#"{"type":["integer","null"]}"#, "", "null"),
    (r#"{"type":["integer","boolean"]}"#, "false", "false"),
    (r#"{"type":["string","object"]}"#, "{\"a\":1}", r#"{"a":1}"#),
    (r#"{"type":["string","object"]}"#, "{a}", r#""{a}""#),
    (r#"{"type":["string","object"]}"#, "[1]", r#""[1]""#),
    (r#"{"type":["string","array"]}"#, "[1, 2]", "[1,2]"),
    (r#"{"type":["string","array"]}"#, "[1", r#""[1""#),
    (r#"{"type":["string","array"]}"#, "plain", r#""plain""#),
    (r#"{"anyOf":[{"type":"string"},{"type":"null"}]}"#, "null", "null"),
    (r#"{"anyOf":[{"type":"integer"},{"type":"null"}]}"#, "4", "4"),
    (r#"{"oneOf":[{"type":"boolean"},{"type":"integer"}]}"#, "true", "true"),
    (r#"{"allOf":[{"type":["string","integer"]},{"type":"integer"}]}"#, "9", "9"),
    (r#"{"type":"integer","nullable":true}"#, "null", "null"),
    (r##"{"$ref":"#/$defs/n"}"##, "8", "8"),
    (r##"{"anyOf":[{"$ref":"#/$defs/n"},{"$ref":"#/$defs/s"}]}"##, "x8", r#""x8""#),
    (r##"{"allOf":[{"$ref":"#/$defs/n"}],"description":"d"}"##, "8", "8"),
    (r##"{"$ref":"#/$defs/nowhere"}"##, "8", r#""8""#),
    // listed values
    (r#"{"enum":["a","b"]}"#, "a", r#""a""#),
    (r#"{"enum":["a","b"]}"#, "c", r#""c""#),
    (r#"{"enum":[1,2,3]}"#, "2", "2"),
    (r#"{"enum":["1",1]}"#, "1", r#""1""#),
    (r#"{"enum":[true,"true"]}"#, "true", r#""true""#),
    (r#"{"enum":[null,"x"]}"#, "null", "null"),
    (r#"{"const":5}"#, "5", "5"),
    (r#"{"const":"5"}"#, "5", r#""5""#),
    (r#"{"enum":[{"k":1}]}"#, "{\"k\":1}", r#"{"k":1}"#),
    // nothing said: text
    ("{}", "12", r#""12""#),
    ("{}", "true", r#""true""#),
    ("{}", "{\"a\":1}", r#""{\"a\":1}""#),
    ("{}", "", r#""""#),
    ("true", "null", r#""null""#),
    // objects and lists as texts
    (r#"{"type":"object"}"#, "", "{}"),
    (r#"{"type":"object"}"#, "{\"a\": [1, 2]}", r#"{"a":[1,2]}"#),
    (r#"{"type":"object"}"#, "broken {", r#""broken {""#),
    (r#"{"type":"object"}"#, "§<a>1§</a>", r#"{"a":"1"}"#),
    (r#"{"type":"object","properties":{"a":{"type":"integer"}}}"#, "§<a>1§</a>", r#"{"a":1}"#),
    (r#"{"type":"object","properties":{"a":{"type":"integer"}}}"#, "\n§<a>1§</a>\n", r#"{"a":1}"#),
    (r#"{"type":"object"}"#, "§<a>§<b>x§</b>§</a>", r#"{"a":{"b":"x"}}"#),
    (r#"{"type":"object"}"#, "§<a>x§</a>beside", r#"{"a":"x","$text":"beside"}"#),
    (r#"{"type":"object"}"#, "§<a>x§</a>§<a>y§</a>", r#"{"a":["x","y"]}"#),
    (r#"{"type":"object","additionalProperties":{"type":"integer"}}"#, "§<k>3§</k>", r#"{"k":3}"#),
    (r#"{"type":"array"}"#, "", "[]"),
    (r#"{"type":"array"}"#, "[]", "[]"),
    (r#"{"type":"array"}"#, "[1, \"a\"]", r#"[1,"a"]"#),
    (r#"{"type":"array","items":{"type":"integer"}}"#, "7", "[7]"),
    (r#"{"type":"array","items":{"type":"integer"}}"#, "§<item>7§</item>§<item>8§</item>", "[7,8]"),
    (r#"{"type":"array","items":{"type":"string"}}"#, "§<item>7§</item>", r#"["7"]"#),
    (r#"{"type":"array","items":{"type":"string"}}"#, "§<item>§</item>", r#"[""]"#),
    (r#"{"type":"array"}"#, "\n§<item>a§</item>\n§<item>b§</item>\n", r#"["a","b"]"#),
    (
        r#"{"type":"array","items":{"type":"array","items":{"type":"integer"}}}"#,
        "§<item>§<item>1§</item>§</item>§<item>§</item>",
        "[[1],[]]",
    ),
    (
        r#"{"type":"array","items":{"type":"object","properties":{"k":{"type":"integer"}}}}"#,
        "§<item>§<k>1§</k>§</item>",
        r#"[{"k":1}]"#,
    ),
    (
        r#"{"type":"array","items":{"type":"object","properties":{"k":{"type":"integer"}}}}"#,
        "§<k>1§</k>§<k>2§</k>",
        r#"[{"k":1},{"k":2}]"#,
    ),
    (
        r#"{"type":"array","prefixItems":[{"type":"integer"},{"type":"string"}]}"#,
        "§<item>1§</item>§<item>1§</item>",
        r#"[1,"1"]"#,
    ),
    (r#"{"type":["array","null"],"items":{"type":"integer"}}"#, "null", "null"),
    (r#"{"type":["array","null"],"items":{"type":"integer"}}"#, "", "[]"),
    (r#"{"type":["array","null"],"items":{"type":"integer"}}"#, "§<item>1§</item>", "[1]"),
    ("{}", "§<item>1§</item>§<item>2§</item>", r#"["1","2"]"#),
    ("{}", "§<a>1§</a>", r#"{"a":"1"}"#),
    (r#"{"type":"string"}"#, "§<b>bold§</b>", r#""<b>bold</b>""#),
    (
        r#"{"anyOf":[{"type":"string"},{"type":"object","properties":{"v":{"type":"integer"}}}]}"#,
        "§<v>3§</v>",
        r#"{"v":3}"#,
    ),
    (
        r#"{"anyOf":[{"type":"string"},{"type":"object","properties":{"v":{"type":"integer"}}}]}"#,
        "v",
        r#""v""#,
    ),
    (r##"{"$ref":"#/$defs/tree"}"##, "§<left>§<left>§</left>§</left>", r#"{"left":{"left":{}}}"#),
];

const DEFINITIONS: &str = r##""$defs":{"n":{"type":"integer"},"s":{"type":"string"},
    "tree":{"type":"object","properties":{"left":{"$ref":"#/$defs/tree"}}}}"##;

#[test]
fn leaves_become_what_their_schema_says() {
    for (schema, inside, value) in LEAVES {
        let parameters =
            format!(r#"{{"type":"object","properties":{{"v":{schema}}},{DEFINITIONS}}}"#);
        let options = options(ThinkingMode::Disabled, &[("f", &parameters)]);
        let raw = block(&call("f", &element("v", &inside.replace('§', MARK))));
        let reply = chunked(&options, &raw, EngineStop::Stop);
        let arguments = &reply.message.tool_calls[0].function.arguments;
        assert_eq!(arguments, &format!("{{\"v\":{value}}}"), "{schema}: {inside}");
    }
}

/// Mode, output, thinking, answer; `~` stands for none.
const THINKING: [(char, &str, &str, &str); 46] = [
    ('d', "", "~", "~"),
    ('d', "Hi", "~", "Hi"),
    ('d', "\n\nHi\n", "~", "\n\nHi\n"),
    ('d', "</mm:think>Hi", "~", "Hi"),
    ('d', "</mm:think>\n\nHi", "~", "\n\nHi"),
    ('d', "<mm:think>a</mm:think>Hi", "a", "Hi"),
    ('d', "Hi <mm:think>", "~", "Hi <mm:think>"),
    ('d', "Hi </mm:think> there", "~", "Hi </mm:think> there"),
    ('d', "<think>a</think>Hi", "~", "<think>a</think>Hi"),
    ('d', "<mm:thin", "~", "<mm:thin"),
    ('d', "<", "~", "<"),
    ('d', "a < b", "~", "a < b"),
    ('a', "", "~", "~"),
    ('a', "Hi", "~", "Hi"),
    ('a', " ", "~", " "),
    ('a', "</mm:think>Hi", "~", "Hi"),
    ('a', "\n</mm:think>\nHi", "~", "\nHi"),
    ('a', "<mm:think>a</mm:think>Hi", "a", "Hi"),
    ('a', "<mm:think>\na\n</mm:think>\n\nHi", "\na\n", "\n\nHi"),
    ('a', "<mm:think></mm:think>Hi", "~", "Hi"),
    ('a', "<mm:think>a", "a", "~"),
    ('a', "<mm:think>a</mm:thin", "a</mm:thin", "~"),
    ('a', "<mm:think>a</mm:think>", "a", "~"),
    ('a', "<mm:think>a</mm:think>b</mm:think>c", "a", "b</mm:think>c"),
    ('a', "<mm:think>a<mm:think>b</mm:think>c", "a<mm:think>b", "c"),
    ('a', "<mm:think><mm:think>a</mm:think>c", "<mm:think>a", "c"),
    ('a', "Hi<mm:think>a</mm:think>", "~", "Hi<mm:think>a</mm:think>"),
    ('a', " <mm:think>a</mm:think>Hi", "a", "Hi"),
    ('a', "<mm:think>1 < 2</mm:think>ok", "1 < 2", "ok"),
    ('a', "<mm:think>]<]</mm:think>ok", "]<]", "ok"),
    ('a', "<mm:think>§</mm:think>ok", "§", "ok"),
    ('a', "<mm:think>say §<x> here</mm:think>ok", "say §<x> here", "ok"),
    // the output ends where a tag may have begun
    ('a', "Hi §", "~", "Hi "),
    ('a', "Hi §<x>y", "~", "Hi §<x>y"),
    ('a', "§§", "~", "§"),
    ('e', "", "~", "~"),
    ('e', "a", "a", "~"),
    ('e', "a</mm:think>", "a", "~"),
    ('e', "a</mm:think>Hi", "a", "Hi"),
    ('e', "</mm:think>Hi", "~", "Hi"),
    ('e', "<mm:think>a</mm:think>Hi", "a", "Hi"),
    ('e', "\na\n</mm:think>\nHi", "\na\n", "\nHi"),
    ('e', "a <mm:think> b</mm:think>Hi", "a <mm:think> b", "Hi"),
    ('e', "a</mm:think>b</mm:think>c", "a", "b</mm:think>c"),
    ('e', "a</mm:thin", "a</mm:thin", "~"),
    ('e', "🙂</mm:think>終", "🙂", "終"),
];

#[test]
fn thinking_and_answer_part_where_the_mode_says() {
    for (mode, raw, reasoning, content) in THINKING {
        let mode = match mode {
            'd' => ThinkingMode::Disabled,
            'a' => ThinkingMode::Adaptive,
            _ => ThinkingMode::Enabled,
        };
        let expected = |text: &str| (text != "~").then(|| text.replace('§', MARK));
        let reply = chunked(&options(mode, &[]), &raw.replace('§', MARK), EngineStop::Stop);
        let found = (reply.message.reasoning_content, reply.message.content);
        assert_eq!(found, (expected(reasoning), expected(content)), "{mode:?}: {raw}");
    }
}

/// Output of a mode without thinking; answer (`~` for none), calls as `name arguments`.
const BLOCKS: [(&str, &str, &[&str]); 40] = [
    ("§<tool_call>\n§<invoke name=\"f\">§</invoke>\n§</tool_call>", "~", &["f {}"]),
    ("§<tool_call>§<invoke name=\"f\">§</invoke>§</tool_call>", "~", &["f {}"]),
    ("§<tool_call>\n\n §<invoke name=\"f\">\n§</invoke>\n\n\n§</tool_call>\n", "~", &["f {}"]),
    ("§<tool_call>\n§<invoke name='f'>§</invoke>\n§</tool_call>", "~", &["f {}"]),
    ("§<tool_call>\n§<invoke name=f>§</invoke>\n§</tool_call>", "~", &["f {}"]),
    ("§<tool_call>\n§<invoke  name = \"f\" >§</invoke>\n§</tool_call>", "~", &["f {}"]),
    ("§<tool_call>\n§<invoke name=\"a-b.c:d\">§</invoke>\n§</tool_call>", "~", &["a-b.c:d {}"]),
    (
        "§<tool_call>\n§<invoke name=\"unheard of\">§</invoke>\n§</tool_call>",
        "~",
        &["unheard of {}"],
    ),
    (
        "I look.\n\n§<tool_call>\n§<invoke name=\"f\">§</invoke>\n§</tool_call>",
        "I look.\n\n",
        &["f {}"],
    ),
    ("§<tool_call>\n§<invoke name=\"f\">§</invoke>\n§</tool_call>Done.", "Done.", &["f {}"]),
    (
        "§<tool_call>\n§<invoke name=\"f\">§</invoke>\n§<invoke name=\"g\">§</invoke>\n§</tool_call>",
        "~",
        &["f {}", "g {}"],
    ),
    (
        "§<tool_call>\n§<invoke name=\"f\">§</invoke>\n§</tool_call>\n§<tool_call>\n§<invoke name=\"f\">§</invoke>\n§</tool_call>",
        "~",
        &["f {}", "f {}"],
    ),
    // closing tags left out
    ("§<tool_call>\n§<invoke name=\"f\">§</invoke>\n", "~", &["f {}"]),
    ("§<tool_call>\n§<invoke name=\"f\">§<s>x§</s>§</tool_call>", "~", &[r#"f {"s":"x"}"#]),
    ("§<tool_call>\n§<invoke name=\"f\">§<s>x§</invoke>§</tool_call>", "~", &[r#"f {"s":"x"}"#]),
    (
        "§<tool_call>\n§<invoke name=\"f\">§<s>x§<invoke name=\"g\">§</invoke>§</tool_call>",
        "~",
        &[r#"f {"s":"x"}"#, "g {}"],
    ),
    (
        "§<tool_call>\n§<invoke name=\"f\">§<s>x§<n>1§</n>§</invoke>§</tool_call>",
        "~",
        &[r#"f {"s":"x","n":1}"#],
    ),
    ("§<tool_call>\n§<invoke name=\"f\">§<n>1§</s>§</invoke>§</tool_call>", "~", &[r#"f {"n":1}"#]),
    // opening tags left out
    ("§<invoke name=\"f\">§<n>1§</n>§</invoke>\n§</tool_call>", "~", &[r#"f {"n":1}"#]),
    ("§<invoke name=\"f\">§</invoke>", "~", &["f {}"]),
    ("§<tool_call>\n§<invoke name=\"f\">x§</s>§</invoke>§</tool_call>", "~", &[r#"f {"s":"x"}"#]),
    // names and structure alike
    (
        "§<tool_call>\n§<invoke name=\"f\">§<item>1§</item>§</invoke>§</tool_call>",
        "~",
        &[r#"f {"item":"1"}"#],
    ),
    (
        "§<tool_call>\n§<invoke name=\"f\">§<a b>1§</a b>§</invoke>§</tool_call>",
        "~",
        &[r#"f {"a b":"1"}"#],
    ),
    (
        "§<tool_call>\n§<invoke name=\"f\">§<$x>1§</$x>§</invoke>§</tool_call>",
        "~",
        &[r#"f {"$x":"1"}"#],
    ),
    (
        "§<tool_call>\n§<invoke name=\"f\">§<名>1§</名>§</invoke>§</tool_call>",
        "~",
        &[r#"f {"名":"1"}"#],
    ),
    ("§<tool_call>\n§<invoke name=\"f\">§<s>§</s>§</invoke>§</tool_call>", "~", &[r#"f {"s":""}"#]),
    (
        "§<tool_call>\n§<invoke name=\"f\">§<s>a§</s>§<s>b§</s>§</invoke>§</tool_call>",
        "~",
        &[r#"f {"s":"a"}"#],
    ),
    (
        "§<tool_call>\n§<invoke name=\"f\">§<n>1§</n>§<s>2§</s>§</invoke>§</tool_call>",
        "~",
        &[r#"f {"n":1,"s":"2"}"#],
    ),
    (
        "§<tool_call>\n§<invoke name=\"f\">stray§<n>1§</n>§</invoke>§</tool_call>",
        "~",
        &[r#"f {"n":1}"#],
    ),
    (
        "§<tool_call>\n§<invoke name=\"f\">§<n>1§</n>stray§</invoke>§</tool_call>",
        "~",
        &[r#"f {"n":1}"#],
    ),
    // talk about calls
    ("Use §<tool_call> to call.", "Use §<tool_call> to call.", &[]),
    ("§<invoke name=\"f\"> is how.", "§<invoke name=\"f\"> is how.", &[]),
    ("§</tool_call>", "§</tool_call>", &[]),
    ("Text with §<b>bold§</b>.", "Text with §<b>bold§</b>.", &[]),
    (
        "<tool_call>\n<invoke name=\"f\"></invoke>\n</tool_call>",
        "<tool_call>\n<invoke name=\"f\"></invoke>\n</tool_call>",
        &[],
    ),
    // what is no call in a block
    (
        "§<tool_call>\n§<invoke>§<s>x§</s>§</invoke>\n§<invoke name=\"g\">§</invoke>\n§</tool_call>",
        "~",
        &["g {}"],
    ),
    (
        "§<tool_call>\n§<function=f>§</function>\n§<invoke name=\"g\">§</invoke>\n§</tool_call>",
        "~",
        &["g {}"],
    ),
    (
        "§<tool_call>\n§<invoke name=\"\">§</invoke>\n§<invoke name=\"g\">§</invoke>\n§</tool_call>",
        "~",
        &["g {}"],
    ),
    ("§<tool_call>\n§</tool_call>", "§<tool_call>\n§</tool_call>", &[]),
    (
        "§<tool_call>\n§<invoke name=\"f\">§<s>has <x> & \"q\"\n§</s>§</invoke>\n§</tool_call>",
        "~",
        &[r#"f {"s":"has <x> & \"q\"\n"}"#],
    ),
];

#[test]
fn blocks_become_calls_and_nothing_else_does() {
    let schema = r#"{"type":"object","properties":{"s":{"type":"string"},"n":{"type":"integer"}}}"#;
    let options = options(ThinkingMode::Disabled, &[("f", schema), ("g", "{}")]);
    for (raw, content, calls) in BLOCKS {
        let reply = chunked(&options, &raw.replace('§', MARK), EngineStop::Stop);
        let content = (content != "~").then(|| content.replace('§', MARK));
        assert_eq!(reply.message.content, content, "{raw}");
        let found: Vec<String> = (reply.message.tool_calls.iter().map(|call| &call.function))
            .map(|function| format!("{} {}", function.name, function.arguments))
            .collect();
        assert_eq!(found, calls, "{raw}");
    }
}

/// The reply, which is the same under every chunking.
fn chunked(options: &OutputOptions, raw: &str, stop: EngineStop) -> Reply {
    let whole = read(options, [raw], stop);
    let mut ways = vec![characters(raw)];
    ways.extend(raw.char_indices().map(|(at, _)| Vec::from(<[&str; 2]>::from(raw.split_at(at)))));
    ways.extend([[1, 2, 3], [4, 1, 7], [2, 50, 1], [13, 5, 12]].map(|cuts| pieces(raw, &cuts)));
    for chunks in ways {
        let split = read(options, chunks.iter().copied(), stop);
        assert!(same(split.clone(), whole.clone()), "{chunks:?}: {split:#?} {whole:#?}");
    }
    let total: usize = whole.account.iter().map(|stretch| stretch.num_bytes).sum();
    assert_eq!(total, raw.len(), "{raw}");
    whole
}
