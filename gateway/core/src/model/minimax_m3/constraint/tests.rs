use super::*;
use crate::json::Json;
use crate::model::OutputOptions;
use crate::model::minimax_m3::output::{M3Parser, dialect};
use crate::output::{EngineStop, MessageFolder, OutputParser, ReasoningField, ReplyFolder};
use engine::Engine;

mod engine;
mod fixed;
mod random;
mod validator;

const IDS: MarkerIds = MarkerIds {
    namespace: engine::NAMESPACE_ID,
    think_open: engine::OPEN_ID,
    think_close: engine::CLOSE_ID,
};

fn parse(text: &str) -> Json {
    Json::parse(text.as_bytes()).unwrap()
}

fn tool(name: &str, parameters: &str, strict: bool) -> ToolSchema {
    ToolSchema {
        name: name.to_owned(),
        parameters: Some(parse(parameters)),
        strict,
        param: format!("tools[0].function.parameters of {name}"),
    }
}

fn forced(tools: Vec<ToolSchema>) -> OutputRules {
    OutputRules {
        thinking: ThinkingMode::Disabled,
        tools: tools.into(),
        choice: ToolChoice::Required,
        parallel: true,
        ..OutputRules::default()
    }
}

/// A reply as a client gets it: its text, its thinking, its calls with their arguments.
#[derive(Debug, PartialEq)]
struct Reply {
    content: Option<String>,
    reasoning: Option<String>,
    calls: Vec<(String, Json)>,
}

fn read(rules: &OutputRules, text: &str) -> Reply {
    let options = OutputOptions { thinking: rules.thinking, tools: rules.tools.clone() };
    let mut parser = M3Parser::new(&options, &dialect::M3);
    let mut folder = ReplyFolder::new("reply", 0, ReasoningField::ReasoningContent);
    let mut events = Vec::new();
    parser.push(text, &mut events);
    parser.finish(&mut events);
    let mut message = MessageFolder::default();
    folder.deltas(events).into_iter().for_each(|delta| message.add(delta));
    folder.finish_reason(EngineStop::Stop);
    let message = message.finish(&folder);
    let calls = message.tool_calls.into_iter().map(|call| {
        let arguments = Json::parse(call.function.arguments.as_bytes());
        (call.function.name, arguments.unwrap_or_else(|error| panic!("{error} in {text}")))
    });
    Reply { content: message.content, reasoning: message.reasoning_content, calls: calls.collect() }
}
