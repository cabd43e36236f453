//! On whose behalf a request is made, and how urgently.

use super::fields::Fields;
use crate::error::RequestError;

/// Lowest and highest priority of the workers' contract.
const PRIORITIES: std::ops::RangeInclusive<i64> = -10..=10;
/// Priority of the service tiers that name a speed; all others are ordinary.
const TIERS: [(&str, i32); 3] = [("flex", -5), ("priority", 5), ("fast", 5)];
const MAX_SALT_CHARACTERS: usize = 128;

/// On whose behalf, and how urgently.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Standing {
    /// Larger goes first, -10 to 10; 0 is ordinary.
    pub priority: i32,
    /// Computed prompts are shared only between requests of equal salt.
    pub cache_salt: String,
    /// Requests of one key are likely to share a beginning.
    pub affinity: Option<String>,
}

impl Standing {
    /// Reads `priority` or `service_tier`, `cache_salt` and `prompt_cache_key`.
    ///
    /// # Errors
    /// `InvalidRequest` naming the field, its value and what is allowed.
    pub(crate) fn read(body: &Fields) -> Result<Self, RequestError> {
        let tier = body.string("service_tier")?;
        let of_tier = TIERS.iter().find(|(name, _)| Some(*name) == tier).map_or(0, |(_, own)| *own);
        let priority = body.integer("priority", PRIORITIES)?;
        let priority = priority.and_then(|value| i32::try_from(value).ok()).unwrap_or(of_tier);
        let cache_salt = body.string("cache_salt")?.unwrap_or_default();
        let length = cache_salt.chars().count();
        if length > MAX_SALT_CHARACTERS {
            let message = format!(
                "cache_salt has {length} characters; at most {MAX_SALT_CHARACTERS} are allowed"
            );
            return Err(RequestError::invalid("cache_salt", message));
        }
        let affinity = body.string("prompt_cache_key")?.filter(|key| !key.is_empty());
        Ok(Self {
            priority,
            cache_salt: cache_salt.to_owned(),
            affinity: affinity.map(str::to_owned),
        })
    }
}
