//! M3's facts out of the checkpoint's files, each checked against the others.

use super::constraint::MarkerIds;
use super::output::dialect::Dialect;
use super::vision::VisionGeometry;
use super::{IMAGE, MESSAGE_END, MODEL_TYPE, MiniMaxM3, NAMESPACE, VIDEO};
use crate::json::Json;
use crate::model::{GenerationDefaults, ModelFacts, ModelFiles, ModelLoadError};

const CONFIG: &str = "config.json";
const GENERATION: &str = "generation_config.json";

/// Reads the spec.
pub(super) fn load(files: &ModelFiles) -> Result<MiniMaxM3, ModelLoadError> {
    let vision = VisionGeometry::from_files(
        files.preprocessor_config.as_ref(),
        files.video_preprocessor_config.as_ref(),
    )
    .map_err(|error| files.invalid("preprocessor_config.json", error.to_string()))?;
    let dialect = Dialect::of_template(&files.chat_template);
    let marker_ids = MarkerIds {
        namespace: files.added_token(NAMESPACE)?.id,
        think_open: files.added_token(dialect.think_open)?.id,
        think_close: files.added_token(dialect.think_close)?.id,
    };
    let stop_token_ids = stop_token_ids(files)?;
    let layout = vision.patch_layout();
    let facts = ModelFacts {
        model_type: MODEL_TYPE.to_owned(),
        vocab_size: whole(files, "text_config.vocab_size")?,
        image_token_id: marker_id(files, "image_token_index", IMAGE)?,
        video_token_id: marker_id(files, "video_token_index", VIDEO)?,
        eos_token_id: stop_token_ids[0],
        patch_size: whole(files, "vision_config.patch_size")?,
        temporal_patch_size: whole(files, "img_token_compression_config.temporal_patch_size")?,
        merge_size: whole(files, "img_token_compression_config.spatial_merge_size")?,
        max_position_embeddings: whole(files, "text_config.max_position_embeddings")?,
    };
    for (name, file_says, config_says) in [
        ("patch_size", layout.patch_size, facts.patch_size),
        ("temporal_patch_size", layout.temporal_patch_size, facts.temporal_patch_size),
        ("merge_size", layout.merge_size, facts.merge_size),
    ] {
        if file_says != config_says {
            return Err(files.invalid(
                "preprocessor_config.json",
                format!("{name} is {file_says}, but config.json says {config_says}"),
            ));
        }
    }
    check_ids(files, &facts)?;
    let defaults = generation_defaults(files)?;
    Ok(MiniMaxM3 { facts, vision, stop_token_ids, marker_ids, dialect, defaults })
}

/// Every added token must have a row in the embedding table.
fn check_ids(files: &ModelFiles, facts: &ModelFacts) -> Result<(), ModelLoadError> {
    match files.added_tokens.iter().find(|token| token.id >= facts.vocab_size) {
        None => Ok(()),
        Some(token) => Err(files.invalid(
            "tokenizer.json",
            format!(
                "the added token {:?} has the id {}, but text_config.vocab_size is {}",
                token.content, token.id, facts.vocab_size
            ),
        )),
    }
}

/// The value at a dotted path of config.json.
fn value<'a>(files: &'a ModelFiles, path: &str) -> Option<&'a Json> {
    path.split('.').try_fold(&files.config, |json, key| json.get(key))
}

fn whole(files: &ModelFiles, path: &str) -> Result<u32, ModelLoadError> {
    let Some(found) = value(files, path) else {
        return Err(files.invalid(CONFIG, format!("{path} is missing")));
    };
    positive(found).ok_or_else(|| {
        let found = found.to_compact();
        files.invalid(CONFIG, format!("{path} is {found}; it must be a whole number above 0"))
    })
}

fn positive(value: &Json) -> Option<u32> {
    let Json::Number(number) = value else { return None };
    number.as_u64().and_then(|value| value.try_into().ok()).filter(|&value| value > 0)
}

fn marker_id(files: &ModelFiles, path: &str, content: &str) -> Result<u32, ModelLoadError> {
    let id = whole(files, path)?;
    let token = files.added_token(content)?;
    if token.id == id {
        return Ok(id);
    }
    Err(files.invalid(
        CONFIG,
        format!("{path} is {id}, but tokenizer.json says {content:?} is {}", token.id),
    ))
}

/// The message end first, then what generation_config.json adds.
fn stop_token_ids(files: &ModelFiles) -> Result<Vec<u32>, ModelLoadError> {
    let end = files.added_token(MESSAGE_END)?.id;
    if let Some(configured) = value(files, "text_config.eos_token_id")
        && positive(configured) != Some(end)
    {
        return Err(files.invalid(
            CONFIG,
            format!(
                "text_config.eos_token_id is {}, but tokenizer.json says {MESSAGE_END:?} is {end}",
                configured.to_compact()
            ),
        ));
    }
    let mut ids = vec![end];
    let configured = files.generation_config.as_ref().and_then(|config| config.get("eos_token_id"));
    let listed = match configured {
        None | Some(Json::Null) => &[],
        Some(Json::Array(listed)) => listed.as_slice(),
        Some(one) => std::slice::from_ref(one),
    };
    for entry in listed {
        let id = positive(entry).ok_or_else(|| {
            let entry = entry.to_compact();
            files.invalid(GENERATION, format!("eos_token_id has {entry}, which is no token id"))
        })?;
        if !ids.contains(&id) {
            ids.push(id);
        }
    }
    Ok(ids)
}

/// Source of the values where the file is silent: the released model's card, as its public serving
/// recipes quote it.
fn generation_defaults(files: &ModelFiles) -> Result<GenerationDefaults, ModelLoadError> {
    let read = |name: &str, range: std::ops::RangeInclusive<f64>| {
        let Some(found) = files.generation_config.as_ref().and_then(|config| config.get(name))
        else {
            return Ok(None);
        };
        match found {
            Json::Null => Ok(None),
            Json::Number(number) if range.contains(&number.as_f64()) => Ok(Some(number.as_f64())),
            other => Err(files.invalid(
                GENERATION,
                format!(
                    "{name} is {}; it must be from {} to {}",
                    other.to_compact(),
                    range.start(),
                    range.end()
                ),
            )),
        }
    };
    let positive = |name: &str, most: f64| match read(name, 0.0..=most)? {
        Some(0.0) => Err(files.invalid(GENERATION, format!("{name} is 0; it must be above 0"))),
        other => Ok(other),
    };
    Ok(GenerationDefaults {
        temperature: read("temperature", 0.0..=2.0)?.unwrap_or(1.0) as f32,
        top_p: positive("top_p", 1.0)?.unwrap_or(0.95) as f32,
        top_k: read("top_k", 0.0..=f64::from(u32::MAX))?.unwrap_or(40.0) as u32,
        min_p: read("min_p", 0.0..=1.0)?.unwrap_or(0.0) as f32,
        repetition_penalty: positive("repetition_penalty", 10.0)?.unwrap_or(1.0) as f32,
    })
}
