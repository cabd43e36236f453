//! Times the pure stages of the gateway with a checkpoint's tokenizer and a text file: opening,
//! encoding, a small request's way in, a reply's way out.
//!
//! `cargo run --release -p gateway-core --example text_speed -- CHECKPOINT_DIR TEXT_FILE`
#![allow(clippy::print_stdout)]

use gateway_core::checkpoint::{Model, OpenOptions, open};
use gateway_core::conversation::check_chat;
use gateway_core::json::Json;
use gateway_core::model::OutputOptions;
use gateway_core::openai::RequestBody;
use gateway_core::output::{ReasoningField, ReplyFolder};
use gateway_core::stop::StopMatcher;
use gateway_core::tokenizer::EngineChoice;
use std::hint::black_box;
use std::path::Path;
use std::time::{Duration, Instant};

type Failure = Box<dyn std::error::Error>;

fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, dir, text_file] = arguments.as_slice() else {
        return Err("usage: text_speed CHECKPOINT_DIR TEXT_FILE".into());
    };
    let text = std::fs::read_to_string(text_file)?;
    let fast = measure(Path::new(dir), EngineChoice::Auto, &text)?;
    let reference = measure(Path::new(dir), EngineChoice::Reference, &text)?;
    println!("both engines give the same ids: {}", fast == reference);
    Ok(())
}

/// The mean time of each stage of a small request with a tool.
fn short_requests(model: &Model) -> Result<(), Failure> {
    const ROUNDS: u32 = 5000;
    let body = r#"{"model":"m","messages":[{"role":"system","content":"Be brief."},
        {"role":"user","content":"What is the weather in Rome?"}],"temperature":0.5,
        "tools":[{"type":"function","function":{"name":"get_weather","description":"Weather now",
        "parameters":{"type":"object","properties":{"city":{"type":"string"}}}}}]}"#;
    let mut spent = [Duration::ZERO; 4];
    for _ in 0..ROUNDS {
        let mut at = Instant::now();
        let mut lap = |stage: usize| {
            let now = Instant::now();
            spent[stage] += now - at;
            at = now;
        };
        let request = RequestBody::parse(body.as_bytes())?;
        lap(0);
        let conversation = check_chat(request, &model.limits())?;
        lap(1);
        let rendered = model.prompt_builder.render(&conversation)?;
        lap(2);
        black_box(model.prompt_builder.expand(&rendered, &[])?);
        lap(3);
    }
    let [parse, check, render, encode] = spent.map(|time| time / ROUNDS);
    println!(
        "  short request: parse {parse:.1?}, check {check:.1?}, render {render:.1?}, encode {encode:.1?}"
    );
    Ok(())
}

/// Prints the figures of one engine; gives its ids of the text.
fn measure(dir: &Path, engine: EngineChoice, text: &str) -> Result<Vec<u32>, Failure> {
    let started = Instant::now();
    let model = open(dir, OpenOptions { engine, clock: || 0 })?;
    let tokenizer = model.prompt_builder.tokenizer();
    println!(
        "{}: opened in {:.0?}{}",
        tokenizer.engine_name(),
        started.elapsed(),
        tokenizer.fast_engine_refusal().map(|why| format!(" ({why})")).unwrap_or_default()
    );
    for run in ["first", "second", "third"] {
        let started = Instant::now();
        let ids = model.prompt_builder.encode_text(text, false)?;
        println!("  {run} encode: {} tokens in {:.1?}", ids.len(), started.elapsed());
    }
    let message = Json::object([("role", "user".into()), ("content", text.into())]);
    let body = format!(r#"{{"messages":[{}]}}"#, message.to_compact());
    for (what, marker) in [("plain", ""), ("with a typed token", "]<]minimax[>[")] {
        let body = body.replacen("\"content\":\"", &format!("\"content\":\"{marker}"), 1);
        let started = Instant::now();
        let request = RequestBody::parse(body.as_bytes())?;
        let parsed = started.elapsed();
        let conversation = check_chat(request, &model.limits())?;
        let checked = started.elapsed();
        let rendered = model.prompt_builder.render(&conversation)?;
        let drawn = started.elapsed();
        let prompt = model.prompt_builder.expand(&rendered, &[])?;
        println!(
            "  chat request, {what}: {} tokens; parse {parsed:.1?}, check {:.1?}, render {:.1?}, encode {:.1?}",
            prompt.token_ids.len(),
            checked - parsed,
            drawn - checked,
            started.elapsed() - drawn
        );
    }
    short_requests(&model)?;
    let ids = model.prompt_builder.encode_text(text, false)?;
    let mut detokenizer = model.prompt_builder.detokenizer(true);
    let started = Instant::now();
    let num_bytes: usize = ids.iter().map(|id| detokenizer.push(&[*id]).len()).sum();
    println!("  detokenized {num_bytes} bytes one by one in {:.1?}", started.elapsed());
    replies(&model, &ids);
    Ok(ids)
}

/// The mean time of a token of a reply: ids to text, text to events, events to deltas.
fn replies(model: &Model, ids: &[u32]) {
    let ids = &ids[..ids.len().min(200_000)];
    let mut detokenizer = model.prompt_builder.detokenizer(true);
    let mut parser = model.spec.output_parser(&OutputOptions::default());
    let mut stop = StopMatcher::new(&["\n\nUser:".to_owned()], false);
    let mut folder = ReplyFolder::new("reply", 0, ReasoningField::default());
    let started = Instant::now();
    for &id in ids {
        let mut events = Vec::new();
        parser.push(&detokenizer.push(&[id]), &mut events);
        stop.filter(&mut events);
        black_box(parser.take_account());
        black_box(folder.deltas(events));
    }
    let mean = started.elapsed() / u32::try_from(ids.len().max(1)).unwrap_or(u32::MAX);
    println!("  reply: {mean:.0?} a token");
}
